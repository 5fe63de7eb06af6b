"""Sentences of messages in Chinese: what has a counterpart, and that it says the same of the same things."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from covey.chinese.codes import titles_and_whys
from covey.chinese.entries import entries
from covey.chinese.sentences import Sentences, Template, sentences
from covey.codes import CODES
from unit.chinese.corpus import (
    CODES_LINE,
    ROOT,
    SENTENCES,
    WAITING,
    pinned,
    sources,
    templates,
    waiting_codes,
    waiting_sentences,
)

UNTRANSLATED = Path(__file__).parent / "untranslated.txt"
COMPOSED = Path(__file__).parent / "composed.txt"
FILE = ROOT / "chinese" / "sentences.txt"
NUM_ENGLISH = 4
"""Sentences that are printed in English: a new one gets a counterpart, so this only falls."""

KNOWN = sentences()
PAIRS = [tuple(pair) for pair in entries(FILE, 2)]
# A title in small letters follows in the English one.
DROPS = {"The nearest code is {w}: {}"}


def listed() -> tuple[list[str], list[str]]:
    """The texts that are no sentences of their own, and those that are printed in English."""
    pieces, _, english = UNTRANSLATED.read_text(encoding="utf-8").partition("# Sentences that are printed")
    first, second = ([x for x in part.splitlines() if ".py: " in x] for part in (pieces, english))
    return first, second


def untranslated() -> set[str]:
    return {
        f"{path.relative_to(ROOT)}: {text!r}"
        for path in sources()
        for text in templates(path)
        if KNOWN.translated(text.strip()) is None
    }


def untranslated_codes() -> set[str]:
    """Codes without an entry, and those whose pinned messages are English in a part."""
    whys = {code.why for code in CODES.values()}
    said = {code for code, _, text in pinned() if text not in whys and KNOWN.translated(text) is None}
    return said | (CODES.keys() - titles_and_whys().keys())


def test_every_sentence_of_the_source_has_a_counterpart_or_is_listed() -> None:
    without = untranslated()
    pieces, english = listed()
    if os.environ.get("COVEY_WRITE_WAITING"):
        waiting = sorted(without - {*pieces, *english})
        lines = [CODES_LINE, *sorted(untranslated_codes()), "", SENTENCES, *waiting]
        WAITING.write_text("\n".join(lines) + "\n", encoding="utf-8")
    known = {*pieces, *english, *waiting_sentences()}
    assert sorted(without - known) == [], f"put these into {FILE.name} or {WAITING.name}"
    assert sorted(known - without) == [], "these have a counterpart, or are gone"
    assert len(english) <= NUM_ENGLISH


def test_the_walk_over_the_source_is_not_blind() -> None:
    found = {text for path in sources() for text in templates(path)}
    assert len(found) > 600
    assert "X, which is no multiple of num_generations X." in found
    assert "A metric of training, or of another set." in found


def test_every_pinned_refusal_is_chinese_throughout() -> None:
    """The corpus of refusals: no part is left in English, but of codes that wait."""
    assert len(list(pinned())) > 700
    assert untranslated_codes() == waiting_codes()


def test_no_template_stands_twice() -> None:
    assert [text for text, count in Counter(english for english, _ in PAIRS).items() if count > 1] == []


def test_a_pair_says_the_same_of_the_same_things() -> None:
    """Every part that differs is used once, and options, commands and files stand in both."""
    name = re.compile(r"--\w+|(?<!\w)[a-z]+(?:_[a-z]+)+|\w+\.(?:json|jsonl|safetensors|py|jinja)\b")
    for english, chinese in PAIRS:
        slots = len(re.findall(r"\{[w*+]?\}", english))
        used = sorted(int(number) for number in re.findall(r"\{(\d)\}", chinese))
        assert used == list(range(1, slots + 1 - (english in DROPS))), english
        commands = [c for c in re.findall(r"`[^`]*`", english) if "{" not in c and c != "`not set`"]
        assert [n for n in [*commands, *name.findall(english)] if n not in chinese] == [], english
        assert "`" in english or "`" not in chinese, english


def test_a_part_that_differs_keeps_its_own_words() -> None:
    """A file that is called like a word of the catalogue, or like another sentence, stays what it is."""
    assert KNOWN.translated("none does not exist.") == "none 不存在"
    assert KNOWN.translated("1 prompt does not exist.") == "1 prompt 不存在"
    assert KNOWN.translated("题目 1.jsonl does not exist.") == "题目 1.jsonl 不存在"
    assert KNOWN.translated("This sentence is not in the catalogue.") is None
    assert KNOWN.translated("") is None


def test_the_template_with_the_most_fixed_words_is_meant() -> None:
    few = Template(fixed=("", " is ", ""), slots=("", ""), chinese="{1} 是 {2}")
    many = Template(fixed=("learning_rate is ", ""), slots=("w",), chinese="学习率为 {1}")
    ordered = Sentences(tuple(sorted((few, many), key=lambda t: -t.weight)))
    assert ordered.translated("learning_rate is 0.") == "学习率为 0"
    assert ordered.translated("seed is 0.") == "seed 是 0"


def test_a_piece_that_must_be_known_decides() -> None:
    assert KNOWN.translated("row 2: there is none; row 4: it is empty") == "第 2 行：没有；第 4 行：是空的"
    assert KNOWN.translated("row 2: there is none; row 4: who knows") is None


def test_sentences_that_are_put_together() -> None:
    """Pieces from several places of the source, as one text."""
    for english, chinese in entries(COMPOSED, 2):
        assert KNOWN.translated(english) == chinese


def test_three_dots_that_leave_something_out_stay() -> None:
    seen = "The data set has 64 rows and no usable prompt: 64 rows without a prompt: 1, 2, 3 ...."
    assert KNOWN.translated(seen) == "数据集有 64 行，没有可用的提示：64 行没有提示：1, 2, 3 ..."


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=5, max_size=5))
def test_batch_arithmetic_keeps_its_numbers_in_order(numbers: list[int]) -> None:
    processes, batch, steps, completions, group = numbers
    seen = (
        f"{processes:,} process{'es' * (processes != 1)} x per_device_train_batch_size {batch} x "
        f"steps_per_generation {steps} = {completions:,} completion{'s' * (completions != 1)} per rollout, "
        f"which is no multiple of num_generations {group}."
    )
    chinese = KNOWN.translated(seen)
    assert chinese is not None
    shown = re.findall(r"\d[\d,]*", chinese, re.ASCII)
    assert shown == [f"{processes:,}", str(batch), str(steps), f"{completions:,}", str(group)]
    assert "个进程" in chinese and "条回答" in chinese and "整数倍" in chinese
