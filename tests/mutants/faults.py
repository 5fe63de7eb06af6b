"""The planted faults: each patches one seam as a bug there would; its code and step stand beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from covey.batching import pack, samples
from covey.learner import annotate, optimizer, reference, update
from covey.learner.backends import single, whole
from covey.models.policy import Policy
from covey.models.prefix import Prefix
from covey.rollout import collect
from covey.rollout.native import branches, engine
from covey.training import backend, scoring
from covey.types import Outcome, Score, TokenStats
from mutants.harness import Mutant

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def changed(owner: Any, name: str, change: Callable[..., Any]) -> Plant:
    """Give the results of a function through `change`, which gets them and the function's arguments."""

    def plant(patch: Patch) -> None:
        real = getattr(owner, name)

        def mutant(*args: Any, **kwargs: Any) -> Any:
            return change(real(*args, **kwargs), *args)

        patch.setattr(owner, name, mutant)

    return plant


def before(owner: Any, name: str, change: Callable[..., tuple[Any, ...]]) -> Plant:
    """Call a function with the arguments that `change` makes of its own."""

    def plant(patch: Patch) -> None:
        real = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **kwargs: real(*change(*args), **kwargs))

    return plant


def each(change: Callable[[Any], Any]) -> Callable[..., list[Any]]:
    """Apply `change` to each of several results."""
    return lambda values, *args: [change(value) for value in values]


def nth(call: int, change: Callable[..., Any]) -> Callable[..., Any]:
    """Apply `change` to the result of one call alone."""
    calls = iter(range(10**6))
    return lambda value, *args: change(value, *args) if next(calls) == call else value


# -- backward and optimizer


def _drops_a_micro_batch(patch: Patch) -> None:
    real, calls = single.SingleBackend.backward, iter(range(10**6))

    def backward(self: Any, micro: Any, loss: Any, *, last: bool) -> Any:
        if next(calls) != 1:
            return real(self, micro, loss, last=last)
        stats = self.policy(micro)
        return stats, loss(stats, micro)

    patch.setattr(single.SingleBackend, "backward", backward)


def _weighs_backward(weight: Callable[[int, bool], float]) -> Plant:
    """The gradient that each backward pass adds, by its number in the step and whether it is the last."""

    def plant(patch: Patch) -> None:
        real, number = single.SingleBackend.backward, 0

        def backward(self: Any, micro: Any, loss: Any, *, last: bool) -> Any:
            nonlocal number
            before = dict(self.masters.gradients())
            out = real(self, micro, loss, last=last)
            for name, master in zip(self.masters.names, self.masters.masters, strict=True):
                if master.grad is not None:
                    master.grad = before[name] + weight(number, last) * (master.grad - before[name])
            number = 0 if last else number + 1
            return out

        patch.setattr(single.SingleBackend, "backward", backward)

    return plant


def _averages_over_micro_batches(patch: Patch) -> None:
    real, passes = single.SingleBackend.backward, 0

    def backward(self: Any, micro: Any, loss: Any, *, last: bool) -> Any:
        nonlocal passes
        out, passes = real(self, micro, loss, last=last), passes + 1
        if last:
            for master in self.masters.masters:
                master.grad.div_(passes)
            passes = 0
        return out

    patch.setattr(single.SingleBackend, "backward", backward)


def _weighs_a_tensor(part: str, weight: float) -> Plant:
    """A hook on one tensor, as a library leaves it behind."""

    def plant(patch: Patch) -> None:
        real = single.SingleBackend.backward

        def backward(self: Any, micro: Any, loss: Any, *, last: bool) -> Any:
            out = real(self, micro, loss, last=last)
            for name, master in zip(self.masters.names, self.masters.masters, strict=True):
                if last and part in name:
                    master.grad.mul_(weight)
            return out

        patch.setattr(single.SingleBackend, "backward", backward)

    return plant


def _clears_the_buffer_at_each_backward(patch: Patch) -> None:
    real = single.SingleBackend.backward

    def backward(self: Any, micro: Any, loss: Any, *, last: bool) -> Any:
        kept = [None if m.grad is None else m.grad.clone() for m in self.masters.masters]
        out = real(self, micro, loss, last=last)
        if not last:
            for master, gradient in zip(self.masters.masters, kept, strict=True):
                master.grad = gradient
        return out

    patch.setattr(single.SingleBackend, "backward", backward)


