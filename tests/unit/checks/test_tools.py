"""Tools and environments: what stands against them, and what mends it."""

from __future__ import annotations

from typing import Any

import pytest

from covey.checks.judge import checks
from covey.types.turns import ToolFault
from support.checks import BASE, Case, assert_fixes_mend, assert_says, config, facts, found

TOOLS = {"tools": ["t.py:add"]}
ENVIRONMENT = {"environment_factory": "e.py:Sums"}
SCHEDULER = {"multi_turn_scheduler": "doubts", "external_plugins": ["p.py"]}
COUNTED = {**ENVIRONMENT, "reward_funcs": ["accuracy", "environment"]}


def _fault(kind: str, entry: str = "t.py:add") -> dict[str, Any]:
    return {"tools": {"faults": (ToolFault(entry=entry, kind=kind, words="it is wrong."),)}}


CASES = (
    *(
        Case(
            code=code,
            option="tools",
            words="t.py:add: it is wrong.",
            facts=facts(**_fault(kind)),
            options=TOOLS,
        )
        for code, kind in (
            *(("E390", "missing"), ("E390", "import"), ("E391", "no_hints"), ("E391", "no_docstring")),
            ("E391", "signature"),
        )
    ),
    *(
        Case(
            code=code,
            option="environment_factory",
            words="e.py:Sums: it is wrong.",
            facts=facts(**_fault(kind, "e.py:Sums")),
            options=ENVIRONMENT,
        )
        for code, kind in (("E390", "missing"), ("E393", "environment"), ("E391", "no_hints"))
    ),
    *(
        Case(
            code=code,
            option="multi_turn_scheduler",
            words="doubts: it is wrong.",
            facts=facts(**_fault(kind, "doubts")),
            options=SCHEDULER,
        )
        for code, kind in (("E390", "missing"), ("E390", "import"), ("E393", "environment"))
    ),
    *(
        Case(
            code="E398",
            option=option,
            words=f"multi_turn_scheduler and {option} are both set",
            options={**SCHEDULER, **options, "completion_form": "text"},
        )
        for option, options in (
            ("tools", TOOLS),
            ("environment_factory", ENVIRONMENT),
        )
    ),
    Case(
        code="E395",
        option="max_turns",
        words="per_round, but max_turns is not set",
        options={**SCHEDULER, "completion_length_limit_scope": "per_round"},
    ),
    *(
        Case(
            code="E392",
            option=option,
            words=words,
            facts=facts(tools={"no_format": kind, "written": "PLEASE add!", "may_be_chatml": True}),
            options=options,
        )
        for option, options in (("tools", TOOLS), ("environment_factory", ENVIRONMENT))
        for kind, words in (
            ("no_tools", "does not tell the model"),
            ("no_calls", "no place for calls"),
            ("unknown_format", "'PLEASE add!'"),
        )
    ),
    Case(
        code="E394",
        option="truncation_strategy",
        words="left cuts the beginning",
        options={**TOOLS, "truncation_strategy": "left", "max_length": 100},
    ),
    Case(
        code="E395",
        option="max_turns",
        words="per_round, but max_turns is not set",
        options={**TOOLS, "completion_length_limit_scope": "per_round"},
    ),
    Case(
        code="E396",
        option="reward_funcs",
        words="but there is no environment",
        options={"reward_funcs": ["accuracy", "environment"]},
    ),
    Case(
        code="E396",
        option="reward_funcs",
        words="has no get_reward()",
        facts=facts(tools={"gives_reward": False}),
        options=COUNTED,
    ),
    Case(
        code="W154",
        option="reward_funcs",
        words="does not count them",
        facts=facts(tools={"gives_reward": True}),
        options=ENVIRONMENT,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_stands_against_tools_is_said(case: Case) -> None:
    assert_says(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_fix_mends(case: Case) -> None:
    assert_fixes_mend(case)


def test_prompts_of_text_have_no_place_for_turns() -> None:
    """W109 says beside it that the template is not applied."""
    text = facts(prompts={"are_text": True})
    assert [(p.code, p.option) for p in found(text, **TOOLS)] == [
        ("E394", "tools"),
        ("W109", "apply_chat_template"),
    ]
    assert found(facts(prompts={"are_text": False}), **TOOLS, apply_chat_template=True) == []


def test_a_template_of_another_family_has_no_template_of_coveys() -> None:
    (problem,) = found(facts(tools={"no_format": "no_tools"}), **TOOLS)
    assert [fix.edits for fix in problem.fixes] == [{}]


def test_nothing_is_said_of_what_fits() -> None:
    assert found(facts(tools={"gives_reward": True, "call_format": "hermes"}), **COUNTED) == []
    per_round = {"completion_length_limit_scope": "per_round", "max_turns": 3}
    assert found(**TOOLS, **per_round) == []
    # Whether a scheduler gives a reward shows when it is played.
    assert found(**SCHEDULER, **per_round, reward_funcs=["environment"]) == []


@pytest.mark.parametrize(
    "options", [{"max_turns": 3}, {"tool_timeout_s": 5.0}, {"completion_length_limit_scope": "per_round"}]
)
def test_options_of_turns_without_turns_have_no_effect(options: dict[str, Any]) -> None:
    (problem,) = checks(config(**options), facts(), {*BASE, *options})
    assert (problem.code, problem.option) == ("W108", next(iter(options)))
    assert "no tools and no environment" in problem.seen
