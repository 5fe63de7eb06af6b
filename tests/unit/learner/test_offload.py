"""Tensors that wait in CPU memory: their bits, who holds bytes where and when, and steps that do not notice.

A run without a GPU has both places in CPU memory; what is away has no memory on the device's side all the
same, so its bytes are counted there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from torch import Tensor, nn

from covey.batching.pack import pack
from covey.comm import LocalComm
from covey.learner.backends.single import SingleBackend
from covey.learner.offload import Offloaded, layer_groups, own_memory
from covey.learner.optimizer import Masters
from covey.learner.reference import MovingReference
from covey.learner.update import update
from covey.models.policy import Policy
from covey.options.schema import Config
from covey.plan.facts import ModelSizes
from covey.plan.layout import THIS_MACHINE
from covey.plan.levers import moment_bytes, parts_away
from covey.plan.memory import training_of
from covey.plan.memory_training import held_parts, step_parts, weights_of
from support.checks import config, facts
from support.options import algorithm, learner
from support.steps import CASES, for_case, plan_of, policy, rows

BF16, FP32 = torch.bfloat16, torch.float32
OPTIMIZER_AWAY = {"offload_optimizer": True}
ROLLOUT, REFERENCE = {"offload_model": True}, {"offload_reference": True}


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """What tensors hold, a storage that two have counted once."""
    return sum({id(s): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def test_offloaded_tensors_come_back_as_they_were() -> None:
    owner, dtype = torch.randn(7, 5), torch.randn(3).to(BF16)
    view, kept = owner.detach()[1:, 2], owner.clone()
    offloaded = Offloaded(lambda: [owner, view, dtype])
    expected = view.clone()
    offloaded.to_cpu()
    assert num_bytes([owner, dtype]) == 0
    assert torch.equal(offloaded.read(owner), kept) and torch.equal(offloaded.read(view), expected)
    other = torch.randn(7, 5)
    assert offloaded.read(other).data_ptr() == other.data_ptr()
    with offloaded.on_device():
        assert torch.equal(owner, kept)
        owner.mul_(2)
    assert offloaded.is_on_cpu and torch.equal(offloaded.read(view), 2 * expected)
    with offloaded.on_device(is_changed=False):
        owner.mul_(2)
    # What was called unchanged is not copied.
    assert torch.equal(offloaded.read(owner), 2 * kept)
    offloaded.to_device()
    assert torch.equal(view, 2 * expected) and num_bytes([owner]) == 140
    with offloaded.on_device():
        owner.mul_(2)
    offloaded.to_cpu(is_changed=False)
    assert torch.equal(offloaded.read(owner), 4 * kept), "a change between two absences was lost"


def test_memory_of_an_array_is_copied_before_it_can_be_let_go() -> None:
    parameter = nn.Parameter(torch.from_numpy(torch.randn(4).numpy().copy()))
    kept = parameter.detach().clone()
    own_memory([parameter])
    offloaded = Offloaded(lambda: [parameter])
    offloaded.to_cpu()
    offloaded.to_device()
    assert torch.equal(parameter, kept)


def test_groups_of_layers() -> None:
    names = ["embed", *(f"model.layers.{n}.{x}" for n in range(5) for x in "ab"), "norm"]
    assert layer_groups(names, None) == [[0], [1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11]]
    assert layer_groups(names, 2) == [[0], [1, 2, 3, 4, 5, 6], [7, 8, 9, 10], [11]]
    assert layer_groups(names, 1) == [[0], [*range(1, 11)], [11]]
    assert layer_groups(["x"], 3) == [[0]]


def backend_with(
    offload: Mapping[str, object], dtype: torch.dtype, *, moving: bool = False, **changes: object
) -> SingleBackend:
    """A policy with a reference that began as other weights."""
    own, reference = policy("prefix"), policy("prefix").requires_grad_(False)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.9)
    follows = algorithm(sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.5)
    pace = MovingReference(own, reference, follows, dtype=dtype) if moving else None
    for parameter in reference.parameters():
        parameter.data = parameter.data.to(dtype)
    options = learner(weight_decay=0.1, **offload, **changes)
    return SingleBackend(own, options, compute_dtype=dtype, reference=reference, moving=pace)


def owners(backend: SingleBackend) -> dict[str, int]:
    """The bytes that lie on the device, by owner."""
    masters, moving = backend.masters, backend.moving
    low = [m for p, m in zip(masters.params, masters.masters, strict=True) if p is not m]
    reference = [] if backend.reference is None else list(backend.reference.parameters())
    return {
        "weights": num_bytes(backend.policy.parameters()),
        "masters": num_bytes(low),
        "moments": num_bytes(t for group in masters._groups for t in group.adam.moments()),
        "reference": num_bytes([*reference, *([] if moving is None else moving.own_tensors())]),
    }


CASE = CASES["k3"]
PLAN = plan_of(max_tokens=60)


def steps_of(
    backend: SingleBackend, num: int = 3, watch: Callable[[str], None] = lambda phase: None
) -> list[object]:
    """Rollouts, annotations and steps, as a run takes them; all that came of them."""
    found: list[object] = []
    (batch,) = pack(for_case(rows(), CASE), PLAN, rollout=0)
    for step in range(1, num + 1):
        with backend.rollout_view():
            watch("rollout")
        for micro in batch.micro_batches:
            found.append(backend.annotate([micro], "reference", lambda: watch("annotate")).tolist())
        result = update(batch, backend, CASE.config, 1e-2, LocalComm())
        assert result.stats is not None and result.stats.update_ratio > 0
        watch("held")
        found += [result.stats, backend.move_reference(step), backend.fingerprints(backend.frozen())]
    saved = {shard.name: shard.tensor.tolist() for shard in backend.shards()}
    moved = {} if backend.moving is None else {n: t.tolist() for n, t in backend.moving.tensors().items()}
    return [*found, saved, moved, [p.tolist() for p in backend.policy.parameters()]]


@pytest.mark.parametrize("moving", [False, True], ids=["still", "moving"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])
def test_steps_do_not_notice(dtype: torch.dtype, moving: bool) -> None:
    """Logprobs of the reference, norms, moments, masters and weights are those of a run without it, to the
    bit."""
    plain = steps_of(backend_with({}, dtype, moving=moving))
    everything = {**OPTIMIZER_AWAY, **ROLLOUT, **REFERENCE, "move_model_batches": 2}
    for offload in (OPTIMIZER_AWAY, ROLLOUT, REFERENCE, everything):
        assert steps_of(backend_with(offload, dtype, moving=moving)) == plain, offload
    assert steps_of(backend_with(everything, dtype, moving=moving, adam_epsilon=1e-7)) != plain


def sizes(model: Policy) -> ModelSizes:
    """What the forecast knows of a model."""
    text = model.model.config
    return ModelSizes(
        family="qwen2",
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_width=text.hidden_size // text.num_attention_heads,
        intermediate=text.intermediate_size,
        vocabulary=text.vocab_size,
        tied=text.tie_word_embeddings,
        parameters=sum(p.numel() for p in model.parameters()),
    )


def forecast(options: Config, model: ModelSizes, phase: str) -> dict[str, int]:
    """What the plan says that a GPU holds of each owner's in a phase."""
    given = facts(model={"sizes": model}, machine={"cuda": True})
    how = training_of(options, given, "none")
    held = held_parts(options, model, how, weights_of(model, how), THIS_MACHINE)
    held["moments"] = moment_bytes(options, model.parameters)
    away = parts_away(options, THIS_MACHINE, phase)
    there = {name: 0 if name in away else size for name, size in held.items()}
    there["reference"] += there.pop("reference in float32", 0)
    return there


