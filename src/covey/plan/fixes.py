"""Ways out of a batch that does not fit: nearby shapes that the rules accept, nearest first.

The generator proposes more than it needs and keeps what `faults` accepts, so a suggestion is never wrong.
Where no change of a single option helps it changes two or three; with at least one prompt there always is a
way out.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import replace
from math import gcd, isqrt, log2
from typing import Any

from covey.config.derive import ACCUMULATION, GENERATION_BATCH, PER_DEVICE, PER_GENERATION, derive_batch
from covey.plan.shape import COUNTS, Shape, faults, in_range, with_product
from covey.texts import counted, tr
from covey.types import Fix

_SHOWN = 3
_USUAL_GROUPS = (8, 4, 2)
_TRIED = 10_000  # divisors beyond this are no sizes that anyone types
_USUAL = {"num_generations": 8, PER_DEVICE: 8}

# What a change costs beside the change in size. Only B takes memory, so raising it is the last resort.
_CHANGE = {"num_generations": 1.5, PER_DEVICE: 1.2, ACCUMULATION: 0.5, PER_GENERATION: 0.5}
_MEMORY = 0.8
_STEP_WEIGHT = 1.0
_ROLLOUT_WEIGHT = 0.5
_GROUP_WEIGHT = 1.0
_POLICY_WEIGHT = 2.0
_SAME_ROLLOUT = 0.6
_NEITHER = 4.0  # a rollout size that is neither of two contradicting ones


def batch_fixes(
    shape: Shape, num_prompts: int | None, typed: Collection[str] | None = None
) -> tuple[Fix, ...]:
    """Return up to three edits, best first, each of which makes the whole batch valid; never none.

    `typed` are the options that the user gave: an edit then names every option that has to be typed so that
    the rules for the others lead to this shape. None takes all of the batch for typed but
    generation_batch_size.
    """
    if num_prompts is not None and num_prompts < 1:
        num_prompts = None  # an empty data set is a fault of its own
    base = _positive(shape)
    best: dict[Hashable, Shape] = {}
    for candidate in _candidates(base, shape, num_prompts):
        if faults(candidate, num_prompts):
            continue
        key = _kind_of_change(shape, candidate)
        if key not in best or _cost(base, shape, candidate) < _cost(base, shape, best[key]):
            best[key] = candidate
    ranked = sorted(best.values(), key=lambda candidate: _cost(base, shape, candidate))
    fewest = min(_moves(shape, candidate) for candidate in ranked)
    shown = _varied(shape, [c for c in ranked if _moves(shape, c) == fewest])
    if len(shown) == 1:
        shown += [c for c in _varied(shape, ranked) if _moves(shape, c) == fewest + 1][:1]
    return tuple(Fix(text=_words(shape, c), edits=edits_to(shape, c, typed)) for c in shown[:_SHOWN])


def _varied(old: Shape, ranked: list[Shape]) -> list[Shape]:
    """Return the candidates with the best of each set of options first, so that people have a choice.

    A change of two options is left out where a change of one of them does better.
    """
    first: dict[frozenset[str], Shape] = {}
    kept: list[Shape] = []
    for candidate in ranked:
        changed = _changed(old, candidate)
        if not any(better and better < changed for better in first):
            kept.append(candidate)
            first.setdefault(changed, candidate)
    leaders = list(first.values())
    return leaders + [candidate for candidate in kept if candidate not in leaders]


def edits_to(shape: Shape, target: Shape, typed: Collection[str] | None) -> dict[str, Any]:
    """Return the options to type so that, with what is typed already, the batch becomes `target`."""
    if typed is None:
        typed = {*COUNTS} - (
            {GENERATION_BATCH} if shape.generation_batch_size == shape.completions_per_rollout else set()
        )
    typed_counts = {name: getattr(shape, name) for name in COUNTS if name in typed}
    edits: dict[str, Any] = {
        name: getattr(target, name)
        for name in ("num_generations", "num_iterations")
        if getattr(target, name) != getattr(shape, name)
    }
    rollout = (
        GENERATION_BATCH if GENERATION_BATCH in typed and PER_GENERATION not in typed else PER_GENERATION
    )
    while wrong := [
        n
        for n in (PER_DEVICE, ACCUMULATION, rollout, GENERATION_BATCH)
        if not _leads_to(n, typed_counts | edits, target)
    ]:
        # One at a time: an option that is typed changes what the others are derived to.
        edits[wrong[0]] = getattr(target, wrong[0])
    return edits


def _leads_to(name: str, typed: dict[str, Any], target: Shape) -> bool:
    return bool(getattr(derive_batch(typed, target.num_processes), name) == getattr(target, name))


def _positive(shape: Shape) -> Shape:
    """Return the shape with usual numbers for counts below 1, which is where a search can begin."""
    usual = {n: v if in_range(v := getattr(shape, n)) else _USUAL.get(n, 1) for n in COUNTS}
    if not in_range(shape.steps_per_generation):
        usual[PER_GENERATION] = usual[ACCUMULATION]
    if usual[ACCUMULATION] > usual[PER_GENERATION]:
        # Nothing is updated between the rollouts of one step, so they are one rollout.
        usual[PER_GENERATION] = usual[ACCUMULATION]
    changed = replace(shape, **usual)
    size = shape.generation_batch_size
    says_more = in_range(size) and size != shape.completions_per_rollout
    return changed if says_more else with_product(changed)


def _candidates(shape: Shape, given: Shape, num_prompts: int | None) -> Iterator[Shape]:
    """Propose shapes around `shape`, from changes of one option to changes of all; `given` is what was
    typed."""
    given_steps = max(1, given.steps_per_generation)
    groups = [shape.num_generations, *_USUAL_GROUPS]
    sized = [with_product(shape, **c) for c in _rollout_sizes(shape)]
    shorter = with_product(
        shape,
        gradient_accumulation_steps=min(shape.gradient_accumulation_steps, given_steps),
        steps_per_generation=given_steps,
    )
    for start in [with_product(shape), shorter, *sized]:
        yield start
        yield from _other_steps(start, num_prompts)
        yield from _other_groups(start, num_prompts)
    for group in dict.fromkeys(groups):
        if group < 2:
            continue
        grouped = with_product(shape, num_generations=group)
        aligned = with_product(grouped, steps_per_generation=grouped.gradient_accumulation_steps)
        for start in (grouped, aligned):
            yield start
            yield from _other_steps(start, num_prompts)
            yield from _other_sizes(start, num_prompts)
            yield from _other_groups(start, num_prompts)
    yield from _smallest(shape)


def _rollout_sizes(shape: Shape) -> Iterator[dict[str, int]]:
    """Propose steps_per_generation as a typed generation_batch_size would have it."""
    per_pass = shape.num_processes * shape.per_device_train_batch_size
    size = shape.generation_batch_size
    if size != shape.completions_per_rollout:
        for steps in {max(1, size // per_pass), -(-size // per_pass)}:
            yield {PER_GENERATION: steps}
        for per_device in _divisors(size // shape.num_processes):
            steps = size // (shape.num_processes * per_device)
            yield {PER_DEVICE: per_device, PER_GENERATION: max(1, steps)}


def _other_steps(shape: Shape, num_prompts: int | None) -> Iterator[Shape]:
    """Propose other numbers of forward passes: both together, or one beside the other."""
    per_pass = shape.num_processes * shape.per_device_train_batch_size
    unit = shape.num_generations // gcd(shape.num_generations, per_pass)
    largest = None if num_prompts is None else num_prompts * shape.num_generations // per_pass
    for near in (shape.steps_per_generation, shape.gradient_accumulation_steps):
        for steps in _multiples(unit, near, largest):
            yield with_product(shape, steps_per_generation=steps, gradient_accumulation_steps=steps)
            yield with_product(shape, steps_per_generation=steps)
            for passes in _nearest(_divisors(steps), shape.gradient_accumulation_steps):
                yield with_product(shape, steps_per_generation=steps, gradient_accumulation_steps=passes)
    both = unit * shape.gradient_accumulation_steps // gcd(unit, shape.gradient_accumulation_steps)
    for steps in _multiples(both, shape.steps_per_generation, largest):
        yield with_product(shape, steps_per_generation=steps)
    for passes in _nearest(_divisors(shape.steps_per_generation), shape.gradient_accumulation_steps):
        yield with_product(shape, gradient_accumulation_steps=passes)


def _other_sizes(shape: Shape, num_prompts: int | None) -> Iterator[Shape]:
    """Propose other batch sizes per device."""
    per_completion = shape.num_processes * shape.steps_per_generation
    unit = shape.num_generations // gcd(shape.num_generations, per_completion)
    largest = None if num_prompts is None else num_prompts * shape.num_generations // per_completion
    for size in _multiples(unit, shape.per_device_train_batch_size, largest):
        yield with_product(shape, per_device_train_batch_size=size)


def _other_groups(shape: Shape, num_prompts: int | None) -> Iterator[Shape]:
    """Propose other group sizes for the same rollout."""
    total = shape.completions_per_rollout
    fewest = 2 if num_prompts is None else max(2, -(-total // num_prompts))
    fitting = [d for d in _divisors(total) if d >= fewest]
    for group in _nearest(fitting, shape.num_generations):
        yield with_product(shape, num_generations=group)


def _smallest(shape: Shape) -> Iterator[Shape]:
    """Propose the smallest rollout there is, one prompt; it fits whatever the data set is."""
    per_device = 1 if shape.num_processes > 1 else 2
    yield with_product(
        shape,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=per_device * shape.num_processes,
    )


def _multiples(unit: int, near: int, largest: int | None) -> list[int]:
    """Return the multiples of `unit` next to `near`, and the largest one that is allowed."""
    below = max(unit, near // unit * unit)
    multiples = {below, below + unit}
    if largest is not None:
        multiples = {m for m in multiples if m <= largest} | (
            {largest // unit * unit} if largest >= unit else set()
        )
    return sorted(multiples)


def _nearest(values: Iterable[int], target: int) -> list[int]:
    """Return the three values nearest to `target` by ratio."""
    return sorted(values, key=lambda v: abs(log2(v / target)))[:3]


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, min(isqrt(number), _TRIED) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _changed(old: Shape, new: Shape) -> frozenset[str]:
    return frozenset(name for name in _CHANGE if getattr(old, name) != getattr(new, name))


def _moves(old: Shape, new: Shape) -> int:
    """Return how many decisions a change is; both numbers of forward passes made equal are one."""
    changed = set(_changed(old, new))
    if {
        ACCUMULATION,
        PER_GENERATION,
    } <= changed and new.gradient_accumulation_steps == new.steps_per_generation:
        changed.discard(ACCUMULATION)
    if old.generation_batch_size != old.completions_per_rollout:
        changed.add(PER_GENERATION)
    return len(changed)


def _kind_of_change(old: Shape, new: Shape) -> Hashable:
    """Return what makes two candidates alike, so that only the better one is shown: the options and the
    direction."""
    smaller = new.generation_batch_size < old.generation_batch_size
    if old.num_generations < 2:
        return _changed(old, new), smaller, new.num_generations
    return _changed(old, new), smaller, new.num_generations < old.num_generations


def _cost(base: Shape, old: Shape, new: Shape) -> float:
    cost = sum(_CHANGE[name] for name in _changed(old, new))
    cost += _STEP_WEIGHT * _distance(new.completions_per_step, base.completions_per_step)
    cost += _ROLLOUT_WEIGHT * _distance(new.completions_per_rollout, base.completions_per_rollout)
    cost += _GROUP_WEIGHT * _distance(
        new.num_generations, base.num_generations if base.num_generations > 1 else 8
    )
    # Steps per rollout are how far off-policy a run is; a fix for sizes leaves that alone where it can.
    ratio = max(1, round(base.steps_per_generation / base.gradient_accumulation_steps))
    cost += _POLICY_WEIGHT * _distance(new.steps_per_generation // new.gradient_accumulation_steps, ratio)
    if new.generation_batch_size not in (old.generation_batch_size, old.completions_per_rollout):
        cost += _NEITHER * (old.generation_batch_size != old.completions_per_rollout)
    cost -= _SAME_ROLLOUT * (new.generation_batch_size == base.generation_batch_size)
    return cost + _MEMORY * max(0.0, log2(new.per_device_train_batch_size / base.per_device_train_batch_size))


def _distance(number: int, other: int) -> float:
    return abs(log2(number / other))


def _words(old: Shape, new: Shape) -> str:
    steps = new.num_iterations * new.steps_per_generation // new.gradient_accumulation_steps
    prompts = new.completions_per_rollout // new.num_generations
    words = tr(
        "{prompts} x {num_generations} completions per rollout, {steps} of {completions}",
        prompts=counted(prompts, "prompt"),
        num_generations=new.num_generations,
        steps=counted(steps, "optimizer step"),
        completions=counted(new.completions_per_step, "completion"),
    )
    factor = new.per_device_train_batch_size / max(1, old.per_device_train_batch_size)
    if factor == 1:
        return tr("{words}; the same memory", words=words)
    return tr("{words}; about {factor:.2g} times the memory of a forward pass", words=words, factor=factor)
