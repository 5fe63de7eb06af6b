"""A run goes on with another number of processes: masters and moments are those of the checkpoint, bit for
bit, and the next gradient is that of the run that was never stopped."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from covey.checkpoint.shards import SavedShards
from covey.checks.survey import survey
from covey.comm import Comm, LocalComm
from covey.config.resolve import from_dict
from covey.errors import ConfigError
from covey.selftest.compare import far
from covey.telemetry.rollouts import read_rollouts
from covey.training.build import build_job
from covey.training.loop import run
from covey.training.process import ranks
from covey.training.run import train
from support.processes import run_in_processes
from support.runs import options

ROWS = 16
"""Completions of an optimizer step, whatever the number of processes."""
MIDDLE = {"num_iterations": 2, "beta": 0.02, "max_steps": 4}
LOW = {"torch_dtype": "bfloat16", "max_steps": 4}


def opts(output: Path, processes: int, **changes: Any) -> dict[str, Any]:
    base = options(
        Path("quickstart"),
        output,
        learning_rate=1e-4,
        num_generations=8,
        per_device_train_batch_size=ROWS // processes,
        save_steps=3,
    )
    return {**base, "mask_truncated_completions": False, "reward_funcs": ["accuracy", "format"], **changes}


def watched(opts: dict[str, Any], comm: Comm, keep: Path) -> None:
    """Run; keep what the optimizer holds at the start, and the gradient of the first and of the last step."""
    resolved = from_dict(opts, comm.world)
    found = survey(resolved.config, comm.world)
    job = build_job(resolved, found, comm)
    job.recorder.console = None
    masters = job.backend.masters
    kept = {f"loaded/{n}": t.clone() for n, t in masters.state().items()}
    step = job.backend.step

    def watching(rate: float) -> Any:
        kept.update({f"gradient/{n}": g for n, g in masters.gradients().items()})
        return step(rate)

    job.backend.step = watching
    run(job)
    job.backend.close()
    found.close()
    save_file(kept, str(keep / f"rank-{comm.rank}.safetensors"))


def trained(opts: dict[str, Any], processes: int, keep: Path) -> list[dict[str, torch.Tensor]]:
    """What each rank kept of a run."""
    keep.mkdir()
    if processes == 1:
        watched(opts, LocalComm(), keep)
    else:
        (keep / "opts.json").write_text(json.dumps(opts))
        run_in_processes(__file__, keep, processes=processes, timeout=300)
    return [load_file(str(keep / f"rank-{rank}.safetensors")) for rank in range(processes)]


def part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {n.removeprefix(f"{prefix}/"): t for n, t in tensors.items() if n.startswith(f"{prefix}/")}


@pytest.mark.multi
@pytest.mark.parametrize(
    ("before", "after", "changes", "bound"),
    [
        pytest.param(1, 2, MIDDLE, 1e-5, id="one to two, in the middle of a rollout"),
        pytest.param(2, 1, {**MIDDLE, "top_p": 0.7}, 1e-5, id="two to one, under filters"),
        pytest.param(2, 1, LOW, 2e-2, id="two to one, in bfloat16"),
        pytest.param(2, 1, MIDDLE, 1e-5, marks=pytest.mark.slow, id="two to one"),
    ],
)
def test_another_number_of_processes(
    before: int, after: int, changes: dict[str, Any], bound: float, tmp_path: Path
) -> None:
    whole = trained(opts(tmp_path / "whole", before, **changes), before, tmp_path / "a")[0]
    trained(opts(tmp_path / "cut", before, **changes, stop_after_steps=3), before, tmp_path / "b")
    checkpoint = tmp_path / "cut/checkpoint-3"
    saved = dict(SavedShards(checkpoint / "trainer/optimizer"))
    assert len(list((checkpoint / "trainer/optimizer").iterdir())) == before
    resumed = opts(tmp_path / "cut", after, **changes, resume_from_checkpoint="latest")
    for kept in trained(resumed, after, tmp_path / "c"):
        loaded = part(kept, "loaded")
        assert loaded.keys() == saved.keys() and len(loaded) > 100
        assert [n for n in saved if not torch.equal(saved[n], loaded[n])] == []
        together = far(part(kept, "gradient"), part(whole, "gradient"))
        assert together < bound
    steps = [json.loads(line)["step"] for line in (tmp_path / "cut/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    recorded, expected = (dict(read_rollouts(tmp_path / run / "rollouts")) for run in ("cut", "whole"))
    assert recorded.keys() == expected.keys()
    assert {len(records) for records in recorded.values()} == {len(expected[0])}


def test_a_rollout_that_is_begun_keeps_its_steps(tmp_path: Path) -> None:
    """What is left of it cannot be cut into steps of another size, whatever --allow_changes says."""
    cut = tmp_path / "cut"
    train(from_dict(opts(cut, 1, **MIDDLE, stop_after_steps=3), 1))
    for allowed in (False, True):
        given = opts(cut, 2, **MIDDLE, resume_from_checkpoint="latest", allow_changes=allowed)
        with pytest.raises(ConfigError) as refused:
            train(from_dict(given, 1))
        (problem,) = [p for p in refused.value.problems if p.code == "E405"]
        assert "in the middle of a rollout, after 1 step" in problem.cause
        assert "16 completions" in problem.cause and "steps of 8" in problem.cause
        (fix,) = problem.fixes
        assert fix.edits["per_device_train_batch_size"] == 16 and "allow_changes" not in fix.edits


if __name__ == "__main__":
    torch.set_num_threads(1)
    work = Path(sys.argv[1])
    with ranks(int(os.environ["WORLD_SIZE"])) as group:
        watched(json.loads((work / "opts.json").read_text()), group, work)
