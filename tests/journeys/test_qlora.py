"""QLoRA from command to files: a run, its resume, two processes, its evaluation, its merge, and a run after
it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from covey.checks.survey import survey
from covey.comm import LocalComm
from covey.config.resolve import from_dict
from covey.quickstart import task
from covey.selftest.compare import far
from covey.training.build import build_job
from covey.training.loop import run as run_job
from journeys.helpers import flags, plan_of, succeed
from support.runs import options, train_and_watch, train_in_processes, write_rollouts

PACKED: dict[str, Any] = {
    "mask_truncated_completions": False,
    "tuner_type": "lora",
    "lora_rank": 4,
    "quant_bits": "4",
    "beta": 0.1,
    "learning_rate": 1e-3,
}


MODEL = task.MODEL_DIR


def metric(run: Path, name: str) -> list[float]:
    return [json.loads(line)[name] for line in (run / "metrics.jsonl").read_text().splitlines()]


def files(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoint-{step}" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of a run that samples, with a checkpoint after the second."""
    output = tmp_path_factory.mktemp("run") / "whole"
    train_and_watch(options(MODEL, output, max_steps=4, save_steps=2, save_total_limit=3, **PACKED))
    return output


def test_a_run_learns_beside_packed_weights(run: Path) -> None:
    """The sampler is the policy, and the reference is the packed model."""
    assert max(metric(run, "sampling/sampling_logp_difference/mean")) < 1e-4
    kl = metric(run, "kl")
    assert kl[0] == 0.0 and kl[-1] > 0.0
    two, four = files(run, 2), files(run, 4)
    assert any(not torch.equal(two[name], four[name]) for name in two)
    assert all(tensor.dtype == torch.float32 for tensor in four.values())


def test_a_resumed_run_has_the_same_bits(run: Path, tmp_path: Path) -> None:
    part = options(MODEL, tmp_path / "run", max_steps=4, save_steps=2, **PACKED)
    train_and_watch({**part, "stop_after_steps": 2})
    train_and_watch({**part, "resume_from_checkpoint": "latest"})
    expected = files(run, 4)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in files(tmp_path / "run", 4).items())


def steep_model(directory: Path) -> Path:
    """A random Llama with the built-in tokenizer, whose weights are so large that roundings are seen."""
    directory.mkdir()
    described = json.loads((MODEL / "config.json").read_text())
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4}
    own = {name: described[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(0)
    config = LlamaConfig(initializer_range=0.5, tie_word_embeddings=True, **sizes, **own)
    LlamaForCausalLM(config).save_pretrained(directory)
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, directory)
    return directory


@pytest.mark.parametrize(("compute", "is_low"), [("auto", False), ("bfloat16", True)])
def test_the_bounds_are_those_of_the_dtype_that_rounds_most(
    tmp_path: Path, compute: str, is_low: bool
) -> None:
    """A run in float32 with the usual options of ms-swift keeps the native engine and is not stopped."""
    given = {**PACKED, "bnb_4bit_compute_dtype": compute, "max_steps": 2, "max_completion_length": 8}
    resolved = from_dict(options(steep_model(tmp_path / "model"), tmp_path / "run", **given), 1)
    found = survey(resolved.config, 1)
    job = build_job(resolved, found, LocalComm())
    job.recorder.console = None
    assert job.health.guards.is_low_precision == is_low
    assert (job.backend.policy.stream, job.health.guards.engine) == ("prefix", "native")
    run_job(job)
    job.backend.close()
    found.close()
    assert job.progress.step == 2


@pytest.mark.multi
def test_two_processes_are_as_one(tmp_path: Path) -> None:
    replay = write_rollouts(tmp_path / "replay", rollouts=2)
    cases = [{"quant_bits": "4"}, {"quant_bits": "8"}]
    runs = [{**PACKED, "max_steps": 2, **case} for case in cases]
    split = [
        options(MODEL, tmp_path / f"two{n}", replay, **{**run, "per_device_train_batch_size": 4})
        for n, run in enumerate(runs)
    ]
    for n, (case, two) in enumerate(zip(runs, train_in_processes(split, tmp_path / "work"), strict=True)):
        one = train_and_watch(options(MODEL, tmp_path / f"one{n}", replay, **case))
        for expected, got in zip(one.gradients, two.gradients, strict=True):
            assert far(got, expected) < 1e-5
        assert far(two.after, one.after) < 1e-5
        assert one.metrics[0]["kl"] == two.metrics[0]["kl"] == 0.0


def test_evaluated_merged_and_gone_on_with(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoint-4"
    words = flags({"val_dataset": ["quickstart#8"], "reward_funcs": ["accuracy"], "max_completion_length": 8})
    moved = tmp_path / "adapter"
    succeed("export", str(checkpoint), "--output_dir", str(moved))
    for number, directory in enumerate((checkpoint, moved)):
        succeed("eval", str(directory), *words, "--output_dir", str(tmp_path / f"eval{number}"))
    # The run's own options, and what lies beside the adapter, pack the base alike.
    one, two = [(tmp_path / f"eval{n}" / "quickstart.jsonl").read_text() for n in range(2)]
    sampled = [[json.loads(line)["sampler_logprobs"] for line in text.splitlines()] for text in (one, two)]
    assert sampled[0] == sampled[1] and sampled[0]
    done = succeed("export", str(checkpoint), "--merge", "--output_dir", str(tmp_path / "merged"))
    assert "a base quantized to 4 bits" in done.out
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    plain = load_file(MODEL / "model.safetensors")
    assert merged.keys() == plain.keys() and any(not torch.equal(merged[n], plain[n]) for n in plain)
    given = {"dataset": ["quickstart#64"], "reward_funcs": ["accuracy"], "max_completion_length": 8}
    after = plan_of("--adapters", str(moved), *flags({"model": str(MODEL), **given}))
    assert (after["options"]["quant_bits"], after["options"]["quant_method"]) == ("4", "bnb")
    assert after["notes"] == [note for note in after["notes"] if note["code"] != "W152"]
    whole = plan_of("--adapters", str(moved), "--quant_bits", "none", *flags({"model": str(MODEL), **given}))
    assert "W152" in {note["code"] for note in whole["notes"]}
