"""Which kernels are missing, what the options make of a policy, and what the opening says of it."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from covey.checks.run.look import run_facts
from covey.checks.survey import survey
from covey.comm import LocalComm
from covey.config.resolve import from_dict
from covey.models import sdpa
from covey.models.policy import Policy
from covey.plan.disk import size
from covey.plan.memory import TIGHT, memory_plan, recompute_of
from covey.training.announce import _kernels, slow_attention
from covey.training.build import build_job
from support.checks import changed
from support.models import random_model, save_model
from support.runs import options, write_rollouts


@pytest.fixture
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    kernels = ("flash_attn", "liger_kernel")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name in kernels else find(name, *rest)
    )


@pytest.mark.usefixtures("_nothing_installed")
@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"attn_impl": "flash_attn"}, (("attn_impl", "flash-attn"),)),
        ({"use_liger_kernel": True}, (("use_liger_kernel", "liger-kernel"),)),
        ({"attn_impl": "flex", "use_liger_kernel": "auto"}, ()),
    ],
)
def test_packages_that_are_asked_for_by_name(changes, missing, tmp_path: Path, monkeypatch) -> None:
    config = from_dict(options(tmp_path / "m", tmp_path / "out", **changes)).config
    monkeypatch.setattr("covey.checks.run.look.num_gpus", lambda: 1)
    assert run_facts(config, 1).machine.missing_packages == missing
    # On a CPU the package is not what is missing.
    monkeypatch.setattr("covey.checks.run.look.num_gpus", lambda: 0)
    assert run_facts(config, 1).machine.missing_packages == ()


def test_the_family_is_known_before_weights_are_loaded(tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path / "model")
    opts = options(model, tmp_path / "out", write_rollouts(tmp_path / "replay", rollouts=1))
    with survey(from_dict(opts).config, 1) as found:
        assert found.facts.model.type == "qwen3"


def test_options_reach_the_policy(tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path / "model")
    replay = write_rollouts(tmp_path / "replay", rollouts=1)
    changes = {"attn_impl": "eager", "gradient_checkpointing": "selective", "activation_offloading": True}
    resolved = from_dict(options(model, tmp_path / "out", replay, beta=0.1, **changes))
    with survey(resolved.config, 1) as found:
        job = build_job(resolved, found, LocalComm())
    policy = job.backend.policy
    assert (policy.attention, policy.recompute, policy.offload) == ("eager", "selective", True)
    # The reference is the same function, so that the KL to it starts at exactly 0.
    assert job.backend.reference.attention == "eager"
    assert _kernels(resolved.config, policy) == (
        "attention: eager; activations are recomputed, except matrix products and attention, kept "
        "in the machine's memory until then"
    )


def test_what_is_planned_of_activations_is_what_runs(tmp_path: Path) -> None:
    """On a machine on which keeping them does not fit."""
    model = save_model("qwen3", tmp_path / "model")
    replay = write_rollouts(tmp_path / "replay", rollouts=1)
    changes = {"max_length": 4096, "max_completion_length": 2048, "per_device_train_batch_size": 4}
    resolved = from_dict(options(model, tmp_path / "out", replay, **changes))
    with survey(resolved.config, 1) as found:
        needed = memory_plan(resolved.config, found.facts).needed_bytes
        tight = replace(
            found, facts=changed(found.facts, machine={"free_memory_bytes": round((needed - 1000) / TIGHT)})
        )
        job = build_job(resolved, tight, LocalComm())
    assert recompute_of(resolved.config, found.facts) == "none"
    assert job.backend.policy.recompute == recompute_of(resolved.config, tight.facts) == "selective"
    assert memory_plan(resolved.config, tight.facts).recompute == "selective"


def test_torch_is_asked_which_kernel_it_takes() -> None:
    """On a CPU, which has two: the fused one, and the other where nothing else is allowed."""
    query = torch.zeros(1, 4, 32, 16)
    mask = torch.zeros(1, 1, 32, 32)
    assert {sdpa._choice(query, 2, bias) for bias in (None, mask)} == {"flash_attention"}
    with sdpa_kernel(SDPBackend.MATH):
        assert sdpa._choice(query, 2, None) == "math"
    assert sdpa.kernels(Policy(random_model("qwen3"))) == {}


def test_a_slow_kernel_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(random_model("qwen3"))
    found = {"prompts": "flash_attention", "rows behind a prompt": "efficient_attention"}
    monkeypatch.setattr(sdpa, "kernels", lambda policy: found)
    assert slow_attention(policy) == ""
    found["prompts"] = "math"
    # 4 bytes for each of 4,096 x 4,096 scores of a head.
    heads = policy.model.config.num_attention_heads
    assert size(heads * 4 * 4096**2) in slow_attention(policy) and "prompts" in slow_attention(policy)
    assert "rows" not in slow_attention(policy).partition(":")[0]
