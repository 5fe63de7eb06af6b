"""Finds faults in a rollout function, and options that it cannot be used with."""

from __future__ import annotations

from collections.abc import Iterator

from covey.checks.check import Check
from covey.codes import Code
from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.plan.problem import problem
from covey.texts import Text, tr
from covey.types import Fix, Problem

_OPTION = "rollout_func"


def function_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what stands against the rollout function of a run."""
    if config.rollout_func is None:
        return []
    return [*_fault(facts), *_unfit(config, facts)]


def _fault(facts: Facts) -> Iterator[Problem]:
    fault = facts.tools.rollout_func
    if fault is None:
        return
    seen = tr("{entry}: {words}.", entry=fault.entry, words=fault.words)
    named = Fix(text=tr("name it as --{option} FILE.py:NAME or package.module:NAME", option=_OPTION))
    given = Fix(
        text=tr(
            "give the function in a Python program: `covey.train({option}=FUNCTION, ...)`", option=_OPTION
        )
    )
    form = Fix(text=tr("give it the form rollout_func(prompts, trainer) of docs/tools.md"))
    fixes = {"missing": (named, given), "signature": (form,)}
    mend = Fix(text=tr("mend its file; Python says the same of it when it imports the file"))
    yield problem("E390", _OPTION, seen, "", *fixes.get(fault.kind, (mend,)))


def _unfit(config: Config, facts: Facts) -> Iterator[Problem]:
    """Give a problem for each option beside which the function cannot be called."""
    alone = Fix(text=tr("leave out rollout_func"), edits={_OPTION: None})
    if config.tools:
        seen = tr("rollout_func and tools are both set.")
        yield problem(
            "E398", "tools", seen, _TURNS, Fix(text=tr("leave out the tools"), edits={"tools": []}), alone
        )
    if config.environment_factory is not None:
        seen = tr("rollout_func and environment_factory are both set.")
        leave = Fix(text=tr("leave out the environment"), edits={"environment_factory": None})
        yield problem("E398", "environment_factory", seen, _TURNS, leave, alone)
    if config.is_ahead:
        name = "async_generate" if config.async_generate else "max_staleness"
        seen = tr("rollout_func and {name} are both set.", name=name)
        cause = tr("The function samples while nothing is trained.")
        turn = Fix(
            text=tr("sample a rollout, then train on it"), edits={"async_generate": False, "max_staleness": 0}
        )
        yield problem("E398", name, seen, cause, turn, alone)
    if config.use_vllm and not config.rollout_servers and facts.layout.engine_parallel > 1:
        seen = tr("rollout_func is set, and one vLLM spans {num} GPUs.", num=facts.layout.engine_parallel)
        cause = tr("Its ranks compute each step together, and only one of them would run the function.")
        one = Fix(text=tr("give each GPU a vLLM of its own"), edits={"vllm_tensor_parallel_size": 1})
        yield problem("E398", "vllm_tensor_parallel_size", seen, cause, one, alone)
    if facts.prompts.has_images:
        seen = tr("rollout_func is set, and the prompts have images.")
        cause = tr("The tokens that the function returns say nothing of images.")
        yield problem("E398", _OPTION, seen, cause, alone)


_TURNS: Text | str = tr("The function itself makes the turns of an episode.")

CODES = (
    Code(
        code="E398",
        title="Option that a rollout function or a scheduler leaves no place for",
        why="A rollout function or a scheduler already decides what happens in an episode. This option would "
        "decide it too, so only one of them can be used.",
    ),
)

CHECK = Check(judge=lambda config, facts, _: function_problems(config, facts), place=565, codes=CODES)
