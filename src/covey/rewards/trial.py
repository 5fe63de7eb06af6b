"""The trial of rewards before a run: faults that every call would show are found on a few rows, and rewards
that cannot tell a right answer from others."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from covey.rewards.answers import extract_gold
from covey.rewards.protocol import JudgedRow, Scored, TrainerState
from covey.rewards.registry import total
from covey.rewards.reward_set import RewardSet
from covey.texts import tr
from covey.types import (
    GOLD_NAMES,
    BlindReward,
    Completion,
    Episode,
    EpisodeId,
    Finish,
    Outcome,
    Prompt,
    RewardCause,
    RewardFault,
    SamplingParams,
    ScorePart,
    Status,
    TokenSequence,
)
from covey.types.arrays import floats, ints

# What a right answer may look like: rewards look for a tag, a box, a mark, a block of code, or at all of it.
_FORMS: tuple[Callable[[str, str], str], ...] = (
    lambda whole, gold: whole,
    lambda whole, gold: f"<think>\n</think>\n<answer>{gold}</answer>",
    lambda whole, gold: f"The answer is $\\boxed{{{gold}}}$.\n#### {gold}",
    lambda whole, gold: f"```python\n{whole}\n```",
)
# The end of a beginning: what it opens, and what a space parts from the answer.
_OPENS = re.compile(r"(<\w+>|\\boxed\{|```\w+)\s*\Z")
_RUNS_ON = re.compile(r"[A-Za-z0-9:.,;]\Z")
_TAGS = ("<think>\n", "</think>\n")
_THOUGHT = "".join(_TAGS)
# What a reward that reads golds as answers says that it reads: each has to score.
_CLAIMED: dict[str, Callable[[str], str]] = {
    "<answer>GOLD</answer>": lambda gold: f"{_THOUGHT}<answer>{gold}</answer>",
    "\\boxed{GOLD}": lambda gold: f"{_THOUGHT}So it is $\\boxed{{{gold}}}$.",
    "<answer>\\boxed{GOLD}</answer>": lambda gold: f"{_THOUGHT}<answer>\\boxed{{{gold}}}</answer>",
    "#### GOLD": lambda gold: f"{_THOUGHT}We add them.\n#### {gold}",
    "The answer is GOLD.": lambda gold: f"{_THOUGHT}The answer is {gold}.",
}
NUM_FORMS = len(_FORMS)
_ROWS = 6
_FEWEST_ROWS = 3
# A reward of random values tells more rows apart than this, but for once in 10^5.
_MOST_TOLD_APART = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What a trial found: faults, and the rewards that give one number per step."""

    faults: list[RewardFault]
    of_steps: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What the comparison of gold answers with others found: rewards that do not tell them apart, and those
    that failed on one of them."""

    blind: list[BlindReward]
    faults: list[RewardFault]


def trial(rewards: RewardSet, rows: Sequence[Scored]) -> Tried:
    """What was seen when every reward was called on these rows, once per reward and row.

    Rows of one prompt come in one call, so that a function that gives one value for all of them shows. A slow
    reward is no fault.
    """
    judged = rewards.score(rows, TrainerState(max_steps=1)).rows
    of_steps = {p.name for said in judged for p in said.parts if p.steps is not None}
    named = tuple(name for name in rewards.names if name in of_steps)
    return Tried(faults=_faults(rows, judged), of_steps=named)


def _faults(rows: Sequence[Scored], judged: Sequence[JudgedRow]) -> list[RewardFault]:
    return [
        _fault(row, part, cause)
        for row, said in zip(rows, judged, strict=True)
        for part, cause in zip(said.parts, said.causes, strict=True)
        if part.status not in (Status.OK, Status.TIMEOUT)
    ]


def answered(prompt: Prompt, text: str, sibling: int) -> Scored:
    """A prompt with this text as its answer: the whole of it, or what follows the beginning that the prompt
    has."""
    begun = prompt.opened if prompt.messages and prompt.messages[-1]["role"] == "assistant" else ""
    one_token = Completion(
        request_id=0,
        token_ids=ints([0]),
        logprobs=floats([0.0]),
        versions=((0, 1),),
        finish=Finish.STOP,
        seconds=0.0,
    )
    episode = Episode(
        id=EpisodeId(seed=0, split="trial", rollout=0, attempt=0, prompt_id=prompt.id, sibling=sibling),
        sequences=(TokenSequence.of_turn(prompt.token_ids, one_token),),
        outcome=Outcome.SCORED,
        text=_behind(begun, text) if begun else text,
        sampling=SamplingParams(temperature=1.0, max_new_tokens=1, stop_token_ids=()),
    )
    return Scored(prompt=replace(prompt, opened=begun), episode=episode)


def _behind(begun: str, text: str) -> str:
    """An answer without what its beginning has written of it: tags of thoughts, what is open at its end."""
    for tag in _TAGS:
        if tag.strip() in begun:
            text = text.removeprefix(tag)
    opens = _OPENS.search(begun)
    if opens is not None and opens[1] in text:
        text = text.partition(opens[1])[2].lstrip("\n")
    return f" {text}" if text and _RUNS_ON.search(begun) else text


def blind(
    rewards: RewardSet, weights: Sequence[float], prompts: Sequence[Prompt], claims: Collection[int] = ()
) -> Compared:
    """The rewards that name a gold column and, called once on some rows, do not see it.

    Each row is answered with nothing, with its gold and with the gold of another row, both in several forms.
    Where no form of the gold scores more (times its weight) than the other, the row is not told apart. A
    reward that fails on a form of the gold of more than half of the rows is a fault, and no reward is judged
    then. A row that scores None or fails is not judged, nor is a gold that is no plain text, nor a weight of
    0. Where every single reward sees it, the weighted total has to score the gold above nothing. The rewards
    numbered in `claims` read golds as answers, and have to see each form that they say they read.
    """
    columns = [c for c in GOLD_NAMES if any(c in p.columns for p in prompts)]
    readers = {
        i: named[0]
        for i, reads in enumerate(rewards.named(columns))
        if weights[i] != 0.0 and (named := [c for c in columns if c in reads])
    }
    blind_rewards: list[BlindReward] = []
    for column in dict.fromkeys(readers.values()):
        tries = _tries(prompts, column)
        if len(tries) < _FEWEST_ROWS:
            continue
        flat = [row for rows in tries for row in rows]
        scored = rewards.score(flat, TrainerState(max_steps=1)).rows
        if faults := _faults_on_golds(tries, _faults(flat, scored)):
            return Compared(blind=[], faults=faults)
        judged = iter(scored)
        said = [[next(judged) for _ in rows] for rows in tries]
        for i in (i for i, name in readers.items() if name == column):
            values = [[_value(row, i, weights[i]) for row in rows] for rows in said]
            seen = _judged(values, rewards.names[i], column, weights[i])
            if i in claims and not seen:
                seen = _unread_forms(rewards, i, [rows[0].prompt for rows in tries], column)
            blind_rewards += seen
        if not blind_rewards:
            totals = [[total(row.parts, weights).total for row in rows] for rows in said]
            blind_rewards += [b for b in _judged(totals, "", column, 1.0) if b.compared == "empty"]
    return Compared(blind=blind_rewards, faults=[])


def _faults_on_golds(tries: Sequence[Sequence[Scored]], faults: Sequence[RewardFault]) -> list[RewardFault]:
    """The first fault of each reward that fails on a form of its own gold in more than half of the rows."""
    golds = {(row.prompt.id + 1, row.text) for rows in tries for row in rows[1 : 1 + NUM_FORMS]}
    failed: dict[str, dict[int | None, RewardFault]] = {}
    for fault in faults:
        if (fault.row, fault.completion) in golds:
            failed.setdefault(fault.reward, {}).setdefault(fault.row, fault)
    return [next(iter(rows.values())) for rows in failed.values() if 2 * len(rows) > len(tries)]


def _judged(
    values: Sequence[Sequence[float | None]], reward: str, column: str, weight: float
) -> list[BlindReward]:
    """The first comparison that fails; a row's values are of nothing, its gold and, where there is one,
    another's."""
    distinct = {v for row in values for v in row if v is not None}
    constant = distinct.pop() / weight if len(distinct) == 1 else None
    own = [row[1 : 1 + NUM_FORMS] for row in values]
    empty = [[row[0]] * NUM_FORMS for row in values]
    others = [row[1 + NUM_FORMS :] for row in values]
    compared: Mapping[Literal["empty", "others"], Any] = {"empty": empty, "others": others}
    for against, theirs in compared.items():
        tells_apart = [
            any(g > t for g, t in pairs)
            for golds, those in zip(own, theirs, strict=True)
            if (pairs := [(g, t) for g, t in zip(golds, those, strict=False) if None not in (g, t)])
        ]
        if len(tells_apart) >= _FEWEST_ROWS and sum(tells_apart) <= _MOST_TOLD_APART * len(tells_apart):
            return [
                BlindReward(
                    reward=reward,
                    column=column,
                    compared=against,
                    num_rows=len(tells_apart),
                    num_told_apart=sum(tells_apart),
                    constant=constant,
                )
            ]
    return []