def _zeroes(part: str) -> Plant:
    def plant(patch: Patch) -> None:
        real = optimizer.Masters.step

        def step(self: Any, *how: Any) -> Any:
            for name, master in zip(self.names, self.masters, strict=True):
                if part in name and master.grad is not None:
                    master.grad.zero_()
            return real(self, *how)

        patch.setattr(optimizer.Masters, "step", step)

    return plant


def _freezes_a_tensor(patch: Patch) -> None:
    real = backend.load_policy

    def load(*args: Any, **kwargs: Any) -> Policy:
        policy = real(*args, **kwargs)
        next(p for n, p in policy.named_parameters() if "down_proj" in n).requires_grad_(False)
        return policy

    patch.setattr(backend, "load_policy", load)


def bf16_masters(patch: Patch) -> None:
    """The masters hold what bfloat16 can hold."""
    real = optimizer.Masters._write_back

    def write_back(self: Any) -> None:
        with torch.no_grad():
            for master in self.masters:
                master.copy_(master.bfloat16())
        real(self, range(len(self.masters)))

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        write_back(self)
        adam = self._groups[0].adam
        stepped = adam._optimizer.step

        def step() -> None:
            stepped()
            write_back(self)

        adam._optimizer.step = step

    made = optimizer.Masters.__init__
    patch.setattr(optimizer.Masters, "__init__", init)


def optimizer_holds_others(patch: Patch) -> None:
    made = optimizer.Masters.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self._groups[0].adam._optimizer.step = lambda: None

    patch.setattr(optimizer.Masters, "__init__", init)


def nan_in_gradient(patch: Patch) -> None:
    real = optimizer.Masters.step

    def step(self: Any, *how: Any) -> Any:
        self.masters[3].grad.view(-1)[0] = math.nan
        return real(self, *how)

    patch.setattr(optimizer.Masters, "step", step)


def _spoils(part: Callable[[Any], torch.Tensor], after: int = 1) -> Plant:
    """NaN in a tensor of the optimizer, right after so many steps."""

    def plant(patch: Patch) -> None:
        real, due = optimizer.Masters.step, nth(after - 1, lambda out, self: spoil(out, self))

        def spoil(out: Any, self: Any) -> Any:
            with torch.no_grad():
                part(self).view(-1)[0] = math.nan
            return out

        patch.setattr(optimizer.Masters, "step", lambda self, *how: due(real(self, *how), self))

    return plant


def _nan_in_loaded_weights(policy: Policy, *args: Any) -> Policy:
    with torch.no_grad():
        policy.get_parameter("model.model.norm.weight")[0] = math.nan
    return policy


def nan_loss(out: Any, *args: Any) -> Any:
    """A loss that is no number."""
    return replace(out, loss=out.loss * math.nan)


# -- sampling


def publishes_once(patch: Patch) -> None:
    real, calls = engine.NativeEngine.publish, iter(range(10**6))

    def publish(self: Any, weights: Any, version: int) -> Any:
        return real(self, weights, version if next(calls) == 0 else 0)

    patch.setattr(engine.NativeEngine, "publish", publish)


def _request(**change: Any) -> Plant:
    def swapped(self: Any, request: Any) -> tuple[Any, ...]:
        wanted = {k: v(request) for k, v in change.items()}
        return self, replace(request, **wanted)

    return before(engine.NativeEngine, "submit", swapped)


def _nan_in_sampler(patch: Patch) -> None:
    real = engine.NativeEngine._completion

    def completion(self: Any, row: Any, finish: Any) -> Any:
        return replace(done := real(self, row, finish), logprobs=(math.nan, *done.logprobs[1:]))

    patch.setattr(engine.NativeEngine, "_completion", completion)


at_another_temperature = _request(sampling=lambda r: replace(r.sampling, temperature=0.7))


def _shifted_positions(self: Any, micro: Any) -> tuple[Any, ...]:
    return self, replace(micro, positions_T=micro.positions_T * 2)


def _leaking_rows(self: Any, micro: Any, *rest: Any) -> tuple[Any, ...]:
    whole = replace(micro.segments[0], start=0, length=int(micro.tokens_T.shape[0]), parent=None)
    return self, replace(micro, segments=(whole,), shared=None), *rest


def _of_text(sample: Any, *_: Any) -> Any:
    """Ids as another tokenizer would have them: two neighbours become one."""
    ids = list(sample.token_ids)
    ids[sample.prompt_length] = (ids[sample.prompt_length] + 1) % 256
    return replace(sample, tokens=replace(sample.tokens, token_ids=tuple(ids)))


# -- groups, credit, packing


