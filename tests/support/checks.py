"""A good run, checks of changed ones, and what is gathered anew after a fix is typed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from covey.checks.judge import checks, refuse_faults
from covey.checks.survey import survey
from covey.config import from_dict
from covey.errors import ConfigError
from covey.options.schema import Config
from covey.plan.facts import (
    DataFacts,
    Facts,
    MachineFacts,
    ModelFacts,
    ModelSizes,
    OutputFacts,
    PromptFacts,
    ResumeFacts,
    RewardFacts,
    TemplateFacts,
)
from covey.plan.problem import START_ANYWAY
from covey.types import Problem, Severity

BASE: dict[str, Any] = {
    "model": "models/tiny",
    "dataset": "train.jsonl",
    "reward_funcs": ["accuracy"],
    "output_dir": "runs/a",
}
GOOD = Facts(
    data=DataFacts(
        num_rows=1000,
        columns=("prompt", "solution"),
        missing_columns=(),
        missing_paths=(),
        unreadable=(),
    ),
    prompts=PromptFacts(
        num_used=1000,
        num_too_long=0,
        longest=100,
        longest_in_data=100,
        are_text=False,
        mention_format=True,
    ),
    model=ModelFacts(directory="models/tiny", context=4096, num_parameters=600_000_000),
    template=TemplateFacts(is_there=True),
    rewards=RewardFacts(available=("accuracy", "format")),
    output=OutputFacts(state="free", checkpoint_bytes=10**9, model_bytes=250 * 10**6, free_bytes=10**12),
    machine=MachineFacts(cuda=True, has_bfloat16=True, nproc_available=8),
)

SIZES = ModelSizes(
    family="qwen2",
    layers=2,
    hidden=8,
    heads=2,
    kv_heads=1,
    head_width=4,
    intermediate=16,
    vocabulary=100,
    tied=True,
    parameters=1000,
)


def config(**options: Any) -> Config:
    """The configuration of the good run with other options."""
    resolved = from_dict({**BASE, **options})
    assert resolved.problems == ()
    return resolved.config


def facts(**changes: Any) -> Facts:
    """The facts of the good run with others: `facts(data={"num_rows": 5})`."""
    return changed(GOOD, **changes)


def changed(given: Facts, **changes: Any) -> Facts:
    """Return facts with other ones of some subjects: `changed(GOOD, data={"num_rows": 5})`."""
    subjects = {
        name: replace(getattr(given, name), **values) if isinstance(values, dict) else values
        for name, values in changes.items()
    }
    return replace(given, **subjects)


def found(given: Facts = GOOD, **options: Any) -> list[Problem]:
    """What the checks say."""
    return checks(config(**options), given)


def surveyed(tmp_path: Path, **options: Any) -> list[Problem]:
    """What is said of a run of the built-in task with these options, by what lies on the disk."""
    base: dict[str, Any] = {
        "dataset": ["quickstart#64"],
        "reward_funcs": ["accuracy"],
        "output_dir": str(tmp_path / "run"),
        "max_completion_length": 32,
        "learning_rate": 1e-4,
    }
    resolved = from_dict({**base, **options}, 1)
    with survey(resolved.config, 1) as seen:
        try:
            return list(refuse_faults(resolved, seen.facts))
        except ConfigError as error:
            return list(error.problems)


def one(given: Facts = GOOD, **options: Any) -> Problem:
    """The only thing that the checks say."""
    (problem,) = found(given, **options)
    return problem


def edits_of(problem: Problem) -> list[dict[str, Any]]:
    """The option values of each fix."""
    return [dict(fix.edits) for fix in problem.fixes]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Facts and options, and what the checks see in them; after the fixes the codes of `left` are still
    said."""

    code: str
    option: str
    words: str
    facts: Facts = GOOD
    options: dict[str, Any] = field(default_factory=dict)
    left: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.code}-{self.option}-{self.words}"


