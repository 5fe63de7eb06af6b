"""What is said of a process that ran out of memory, and that what it offers takes less by the forecast."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.activity import Activity
from covey.config.resolve import from_dict
from covey.meeting import Meeting
from covey.plan.memory import memory_plan
from covey.training.out_of_memory import Asked, asked_in, explain_memory, is_out_of_memory
from covey.training.together import Together
from support.checks import facts
from unit.plan.test_check_memory import GPU

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which "
    "3.10 GiB is free. Including non-PyTorch memory, this process has 76.04 GiB memory in use. Of the "
    "allocated memory 45.00 GiB is allocated by PyTorch, and 30.00 GiB is reserved by PyTorch but "
    "unallocated."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:126] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 4000000000 bytes. Error code 12 (Cannot allocate memory)"
)
GIB = 2**30


class OutOfMemoryError(RuntimeError):
    """As torch calls it."""


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (OutOfMemoryError(CUDA), True),
        (RuntimeError(CPU), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_is_out_of_memory(error: BaseException, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one


def test_the_amounts_are_read() -> None:
    assert asked_in(CUDA) == Asked(20 * GIB, int(3.1 * GIB), int(79.15 * GIB), 30 * GIB)
    assert asked_in(CPU) == Asked(4_000_000_000, None, None, None)
    assert asked_in("") == Asked(None, None, None, None)


def explained(
    tmp_path: Path, error: BaseException, **options: object
) -> tuple[list[dict[str, object]], str, str]:
    """The edits of the fixes, what was seen and the cause, in the third micro-batch of four of rank 1."""
    named = {"model": "m", "dataset": ["d.jsonl"], "reward_funcs": ["accuracy"], "output_dir": str(tmp_path)}
    resolved = from_dict({**named, **options}, 2)
    activity = Activity()
    activity.step = 7
    activity.enter("update")
    activity.advance(3, 4)
    others = Together(Meeting(tmp_path, 1, 2), activity, output_dir=tmp_path)
    finding = explain_memory(resolved, GPU, others, error)
    assert finding is not None and (finding.code, finding.step) == ("F135", 7)
    return [dict(fix.edits) for fix in finding.fixes], finding.seen, finding.cause


def test_what_is_said_of_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-6").mkdir()
    (tmp_path / "checkpoint-6" / "manifest.json").touch()
    edits, seen, cause = explained(tmp_path, OutOfMemoryError(CUDA))
    assert seen == (
        "rank 1 of 2 ran out of memory on the GPU in update, micro-batch 3 of 4, after step 7; it asked for "
        "21.47 GB, and 3.329 GB of 84.99 GB were free"
    )
    assert "The forecast was" in cause and "80 GB were free when the run started" in cause
    assert "torch held another 32.21 GB in reserve, but in pieces too small" in cause
    assert edits[0]["resume_from_checkpoint"] == "auto"


@pytest.mark.parametrize("kept", ["auto", "false"])
def test_what_is_offered_takes_less_by_the_forecast(kept: str, tmp_path: Path) -> None:
    given = {"gradient_checkpointing": kept, "per_device_train_batch_size": 8, "num_generations": 8}
    edits, _, _ = explained(tmp_path, OutOfMemoryError(CUDA), **given)
    base = from_dict({"model": "m", "dataset": ["d"], "reward_funcs": ["accuracy"], **given}, 2).config
    now = memory_plan(base, GPU).needed_bytes
    offered = [e for e in edits if e]
    assert len(offered) >= 2
    for edit in offered:
        change = {n: v for n, v in edit.items() if n not in ("resume_from_checkpoint", "allow_changes")}
        then = memory_plan(from_dict({**base.model_dump(exclude_none=True), **change}, 2).config, GPU)
        assert then.needed_bytes < 0.9 * now, edit


def test_of_other_errors_it_says_nothing(tmp_path: Path) -> None:
    resolved = from_dict({"model": "m", "dataset": ["d"], "reward_funcs": ["accuracy"]}, 1)
    assert explain_memory(resolved, facts(), Together(None), ValueError("x")) is None
