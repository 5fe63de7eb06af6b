"""The verbs of the `covey` command, and what its exit code says.

0 done; 2 the configuration or the input is at fault, and nothing was started; 3 a guard stopped the run, its
directory could no longer be written, or `covey doctor` found something wrong with it; 130 Ctrl-C; 143
SIGTERM; 1 anything else, such as a checkpoint that `covey verify` finds damaged. Verbs import what they need
when they run, so that `covey --help` is quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from covey.cli import show
from covey.cli.ranks import leave, leave_early, speaks
from covey.cli.signals import Terminated, ends_on_signals
from covey.cli.verbs import VERBS, overview, unknown_verb
from covey.environment import settle
from covey.errors import CheckpointError, ConfigError, GuardStop, RunFailed
from covey.exits import follow_launcher
from covey.plan.launchers import adopted
from covey.texts import tr
from covey.texts.language import Language, language_of, passed_on
from covey.texts.terminal import say, say_json
from covey.types import Problem

if TYPE_CHECKING:
    from covey.config.take import Layer

DONE, AT_FAULT, GUARDED, INTERRUPTED, TERMINATED = 0, 2, 3, 130, 143

# A verb is the function of its name in the module of its name, but for these.
_FUNCTIONS = {"eval": ("evaluate", "evaluate"), "rlhf": ("train", "rlhf")}
_SAY_HELP_ALONE = ("doctor", "export", "verify")
_SPEAK_CHINESE = ("doctor", "explain")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; an error that covey does not foresee is raised as it is."""
    os.environ.update(adopted(os.environ, os.getppid()))
    follow_launcher()
    settle()
    # `deepspeed` puts the number in front of the words of each process; LOCAL_RANK says the same.
    number = f"--local_rank={os.environ.get('LOCAL_RANK', '')}"
    given = [word for word in (sys.argv[1:] if argv is None else argv) if word != number]
    if {*given} <= {"--help", "-h"}:
        return leave(_say(overview()))
    from covey.config.argv import take_out
    from covey.options.verbs import CommonOptions

    common, words = take_out("", given, CommonOptions)
    language: Language = language_of(os.environ)
    if "lang" in common.typed:
        language = common.typed["lang"].value or language
    with ends_on_signals(), passed_on(language):
        try:
            return _run(common, words, language)
        except KeyboardInterrupt:
            return INTERRUPTED
        except Terminated:
            return TERMINATED


def _run(common: Layer, words: list[str], language: Language) -> int:
    """Run the verb and leave its exit code; a signal may come at any time, also while a rank waits for the
    one that says why."""
    try:
        return leave(_answered(common, words, language))
    except KeyboardInterrupt:
        return leave_early(INTERRUPTED)
    except Terminated:
        return leave_early(TERMINATED)


def _answered(common: Layer, words: list[str], language: Language) -> int:
    try:
        if common.problems:
            raise ConfigError(common.problems)
        return _do({name: typed.value for name, typed in common.typed.items()}, words, language)
    except ConfigError as error:
        return _refused(error, words, language)
    except CheckpointError as error:
        return _refused(ConfigError([_checkpoint(error, words[0])]), words, language)
    except GuardStop as error:
        if speaks(is_of_all=True):
            show.finding(error.finding, language)
        return GUARDED
    except RunFailed as error:
        show.finding(error.finding, language)
        return error.exit_code


def _refused(error: ConfigError, words: list[str], language: Language) -> int:
    """Print the problems: as text on standard error, and as JSON if `--json` was given."""
    if speaks():
        show.problems(error.problems, language)
        from covey.cli.refusal import as_json, asks_for_json

        if asks_for_json(words):
            say_json(as_json(error))
    return AT_FAULT


def _do(common: Mapping[str, Any], words: list[str], language: Language) -> int:
    """Do what the options of every verb and the verb ask for."""
    if common.get("version"):
        from importlib.metadata import version

        return _say(tr("covey {version}\n", version=version("covey")))
    if not words:
        return _say(overview())
    verb, *argv = words
    if verb not in VERBS:
        raise ConfigError([unknown_verb(verb, argv)])
    if common.get("help") or (not argv and verb in _SAY_HELP_ALONE):
        argv = []
        if verb != "explain":
            from covey.cli.help import verb_help

            return _say(verb_help(verb))
    module, function = _FUNCTIONS.get(verb, (verb, verb))
    run = getattr(import_module(f"covey.cli.{module}"), function)
    code: int = run(argv, language) if verb in _SPEAK_CHINESE else run(argv)
    return code


def _say(text: str) -> int:
    say(text.removesuffix("\n"))
    return DONE


def _checkpoint(error: CheckpointError, verb: str) -> Problem:
    from covey.plan.problem import problem
    from covey.types import Fix

    cause = tr("The checkpoint was not completely written, was copied only in part, or was edited.")
    if verb in ("train", "rlhf", "quickstart", "plan"):
        older = Fix(text=tr("resume from an older checkpoint: --resume_from_checkpoint DIR"))
        return problem("E404", "resume_from_checkpoint", f"{error}", cause, older)
    return problem("E413", verb, f"{error}", cause, Fix(text=tr("use another checkpoint of the run")))
