"""Whole runs whose reference follows the policy: the KL after a copy, its size, ranks, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from covey.checkpoint.shards import SavedShards
from covey.cli.main import main
from covey.selftest.compare import far
from journeys.helpers import flags
from support.models import save_model
from support.runs import options, train_and_watch, train_in_processes, write_rollouts

SYNC: dict[str, Any] = {"beta": 0.1, "sync_ref_model": True}
LORA: dict[str, Any] = {"tuner_type": "lora", "lora_rank": 4, "target_modules": ["q_proj", "down_proj"]}
LOW: dict[str, Any] = {"torch_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp("replay"), rollouts=8)


def series(run: Path, name: str) -> list[Any]:
    return [json.loads(line).get(name) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", [{}, LOW, LORA, {**LORA, **LOW}], ids=["full", "low", "lora", "lora, low"])
def test_a_copy_begins_at_a_kl_of_zero(
    kind: dict[str, Any], model: Path, replay: Path, tmp_path: Path
) -> None:
    """With alpha 1, exactly 0 in the rollout behind each sync, and in no other but the first."""
    copies = {**SYNC, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 1.0}
    train_and_watch(options(model, tmp_path / "run", replay, max_steps=8, **copies, **kind))
    assert [value == 0.0 for value in series(tmp_path / "run", "kl")] == [n in (0, 3, 6) for n in range(8)]
    assert series(tmp_path / "run", "reference/last_sync") == [0, 0, 3, 3, 3, 6, 6, 6]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["kind"] == "reference_moved"] == [3, 6]


@pytest.mark.parametrize("kind", [{}, LORA], ids=["full", "lora"])
def test_the_kl_is_smaller_the_more_the_reference_follows(
    kind: dict[str, Any], model: Path, replay: Path, tmp_path: Path
) -> None:
    found = []
    for name, changes in {
        "none": {"sync_ref_model": False, "beta": 0.1},
        "rare": {**SYNC, "ref_model_sync_steps": 4},
        "often": {**SYNC, "ref_model_sync_steps": 2},
    }.items():
        train_and_watch(options(model, tmp_path / name, replay, max_steps=8, **changes, **kind))
        found.append(sum(series(tmp_path / name, "kl")[5:]))
    assert found[0] > 1.5 * found[1] > 1.5 * 1.2 * found[2] > 0


@pytest.mark.parametrize("kind", [{}, LORA], ids=["full", "lora"])
def test_the_checkpoint_holds_the_mean_by_hand(
    kind: dict[str, Any], model: Path, replay: Path, tmp_path: Path
) -> None:
    """0.6 policy + 0.4 reference after steps 2 and 4, from the policies of the checkpoints themselves."""
    changes = {**SYNC, "ref_model_sync_steps": 2, "save_steps": 2, "save_total_limit": 9, "max_steps": 6}
    run = tmp_path / "run"
    train_and_watch(options(model, run, replay, **changes, **kind, keep_trainer_state=9))
    held = [dict(SavedShards(run / f"checkpoint-{n}/trainer/reference")) for n in (2, 4, 6)]
    policies = []
    for step in (2, 4, 6):
        (path,) = (run / f"checkpoint-{step}").glob("*model.safetensors")
        names = {n.removeprefix("base_model.model."): t for n, t in load_file(str(path)).items()}
        policies.append({n.replace(".weight", ".default.weight") if kind else n: t for n, t in names.items()})
    for now, before, policy in zip(held[1:], held[:-1], policies[1:], strict=True):
        checked = 0
        for name, tensor in now.items():
            own = policy.get(name.removeprefix("model."))
            if own is not None:
                torch.testing.assert_close(tensor, 0.6 * own + 0.4 * before[name], rtol=1e-5, atol=1e-8)
                checked += 1
        assert checked >= len(now) - 1  # a tied head is saved once


@pytest.mark.slow
@pytest.mark.multi
def test_two_ranks_are_one(model: Path, replay: Path, tmp_path: Path) -> None:
    """The same weights and the same KL, of all weights and with an adapter."""
    changes = {**SYNC, "ref_model_sync_steps": 2, "max_steps": 6}
    kinds = {"full": {}, "lora": LORA}
    two = train_in_processes(
        [
            options(model, tmp_path / f"two-{n}", replay, **changes, **kind, per_device_train_batch_size=4)
            for n, kind in kinds.items()
        ],
        tmp_path / "work",
    )
    for (name, kind), both in zip(kinds.items(), two, strict=True):
        one = train_and_watch(options(model, tmp_path / f"one-{name}", replay, **changes, **kind))
        assert far(both.after, one.after) < 1e-4
        values = [series(tmp_path / f"{n}-{name}", "kl") for n in ("one", "two")]
        assert values[1] == pytest.approx(values[0], rel=1e-3, abs=1e-7)
        assert values[0][-1] > 0


def test_a_resume_that_begins_to_move_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint has such a reference or has none, whatever is allowed."""
    base = options(Path("quickstart"), tmp_path / "run", max_steps=4, save_steps=2, beta=0.1)
    train_and_watch({**base, "stop_after_steps": 2})
    again = {**base, **SYNC, "ref_model_sync_steps": 2, "resume_from_checkpoint": "latest"}
    for allowed in (True, False):
        assert main(["train", *flags({**again, "allow_changes": allowed})]) == 2
        said = capsys.readouterr().err
        assert "E405" in said and "sync_ref_model False -> True" in said and "allow_changes" not in said