def _two_lost(found: Any, *args: Any) -> Any:
    """Two episodes whose sandbox did not start."""
    first = found[0].group
    lost = [
        replace(e, outcome=Outcome.INFRASTRUCTURE, sequences=(), failure="sandbox") for e in first.episodes
    ]
    return [replace(found[0], group=replace(first, episodes=(*lost[:2], *first.episodes[2:]))), *found[1:]]


def _swap_groups(found: Any, *args: Any) -> Any:
    first, second = found[0].group, found[1].group
    mixed = (
        replace(first, episodes=(second.episodes[0], *first.episodes[1:])),
        replace(second, episodes=(first.episodes[0], *second.episodes[1:])),
    )
    return [replace(found[i], group=mixed[i]) for i in (0, 1)] + found[2:]


def _rotated(credits: list[Any], *args: Any) -> list[Any]:
    return [*credits[3:], *credits[:3]]


def _advantages(change: Callable[[float], float]) -> Plant:
    return changed(
        annotate,
        "row_credits",
        lambda credits, *args: [replace(c, advantage=change(c.advantage)) for c in credits],
    )


def _roll_advantages(micro: Any, *args: Any) -> Any:
    return replace(micro, advantage_N=micro.advantage_N.roll(1))


def _without_last(sample: Any, *args: Any) -> Any:
    mask = list(sample.is_trained)
    mask[-1] = False
    tokens = replace(sample.tokens, is_trained=tuple(mask), logprobs=sample.sampler_logprobs[:-1])
    return replace(sample, tokens=tokens)


