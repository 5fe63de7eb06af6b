"""2N steps are N steps, a save, a new process's resume, and N steps: bit for bit, records included.

Bit for bit means every weight, AdamW moment, drawn token and recorded metric but the times. In one process
the run stops at the end of a rollout and in the middle of one (two passes a rollout); the same holds for two
DDP processes.
"""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from covey.checkpoint.manifest import FileEntry, hash_file, list_files, read_manifest, render_manifest
from covey.checkpoint.read import verify
from covey.config.resolve import from_dict
from covey.errors import CheckpointError
from covey.rewards.reward_set import RewardSet
from covey.rollout.generate import _Sampler
from covey.rollout.native.engine import NativeEngine
from covey.telemetry.rollouts import read_rollouts
from covey.training.run import train
from support.runs import options, train_and_watch, train_in_processes

TIMES = ("time/", "throughput/", "memory/")


def opts(output: Path, **changes: Any) -> dict[str, Any]:
    """Options of a sampled run of 6 steps, saved every 3."""
    base = options(
        Path("quickstart"),
        output,
        max_steps=6,
        save_steps=3,
        learning_rate=1e-4,
        num_generations=8,
        per_device_train_batch_size=16,
        keep_trainer_state=2,
    )
    return {**base, "mask_truncated_completions": False, "reward_funcs": ["accuracy", "format"], **changes}


def records(run: Path) -> list[dict[str, Any]]:
    """The metrics of every step, without what a clock says."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint: the model's and the trainer's."""
    found = {}
    for file in sorted(checkpoint.rglob("*.safetensors")):
        for name, tensor in load_file(str(file)).items():
            found[f"{file.relative_to(checkpoint)}:{name}"] = tensor
    return found


def assert_same_run(actual: Path, expected: Path, step: int) -> None:
    """Equal records, completions, and checkpoints at `step`, to the bit."""
    assert records(actual) == records(expected)
    ours, theirs = (tensors(run / f"checkpoint-{step}") for run in (actual, expected))
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("trainer/optimizer") for name in ours)
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert different == []
    states = [(run / f"checkpoint-{step}/trainer/state.json").read_text() for run in (actual, expected)]
    assert states[0] == states[1]
    ids = [
        [r["completion_ids"] for _, records in read_rollouts(run / "rollouts") for r in records]
        for run in (actual, expected)
    ]
    assert ids[0] == ids[1]


