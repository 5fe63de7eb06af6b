"""What runs on a real model leave: resumes, checkpoints, adapters, merges and exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from journeys.helpers import events, metrics, read_lines, succeed
from support.real import around, real
from support.real_runs import LIMIT, SAVED, STEPS, answer, train


def test_a_resumed_run_is_the_whole_run(data, tmp_path):
    model = real("smollm2")
    options = {"tuner_type": "lora", "save_only_model": False, "save_steps": 10}
    whole = train(model, data, tmp_path / "whole", **options)
    train(model, data, tmp_path / "cut", **options, stop_after_steps=SAVED)
    run = train(model, data, tmp_path / "cut", **options, resume_from_checkpoint="latest")
    assert metrics(run) == metrics(whole)
    mine, theirs = (load_file(r / f"checkpoint-{STEPS}" / "adapter_model.safetensors") for r in (run, whole))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The real model as base models are published: no file names the end token of its template."""
    made = tmp_path_factory.mktemp("base") / "model"
    made.mkdir()
    for file in real("smollm2").iterdir():
        (made / file.name).symlink_to(file)
    for name in ("config.json", "generation_config.json"):
        said = json.loads((made / name).read_text())
        (made / name).unlink()
        (made / name).write_text(json.dumps({**said, "eos_token_id": 0}))
    return made


@pytest.fixture(scope="module")
def runs(base, data, tmp_path_factory) -> dict[str, Path]:
    """A run of all weights and one of an adapter, each of one step."""
    root, few = tmp_path_factory.mktemp("runs"), {"max_steps": 1, "learning_rate": 1e-6}
    return {
        "checkpoint": train(base, data, root / "full", **few) / "checkpoint-1",
        "adapter": train(base, data, root / "lora", tuner_type="lora", **few) / "checkpoint-1",
    }


@pytest.mark.parametrize("kind", ["checkpoint", "export", "adapter", "merge", "float32 merge"])
def test_what_a_run_leaves_stops_where_the_run_stopped(kind, base, runs, tmp_path):
    made = runs.get(kind, tmp_path / "made")
    words = {
        "export": [runs["checkpoint"]],
        "merge": [runs["adapter"], "--merge"],
        "float32 merge": [runs["adapter"], "--merge", "--torch_dtype", "float32"],
    }
    if kind in words:
        succeed("export", *map(str, words[kind]), "--output_dir", str(made))
    ids = answer(made, base)
    assert len(ids) < LIMIT and ids[-1] == 2
    assert answer(base, base)[-1] != 2, "the model stopped before as well, so this shows nothing"


def test_a_typed_template_is_the_only_one(data, tmp_path):
    model, typed = around("qwen3", tmp_path / "model"), tmp_path / "mine.jinja"
    typed.write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>\n{% endfor %}[assistant] "
    )
    run = train(model, data, tmp_path / "run", max_steps=1, chat_template=str(typed), learning_rate=1e-4)
    theirs = AutoTokenizer.from_pretrained(run / "checkpoint-1")
    asked = [row["messages"] for row in read_lines(data)]
    prompts = {theirs.apply_chat_template(a, add_generation_prompt=True, tokenize=False) for a in asked}
    sampled = {record["prompt"] for record in read_lines(run / "rollouts" / "rollout-000000.jsonl")}
    assert len(sampled) == 2 and sampled <= prompts
    assert "chat_template" not in json.loads((run / "checkpoint-1" / "tokenizer_config.json").read_text())
    ends = json.loads((run / "checkpoint-1" / "generation_config.json").read_text())
    assert (ends["eos_token_id"], ends["top_k"]) == ([151_645, 151_643], 64)


def test_ids_of_a_padded_vocabulary_are_said(data, tmp_path):
    """Qwen 3's embedding has 151,936 rows for 151,669 tokens; a random model samples of them all."""
    model = around("qwen3", tmp_path / "model", rows=2 * 151_669)
    run = train(model, data, tmp_path / "run", max_steps=1)
    assert 0.2 < metrics(run)[0]["completions/unknown_ids_ratio"] < 0.8
    assert "F233" in {e.get("code") for e in events(run, "finding")}
