"""suppress_tokens of a model's generation_config.json, from the plan to the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import covey as package
from covey.errors import ConfigError, GuardStop
from journeys.helpers import flags, own_model, read_lines, rollouts, small, succeed

# +, 8 and 9, a token that the model never samples, and one that it does not have.
BANNED = [24, 10, 23, 100, 400]


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own_model(Path("model"))
    ban(BANNED)
    Path("r.py").write_text(
        "def length(completions, **_):\n    return [len(set(text)) / 16 for text in completions]\n"
    )


def ban(tokens: Any) -> None:
    path = Path("model/generation_config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "suppress_tokens": tokens}))


def options(output: str, **changes: Any) -> dict[str, Any]:
    given = small(
        "quickstart#64", output, model="model", reward_funcs=["r.py:length"], beta=0.05, max_steps=2
    )
    return {**given, **changes}


def weights(run: str) -> torch.Tensor:
    files = Path(run, "checkpoint-2").glob("*.safetensors")
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return torch.cat([found[name].flatten() for name in sorted(found)])


def test_a_run_neither_samples_nor_counts_them() -> None:
    said = succeed("train", *flags(options("run"))).out
    assert "never sampled" in said and "(24)" in said and "(400)" not in said
    records = [record for lines in rollouts(Path("run")) for record in lines]
    assert all(record["banned_token_ids"] == [10, 23, 24, 100] for record in records)
    assert not {*BANNED} & {token for record in records for token in record["completion_ids"]}
    first, second = read_lines(Path("run/metrics.jsonl"))
    assert first["kl"] == 0.0 < second["kl"] and first["grad_norm"] > 0
    # The checkpoint's users ban them too, and covey resumes with the same.
    saved = json.loads(Path("run/checkpoint-2/generation_config.json").read_text())
    assert saved["suppress_tokens"] == BANNED
    again = options("run", max_steps=3, resume_from_checkpoint="latest")
    assert package.train(**again).step == 3


@pytest.mark.multi
def test_ranks_that_hold_shards_ban_them_too() -> None:
    succeed("train", *flags(options("one")))
    two = options("two", per_device_train_batch_size=4, fsdp="full_shard", nproc_per_node=2)
    succeed("train", *flags(two))
    assert float((weights("one") - weights("two")).norm() / weights("one").norm()) < 1e-6
    assert [[r["completion_ids"] for r in lines] for lines in rollouts(Path("one"))] == [
        [r["completion_ids"] for r in lines] for lines in rollouts(Path("two"))
    ]


def test_records_of_a_model_that_did_not_ban_them_are_named() -> None:
    ban([])
    package.train(**options("free"))
    ban(BANNED)
    with pytest.raises(GuardStop) as stopped:
        package.train(**options("replayed", replay_rollouts="free/rollouts"))
    assert stopped.value.finding.code == "F110" and "suppress_tokens" in stopped.value.finding.seen


@pytest.mark.parametrize("tokens", ["24", [24.5], [[24]], {"a": 1}, [True]])
def test_no_list_of_ids(tokens: Any) -> None:
    ban(tokens)
    with pytest.raises(ConfigError, match="suppress_tokens"):
        package.train(**options("run"))