SELECTED = {
    "dynamic_sample": True,
    "max_resample_times": 1,
    "replay_buffer_size": 3,
    "reward_funcs": ["accuracy"],
    "learning_rate": 1e-3,
}
MOVING = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}
CASES = {
    "end of a rollout": {},
    "middle of a rollout": {"num_iterations": 2, "beta": 0.02},
    "linear schedule and warm-up": {"lr_scheduler_type": "linear", "warmup_steps": 2},
    # Saved one step after a sync, in float32, in bfloat16 and as an adapter.
    "moving reference": {**MOVING, "num_iterations": 2},
    "moving reference in bfloat16": {**MOVING, "torch_dtype": "bfloat16"},
    "moving reference of an adapter": {**MOVING, "tuner_type": "lora", "lora_rank": 4, "learning_rate": 1e-3},
    # In the middle of a rollout too: two passes, of which the first is over at step 3.
    "schedules and an adaptive bonus": {
        "num_iterations": 2,
        "temperature_end": 0.6,
        "beta": 0.05,
        "beta_end": 0.0,
        "beta_schedule": "cosine",
        "use_adaptive_entropy": True,
        "entropy_coef": 0.02,
        "entropy_target": 0.2,
        "top_entropy_quantile": 0.5,
    },
    "groups without signal replaced": {**SELECTED, "per_device_train_batch_size": 32},
    "the same in the middle of a rollout": {
        **SELECTED,
        "per_device_train_batch_size": 32,
        "num_iterations": 2,
    },
    # Kept sets of the rows being trained on, and of the groups that are held.
    "middle of a rollout under filters": {"num_iterations": 2, "beta": 0.02, "top_p": 0.7},
    "groups replaced under filters": {
        **SELECTED,
        "per_device_train_batch_size": 32,
        "num_iterations": 2,
        "top_k": 20,
        "min_p": 0.01,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_one_process(case: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train_and_watch(opts(whole, **CASES[case]))
    train_and_watch(opts(cut, stop_after_steps=3, **CASES[case]))
    assert len(records(cut)) == 3
    train_and_watch(opts(cut, resume_from_checkpoint="latest", **CASES[case]))
    assert_same_run(cut, whole, 6)


def test_what_changes_on_the_way_does(tmp_path: Path) -> None:
    """The case above is not blind: temperature, beta and the bonus differ before and after the stop."""
    run = tmp_path / "run"
    train_and_watch(opts(run, **CASES["schedules and an adaptive bonus"]))
    found = records(run)
    for name in ("temperature", "beta"):
        values = [r[name] for r in found]
        assert values == sorted(set(values), reverse=True)
    coefs = [r["entropy_coef"] for r in found]
    turns = [after > before for before, after in itertools.pairwise(coefs)]
    assert turns == sorted(turns) and len(set(turns)) == 2, f"down, and then up: {coefs}"


def test_prompts_are_drawn_and_groups_replayed_on_both_sides(tmp_path: Path) -> None:
    """The case above is not blind: before and after the stop, groups are drawn, replayed and left flat."""
    run = tmp_path / "run"
    train_and_watch(opts(run, **CASES["groups without signal replaced"]))
    for half in (records(run)[1:3], records(run)[3:]):
        assert all(sum(r[f"select/{name}"] for r in half) > 0 for name in ("attempts", "replayed"))


def test_a_resume_may_leave_the_selection_out_or_take_it_up(tmp_path: Path) -> None:
    run = tmp_path / "run"
    short = {**CASES["groups without signal replaced"], "max_steps": 3, "save_steps": 1}
    off = {"dynamic_sample": False, "replay_buffer_size": 0, "max_resample_times": 3}
    train_and_watch(opts(run, **short, stop_after_steps=1))
    change = {"resume_from_checkpoint": "latest", "allow_changes": True}
    train_and_watch(opts(run, **{**short, **off}, **change, stop_after_steps=2))
    train_and_watch(opts(run, **short, **change))
    assert ["select/attempts" in r for r in records(run)] == [True, False, True]


# Where a signal comes: in which call of what, while rollout 3 is drawn or scored.
WITHIN = {
    "native": (NativeEngine, "_advance", {}),
    "generate": (_Sampler, "__call__", {"engine": "generate"}),
    "reward": (RewardSet, "begin", {}),
    "selected": (NativeEngine, "_advance", {**SELECTED, "per_device_train_batch_size": 32}),
    "bfloat16": (NativeEngine, "_advance", {"torch_dtype": "bfloat16"}),
}


def run_whole_and_cut(
    where: tuple[type, str],
    share: float,
    opts_of: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Path, Path]:
    """Run four steps; then again with SIGTERM before the call of a method at `share` of all, and resume.

    The rollout that the signal cuts is neither trained on nor recorded. Returns both directories.
    """
    owner, name = where
    real, calls, number = getattr(owner, name), 0, -1

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        # Rewards are also tried before the run begins.
        calls += signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        if calls == number:
            signal.raise_signal(signal.SIGTERM)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(from_dict(opts_of(whole, max_steps=4), 1))
    number, calls = 1 + int(share * calls), 0
    stopped = train(from_dict(opts_of(cut, max_steps=4), 1))
    assert stopped.exit_code == 143
    assert stopped.step == (0 if share == 0.0 else stopped.step) and stopped.step < 4
    assert verify(cut / f"checkpoint-{stopped.step}").trainer
    assert len(list((cut / "rollouts").glob("*.jsonl"))) == stopped.step
    number = -1
    train(from_dict(opts_of(cut, max_steps=4, resume_from_checkpoint="latest"), 1))
    return whole, cut


@pytest.mark.parametrize("case", WITHIN)
@pytest.mark.parametrize("share", [0.0, 0.4, 0.99], ids=["first", "third", "last"])
def test_a_signal_within_a_rollout(
    case: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollout is left at once, in the first of the run too, and is sampled again: the run is the same."""
    owner, name, changes = WITHIN[case]
    whole, cut = run_whole_and_cut((owner, name), share, partial(opts, **changes), tmp_path, monkeypatch)
    assert_same_run(cut, whole, 4)


@pytest.mark.multi
@pytest.mark.parametrize(
    "case",
    [
        "middle of a rollout",
        pytest.param("end of a rollout", marks=pytest.mark.slow),
        pytest.param("groups without signal replaced", marks=pytest.mark.slow),
        pytest.param("moving reference of an adapter", marks=pytest.mark.slow),
    ],
)
def test_two_processes(case: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    changes = {**CASES[case], "per_device_train_batch_size": 8}
    train_in_processes([opts(whole, **changes), opts(cut, stop_after_steps=3, **changes)], tmp_path / "first")
    assert len(records(cut)) == 3
    train_in_processes([opts(cut, resume_from_checkpoint="latest", **changes)], tmp_path / "second")
    assert_same_run(cut, whole, 6)


def test_bfloat16_keeps_its_masters(tmp_path: Path) -> None:
    """What is computed in bfloat16 resumes from float32 masters, bit for bit."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train_and_watch(opts(whole, torch_dtype="bfloat16"))
    train_and_watch(opts(cut, torch_dtype="bfloat16", stop_after_steps=3))
    train_and_watch(opts(cut, torch_dtype="bfloat16", resume_from_checkpoint="latest"))
    assert_same_run(cut, whole, 6)
    saved = tensors(whole / "checkpoint-6")
    masters = {n: t for n, t in saved.items() if "master/" in n}
    assert masters and all(t.dtype == torch.float32 for t in masters.values())


LEVERS = {"offload_optimizer": True, "offload_model": True, "offload_reference": True}


@pytest.mark.parametrize("case", ["moving reference in bfloat16", "middle of a rollout"])
def test_offloading_changes_no_bit(case: str, tmp_path: Path) -> None:
    """Half a run with it, the other half without, is the run without: what is saved lies in CPU memory."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train_and_watch(opts(whole, **CASES[case]))
    train_and_watch(opts(cut, stop_after_steps=3, **LEVERS, **CASES[case]))
    train_and_watch(opts(cut, resume_from_checkpoint="latest", **CASES[case]))
    assert_same_run(cut, whole, 6)


@pytest.mark.multi
def test_offloading_changes_no_bit_of_shards(tmp_path: Path) -> None:
    """The same the other way round in two processes, whose rollouts have the memory of the shards."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    changes = {"fsdp": "full_shard", "torch_dtype": "bfloat16", "beta": 0.1, "per_device_train_batch_size": 8}
    train_in_processes([opts(whole, **changes), opts(cut, stop_after_steps=3, **changes)], tmp_path / "first")
    with_levers = {**changes, **LEVERS, "resume_from_checkpoint": "latest"}
    train_in_processes([opts(cut, **with_levers)], tmp_path / "second")
    assert_same_run(cut, whole, 6)


def test_moments_of_8_bits(tmp_path: Path) -> None:
    """They are saved as they are; a run with moments of 32 bits does not go on from them."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train_and_watch(opts(whole, optim="adamw_8bit"))
    train_and_watch(opts(cut, optim="adamw_8bit", stop_after_steps=3))
    other = opts(cut, optim="adamw_torch", resume_from_checkpoint="latest", allow_changes=True)
    with pytest.raises(CheckpointError, match="8 bits"):
        train(from_dict(other, 1))
    train_and_watch(opts(cut, optim="adamw_8bit", resume_from_checkpoint="latest", offload_optimizer=True))
    assert_same_run(cut, whole, 6)
    saved = {n: t for n, t in tensors(whole / "checkpoint-6").items() if ":state1/" in n}
    assert {t.dtype for t in saved.values()} == {torch.uint8, torch.float32}


def test_steps_after_the_checkpoint_stand_once(tmp_path: Path) -> None:
    """A run that was killed after its checkpoint repeats steps; the first version of them moves aside."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train_and_watch(opts(whole))
    train_and_watch(opts(cut, stop_after_steps=5))
    train_and_watch(
        opts(cut, resume_from_checkpoint=str(cut / "checkpoint-3")),
    )
    assert [r["step"] for r in records(cut)] == [1, 2, 3, 4, 5, 6]
    moved = [json.loads(x) for x in (cut / "superseded/1/metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in moved] == [4, 5]
    assert_same_run(cut, whole, 6)


def findings(run: Path) -> list[dict[str, Any]]:
    """What was said of a run, without the times."""
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "time"} for line in lines if line["kind"] == "finding"]


FLAT = {"per_device_train_batch_size": 64, "reward_funcs": ["format"], "save_steps": 2, "temperature": 0.05}


def test_a_resumed_run_is_judged_as_one(tmp_path: Path) -> None:
    """At such a temperature every group is flat; the third rollout makes it a sign, wherever a run stops."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train_and_watch(opts(whole, **FLAT))
    train_and_watch(opts(cut, stop_after_steps=2, **FLAT))
    train_and_watch(opts(cut, resume_from_checkpoint="latest", stop_after_steps=4, **FLAT))
    train_and_watch(opts(cut, resume_from_checkpoint="latest", **FLAT))
    said = findings(whole)
    assert ("F211", 3) in [(f["code"], f["step"]) for f in said]
    assert findings(cut) == said
    assert_same_run(cut, whole, 6)


def test_a_checkpoint_of_before_the_rules_were_kept(tmp_path: Path, capsys: Any) -> None:
    """It is gone on from; the rules begin at the resume, and say so."""
    run = tmp_path / "run"
    train_and_watch(opts(run, stop_after_steps=2, **FLAT))
    checkpoint = run / "checkpoint-2"
    state = checkpoint / "trainer" / "state.json"
    body = json.loads(state.read_text())
    del body["components"]["health"]
    state.write_text(json.dumps(body))
    manifest = read_manifest(checkpoint)
    files = {
        name: FileEntry(size=p.stat().st_size, sha256=hash_file(p))
        for name, p in list_files(checkpoint).items()
    }
    (checkpoint / "manifest.json").write_text(render_manifest(replace(manifest, files=files)))
    train(from_dict(opts(run, resume_from_checkpoint="latest", **FLAT), 1))
    assert "the checkpoint has no records for the doctor's rules" in capsys.readouterr().out
    assert ("F211", 5) in [(f["code"], f["step"]) for f in findings(run)]


def test_guard(tmp_path: Path) -> None:
    """The comparison is not blind: a run with another seed, and one with a moment changed by one bit,
    fail."""
    whole, other = tmp_path / "whole", tmp_path / "other"
    train_and_watch(opts(whole, max_steps=3))
    train_and_watch(opts(other, max_steps=3, seed=43, data_seed=42))
    with pytest.raises(AssertionError):
        assert_same_run(other, whole, 3)
    shutil.copytree(whole, tmp_path / "spoiled")
    moments = tmp_path / "spoiled" / "checkpoint-3" / "trainer" / "optimizer" / "rank-00000.safetensors"
    data = bytearray(moments.read_bytes())
    data[-1] ^= 1
    moments.write_bytes(data)
    assert_same_run(whole, whole, 3)
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "spoiled", whole, 3)