LEVERS: dict[str, dict[str, bool]] = {
    "nothing": {},
    "optimizer": OPTIMIZER_AWAY,
    "model": ROLLOUT,
    "reference": REFERENCE,
}


@pytest.mark.parametrize("moving", [False, True], ids=["still", "moving"])
@pytest.mark.parametrize("lever", LEVERS)
def test_bytes_of_each_owner_are_those_of_the_forecast(lever: str, moving: bool) -> None:
    options = config(torch_dtype="bfloat16", beta=0.1, sync_ref_model=moving, **LEVERS[lever])
    backend = backend_with(LEVERS[lever], BF16, moving=moving)
    model = sizes(backend.policy)
    seen: dict[str, dict[str, int]] = {}
    steps_of(backend, 2, lambda phase: seen.update({phase: owners(backend)}))
    for phase, name in (("rollout", "rollout"), ("annotate", "annotate"), ("held", "step")):
        assert seen[phase] == forecast(options, model, name), phase
    # One weight is 2 bytes, its master 4, its moments 8.
    assert seen["annotate"]["reference"] == (6 if moving else 2) * model.parameters


@pytest.mark.parametrize("groups", [None, 1, 2])
def test_a_step_holds_the_state_of_a_group(groups: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most that is there at a time is what the plan says: that of the embedding, or of some layers."""
    backend = backend_with({**OPTIMIZER_AWAY, "move_model_batches": groups}, BF16)
    model = sizes(backend.policy)
    most: list[int] = []
    leave = Offloaded.to_cpu

    def watched(self: Offloaded, **how: bool) -> None:
        found = owners(backend)
        most.append(found["masters"] + found["moments"])
        leave(self, **how)

    monkeypatch.setattr(Offloaded, "to_cpu", watched)
    steps_of(backend, 2)
    options = config(torch_dtype="bfloat16", offload_optimizer=True, move_model_batches=groups)
    how = training_of(options, facts(model={"sizes": model}, machine={"cuda": True}), "none")
    held = held_parts(options, model, how, weights_of(model, how), THIS_MACHINE)
    held["moments"] = moment_bytes(options, model.parameters)
    planned = step_parts(options, model, how, held, THIS_MACHINE)["optimizer state of some layers"]
    # The last norm belongs to no layer.
    assert max(most) == pytest.approx(planned, abs=12 * 2 * model.hidden)
    assert max(most) < 12 * model.parameters


@pytest.mark.parametrize("kinds", [({}, OPTIMIZER_AWAY), (OPTIMIZER_AWAY, {})])
def test_what_was_saved_is_loaded_wherever_it_lies(kinds: tuple[dict[str, bool], dict[str, bool]]) -> None:
    first, second = (backend_with(offload, BF16) for offload in kinds)
    steps_of(first, 2)
    second.masters.load_state({shard.name: shard.tensor.clone() for shard in first.shards()})
    assert steps_of(second, 2) == steps_of(first, 2)


def test_masters_of_a_step_that_failed_are_away_again() -> None:
    module = nn.Linear(4, 4)
    masters = Masters.of(module, learner(**OPTIMIZER_AWAY), BF16)
    module(torch.full((1, 4), torch.nan, dtype=BF16)).sum().backward()
    masters.absorb()
    with pytest.raises(ArithmeticError):
        masters.step(1e-3)
    assert num_bytes(masters.masters) == 0 and len(masters.state()) == 2
