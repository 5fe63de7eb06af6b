"""What a configuration trains and samples with: the backend with its policy and reference, and the engine."""

from __future__ import annotations

from pathlib import Path

import torch

from covey.comm import Comm
from covey.config.schema import Config
from covey.learner.backends.base import Backend
from covey.learner.backends.ddp import DDPBackend
from covey.learner.backends.single import SingleBackend
from covey.models.load import choose_liger, choose_stream, load_adapted, load_policy
from covey.models.policy import Policy
from covey.plan.facts import Facts
from covey.plan.memory import engine_rests, recompute_of
from covey.rollout.engine import Engine
from covey.rollout.generate import GenerateEngine
from covey.rollout.native.engine import NativeEngine
from covey.training import settings
from covey.training.facts import model_dir
from covey.training.facts.model import lora_settings


def backend_for(
    config: Config, facts: Facts, device: torch.device, comm: Comm, *, reference: bool
) -> Backend:
    """The policy of a run or of the checkpoint that it resumes from, its reference and its optimizer."""
    resume = None if facts.resume is None else Path(facts.resume.path)
    dtype = settings.compute_dtype(config, device)
    lora = lora_settings(config)
    if lora is None:
        policy = load_policy(
            resume or model_dir(config),
            device=device,
            disable_dropout=config.disable_dropout,
            gradient_checkpointing=False,
            trust_remote_code=config.trust_remote_code,
            kernels=config.kernels,
        )
    else:
        policy = load_adapted(
            model_dir(config),
            lora,
            adapter=resume,
            seed=config.seed,
            compute_dtype=dtype,
            device=device,
            disable_dropout=config.disable_dropout,
            gradient_checkpointing=False,
            trust_remote_code=config.trust_remote_code,
            kernels=config.kernels,
        )
    choose_liger(policy, config.use_liger_kernel)
    policy.keep_activations(recompute_of(config, facts), offload=config.activation_offloading)
    optimizer = settings.optimizer(config)
    # A policy with an adapter is its own reference: the same weights with the adapter off.
    frozen = _reference(config, device) if reference and lora is None else None
    moving = settings.moving_reference(config, policy, frozen, dtype) if reference else None
    if frozen is not None:
        _ready(frozen, config, dtype)
    kind = DDPBackend if comm.world > 1 else SingleBackend
    return kind(policy, optimizer, compute_dtype=dtype, reference=frozen, moving=moving)


def _reference(config: Config, device: torch.device) -> Policy:
    """A frozen copy of the model that the run started from, a resumed run too."""
    policy = load_policy(
        model_dir(config),
        device=device,
        disable_dropout=True,
        gradient_checkpointing=False,
        trust_remote_code=config.trust_remote_code,
        kernels=config.kernels,
    )
    policy.requires_grad_(False)
    return policy.eval()


def _ready(policy: Policy, config: Config, dtype: torch.dtype) -> None:
    """Cast a reference and let it compute as the policy does."""
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(dtype)
    choose_liger(policy, config.use_liger_kernel)
    choose_stream(policy, config.attn_impl)


def engine_for(config: Config, facts: Facts, policy: Policy) -> Engine:
    """The engine that a configuration asks for, or the one that the model can be sampled with."""
    # A model that cannot run as a stream keeps state that the native engine's cache does not know.
    if config.engine == "generate" or policy.stream == "padded":
        return GenerateEngine(policy)
    return NativeEngine(policy, rests=engine_rests(config, facts))
