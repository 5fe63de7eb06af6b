"""When checkpoints are written, which stay, and which of them is the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os.path import isdir
from pathlib import Path

from covey.checkpoint.exact import JSON
from covey.checkpoint.registry import Registry
from covey.checkpoint.retain import retain
from covey.checkpoint.write import Entries, write_checkpoint
from covey.comm import Comm
from covey.options.schema import Config
from covey.training.evaluate import Best
from covey.training.failure import writing
from covey.training.recorder import Recorder


@dataclass(slots=True, kw_only=True)
class Saver:
    """Writes the checkpoints of a run; `saved_step` is the last one that stands.

    `check` raises GuardStop where the weights of a step must not be saved. `model_writer` gathers what this
    rank writes of the model, and returns what writes it into a directory.
    """

    options: Config
    check: Callable[[int], None]
    model_writer: Callable[[], Callable[[Path], Entries]]
    meta: Mapping[str, JSON]
    registry: Registry
    best: Best
    recorder: Recorder
    comm: Comm
    saved_step: int = -1

    @property
    def output_dir(self) -> Path:
        """Return the directory of the run."""
        return Path(self.options.output_dir)

    def path(self, step: int) -> Path:
        """Return the directory of a step's checkpoint."""
        return self.output_dir / f"checkpoint-{step}"

    @property
    def best_path(self) -> Path | None:
        """Return the checkpoint of the best evaluation, where it was saved."""
        path = None if self.best.step is None else self.path(self.best.step)
        return path if path is not None and isdir(path) else None

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due every `save_steps` steps."""
        every = self.options.save_steps
        return every != 0 and step % every == 0

    def save(self, step: int) -> bool:
        """Write `checkpoint-<step>` once, on every rank its own part, and let older ones go; whether it was
        written now. Collective.

        Raises GuardStop (F128) before anything is written where the weights are not finite, and on every rank
        RunFailed (F130, F132) where one of them cannot write.
        """
        if self.saved_step == step:
            return False
        self.comm.activity.enter("save")
        self.check(step)
        states = None if self.options.save_only_model else self.registry.states()
        write_model = self.model_writer()
        self.saved_step = step
        with writing(self.output_dir, self.recorder.lock, step):
            path = write_checkpoint(
                self.output_dir,
                step=step,
                write_model=write_model,
                states=states,
                shards=None if states is None else self.registry.shards(),
                meta=self.meta,
                comm=self.comm,
            )
        if self.recorder.files is None:
            return True
        self.recorder.event("saved", step=step, path=path.name)
        best = self.best_path
        with self.recorder.writing(step):
            deletions = retain(
                self.output_dir,
                written=path,
                total_limit=self.options.save_total_limit,
                keep_trainer_state=self.options.keep_trainer_state,
                protected=() if best is None else (best,),
            )
        for deletion in deletions:
            self.recorder.event("deleted", step=step, path=str(deletion.path.relative_to(self.output_dir)))
        return True