def _unread_forms(rewards: RewardSet, i: int, prompts: Sequence[Prompt], column: str) -> list[BlindReward]:
    """The first claimed form of the gold that scores no more than nothing on half of the rows; only the
    reward itself is called."""
    name = rewards.names[i]
    alone = rewards.without([other for other in rewards.names if other != name])
    golds = [(p, extract_gold(_plain(p.columns[column]) or "")) for p in prompts]
    rows = [
        answered(prompt, text, sibling)
        for prompt, gold in golds
        for sibling, text in enumerate(("", *(form(gold) for form in _CLAIMED.values())))
    ]
    said = iter(_value(row, 0, 1.0) for row in alone.score(rows, TrainerState(max_steps=1)).rows)
    values = [[next(said) for _ in range(1 + len(_CLAIMED))] for _ in prompts]
    for index, form in enumerate(_CLAIMED, start=1):
        tells_apart = [r > e for row in values if (r := row[index]) is not None and (e := row[0]) is not None]
        if len(tells_apart) >= _FEWEST_ROWS and 2 * sum(tells_apart) <= len(tells_apart):
            return [
                BlindReward(
                    reward=name,
                    column=column,
                    compared="empty",
                    num_rows=len(tells_apart),
                    num_told_apart=sum(tells_apart),
                    form=form,
                )
            ]
    return []


