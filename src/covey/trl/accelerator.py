"""What scripts ask an accelerator for: which process this is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from covey.trl.config import GRPOConfig


class Accelerator:
    """Says which of the processes this is; covey uses no accelerate, and this object moves and wraps
    nothing."""

    def __init__(self, args: GRPOConfig) -> None:
        self._args = args

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

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the model as it is: nothing is wrapped around it."""
        return model
