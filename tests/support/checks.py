"""A good run, checks of changed ones, and what is gathered anew after a fix is typed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from covey.config import from_dict
from covey.errors import ConfigError
from covey.options.schema import Config
from covey.plan.checks import checks, refuse_faults
from covey.plan.facts import Facts, ModelSizes, ResumeFacts
from covey.plan.problem import START_ANYWAY
from covey.training.facts import survey
from covey.types import Problem, Severity

BASE: dict[str, Any] = {
    "model": "models/tiny",
    "dataset": "train.jsonl",
    "reward_funcs": ["accuracy"],
    "output_dir": "runs/a",
}
GOOD = Facts(
    num_rows=1000,
    num_prompts=1000,
    num_prompts_too_long=0,
    longest_prompt=100,
    longest_prompt_in_data=100,
    columns=("prompt", "solution"),
    missing_columns=(),
    dataset_missing=(),
    dataset_unreadable=(),
    model_dir="models/tiny",
    model_context=4096,
    num_parameters=600_000_000,
    has_chat_template=True,
    prompts_are_text=False,
    mentions_format=True,
    output_dir_state="free",
    rewards_available=("accuracy", "format"),
    checkpoint_bytes=10**9,
    model_bytes=250 * 10**6,
    free_disk_bytes=10**12,
    cuda=True,
    has_bfloat16=True,
    nproc_available=8,
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
    """The facts of the good run with others."""
    return replace(GOOD, **changes)


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
    changed = {
        "faulty_rewards": tuple(f for f in given.faulty_rewards if f.reward in after.reward_funcs),
        "unmatched_targets": tuple(f for f in given.unmatched_targets if f.target in names),
        "untrainable_targets": tuple(t for t in given.untrainable_targets if t[0] in names),
        "resume": _resume(given.resume, before, after),
        "dataset_unreadable": tuple(
            f for f in given.dataset_unreadable or () if {*before.dataset} == {*after.dataset}
        ),
        **_lengths(given, before, after),
    }
    source = ("model", "chat_template", "trust_remote_code")
    if any(getattr(after, name) != getattr(before, name) for name in source):
        changed |= {"model_problem": None, "model_fault": None, "template_problem": None}
    if after.streaming != before.streaming:
        changed["data_problem"] = None
    if after.system == "r1":
        changed["mentions_format"] = True
    if after.apply_chat_template:
        changed["prompts_are_text"] = False
    if after.columns != before.columns:
        renamed = {new: old for old, new in (before.columns or {}).items()}
        in_data = [renamed.get(name, name) for name in given.columns or ()]
        assert set(after.columns or {}) <= set(in_data), "a column that is not there is renamed"
        columns = tuple((after.columns or {}).get(name, name) for name in in_data)
        lacking = given.missing_columns or ()
        missing = tuple(m for m in lacking if not {*m.column.split(" or ")} & {*columns})
        changed |= {"columns": columns, "missing_columns": missing}
    if after.output_dir != before.output_dir:
        changed["output_dir_state"] = "free"
    return replace(given, **changed)


def _resume(given: ResumeFacts | None, before: Config, after: Config) -> ResumeFacts | None:
    if given is None or after.resume_from_checkpoint != before.resume_from_checkpoint:
        return None
    still = tuple((n, old, getattr(after, n)) for n, old, _ in given.config_changes)
    return replace(given, config_changes=tuple(c for c in still if c[1] != c[2]))


def _lengths(given: Facts, before: Config, after: Config) -> dict[str, Any]:
    """Prompts that are left out under other limits; the data is one prompt of each length up to the
    longest."""
    limit = _limit(given, after)
    longest = given.longest_prompt_in_data
    if limit == _limit(given, before) or longest is None:
        return {}
    if limit is not None and longest > limit:
        return {"longest_prompt": limit}
    num_prompts = (given.num_prompts or 0) + (given.num_prompts_too_long or 0)
    return {"longest_prompt": longest, "num_prompts": num_prompts, "num_prompts_too_long": 0}


def _limit(given: Facts, asked: Config) -> int | None:
    if asked.max_length is not None or given.model_context is None:
        return asked.max_length
    return given.model_context - asked.max_completion_length