def _value(row: JudgedRow, i: int, weight: float) -> float | None:
    part = row.parts[i]
    return None if part.status is not Status.OK or part.value is None else weight * part.value


def _tries(prompts: Sequence[Prompt], column: str) -> list[list[Scored]]:
    """Of rows that are spread over the data: nothing, each form of the gold, each form of another gold."""
    every = max(1, len(prompts) // _ROWS)
    golds = [(p, text) for p in prompts[::every] if (text := _plain(p.columns.get(column)))][:_ROWS]
    tries = []
    for n, (prompt, own) in enumerate(golds):
        behind = [text for _, text in (*golds[n:], *golds[:n])]
        other = next((text for text in behind if extract_gold(text) != extract_gold(own)), None)
        texts = ["", *_forms(own), *(_forms(other) if other is not None else ())]
        tries.append([answered(prompt, text, sibling) for sibling, text in enumerate(texts)])
    return tries


def _forms(whole: str) -> list[str]:
    return [form(whole, extract_gold(whole)) for form in _FORMS]


def _plain(value: Any) -> str | None:
    """A gold as an answer would say it; None for one that no answer spells out, such as cases of a test."""
    if isinstance(value, str):
        text = value.strip()
        return None if text.startswith(("{", "[")) else text
    return str(value) if isinstance(value, int | float) else None


def _fault(row: Scored, part: ScorePart, cause: RewardCause) -> RewardFault:
    shown = tr("the completion {text!r:.60}", text=row.text) if row.text else tr("an empty completion")
    return RewardFault(
        reward=part.name,
        kind="trial",
        words=tr(
            "{said}; seen on row {row}, with {shown}", said=part.message, row=row.prompt.id + 1, shown=shown
        ),
        cause=cause,
        row=row.prompt.id + 1,
        completion=row.text,
        said=part.message,
    )
