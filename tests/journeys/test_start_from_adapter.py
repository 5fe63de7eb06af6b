"""Runs that start from a saved adapter: the model at step 0, the KL to each reference, resume, and files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from covey.checks.judge import refuse_faults
from covey.checks.survey import survey
from covey.comm import LocalComm
from covey.config.resolve import from_dict
from covey.errors import ConfigError
from covey.models.probe import micro_of
from covey.selftest.compare import far
from covey.token_streams import Row
from covey.training.build import build_job
from journeys.helpers import flags, plan_of
from support.adapters import add_trainer_state, make_adapter, peft_logits
from support.models import save_model
from support.runs import options, train_and_watch, train_in_processes, write_rollouts

KL: dict[str, Any] = {"beta": 0.1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(model, tmp_path_factory.mktemp("adapter") / "sft")


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts without rows that the loss leaves out."""
    directory = write_rollouts(tmp_path_factory.mktemp("replay"), rollouts=4)
    for path in directory.iterdir():
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            record |= {"finish": "stop", "status": "ok", "reward": record["reward"] or 0.0}
            record["parts"] = [{**record["parts"][0], "value": record["reward"], "status": "ok"}]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory


def metric(run: Path, name: str) -> list[Any]:
    return [json.loads(line).get(name) for line in (run / "metrics.jsonl").read_text().splitlines()]


def logprobs(logits: list[torch.Tensor], records: list[dict[str, Any]]) -> torch.Tensor:
    """Of every completion's tokens at the temperature that they were drawn at."""
    parts = []
    for logit, record in zip(logits, records, strict=True):
        ids, start = torch.tensor(record["completion_ids"]), len(record["prompt_ids"])
        rows = logit[start - 1 : start - 1 + len(ids)] / record["temperature"]
        parts.append(rows.log_softmax(-1).gather(1, ids[:, None])[:, 0])
    return torch.cat(parts)


def kl_by_hand(model: Path, adapter: Path, replay: Path) -> float:
    """k3 of the adapter against its base, the mean over the tokens of the first rollout, by peft."""
    lines = (replay / "rollout-000000.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    rows = [record["prompt_ids"] + record["completion_ids"] for record in records]
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        plain = [base(input_ids=torch.tensor([row])).logits[0] for row in rows]
    log_ratio = logprobs(plain, records) - logprobs(peft_logits(model, adapter, rows), records)
    return float((log_ratio.exp() - log_ratio - 1).mean())


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "lora_dropout": 0.05},
    "dora": {"use_dora": True},
    "norms": {"modules_to_save": ["norm"]},
    "pattern": {"target_modules": r".*layers\.[02]\..*(q_proj|up_proj)"},
    "layers": {"layers_to_transform": [1]},
    "uniform": {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"down_proj": 8}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_starts_as_peft_loads_the_adapter(kind: str, model: Path, replay: Path, tmp_path: Path) -> None:
    """Log-probabilities of the policy before the first step are those of peft's model, and so are those of
    the adapter that it saves."""
    adapter = make_adapter(model, tmp_path / "sft", **KINDS[kind])
    opts = options(model, tmp_path / "run", replay, adapters=str(adapter), save_steps=9, **KL)
    resolved = from_dict(opts, 1)
    with survey(resolved.config, 1) as found:
        refuse_faults(resolved, found.facts)
        job = build_job(resolved, found, LocalComm())
        records = [{"prompt_ids": [1, 5], "completion_ids": [9, 200, 31], "temperature": 1.0}]
        ids = [1, 5, 9, 200, 31]
        row = Row(token_ids=ids, is_trained=[False] * 2 + [True] * 3, prompt_length=2, prompt_key=0)
        policy = job.backend.policy
        with torch.no_grad():
            own = policy(micro_of([row], policy.stream, policy.device)).logprob_N
        expected = logprobs(peft_logits(model, adapter, [ids]), records)
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)
        job.saver.model_writer()(tmp_path / "saved")
        saved = logprobs(peft_logits(model, tmp_path / "saved", [ids]), records)
        torch.testing.assert_close(saved, expected, rtol=1e-5, atol=1e-5)
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        with torch.no_grad():
            base = logprobs([plain(input_ids=torch.tensor([ids])).logits[0]], records)
        assert (base - own).abs().max() > 1e-2
        job.backend.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kl_at_step_0_is_that_of_the_reference(
    dtype: str, model: Path, adapter: Path, replay: Path, tmp_path: Path
) -> None:
    """0 to the start, by its word and by its directory; by hand to the base; and the start stays where it is
    while the policy moves."""
    found = {}
    for name in ("start", str(adapter), "base"):
        run = tmp_path / Path(name).name
        asked = {"adapters": str(adapter), "ref_adapters": name, "torch_dtype": dtype, **KL}
        train_and_watch(options(model, run, replay, max_steps=3, **asked))
        found[Path(name).name] = metric(run, "kl")
        assert metric(run, "reference/last_sync") == [None] * 3
    assert found["start"][0] == 0.0
    assert min(found["start"][1:]) > 0.0
    # Logprobs in bfloat16 are off by up to 1 %, and a KL of some 1e-5 by its own size.
    assert dtype == "bfloat16" or found["start"][1] < found["start"][2]
    assert found[adapter.name] == found["start"]
    rel = 1e-4 if dtype == "float32" else 0.1
    assert found["base"][0] == pytest.approx(kl_by_hand(model, adapter, replay), rel=rel)
    assert found["base"][0] > 10 * found["start"][2] / 3