def assert_says(case: Case) -> None:
    """The case is seen, alone, with why it matters and what to do."""
    problem = one(case.facts, **case.options)
    assert (problem.code, problem.option) == (case.code, case.option)
    assert case.words in problem.seen
    assert problem.why and problem.fixes
    assert (problem.severity is Severity.WARNING) == case.code.startswith("W")


def assert_fixes_mend(case: Case) -> None:
    """With each fix that gives values typed, and facts gathered anew, nothing is wrong any more."""
    typed = {*BASE, *case.options}
    before = config(**case.options)
    (problem,) = checks(before, case.facts, typed)
    for fix in problem.fixes:
        if fix.edits:
            after = config(**{**case.options, **fix.edits})
            again = checks(after, gathered_anew(case.facts, before, after))
            # What is refused by a forecast alone may be started all the same, with a warning.
            left = ("W150", *case.left) if fix == START_ANYWAY else case.left
            assert tuple(p.code for p in again) == left, fix


def gathered_anew(given: Facts, before: Config, after: Config) -> Facts:
    """The facts where they depend on the options that differ; all others are those of the same files."""
    names = {*after.target_modules, *after.modules_to_save}
    lora, data, resume = given.lora, given.data, _resume(given.output.resume, before, after)
    unreadable = tuple(f for f in data.unreadable or () if {*before.dataset} == {*after.dataset})
    found = changed(
        given,
        rewards={"faulty": tuple(f for f in given.rewards.faulty if f.reward in after.reward_funcs)},
        lora={
            "unmatched_targets": tuple(f for f in lora.unmatched_targets if f.target in names),
            "untrainable_targets": tuple(t for t in lora.untrainable_targets if t[0] in names),
        },
        output={"resume": resume},
        data={"unreadable": unreadable},
        prompts=_lengths(given, before, after),
    )
    source = ("model", "chat_template", "trust_remote_code")
    if any(getattr(after, name) != getattr(before, name) for name in source):
        found = changed(
            found, model={"problem": None, "fault": None}, template={"problem": None}, tools={"no_format": ""}
        )
    if after.streaming != before.streaming:
        found = changed(found, data={"problem": None})
    if after.system == "r1":
        found = changed(found, prompts={"mention_format": True})
    if after.apply_chat_template:
        found = changed(found, prompts={"are_text": False})
    if after.columns != before.columns:
        renamed = {new: old for old, new in (before.columns or {}).items()}
        in_data = [renamed.get(name, name) for name in data.columns or ()]
        assert set(after.columns or {}) <= set(in_data), "a column that is not there is renamed"
        columns = tuple((after.columns or {}).get(name, name) for name in in_data)
        lacking = data.missing_columns or ()
        missing = tuple(m for m in lacking if not {*m.column.split(" or ")} & {*columns})
        found = changed(found, data={"columns": columns, "missing_columns": missing})
    if after.output_dir != before.output_dir:
        found = changed(found, output={"state": "free"})
    return found


def _resume(given: ResumeFacts | None, before: Config, after: Config) -> ResumeFacts | None:
    if given is None or after.resume_from_checkpoint != before.resume_from_checkpoint:
        return None
    still = tuple((n, old, getattr(after, n)) for n, old, _ in given.config_changes)
    return replace(given, config_changes=tuple(c for c in still if c[1] != c[2]))


def _lengths(given: Facts, before: Config, after: Config) -> dict[str, Any]:
    """Prompts that are left out under other limits; the data is one prompt of each length up to the
    longest."""
    limit = _limit(given, after)
    longest = given.prompts.longest_in_data
    if limit == _limit(given, before) or longest is None:
        return {}
    if limit is not None and longest > limit:
        return {"longest": limit}
    num_prompts = (given.prompts.num_used or 0) + (given.prompts.num_too_long or 0)
    return {"longest": longest, "num_used": num_prompts, "num_too_long": 0}


def _limit(given: Facts, asked: Config) -> int | None:
    if asked.max_length is not None or given.model.context is None:
        return asked.max_length
    return given.model.context - asked.max_completion_length
