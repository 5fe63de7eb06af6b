"""How problems and options look."""

import pytest

from covey.cli.help import help_text
from covey.cli.main import main
from covey.cli.show import problem_text
from covey.config.dialect import MS_SWIFT
from covey.config.names import ALIASES
from covey.config.quickstart import QUICKSTART
from covey.options.declare import fields_of
from covey.options.schema import OPTIONS
from covey.options.verbs import PlanOptions, QuickstartOptions, VerbOptions
from covey.plan.words import flags
from covey.types import Fix, Problem, Severity


def test_four_parts_and_what_to_type() -> None:
    problem = Problem(
        code="W103", option="learning_rate", seen="learning_rate is 0.", why="word " * 30, cause="A dry run.",
        fixes=(
            Fix(text="the default", edits={"learning_rate": 1e-6}),
            Fix(text="leave it out"),
        ),
        severity=Severity.WARNING,
    )  # fmt: skip
    assert problem_text(problem).splitlines() == [
        "W103 learning_rate (warning)",
        "  seen   learning_rate is 0.",
        "  why    " + ("word " * 18).strip(),
        "         " + ("word " * 12).strip(),
        "  cause  A dry run.",
        "  type   --learning_rate 1e-06",
        "         the default",
        "  or     leave it out",
    ]


@pytest.mark.parametrize("verb", ["train", "rlhf", "plan", "eval", "quickstart"])
def test_help_has_every_option_with_its_default_and_other_names(verb: str) -> None:
    text = help_text(verb)
    assert text.startswith(f"usage: covey {verb} ")
    shown = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    own = list(fields_of({"plan": PlanOptions, "quickstart": QuickstartOptions}.get(verb, VerbOptions)))
    assert shown == [f"--{name}" for name in (*own, *OPTIONS)]
    # A name of another tool is shown with its option, and hidden with it.
    for alias, name in ALIASES.items():
        assert (f"--{alias}" in text) == (name in OPTIONS)
    parts = ["default: 1024", "default: 1e-6, or 1e-5", "default: all 1", "default: not set", "required"]
    parts += ["auto|float32|bfloat16", "[true|false]", "Batch: all numbers count completions, not prompts"]
    for part in parts:
        assert part in text


def test_help_of_rlhf_has_the_defaults_of_ms_swift(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rlhf", "--help"]) == 0
    text = capsys.readouterr().out
    for name, value in {**MS_SWIFT, "learning_rate": 1e-4}.items():
        assert f"  {flags({name: value})}\n" in text
        assert f"      default here: {flags({name: value}).split()[1]}\n" in text


def test_help_of_quickstart_has_its_values() -> None:
    text = help_text("quickstart", QUICKSTART)
    assert "default here: 600" in text
    assert "  --reward_funcs accuracy format\n" in text