def _half_denominator(found: Any, *args: Any) -> Any:
    return replace(found, num_tokens=found.num_tokens // 2)


def _row_twice(numbers: list[list[int]], *args: Any) -> list[list[int]]:
    return [[*numbers[0], numbers[0][0]], *numbers[1:]]


def row_lost(numbers: list[list[int]], *args: Any) -> list[list[int]]:
    return [numbers[0][1:], *numbers[1:]]


def _annotation(which: str, change: Callable[[Any], Any]) -> Plant:
    def plant(patch: Patch) -> None:
        real = single.SingleBackend.annotate
        patch.setattr(
            single.SingleBackend,
            "annotate",
            lambda self, micros, kind, advance: (change if kind == which else (lambda x: x))(
                real(self, micros, kind, advance)
            ),
        )

    return plant


def _nan_first(values: torch.Tensor) -> torch.Tensor:
    values = values.clone()
    values[0] = math.nan
    return values


def _detached(stats: TokenStats, *args: Any) -> TokenStats:
    return stats._replace(logprob_N=stats.logprob_N.detach() + 0.0 * stats.logprob_N)


# -- rewards


def _scores(change: Callable[[Sequence[Score]], list[Score]]) -> Plant:
    def plant(patch: Patch) -> None:
        real = scoring.Scoring.__call__

        def call(self: Any, rows: Any) -> Any:
            wait = real(self, rows)
            return lambda: change(wait())

        patch.setattr(scoring.Scoring, "__call__", call)

    return plant


# -- adapters


def unmerged_inexactly(patch: Patch) -> None:
    real = whole.merged

    @contextmanager
    def merged(policy: Policy) -> Any:
        with real(policy) as out:
            yield out
        if policy.adapter is not None:
            with torch.no_grad():
                for parameter in policy.parameters():
                    if not parameter.requires_grad:
                        parameter.mul_(1 + 1e-3)

    patch.setattr(whole, "merged", merged)


def _does_not_move(patch: Patch) -> None:
    patch.setattr(reference.MovingReference, "move", lambda self, step, masters: True)


def _moves_at_other_steps(patch: Patch) -> None:
    real = reference.MovingReference.move
    patch.setattr(
        reference.MovingReference, "move", lambda self, step, masters: real(self, step + 1, masters)
    )


def _grown_from_the_prompt(stream: Any, *args: Any) -> Any:
    """Branches that see the prompt and not what lies between."""
    root: list[int] = []
    for number, segment in enumerate(stream.segments):
        root.append(number if segment.parent is None else root[segment.parent])
    return replace(
        stream,
        segments=tuple(
            s if s.parent is None else replace(s, parent=r)
            for s, r in zip(stream.segments, root, strict=True)
        ),
    )


def _spoils_prompts(change: Callable[[Prefix], None]) -> Plant:
    """In each backward pass that goes on from another one's prompt; the probe at load sees none of it."""

    def spoiled(self: Any, micro: Any, loss: Any) -> tuple[Any, ...]:
        if micro.shared is not None and micro.shared.follows:
            change(self.policy._prefix)
        return self, micro, loss

    return before(single.SingleBackend, "backward", spoiled)


def _another_prompt(prefix: Prefix) -> None:
    # Keys and values in another order of tokens would give the same attention.
    prefix._kept = {name: part.flip(-1) for name, part in prefix._kept.items()}


LORA = {"tuner_type": "lora", "lora_rank": 4}
TWICE = {"num_iterations": 2}
KL = {"beta": 0.1}
FILTERS = {"top_p": 0.9}
MOVING = {**KL, "sync_ref_model": True, "ref_model_sync_steps": 2}
MANY = {"per_device_train_batch_size": 32}
IN_PASSES = {"max_tokens_per_micro_batch": 24}

MUTANTS = (
    Mutant("drops the second micro-batch", "F123", 1, _drops_a_micro_batch),
    Mutant("clears the gradient at each backward", "F123", 1, _clears_the_buffer_at_each_backward),
    Mutant(
        "counts the first backward twice",
        "F127",
        1,
        _weighs_backward(lambda n, last: 1.0 + (n == 0)),
    ),
    Mutant("counts the last backward twice", "F127", 1, _weighs_backward(lambda n, last: 1.0 + last)),
    Mutant(
        "scales every gradient by 1/accumulation",
        "F127",
        1,
        _weighs_backward(lambda n, last: 0.5),
    ),
    Mutant("averages over micro-batches", "F127", 1, _averages_over_micro_batches),
    Mutant(
        "forgets a prompt's earlier passes",
        "F127",
        1,
        _spoils_prompts(lambda prefix: prefix._held.clear()),
        IN_PASSES,
    ),
    Mutant("goes on from another prompt", "F115", 1, _spoils_prompts(_another_prompt), IN_PASSES),
    Mutant("weighs one tensor's gradient", "F127", 1, _weighs_a_tensor("layers.1.mlp.up_proj", 1.5)),
    Mutant("weighs a LoRA B's gradient", "F127", 1, _weighs_a_tensor("1.mlp.up_proj.lora_B", 0.5), LORA),
    Mutant(
        "divides the loss by the micro-batches",
        "F111",
        1,
        changed(update, "policy_loss", lambda out, *a: replace(out, loss=out.loss / 2)),
    ),
    Mutant("cuts the graph before the loss", "F102", 1, changed(Policy, "forward", _detached)),
    Mutant("clears every gradient before the step", "F102", 1, _zeroes("")),
    Mutant("freezes a tensor", "F124", 1, _freezes_a_tensor),
    Mutant("clears one tensor's gradient", "F124", 1, _zeroes("layers.1.mlp.up_proj")),
    Mutant("clears the gradient of a LoRA B", "F124", 1, _zeroes("layers.1.mlp.up_proj.lora_B"), LORA),
    Mutant("clears the gradient of a LoRA A", "F124", 2, _zeroes("layers.1.mlp.up_proj.lora_A"), LORA),
    Mutant("keeps bf16 masters at lr 1e-6", "F103", 1, bf16_masters, {"learning_rate": 1e-6}),
    Mutant("steps other tensors than the model's", "F103", 1, optimizer_holds_others),
    Mutant("NaN in a gradient", "F101", 1, nan_in_gradient),
    Mutant("NaN in the loss", "F101", 1, changed(update, "policy_loss", nan_loss)),
    Mutant(
        "NaN in a temperature",
        "F101",
        1,
        before(
            Policy, "forward", lambda self, m: (self, replace(m, temperature_N=m.temperature_N * math.nan))
        ),
    ),
    Mutant("NaN in the loaded weights", "F118", 1, changed(backend, "load_policy", _nan_in_loaded_weights)),
    Mutant("NaN in a weight after a step", "F118", 2, _spoils(lambda m: m.masters[3])),
    Mutant("NaN in a weight after the last step", "F128", 3, _spoils(lambda m: m.masters[3], after=3)),
    Mutant(
        "NaN in a moment after a step",
        "F118",
        3,
        _spoils(lambda m: m._groups[0].adam._optimizer.state[m.masters[3]]["exp_avg"]),
    ),
    Mutant("NaN in a reward", "F118", 1, _scores(lambda s: [replace(s[0], total=math.nan), *s[1:]])),
    Mutant("NaN in an advantage", "F118", 1, _advantages(lambda a: math.nan)),
    Mutant("NaN in the sampler's logprobs", "F118", 1, _nan_in_sampler),
    Mutant("NaN in old logprobs", "F118", 1, _annotation("old", _nan_first), TWICE),
    Mutant("NaN in reference logprobs", "F118", 1, _annotation("reference", _nan_first), KL),
    Mutant("skips a weight publish", "F114", 2, publishes_once),
    Mutant("samples at another temperature", "F115", 1, at_another_temperature),
    Mutant(
        "learner at another temperature",
        "F115",
        1,
        before(Policy, "forward", lambda self, m: (self, replace(m, temperature_N=m.temperature_N * 1.4))),
    ),
    Mutant("learner at wrong positions", "F115", 1, before(Policy, "forward", _shifted_positions)),
    Mutant("model mixes packed rows", "F105", 0, before(Policy, "forward", _leaking_rows)),
    Mutant(
        "training mixes packed rows",
        "F115",
        1,
        before(single.SingleBackend, "backward", _leaking_rows),
    ),
    Mutant(
        "duplicates sibling completions",
        "F125",
        1,
        _request(turn=lambda r: replace(r.turn, sibling=0)),
        MANY,
    ),
    Mutant("trains re-encoded text", "F110", 1, changed(samples, "_sample", _of_text)),
    Mutant("loses the last token of each row", "F110", 1, changed(samples, "_sample", _without_last)),
    Mutant(
        "shifts the mask by one",
        "F110",
        1,
        changed(pack, "build_micros", each(lambda m: replace(m, context_U=(m.context_U - 1).clamp_min(0)))),
    ),
    Mutant(
        "predicts tokens from other places",
        "F110",
        1,
        changed(pack, "build_micros", each(lambda m: replace(m, context_N=m.context_N.roll(1)))),
    ),
    Mutant(
        "a branch forgets what it grew from",
        "F115",
        1,
        changed(pack, "build_streams", each(_grown_from_the_prompt)),
    ),
    Mutant(
        "copies another completion's cache",
        "F115",
        1,
        changed(branches.Branches, "part", lambda out, *a: (out[0][::-1], out[1])),
    ),
    Mutant(
        "shifts the targets by one",
        "F110",
        1,
        changed(pack, "build_micros", each(lambda m: replace(m, target_N=m.target_N.roll(1)))),
    ),
    Mutant(
        "wrong temperature in the batch",
        "F110",
        1,
        changed(pack, "build_micros", each(lambda m: replace(m, temperature_N=m.temperature_N * 2))),
    ),
    Mutant(
        "trains on the full softmax of filtered tokens",
        "F115",
        1,
        before(Policy, "_stats", lambda self, hidden, m: (self, hidden, replace(m, kept=None))),
        FILTERS,
    ),
    Mutant("loses the kept sets", "F110", 1, changed(pack, "_kept", lambda out, *a: None), FILTERS),
    Mutant(
        "gives tokens each other's kept sets",
        "F110",
        1,
        changed(pack, "_kept", lambda out, *a: replace(out, words_K=out.words_K.flip(0))),
        FILTERS,
    ),
    Mutant("forwards a row twice", "F111", 1, changed(pack, "micro_batches", _row_twice)),
    Mutant("leaves a row out", "F111", 1, changed(pack, "micro_batches", row_lost)),
    Mutant("divides by a part of the tokens", "F111", 1, changed(pack, "_denominators", _half_denominator)),
    Mutant("mixes groups", "F112", 1, changed(collect, "assemble", _swap_groups)),
    Mutant("loses episodes to a sandbox", "F138", 1, changed(collect, "assemble", _two_lost)),
    Mutant("gives advantages to other groups", "F113", 1, changed(annotate, "row_credits", _rotated)),
    Mutant("advantages ten times too large", "F113", 1, _advantages(lambda a: 10 * a)),
    Mutant("advantages without their mean", "F113", 1, _advantages(lambda a: a + 0.5)),
    Mutant("advantages of the neighbour", "F113", 1, changed(pack, "build_micros", each(_roll_advantages))),
    Mutant("old logprobs of other weights", "F116", 1, _annotation("old", lambda x: x - 0.05), TWICE),
    Mutant("reference that is not the start", "F117", 1, _annotation("reference", lambda x: x - 0.3), KL),
    Mutant("loses a group on the way", "F122", 1, changed(collect, "assemble", lambda g, *a: g[:-1])),
    Mutant("adapter not taken out exactly", "F119", 1, unmerged_inexactly, LORA),
    Mutant("moving reference not moved", "F119", 2, _does_not_move, MOVING),
    Mutant("moving adapter not moved", "F119", 2, _does_not_move, {**MOVING, **LORA}),
    Mutant("moves the reference too early", "F119", 1, _moves_at_other_steps, MOVING),
)
