"""Whether the memory forecast passes what is free, and what takes less."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import islice

from covey.options.schema import Config
from covey.plan.disk import size
from covey.plan.facts import Facts
from covey.plan.ladder import SHORTEST, Edits, computed_again, ladder_fixes, smaller_passes, typed_as
from covey.plan.levers import lever_edits
from covey.plan.memory import TIGHT, MemoryPlan, memory_plan
from covey.plan.problem import START_ANYWAY, problem, warning
from covey.plan.shape import counted, faults, shape_of
from covey.types import Fix, Problem

_REFUSED = 0.97
_SHOWN = 3
# Of what a run takes that did not fit: the most that is proposed for it.
_LESS = 0.85
# Parts of a rollout that no offloading takes away.
_BESIDE_STATES = ("communication", "KV cache", "sampling", "recordings", "engine")


def memory_problems(config: Config, facts: Facts, typed: Collection[str] | None = None) -> list[Problem]:
    """Return what the forecast says against the configuration; nothing where the batch is at fault.

    A model of an unknown family is only warned of: its forecast is too high more often than not.
    """
    if faults(shape_of(config, facts.num_processes), facts.num_prompts) or not _is_planned(config):
        return []
    plan = memory_plan(config, facts)
    if plan.free_bytes is None or plan.share <= TIGHT:
        return []
    if facts.layout.is_here:
        fixes = _fixes(config, facts, typed, lambda planned: planned.share <= TIGHT)
    else:
        fixes = ladder_fixes(config, facts, typed)
    fixes = fixes or (_less_or_more(plan, facts),)
    option, seen, cause = "per_device_train_batch_size", _seen(plan, facts), _cause(plan)
    if plan.share <= _REFUSED or not plan.is_exact:
        return [warning("W114", option, seen, cause, *fixes)]
    if config.ignore_memory_forecast:
        return [warning("W150", option, seen, cause, *fixes)]
    return [problem("E211", option, seen, cause, *fixes, START_ANYWAY)]


def less_memory_fixes(config: Config, facts: Facts, typed: Collection[str] | None) -> tuple[Fix, ...]:
    """What takes clearly less than the run by the same arithmetic, for one that has run out of memory: that
    the forecast fits says nothing then."""
    plan = memory_plan(config, facts)
    if not plan.phases or not _is_planned(config):
        return ()
    if config.gradient_checkpointing == "auto":
        config = config.model_copy(update={"gradient_checkpointing": typed_as(plan.recompute)})
    limit = int(_LESS * plan.needed_bytes)
    return _fixes(config, facts, typed, lambda planned: planned.needed_bytes <= limit)


def _is_planned(config: Config) -> bool:
    return config.max_completion_length >= 1 and config.torch_dtype != "float16"


def _less_or_more(plan: MemoryPlan, facts: Facts) -> Fix:
    """What is left where no change of the run fits: a model that is small enough to be sampled whole, or as
    much memory as this one takes."""
    rollout = next((phase.parts for phase in plan.phases if phase.name == "rollout"), {})
    whole = sum(rollout.get(name, 0) for name in ("weights", "gathered weights"))
    is_sampling = plan.binding.name == "rollout" and facts.layout.engine == "own"
    if not is_sampling or not whole or not facts.num_parameters or plan.free_bytes is None:
        return Fix(text="a smaller model, or a machine with more memory")
    # What is offloaded at most is everything else that grows with the model.
    others = plan.needed_bytes - plan.binding.num_bytes
    others += sum(num_bytes for name, num_bytes in rollout.items() if name in _BESIDE_STATES)
    most = (TIGHT * plan.free_bytes - others) * facts.num_parameters / whole / 1e9
    needed = size(round(plan.needed_bytes / TIGHT))
    smaller = (
        f"a model of at most about {most:.2g} B parameters with its states offloaded, or " if most > 0 else ""
    )
    return Fix(text=f"{smaller}{needed} free for each process")


def _seen(plan: MemoryPlan, facts: Facts) -> str:
    shared = facts.num_processes > 1 and not facts.cuda
    who = f"{counted(facts.num_processes, 'process', 'es')} take" if shared else "The run takes"
    where = "on the GPU" if facts.cuda else "on this machine"
    if not facts.layout.is_here:
        who, where = f"Each process of {facts.layout.in_words()} takes", "on its GPU"
    return (
        f"{who} about {size(plan.needed_bytes)} in the phase {plan.binding.name}, Python and its libraries "
        f"included; {size(plan.free_bytes or 0)} are free {where}."
    )


def _cause(plan: MemoryPlan) -> str:
    name, largest = max(plan.binding.parts.items(), key=lambda part: part[1])
    words = (
        f"The largest part, {name}, is {size(largest)} of the {size(plan.binding.num_bytes)} of one "
        "process; completions are counted at their longest."
    )
    if name == "gathered weights":
        words += (
            " The native engine samples with a whole copy of the weights in each process; sharding, "
            "offloading and LoRA do not make it smaller."
        )
    return words


def _fixes(
    config: Config, facts: Facts, typed: Collection[str] | None, fits: Callable[[MemoryPlan], bool]
) -> tuple[Fix, ...]:
    """The first ways out whose forecast by the same arithmetic fits; those that leave the run
    what it is come first, and two together where neither is enough."""
    again = computed_again(config, facts)
    low: Edits = {"torch_dtype": "bfloat16"}
    lora: Edits = {"tuner_type": "lora"}
    smaller = list(smaller_passes(config, facts, typed))

    def fitting(text: str, *ways: tuple[Edits, Edits]) -> list[Fix]:
        found = (edits for edits, change in ways if fits_with(change))
        return [Fix(text=text, edits=edits) for edits in islice(found, 1)]

    def fits_with(change: Edits) -> bool:
        if all(getattr(config, name) == value for name, value in change.items()):
            return False
        return fits(memory_plan(config.model_copy(update=change), facts))

    fixes = [
        *fitting("the same run, whose backward pass computes activations again", *again),
        *fitting("the same run in smaller forward passes", *smaller),
    ]
    # What leaves the fewest activations, where that alone is not enough.
    least: Edits = again[-1][0] if again else {}
    if not fixes and least:
        fixes += fitting(
            "the same run in smaller forward passes, with activations computed again",
            *((least | edits, least | change) for edits, change in smaller),
        )
    if facts.cuda:
        fixes += fitting("half the bytes for weights and activations", (low, low))
        for words, edits in lever_edits(config, facts.layout):
            fixes += fitting(words, (edits, edits))
    both = [] if fixes else [(least | lora, least | lora)]
    fixes += fitting("adapters alone are trained", (lora, lora), *both)
    lengths = ({"max_completion_length": n} for n in _shorter(config.max_completion_length))
    fixes += fitting("shorter completions", *((short, short) for short in lengths))
    return tuple(fixes[:_SHOWN])


def _shorter(length: int) -> Iterator[int]:
    while length // 2 >= SHORTEST:
        length //= 2
        yield length
