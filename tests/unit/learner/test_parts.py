"""Parts of a model that sees images: which of them a step changes, and at what learning rate."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from covey.algorithm.losses import LossOutput
from covey.learner.backends.deepspeed import ZeroEngine, partition
from covey.learner.backends.fsdp2 import FSDP2Backend
from covey.learner.backends.single import SingleBackend
from covey.learner.backends.zero import Zero2Backend, Zero3Backend, whole_engine
from covey.learner.rates import rate_factors
from covey.learner.reference import MovingReference
from covey.learner.sharding.build import meta_policy, rows_of_source, sharded_policy
from covey.learner.sharding.partitions import Partitioned
from covey.learner.sharding.units import sharding_over
from covey.models.adapter_shapes import LoraSettings
from covey.models.load import load_policy
from covey.models.lora import add_adapter, applied_rank
from covey.models.policy import Policy
from covey.models.probe import micro_of
from covey.options.schema import LearnerOptions
from covey.plan.deepspeed import engine_settings
from covey.plan.layout import PRESETS, Layout
from covey.token_streams import Row
from covey.types.media import PARTS, Part
from support import squares
from support.checks import config, facts
from support.options import algorithm, learner
from support.vision import FAMILIES, medium, pixels_of, policy_of, row, save_model

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
CAT, TEXT = medium("cat", 2, 3), row([11, 12, 13], [40, 41, 42], "text")
SEEN = row([9, CAT, 10], [30, 31, 32, 33, 34], "cat")
RATE = 2.0**-10
FROZEN: tuple[tuple[Part, ...], ...] = (
    (),
    ("vit",),
    ("aligner",),
    ("llm",),
    ("vit", "aligner"),
    ("vit", "llm"),
    ("aligner", "llm"),
)


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def backward(backend: Any, *rows: Row) -> None:
    """Run a micro-batch for each row."""

    def loss(stats: Any, micro: Any) -> LossOutput:
        return LossOutput(loss=(stats.logprob_N * torch.linspace(-1, 2, len(stats.logprob_N))).sum(), sums={})

    for number, one in enumerate(rows, start=1):
        backend.backward(micro_of([one], "padded", CPU), loss, last=number == len(rows))


def values(backend: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in backend.weights()}


def changes(backend: Any, *rows: Row, rate: float = RATE) -> dict[str, Tensor]:
    """What a step over these rows adds to each weight."""
    before = values(backend)
    backward(backend, *rows)
    backend.step(rate)
    return {name: weight - before[name] for name, weight in values(backend).items()}


def seeing(family: str) -> tuple[Policy, Row]:
    """A policy of a family, those whose tower takes squares among them, and a row with an image."""
    if family not in squares.FAMILIES:
        return policy_of(family, stream="padded"), SEEN
    image = squares.medium(family, "cat")
    return squares.policy_of(family), squares.row([9, image, 10], [30, 31, 32, 33, 34], "cat")


def moved_parts(policy: Policy, found: dict[str, Tensor]) -> set[Part]:
    """The parts of which each tensor has changed, if any has."""
    by_part: dict[Part, set[bool]] = {}
    for name, change in found.items():
        by_part.setdefault(policy.part_of(name), set()).add(bool(change.any()))
    assert all(len(flags) == 1 for flags in by_part.values()), "a part changes throughout or not at all"
    return {part for part, flags in by_part.items() if flags == {True}}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("family", [*FAMILIES, *squares.FAMILIES])
def test_full_training_leaves_the_frozen_parts(family: str, frozen: tuple[Part, ...]) -> None:
    policy, seen = seeing(family)
    policy.freeze(frozen)
    backend = SingleBackend(policy, learner())
    assert moved_parts(policy, changes(backend, seen)) == policy.trained_parts == set(PARTS) - {*frozen}
    assert {policy.part_of(name) for name in backend.frozen()} == {*frozen}
    assert {policy.part_of(key.partition("/")[2]) for key in backend.masters.state()} == policy.trained_parts


def linear_parts(family: str, frozen: Collection[Part]) -> set[Part]:
    """The parts that have linear layers and are not frozen. That which joins the two of Gemma 3 has none."""
    return set(PARTS) - {*frozen} - ({"aligner"} if family == "gemma3" else set())


@pytest.mark.parametrize(
    ("family", "frozen"),
    [(f, parts) for f in (*FAMILIES, *squares.FAMILIES) for parts in FROZEN if linear_parts(f, parts)],
)
def test_all_linear_leaves_the_frozen_parts(family: str, frozen: tuple[Part, ...]) -> None:
    policy, seen = seeing(family)
    add_adapter(policy, LoraSettings(rank=4, alpha=8, frozen=frozenset(frozen)), seed=0)
    assert policy.adapter is not None
    parts = linear_parts(family, frozen)
    assert {policy.part_of(name) for name in policy.adapter.facts.targets} == policy.trained_parts == parts
    backend = SingleBackend(policy, learner())
    backward(backend, seen)
    backend.step(RATE)
    ups = {n: p for n, p in policy.named_parameters() if ".lora_B." in n}
    assert ups and all(bool(p.any()) for p in ups.values())
    # An engine that applies adapters itself does so in the language model alone.
    assert applied_rank(policy) == (4 if parts == {"llm"} else 0)


def test_named_modules_get_adapters_in_each_part() -> None:
    policy = policy_of("qwen2_5_vl", stream="padded")
    everything = frozenset(PARTS)
    settings = LoraSettings(rank=4, alpha=8, target_modules=("gate_proj",), frozen=everything)
    add_adapter(policy, settings, seed=0)
    assert policy.trained_parts == {"vit", "llm"}


def test_a_model_of_text_has_one_part_and_freezes_none(tiny_policy: Any) -> None:
    policy = tiny_policy("padded")
    policy.freeze(PARTS)
    assert policy.trained_parts == {"llm"} and policy.part_of("model.visual.merger.weight") == "llm"
    assert all(p.requires_grad for p in policy.parameters())
    assert rate_factors(policy, learner(learning_rate=0.0, vit_lr=1e-3)) == {}


# -- learning rates ----------------------------------------------------------------------------------------


def rates_of(options: LearnerOptions, kind: str = "full") -> dict[str, Tensor]:
    policy = policy_of("qwen3_vl", stream="padded")
    if kind == "lora":
        add_adapter(policy, LoraSettings(rank=4, alpha=8), seed=0)
    backend = SingleBackend(policy, options)
    before = {n: p.detach().clone() for n, p in policy.named_parameters()}
    backward(backend, SEEN)
    backend.step(options.learning_rate)
    return {n: p.detach() - before[n] for n, p in policy.named_parameters()}


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_part_takes_the_first_step_at_its_own_rate(kind: str) -> None:
    """It is that of a run at this rate, to the bit: the factors are powers of 2."""
    policy = policy_of("qwen3_vl")
    plain = rates_of(learner(learning_rate=RATE), kind)
    own = rates_of(learner(learning_rate=RATE, vit_lr=8 * RATE, aligner_lr=RATE / 4), kind)
    fast = rates_of(learner(learning_rate=8 * RATE), kind)
    slow = rates_of(learner(learning_rate=RATE / 4), kind)
    expected = {"vit": fast, "aligner": slow, "llm": plain}
    for name, change in own.items():
        assert torch.equal(change, expected[policy.part_of(name)][name]), name
    parts = {policy.part_of(name) for name, change in own.items() if bool(change.any())}
    assert parts == set(PARTS)
    ratios = [
        float(own[n].norm() / plain[n].norm())
        for n, c in own.items()
        if policy.part_of(n) == "vit" and c.any()
    ]
    assert ratios and all(abs(ratio - 8.0) < 1e-2 for ratio in ratios)


def test_the_schedule_scales_each_rate() -> None:
    """At half of the learning rate each part steps at half of its own."""
    policy = policy_of("qwen2_vl", stream="padded")
    half = changes(SingleBackend(policy, learner(learning_rate=RATE, vit_lr=4 * RATE)), SEEN, rate=RATE / 2)
    again = policy_of("qwen2_vl", stream="padded")
    slower = changes(
        SingleBackend(again, learner(learning_rate=RATE / 2, vit_lr=2 * RATE)), SEEN, rate=RATE / 2
    )
    assert all(torch.equal(half[name], change) for name, change in slower.items())


def test_moments_of_8_bits_have_rates_too() -> None:
    """Each weight steps in the first step by about its rate, whatever its gradient is."""
    policy = policy_of("qwen2_vl", stream="padded")
    own = changes(
        SingleBackend(policy, learner(learning_rate=RATE, vit_lr=8 * RATE, optim="adamw_8bit")), SEEN
    )
    largest = {
        part: max(float(c.abs().max()) for n, c in own.items() if policy.part_of(n) == part) for part in PARTS
    }
    assert largest["vit"] == pytest.approx(8 * RATE, rel=0.02)
    assert largest["llm"] == pytest.approx(RATE, rel=0.02) == pytest.approx(largest["aligner"], rel=0.02)


# -- passes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frozen", "adapted", "keeps"),
    [((), False, True), (("vit",), False, True), (("vit", "aligner"), False, False), ((), True, True)],
)
def test_a_tower_without_a_trained_weight_keeps_nothing(
    frozen: tuple[Part, ...], adapted: bool, keeps: bool
) -> None:
    policy = policy_of("qwen3_vl", stream="padded")
    policy.freeze(frozen)
    if adapted:
        add_adapter(policy, LoraSettings(rank=4, alpha=8), seed=0)
    vision: Any = policy.vision
    features_FD, deep = vision._features(policy.model.base_model, pixels_of([CAT]), CPU)
    assert [part.requires_grad for part in (features_FD, *deep)] == [keeps] * 3
    with torch.no_grad():
        assert not vision._features(policy.model.base_model, pixels_of([CAT]), CPU)[0].requires_grad


def test_recomputation_changes_nothing_beside_a_frozen_tower() -> None:
    found = []
    for kind in ("none", "full"):
        policy = policy_of("qwen3_vl", stream="padded").train()
        policy.freeze(("vit",))
        policy.keep_activations(kind)
        found.append(changes(SingleBackend(policy, learner()), SEEN))
    kept, again = found
    assert all(torch.equal(again[name], change) for name, change in kept.items())


def test_text_alone_leaves_a_run_that_trains_only_what_sees() -> None:
    """Its gradient is 0, and a pass that adds none is no fault."""
    policy = policy_of("qwen2_5_vl", stream="padded")
    policy.freeze(("llm",))
    backend = SingleBackend(policy, learner())
    assert not any(bool(change.any()) for change in changes(backend, TEXT).values())
    assert backend.gradient_probe() is None
    assert moved_parts(policy, changes(backend, TEXT, SEEN)) == {"vit", "aligner"}
    assert SingleBackend(policy_of("qwen2_5_vl"), learner()).gradient_probe() is not None


def test_a_moving_reference_holds_what_is_trained() -> None:
    policy, reference = policy_of("qwen2_vl"), policy_of("qwen2_vl")
    policy.freeze(("vit", "aligner"))
    options = algorithm(sync_ref_model=True, ref_model_sync_steps=1)
    moving = MovingReference(policy, reference, options, dtype=FP32)
    assert moving.state().keys() == {n for n, p in policy.named_parameters() if p.requires_grad}


# -- backends ----------------------------------------------------------------------------------------------


def with_pixels(policy: Policy) -> Policy:
    assert policy.vision is not None
    policy.vision.read = pixels_of
    return policy


def settings(name: str) -> dict[str, Any]:
    stage, offload = PRESETS[name]
    layout = Layout(num_gpus=2, gpu_bytes=0, zero_stage=stage, offload=offload)
    return engine_settings(config(deepspeed=name), facts(layout=layout, machine={"cuda": False}))


def made(base: Path, name: str, frozen: Collection[Part], options: LearnerOptions, dtype: torch.dtype) -> Any:
    """A backend of this name over the model of a directory."""
    if name in ("fsdp2", "zero3"):
        how: dict[str, Any] = {"adapter": None, "seed": 0, "dtype": dtype, "trust_remote_code": False}
        meta, sampler = (meta_policy(base, None, frozen=frozen, **how) for _ in range(2))
        for policy in (meta.policy, sampler.policy):
            policy.runs_on = CPU
            with_pixels(policy)
        if name == "fsdp2":
            layout = Layout(num_gpus=2, gpu_bytes=0, is_here=True, zero_stage=3, fsdp=True)
            split = sharded_policy(meta, base, sharding_over(layout, CPU), dtype, trust_remote_code=False)
            return FSDP2Backend(split, sampler.policy, options, compute_dtype=dtype)
        with rows_of_source(meta, base, trust_remote_code=False) as read:
            partition(meta.policy, settings(name), read, dtype)
            own = Partitioned(ZeroEngine(meta.policy, settings(name), options))
            own.fill_masters(read)
        return Zero3Backend(own, sampler.policy, options, compute_dtype=dtype)
    policy = with_pixels(load_policy(base, device=CPU, disable_dropout=True))
    policy.freeze(frozen)
    if name == "single":
        return SingleBackend(policy, options, compute_dtype=dtype)
    return Zero2Backend(whole_engine(policy, settings(name), options, dtype), options)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", ["fsdp2", "zero2", "zero3"])
def test_each_backend_takes_the_step_of_one_process(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base = save_model("qwen2_5_vl", tmp_path)
    # Large enough that bfloat16 shows it; gradients that are rounding alone move no weight.
    rate = 2.0**-5
    options = learner(learning_rate=rate, vit_lr=4 * rate, adam_epsilon=1e-5)
    frozen: tuple[Part, ...] = ("aligner",)
    single, other = (made(base, kind, frozen, options, dtype) for kind in ("single", name))
    assert {n for n, _ in other.weights()} == {n for n, _ in single.weights()}
    assert all(weight.dtype == dtype for _, weight in other.weights())
    expected, found = (changes(backend, SEEN, TEXT, rate=rate) for backend in (single, other))
    try:
        assert moved_parts(single.policy, expected) == moved_parts(single.policy, found) == {"vit", "llm"}
        gaps = [float((found[n] - c).norm() / c.norm().clamp_min(1e-9)) for n, c in expected.items()]
        assert max(gaps) < (1e-4 if dtype == FP32 else 0.1)
        assert {other.policy.part_of(n) for n in other.frozen()} == {"aligner"}
    finally:
        other.close()
