"""What the checkpoints of a run take on the disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.texts import counted, tr

_SPARE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPlan:
    """Bytes of a checkpoint and of all that stand at once; None where the model is not known.

    `checkpoint_bytes` is one that a run can be resumed from, `model_bytes` one that is reduced to the model,
    `num_kept` how many stay: save_total_limit, and the best one where something is evaluated. The next one
    is whole before an old one goes, so `peak_bytes` counts one more.
    """

    checkpoint_bytes: int | None
    model_bytes: int | None
    num_kept: int
    peak_bytes: int | None
    free_bytes: int | None

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers."""
        return asdict(self)

    def in_words(self) -> list[str]:
        """Return the numbers as lines for people."""
        if self.checkpoint_bytes is None or self.model_bytes is None or self.peak_bytes is None:
            return []
        rest = self.checkpoint_bytes - self.model_bytes
        free = "" if self.free_bytes is None else tr("; {size} are free", size=size(self.free_bytes))
        return [
            tr(
                "one checkpoint {size} = model {model_size} + {resume_size} of resume state (newest "
                "checkpoints only)",
                size=size(self.checkpoint_bytes),
                model_size=size(self.model_bytes),
                resume_size=size(rest),
            )
            if rest
            else tr("one checkpoint {size} = the model", size=size(self.checkpoint_bytes)),
            tr(
                "{checkpoints} kept plus the one being written: at most {size}{free}",
                checkpoints=counted(self.num_kept, "checkpoint"),
                size=size(self.peak_bytes),
                free=free,
            ),
        ]


def disk_plan(config: Config, facts: Facts) -> DiskPlan:
    """Return what the checkpoints of a configuration take."""
    model = facts.output.model_bytes
    whole = model if config.save_only_model else facts.output.checkpoint_bytes
    kept = config.save_total_limit + (config.eval_strategy != "no")
    peak = None
    if whole is not None and model is not None:
        full = min(kept, config.keep_trainer_state) + _SPARE
        peak = full * whole + (kept + _SPARE - full) * model
    return DiskPlan(
        checkpoint_bytes=whole,
        model_bytes=model,
        num_kept=kept,
        peak_bytes=peak,
        free_bytes=facts.output.free_bytes,
    )


def size(num_bytes: int) -> str:
    """Return bytes as people read them, in powers of 1000: `size(10_240_000)` is "10.24 MB"."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.4g} {unit}"
    return f"{num_bytes / 1e3:.4g} kB"