def test_the_reference_may_be_another_adapter(
    model: Path, adapter: Path, replay: Path, tmp_path: Path
) -> None:
    """Of the same shape: the KL is that of peft's two models, and the policy starts as its own adapter."""
    other = make_adapter(model, tmp_path / "other", seed=4)
    asked = {"adapters": str(adapter), "ref_adapters": str(other), **KL}
    train_and_watch(options(model, tmp_path / "run", replay, max_steps=1, **asked))
    lines = (replay / "rollout-000000.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    rows = [record["prompt_ids"] + record["completion_ids"] for record in records]
    of_other, of_own = (logprobs(peft_logits(model, a, rows), records) for a in (other, adapter))
    log_ratio = of_other - of_own
    expected = float((log_ratio.exp() - log_ratio - 1).mean())
    (kl,) = metric(tmp_path / "run", "kl")
    assert math.isclose(kl, expected, rel_tol=1e-4)


def test_a_reference_that_follows_begins_at_the_start(
    model: Path, adapter: Path, replay: Path, tmp_path: Path
) -> None:
    asked = {"adapters": str(adapter), "sync_ref_model": True, "ref_model_sync_steps": 2, **KL}
    copies = {**asked, "ref_model_mixup_alpha": 1.0}
    train_and_watch(options(model, tmp_path / "run", replay, max_steps=3, **copies))
    assert [value == 0.0 for value in metric(tmp_path / "run", "kl")] == [True, False, True]


@pytest.mark.parametrize("is_swift", [False, True], ids=["trl", "ms-swift"])
@pytest.mark.parametrize("way", ["model", "adapters"])
def test_a_checkpoint_of_another_trainer_is_started_from(
    way: str, is_swift: bool, model: Path, adapter: Path, replay: Path, tmp_path: Path
) -> None:
    """A directory of an adapter as --model is what --adapters with its base is; no pickle is touched."""
    checkpoint = add_trainer_state(make_adapter(model, tmp_path / "checkpoint-40"), is_swift=is_swift)
    named = {"model": str(checkpoint)} if way == "model" else {"adapters": str(checkpoint)}
    opts = {**options(model, tmp_path / "run", replay, max_steps=1, **KL), **named}
    result = train_and_watch(opts)
    twin = options(model, tmp_path / "twin", replay, max_steps=1, adapters=str(adapter), **KL)
    expected = train_and_watch(twin)
    assert result.before.keys() == expected.before.keys()
    assert all(torch.equal(result.before[n], expected.before[n]) for n in expected.before)
    assert all(torch.equal(result.after[n], expected.after[n]) for n in expected.after)


def test_a_whole_checkpoint_of_another_trainer_is_a_model(model: Path, replay: Path, tmp_path: Path) -> None:
    checkpoint = add_trainer_state(save_model("qwen2", tmp_path / "checkpoint-40"), is_swift=True)
    (checkpoint / "global_step40").mkdir()
    (checkpoint / "global_step40" / "mp_rank_00_model_states.pt").write_bytes(b"\x80\x04 not to be read")
    (checkpoint / "zero_to_fp32.py").write_text("raise SystemExit")
    result = train_and_watch(options(checkpoint, tmp_path / "run", replay, max_steps=1))
    expected = train_and_watch(options(model, tmp_path / "twin", replay, max_steps=1))
    assert all(torch.equal(result.after[n], expected.after[n]) for n in expected.after)


def test_a_resumed_run_keeps_the_first_reference(model: Path, replay: Path, tmp_path: Path) -> None:
    """2 + 2 steps are 4 steps; the reference comes from the adapter's directory again, wherever that lies,
    and another adapter there is refused."""
    adapter = make_adapter(model, tmp_path / "sft")
    asked = {"adapters": str(adapter), "save_steps": 2, **KL}
    whole = train_and_watch(options(model, tmp_path / "whole", replay, max_steps=4, **asked))
    run = tmp_path / "run"
    train_and_watch(options(model, run, replay, max_steps=2, **asked))
    moved = adapter.rename(tmp_path / "moved")
    again = {**asked, "adapters": str(moved), "resume_from_checkpoint": "latest", "max_steps": 4}
    result = train_and_watch(options(model, run, replay, **again))
    assert all(torch.equal(result.after[n], whole.after[n]) for n in whole.after)
    assert metric(run, "kl") == metric(tmp_path / "whole", "kl")
    make_adapter(model, moved, seed=9)
    assert codes(options(model, run, replay, **{**again, "max_steps": 6})) == ["E419"]
    without = {n: v for n, v in again.items() if n != "adapters"}
    shape = {"tuner_type": "lora", "lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    assert "E419" in codes(options(model, run, replay, **{**without, **shape, "max_steps": 6}))


def codes(opts: dict[str, Any]) -> list[str]:
    """Codes of what stands against a run; none where it would start."""
    resolved = from_dict(opts, 1)
    with survey(resolved.config, 1) as found:
        try:
            refuse_faults(resolved, found.facts)
        except ConfigError as error:
            return [problem.code for problem in error.problems if problem.code.startswith("E")]
    return []


@pytest.mark.slow
@pytest.mark.multi
def test_two_ranks_are_one(model: Path, adapter: Path, replay: Path, tmp_path: Path) -> None:
    asked = {"adapters": str(adapter), "max_steps": 3, **KL}
    halves = options(model, tmp_path / "two", replay, **asked, per_device_train_batch_size=4)
    (two,) = train_in_processes([halves], tmp_path / "work")
    one = train_and_watch(options(model, tmp_path / "one", replay, **asked))
    assert far(two.after, one.after) < 1e-4
    both = [metric(tmp_path / name, "kl") for name in ("one", "two")]
    assert both[0][0] == both[1][0] == 0.0
    assert both[1] == pytest.approx(both[0], rel=1e-3, abs=1e-7)


def test_the_plan_says_what_is_trained_and_held(model: Path, adapter: Path, tmp_path: Path) -> None:
    """The reference by its word, and the memory of the adapter that is kept beside the one that trains."""
    none = options(model, tmp_path / "a", adapters=str(adapter), save_steps=9)
    start, base = plan_of(*flags({**none, **KL})), plan_of(*flags({**none, **KL, "ref_adapters": "base"}))
    plans = (start, base, plan_of(*flags(none)))
    held = [plan["memory"]["phases"]["update"]["parts"].get("reference adapter") for plan in plans]
    assert held[0] == 4 * start["facts"]["num_trained"]
    assert held[1:] == [None, None]
    assert "the adapter as it is at the start" in "\n".join(start["lines"])
