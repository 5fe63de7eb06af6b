"""Builds what a configuration trains and samples with: backend, policy, reference and engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from covey.checks.model.look import lora_settings
from covey.checks.survey import model_dir
from covey.comm import Comm
from covey.config.quantization import quantization_of
from covey.config.start import adapter_directory, reference_adapter
from covey.learner.backends.base import Backend
from covey.learner.backends.ddp import DDPBackend
from covey.learner.backends.deepspeed import ZeroEngine, partition
from covey.learner.backends.fsdp2 import FSDP2Backend
from covey.learner.backends.single import SingleBackend
from covey.learner.backends.zero import Zero2Backend, Zero3Backend, whole_engine
from covey.learner.offload import own_offloads
from covey.learner.reference import MovingReference
from covey.learner.sharding.build import MetaPolicy, meta_policy, rows_of_source, sharded_policy
from covey.learner.sharding.partitions import Partitioned
from covey.learner.sharding.reference import SplitReference
from covey.learner.sharding.units import Sharded, sharding_over
from covey.models.live import LiveModel, take_weights
from covey.models.load import choose_liger, choose_stream, load_adapted, load_policy, prepare_policy
from covey.models.lora import load_adapter
from covey.models.policy import Policy
from covey.models.vision.pixels import PixelReader
from covey.options.schema import Config
from covey.plan.deepspeed import engine_settings
from covey.plan.facts import Facts
from covey.plan.memory import engine_rests, recompute_of, reduces_each
from covey.rollout.engine import Engine
from covey.rollout.generate import GenerateEngine
from covey.rollout.native.engine import NativeEngine
from covey.training.process import compute_dtype
from covey.training.served import served_engine
from covey.training.vllm import colocated

# Splits a policy without weights over the ranks, and fills it from a source; False: it is a frozen reference.
Splitter = Callable[[MetaPolicy, Path | nn.Module, bool], Any]


def backend_for(
    config: Config,
    facts: Facts,
    device: torch.device,
    comm: Comm,
    *,
    reference: bool,
    live: LiveModel | None = None,
) -> Backend:
    """Build the policy of a run or of the checkpoint that it resumes from, its reference and its optimizer.

    Of a `live` model the policy is that object; its reference is a copy of it as it was given.
    """
    is_split = facts.layout.fsdp or facts.layout.zero_stage == 3
    build = _sharded if is_split else _whole
    return build(config, facts, device, comm, reference, live)


def _whole(
    config: Config, facts: Facts, device: torch.device, comm: Comm, reference: bool, live: LiveModel | None
) -> Backend:
    """Build a backend with one whole model in each process."""
    resume = None if facts.output.resume is None else Path(facts.output.resume.path)
    dtype = compute_dtype(config, device)
    lora = lora_settings(config)
    start: Path | nn.Module = model_dir(config) if live is None else live.model
    # The adapter that trains, and that of the reference where it has one, which is put on and copied first.
    own, of_reference = resume or adapter_directory(config), reference_adapter(config) if reference else None
    # A policy with an adapter is its own reference: the same weights with the adapter off.
    has_copy = reference and lora is None
    first = copy.deepcopy(start) if has_copy else start
    if lora is None:
        if live is not None and resume is not None:
            take_weights(live.model, resume, trust_remote_code=config.trust_remote_code)
        policy = load_policy(
            start if live is not None else resume or start,
            device=device,
            disable_dropout=config.disable_dropout,
            trust_remote_code=config.trust_remote_code,
            kernels=config.kernels,
        )
        policy.freeze(config.frozen_parts)
    else:
        policy = load_adapted(
            start,
            lora,
            adapter=of_reference or own,
            seed=config.seed,
            compute_dtype=dtype,
            device=device,
            disable_dropout=config.disable_dropout,
            trust_remote_code=config.trust_remote_code,
            kernels=config.kernels,
            quantization=quantization_of(config),
        )
    choose_liger(policy, config.use_liger_kernel)
    policy.keep_activations(recompute_of(config, facts), offload=config.activation_offloading)
    options = own_offloads(config, facts.layout)
    frozen = _reference(first, config, device) if has_copy else None
    has_own = reference and _has_own_reference(config, policy)
    moving = MovingReference(policy, frozen, config, dtype=dtype) if has_own else None
    if of_reference is not None and own is not None:
        load_adapter(policy, own)
    if frozen is not None:
        _ready(frozen, config, dtype)
    _share_pixels([policy, frozen], config, live)
    if facts.layout.zero_stage:
        engine = whole_engine(policy, engine_settings(config, facts), options, dtype)
        return Zero2Backend(engine, options, reference=frozen, moving=moving)
    kind = DDPBackend if comm.world > 1 else SingleBackend
    return kind(policy, options, compute_dtype=dtype, reference=frozen, moving=moving)


def _sharded(
    config: Config, facts: Facts, device: torch.device, comm: Comm, reference: bool, live: LiveModel | None
) -> Backend:
    """Build a backend with one model over all processes."""
    resume = None if facts.output.resume is None else Path(facts.output.resume.path)
    dtype, lora = compute_dtype(config, device), lora_settings(config)
    start: Path | nn.Module = model_dir(config) if live is None else live.model
    first = start if live is not None or lora is not None else resume or start
    own, of_reference = resume or adapter_directory(config), reference_adapter(config) if reference else None

    def meta(source: Path | nn.Module, adapter: Path | None, *, trains: bool) -> MetaPolicy:
        found = meta_policy(
            source,
            lora,
            adapter=adapter,
            seed=config.seed,
            dtype=dtype,
            trust_remote_code=config.trust_remote_code,
            frozen=config.frozen_parts,
        )
        found.policy.runs_on = device
        silent = config.disable_dropout or not trains
        prepare_policy(found.policy, device, disable_dropout=silent, kernels=config.kernels)
        choose_liger(found.policy, config.use_liger_kernel)
        return found

    trained, sampler = meta(first, of_reference or own, trains=True), meta(first, own, trains=False)
    trained.policy.keep_activations(recompute_of(config, facts))
    split = _by_fsdp(config, facts, device, dtype) if facts.layout.fsdp else _by_zero3(config, facts, dtype)
    frozen: Any = None
    if reference and lora is None and not config.sync_ref_model:
        still = meta(start, None, trains=False)
        still.policy.requires_grad_(False).eval()
        for parameter in still.policy.parameters():
            parameter.data = parameter.data.to(dtype)
        frozen = split(still, start, False)
    if live is not None and lora is None and resume is not None:
        # The reference has been read by now: it is the model as it was given.
        take_weights(live.model, resume, trust_remote_code=config.trust_remote_code)
    trained.policy.train()
    policy = split(trained, first, True)
    has_own = reference and _has_own_reference(config, policy.policy)
    moving = SplitReference(policy, config) if has_own else None
    if of_reference is not None:
        policy.refill(sampler.values)
    still_policy = None if frozen is None else frozen.policy
    _share_pixels([policy.policy, sampler.policy, still_policy], config, live)
    how: dict[str, Any] = {"compute_dtype": dtype, "reference": frozen, "moving": moving}
    options = own_offloads(config, facts.layout)
    if facts.layout.fsdp:
        how["reduces_each"] = reduces_each(config, facts)
        return FSDP2Backend(policy, sampler.policy, options, **how)
    return Zero3Backend(policy, sampler.policy, options, **how)


def _by_fsdp(config: Config, facts: Facts, device: torch.device, dtype: torch.dtype) -> Splitter:
    sharding = sharding_over(facts.layout, device)
    # FSDP itself keeps the shards of a reference in CPU memory, and copies a layer at a time.
    of_reference = replace(sharding, offload=sharding.offload or config.offload_reference)

    def split(found: MetaPolicy, source: Path | nn.Module, trains: bool) -> Sharded:
        how = sharding if trains else of_reference
        return sharded_policy(found, source, how, dtype, trust_remote_code=config.trust_remote_code)

    return split


def _by_zero3(config: Config, facts: Facts, dtype: torch.dtype) -> Splitter:
    own, options = engine_settings(config, facts), own_offloads(config, facts.layout)

    def split(found: MetaPolicy, source: Path | nn.Module, trains: bool) -> Partitioned:
        with rows_of_source(found, source, trust_remote_code=config.trust_remote_code) as read:
            partition(found.policy, own, read, dtype)
            made = Partitioned(ZeroEngine(found.policy, own, options if trains else None))
            made.fill_masters(read)
        return made

    return split


def _share_pixels(policies: Iterable[Policy | None], config: Config, live: LiveModel | None) -> None:
    """Have policies that see images read them once for all."""
    seeing = [policy.vision for policy in policies if policy is not None and policy.vision is not None]
    if seeing:
        read = PixelReader(model_dir(config) if live is None else live.directory)
        for vision in seeing:
            vision.read = read


def _has_own_reference(config: Config, policy: Policy) -> bool:
    """Whether the reference follows the policy, or has an adapter of its own, and stays."""
    return config.sync_ref_model or (policy.adapter is not None and reference_adapter(config) is not None)


def _reference(first: Path | nn.Module, config: Config, device: torch.device) -> Policy:
    """Return a frozen copy of the model that the run started from, a resumed run too."""
    policy = load_policy(
        first,
        device=device,
        disable_dropout=True,
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


def sampling_engine(
    config: Config,
    facts: Facts,
    backend: Backend,
    comm: Comm,
    tokenizer: Tokenizer,
    live: LiveModel | None = None,
) -> Engine:
    """Return the engine of a run, and the layout that its rows are on from now on. Collective."""
    backend.choose_layout(config.attn_impl)
    return engine_for(config, facts, backend.sampler, comm, tokenizer, live)


def engine_for(
    config: Config,
    facts: Facts,
    policy: Policy,
    comm: Comm,
    tokenizer: Tokenizer,
    live: LiveModel | None = None,
) -> Engine:
    """Return the engine that a configuration asks for, or the one that the model can be sampled with; it
    finds stop strings by the tokenizer. Collective."""
    if config.rollout_servers:
        return served_engine(config, facts, policy, comm, tokenizer)
    if config.use_vllm:
        return colocated(config, facts, policy, comm, tokenizer, live)
    # A model that cannot run as a stream keeps state that the native engine's cache does not know.
    if config.engine == "generate" or policy.stream == "padded":
        return GenerateEngine(policy, tokenizer=tokenizer)
    return NativeEngine(policy, rests=engine_rests(config, facts), tokenizer=tokenizer)
