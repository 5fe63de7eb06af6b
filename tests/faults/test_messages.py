"""Every refusal, word for word: the whole of standard error, read as a person reads it.

`messages/CASE.txt` holds the command and what it prints; COVEY_WRITE_MESSAGES=1 writes these files anew, and
what has changed in them is to be read like prose.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from covey.checks.judge import refuse_faults
from covey.checks.survey import survey
from covey.cli.main import main
from covey.cli.options import read
from covey.config.names import look_up
from covey.errors import ConfigError
from covey.options.declare import fields_of
from covey.options.verbs import RolloutOptions
from covey.plan.words import flags
from covey.types import Problem, Severity
from faults import (
    cases_data,
    cases_images,
    cases_inputs,
    cases_options,
    cases_rows,
    cases_run,
    cases_servers,
    cases_turns,
)
from faults.case import SUMS, Case, words
from support.quick import REFUSALS

MESSAGES = Path(__file__).parent / "messages"
CASES = (
    *(*cases_options.CASES, *cases_inputs.CASES, *cases_rows.CASES),
    *(*cases_data.CASES, *cases_run.CASES, *cases_servers.CASES, *cases_images.CASES, *cases_turns.CASES),
)
# The others are verbs that do not exist: there is no run to mend.
RUNS = tuple(case for case in CASES if case.words.startswith(("train ", "rlhf ")))


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """A case in a directory of its own, on a machine without a GPU or a launcher."""
    case: Case = request.param
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # A busy machine would say how far it has read.
    monkeypatch.setattr("covey.checks.data.look._PATIENCE_S", math.inf)
    for name in ("NPROC_PER_NODE", "WORLD_SIZE", "RANK", "COVEY_OUTPUT_DIR", "COVEY_EXIT_FILE"):
        monkeypatch.delenv(name, raising=False)
    for path, text in {"sums.jsonl": SUMS, **case.files}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    case.make(tmp_path)
    case.edge(monkeypatch, tmp_path)
    yield case


# What a fix without a value to type says: the option is not typed at all.
_LEFT_OUT = re.compile(r"^(?:[\w ]+: )?leave out --(\w+)$")


def everything_in(directory: Path) -> dict[str, bytes]:
    """Every file with its bytes; what Python compiles aside."""
    paths = sorted(p for p in directory.rglob("*") if "__pycache__" not in p.parts)
    return {str(p.relative_to(directory)): p.read_bytes() if p.is_file() else b"" for p in paths}


def test_message(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, the whole text, no weights loaded and nothing written."""
    before, had_loader = everything_in(tmp_path), "covey.models.load" in sys.modules
    assert main(shlex.split(case.words)) == 2
    printed = capsys.readouterr()
    assert everything_in(tmp_path) == before
    assert had_loader or "covey.models.load" not in sys.modules
    assert printed.out == ""
    said = f"$ covey {case.words}\n\n{printed.err.replace(str(tmp_path), 'HERE')}"
    path = MESSAGES / f"{case.name}.txt"
    if os.environ.get("COVEY_WRITE_MESSAGES"):
        path.write_text(said, encoding="utf-8")
    assert said == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("case", RUNS, ids=lambda case: case.name, indirect=True)
def test_every_fix_mends(case: Case) -> None:
    """Whoever types the flags of any fix, in place of what was typed for the same options, or leaves out the
    option that it says, does not see that problem again, and no other in its stead."""
    verb, *typed = shlex.split(case.words)
    said = problems_of(verb, typed)
    errors = {p.code for p in said if p.severity is Severity.ERROR}
    assert errors
    for problem in said:
        in_a_file = problem.code == "E101" and f"--{problem.option}" not in typed
        for fix in () if in_a_file else problem.fixes:
            dropped = dict.fromkeys(_LEFT_OUT.findall(str(fix.text)))
            if not fix.edits and not dropped:
                continue
            edits = flags(fix.edits) if fix.edits else ""
            fixed = [*without(typed, problem.option, fix.edits or dropped), *shlex.split(edits)]
            left = problems_of(verb, fixed)
            assert (problem.code, problem.option, problem.seen) not in {
                (p.code, p.option, p.seen) for p in left
            }
            wrong = [p for p in left if p.severity is Severity.ERROR]
            assert {p.code for p in wrong} <= errors, (fix, left)
            is_error = problem.severity is Severity.ERROR
            assert len(wrong) + is_error <= sum(p.severity is Severity.ERROR for p in said), (fix, left)


def test_no_message_is_left_over() -> None:
    """Each text belongs to a case, and no two cases share a name."""
    names = [case.name for case in CASES]
    assert sorted(names) == sorted(path.stem for path in MESSAGES.glob("*.txt"))
    assert len(names) == len(set(names))


def test_every_option_that_a_message_names_is_one() -> None:
    """What follows two dashes in a text is an option of this version, or the name that was typed."""
    foreign = {"--help", "--repo-type", "--local-dir", "--dataset", "--merge"}
    foreign |= {f"--{name}" for name in fields_of(RolloutOptions)}
    for path in MESSAGES.glob("*.txt"):
        command, _, said = path.read_text(encoding="utf-8").partition("\n")
        for flag in re.findall(r"(?<![\w-])--[A-Za-z]\w*(?:-\w+)*", said):
            known = look_up(flag)
            typed = flag in command or known.refused is not None
            assert known.option is not None or typed or flag in foreign, (path.name, flag)


def test_a_slow_reward_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge may take longer in its trial than a call may; the run says so if it stays so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "sums.jsonl").write_text(SUMS, encoding="utf-8")
    source = "import time\n\n\ndef slow(completions, **kwargs):\n    time.sleep(60)\n"
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    typed = shlex.split(words("--reward_timeout_s 0.2 --reward_workers 1", reward="mine.py:slow"))
    assert errors_of(typed[0], typed[1:]) == []


def errors_of(verb: str, typed: list[str]) -> list[Problem]:
    """What is wrong with a command, without its run."""
    return [p for p in problems_of(verb, typed) if p.severity is Severity.ERROR]


def problems_of(verb: str, typed: list[str]) -> Sequence[Problem]:
    """What is said of a command, without its run: errors, warnings and notes."""
    try:
        resolved, num_processes = read(verb, typed)
        with survey(resolved.config, num_processes) as found:
            return refuse_faults(resolved, found.facts)
    except ConfigError as error:
        return error.problems


def without(typed: list[str], option: str, edits: Mapping[str, object]) -> list[str]:
    """A command less the flags of a misspelt name and of the options that are typed anew."""
    kept, skips = [], False
    for word in typed:
        if word.startswith("--"):
            known = look_up(word)
            skips = known.option in edits or (known.option is None and known.typed == option)
        if not skips:
            kept.append(word)
    return kept


def test_make_check_runs_refusals_that_are_there() -> None:
    assert {*REFUSALS} <= {case.name for case in CASES}
