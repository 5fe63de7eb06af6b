"""The verbs of the `covey` command, and what its exit code says.

0 done; 2 the configuration or the input is at fault, and nothing was started; 3 a guard stopped the run, its
directory could no longer be written, or `covey doctor` found something wrong with it; 130 Ctrl-C; 143
SIGTERM; 1 anything else. Verbs import what they need when they run, so that `covey --help` is quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from covey.cli import show
from covey.cli.language import Language, language_of, passed_on, take_language
from covey.cli.ranks import leave, speaks
from covey.cli.signals import Terminated, ends_on_signals
from covey.cli.verbs import VERBS, unknown_verb
from covey.environment import settle
from covey.errors import CheckpointError, ConfigError, GuardStop, RunFailed
from covey.exits import follow_launcher
from covey.types import Problem

DONE, AT_FAULT, GUARDED, INTERRUPTED, TERMINATED = 0, 2, 3, 130, 143

# A verb reads its own words: lists of several words and flags of any spelling are beyond typer.
_OWN_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(
    name="covey",
    help="Reinforcement learning of language models with GRPO.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_VERSION = typer.Option(False, "--version", help="Print the version and exit.")
# It stands here for --help: the word is taken out before typer reads the others.
_LANG = typer.Option(None, "--lang", metavar="zh|en", help="Language of messages; a word for every verb.")


@app.callback(invoke_without_command=True)
def _covey(context: typer.Context, version: bool = _VERSION, lang: str | None = _LANG) -> int:
    if version:
        from importlib.metadata import version as version_of

        sys.stdout.write(f"covey {version_of('covey')}\n")
    elif context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")
    return DONE


@app.command(context_settings=_OWN_WORDS, help=VERBS["train"])
def train(context: typer.Context) -> int:
    """Hand the words to the verb train."""
    from covey.cli.train import train as verb

    return verb(context.args)


@app.command(context_settings=_OWN_WORDS, help=VERBS["rlhf"])
def rlhf(context: typer.Context) -> int:
    """Hand the words to the verb rlhf."""
    from covey.cli.train import rlhf as verb

    return verb(context.args)


@app.command(context_settings=_OWN_WORDS, help=VERBS["plan"])
def plan(context: typer.Context) -> int:
    """Hand the words to the verb plan."""
    from covey.cli.plan import plan as verb

    return verb(context.args)


@app.command(context_settings=_OWN_WORDS, help=VERBS["eval"], name="eval")
def evaluate(context: typer.Context) -> int:
    """Hand the words to the verb eval."""
    from covey.cli.evaluate import evaluate as verb

    return verb(context.args)


@app.command(context_settings=_OWN_WORDS, help=VERBS["export"])
def export(context: typer.Context) -> int:
    """Hand the words to the verb export."""
    from covey.cli.export import export as verb

    return verb(context.args)


@app.command(context_settings=_OWN_WORDS, help=VERBS["quickstart"])
def quickstart(context: typer.Context) -> int:
    """Hand the words to the verb quickstart."""
    from covey.cli.quickstart import quickstart as verb

    return verb(context.args)


@app.command(context_settings=_OWN_WORDS, help=VERBS["selftest"])
def selftest(context: typer.Context) -> int:
    """Hand the words to the verb selftest."""
    from covey.cli.selftest import selftest as verb

    return verb(context.args)


@app.command(context_settings=_OWN_WORDS, help=VERBS["doctor"])
def doctor(context: typer.Context) -> int:
    """Hand the words to the verb doctor."""
    from covey.cli.doctor import doctor as verb

    return verb(context.args, context.obj)


@app.command(context_settings=_OWN_WORDS, help=VERBS["explain"])
def explain(context: typer.Context) -> int:
    """Hand the words to the verb explain."""
    from covey.cli.explain import explain as verb

    return verb(context.args, context.obj)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; an error that covey does not foresee is raised as it is."""
    words = list(sys.argv[1:] if argv is None else argv)
    follow_launcher()
    settle()
    with ends_on_signals():
        try:
            language, words = take_language(words, os.environ)
        except ConfigError as error:
            if speaks():
                show.problems(error.problems, language_of(os.environ))
            return leave(AT_FAULT)
        with passed_on(language):
            return leave(_run(words, language))


def _run(words: list[str], language: Language) -> int:
    try:
        if words and words[0] not in VERBS and words[0] not in ("--version", "--help", "-h"):
            raise ConfigError([unknown_verb(words[0])])
        code: int = app(args=words, prog_name="covey", standalone_mode=False, obj=language)
        return code
    except ConfigError as error:
        if speaks():
            show.problems(error.problems, language)
        return AT_FAULT
    except CheckpointError as error:
        if speaks():
            show.problems([_checkpoint(error)], language)
        return AT_FAULT
    except GuardStop as error:
        if speaks():
            show.finding(error.finding, language)
        return GUARDED
    except RunFailed as error:
        show.finding(error.finding, language)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except Terminated:
        return TERMINATED


def _checkpoint(error: CheckpointError) -> Problem:
    from covey.codes import CODES
    from covey.types import Fix

    return Problem(
        code="E404",
        option="resume_from_checkpoint",
        seen=f"{error}",
        why=CODES["E404"].why,
        cause="A checkpoint that was cut short, copied in part, or edited.",
        fixes=(Fix(text="resume from an older checkpoint: --resume_from_checkpoint DIR"),),
    )
