"""Stop words that cannot end a completion."""

from __future__ import annotations

from covey.options.schema import Config
from covey.plan.facts import TemplateFacts
from covey.plan.problem import problem
from covey.texts import tr
from covey.types import Fix, Problem

MOST_STOP_WORDS = 64
LONGEST_STOP_WORD = 1024
"""In characters."""


def stop_word_problems(config: Config, template: TemplateFacts) -> list[Problem]:
    """Return what is wrong with the texts that end a completion."""
    words, longest = config.stop_words, max(map(len, config.stop_words), default=0)
    problems = [_hidden(words, *pair) for pair in template.hidden_stop_words if pair[0] in words]
    if len(words) > MOST_STOP_WORDS or longest > LONGEST_STOP_WORD:
        seen = tr(
            "stop_words has {number} texts, the longest with {longest:,} characters; at most {most} texts of "
            "{most_characters:,} characters each are looked for.",
            number=len(words),
            longest=longest,
            most=MOST_STOP_WORDS,
            most_characters=LONGEST_STOP_WORD,
        )
        cause = tr("A whole answer or a file may have been given in the place of a stop word.")
        fix = Fix(text=tr("give short texts that come at the end of an answer: --stop_words '</answer>'"))
        problems.append(problem("E109", "stop_words", seen, cause, fix))
    return problems


def _hidden(words: list[str], word: str, token: str) -> Problem:
    others = [token if other == word else other for other in words]
    return problem(
        "E109",
        "stop_words",
        tr(
            "The stop word {word!r} contains {token}, a special token of the tokenizer. The text of a "
            "completion is without special tokens, so it never contains this word.",
            word=word,
            token=token,
        ),
        "",
        Fix(text=tr("end completions at the token alone"), edits={"stop_words": list(dict.fromkeys(others))}),
    )
