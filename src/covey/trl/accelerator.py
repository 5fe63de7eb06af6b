"""Tells scripts which process this is, as the accelerator of TRL's trainer does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from covey.trl.trainer import GRPOTrainer


def wait_for_all(num_processes: int) -> None:
    """Wait until every process calls this, before or behind a run."""
    if num_processes > 1:
        from covey.training.process import ranks

        # A run makes a process group of its own; this one lasts as long as the wait.
        with ranks(num_processes) as comm:
            comm.max([0.0])


class Accelerator:
    """Says which of the processes this is; covey uses no accelerate, and this object moves and wraps
    nothing."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer, self._args = trainer, trainer.args

    @property
    def num_processes(self) -> int:
        """Return how many processes train."""
        return self._args.world_size

    @property
    def process_index(self) -> int:
        """Return the number of this process."""
        return self._args.process_index

    @property
    def local_process_index(self) -> int:
        """Return the number of this process among those of its machine."""
        return self._args.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Return whether this is the first process."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Return whether this is the first process of its machine."""
        return self.local_process_index == 0

    @property
    def device(self) -> torch.device:
        """Return the device of this process."""
        return self._args.device

    def print(self, *values: Any, **kwargs: Any) -> None:
        """Print in the first process of each machine."""
        if self.is_local_main_process:
            print(*values, **kwargs)  # noqa: T201 (a script asks for it)

    def wait_for_everyone(self) -> None:
        """Wait until every process calls this."""
        if self._trainer.job is not None:
            self._trainer.job.comm.max([0.0])
        else:
            wait_for_all(self.num_processes)

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the model as it is: nothing is wrapped around it."""
        return model
