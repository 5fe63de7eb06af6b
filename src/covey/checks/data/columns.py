"""Facts about the columns of the data: which are there, which lack, and what a renamed one would give."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from covey.config.names import free_name, nearest
from covey.data.forms import PROMPT_COLUMNS, RESPONSES, are_pairs, names_a_prompt, read_row
from covey.data.lazy_rows import columns_of
from covey.data.mix import rename_columns
from covey.data.prompts import chosen, fields_of
from covey.options.schema import Config
from covey.plan.facts import Facts, GoldFacts, MissingColumn, OpenLists
from covey.rewards.builtin import built_in_of
from covey.rewards.declare import BuiltIn
from covey.rewards.gold_lists import ColumnLists, names_alternatives
from covey.rewards.gold_texts import shown
from covey.rewards.golds import check_golds
from covey.texts import joined, tr
from covey.types import GOLD_COLUMNS, GOLD_NAMES, Prompt

Rows = Sequence[Mapping[str, Any]]

_TRIED = 200
_GOLD_BUDGET_S = 1.0
_FEW_BAD = 0.05
# A column whose name is so near to one that covey reads is that one, misspelt.
_ALIKE = 0.8
_FEW = 5
# Lists that show nothing among others that show what they are: fewer go without a word.
_MANY = 0.1
# What other data sets call the two columns, beside names that are merely near.
_ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "question": ("text", "task", "user", "user_input", "input_text", "content", "题目", "问题"),
    "solution": (
        *(*GOLD_NAMES[len(GOLD_COLUMNS) :], "final_answer", "correct_answer", "expected"),
        *("golden_answers", "aliases", *RESPONSES),
        *("final", "result", "答案", "参考答案"),
    ),
}
# A column of this ending speaks of another one, and is not it.
_ABOUT = ("type", "id", "idx", "index", "format", "length", "len", "source", "start", "count", "level")


def with_columns(facts: Facts, config: Config, rows: Rows, sets: Sequence[tuple[str, Rows]]) -> Facts:
    """The facts with the names of the columns and of those that the prompts or rewards lack."""
    columns = set(columns_of(rows))
    made = _made(rows, columns)
    missing = _missing(config, columns, made)
    if missing and are_pairs(sorted(columns)):
        facts = replace(facts, data=replace(facts.data, has_preference_pairs=True))
    tried = _Trial(rows, config)
    found = tuple(tried.with_rename(m) for m in missing)
    if config.gold_lists is None and (lists := tried.open_lists(found)):
        # They are said with the column that lacks, and not after it.
        facts = replace(
            facts, rewards=replace(facts.rewards, golds=GoldFacts(num_checked=0, num_bad=0, open_lists=lists))
        )
    if config.task_rewards is None:
        for name, held in sets:
            there = set(columns_of(held))
            lacking = [] if missing else _missing(config, there, _made(held, there))
            found += tuple(replace(m, where=name) for m in lacking)
    return replace(
        facts,
        data=replace(
            facts.data,
            columns=tuple(sorted(columns | made)),
            made_columns=tuple(sorted(made)),
            missing_columns=found,
        ),
    )


def renamed_golds(prompts: Sequence[Prompt], config: Config, made: Sequence[str]) -> Mapping[str, str] | None:
    """Columns under other names, old to new, with which nearly all golds can be read: another column takes
    the name of the one that does not hold them. None where no column does."""
    every = max(1, len(prompts) // _TRIED)
    numbers = range(0, len(prompts), every)[:_TRIED]
    # A prompt of any text: what is read of these rows is their gold.
    rows = [
        {n: v for n, v in columns.items() if n not in made} | {"prompt": "-"}
        for columns in fields_of(chosen(prompts, numbers), "columns")
    ]
    target = GOLD_COLUMNS[0]
    rename = _Trial(rows, config).golds_under(target)
    if rename is None:
        return None
    names = {new: old for old, new in (config.columns or {}).items()}
    return {**(config.columns or {}), **{names.get(old, old): new for old, new in rename.items()}}


def open_lists_of(
    lists: ColumnLists, column: str, row_of: Callable[[int], int], where: str = "", task: str = ""
) -> OpenLists | None:
    """The lists of a column, by its name in the data, if many may be alternatives or parts; `row_of` is the
    number of a row, from 1."""
    if names_alternatives(column) or lists.first_open is None or lists.num_open < _MANY * lists.num_lists:
        return None
    number, gold = lists.first_open
    return OpenLists(
        column=column,
        where=where,
        task=task,
        num_lists=lists.num_lists,
        num_open=lists.num_open,
        row=row_of(number),
        example=shown(gold),
        is_decided=lists.is_decided,
    )


def _made(rows: Rows, columns: set[str]) -> set[str]:
    """The gold columns that reading the rows makes of others."""
    read = (read_row(row, system=None, is_raw=True) for row in rows[:_TRIED])
    return {name for row in read for name in GOLD_COLUMNS if name in row.columns} - columns


def _missing(config: Config, columns: set[str], made: set[str]) -> list[MissingColumn]:
    if not columns:
        return []
    missing = []
    if not names_a_prompt(sorted(columns)):
        missing.append(MissingColumn(column=joined(tr(" or "), PROMPT_COLUMNS), needed_by=tr("every prompt")))
    lacking: dict[str, str] = {}
    for name in config.reward_funcs:
        built_in = built_in_of(name)
        if built_in is not None and built_in.golds and not (columns | made) & set(built_in.golds):
            lacking.setdefault(" or ".join(built_in.golds), tr("the reward {name}", name=name))
    return [*missing, *(MissingColumn(column=column, needed_by=who) for column, who in lacking.items())]


class _Trial:
    """Columns renamed as a user might, one after the other, and read by the code that reads the data."""

    def __init__(self, rows: Rows, config: Config) -> None:
        self._rows: Rows = rows[:_TRIED]
        # A rename is to mend what is refused above this share.
        self._few_bad = min(_FEW_BAD, config.max_bad_gold)
        self._readers = [b for n in config.reward_funcs if (b := built_in_of(n)) is not None and b.golds]

    def with_rename(self, missing: MissingColumn) -> MissingColumn:
        """What lacks, with the first column that works under its name; the next trial has it renamed."""
        wanted = missing.column.split(" or ")
        is_prompt = missing.needed_by == "every prompt"
        usual = "question" if is_prompt else wanted[0]
        for old in self._candidates(usual, wanted, is_prompt=is_prompt):
            target = (nearest(old, wanted, cutoff=_ALIKE) or usual) if is_prompt else usual
            renamed = [dict(row) for row in rename_columns(self._rows, {old: target})]
            is_known = _plain(old) in _ELSEWHERE.get(target, ())
            works = (
                _are_prompts(renamed, may_repeat=is_known)
                if is_prompt
                else _are_golds(renamed, target, self._readers, self._few_bad, may_repeat=is_known)
            )
            if works:
                self._rows = renamed
                return replace(missing, rename=(old, target))
        return missing

    def open_lists(self, found: Sequence[MissingColumn]) -> tuple[OpenLists, ...]:
        """Return the columns that were renamed to hold the golds."""
        renamed = {m.rename[1]: m.rename[0] for m in found if m.rename is not None}
        lists = {column: ColumnLists() for column in renamed if column in GOLD_COLUMNS}
        for number, row in enumerate(self._rows):
            for column, of in lists.items():
                of.add(number, read_row(row, system=None, is_raw=True).columns.get(column))
        return tuple(
            words
            for column, of in lists.items()
            if (words := open_lists_of(of, renamed[column], lambda number: number + 1)) is not None
        )

    def golds_under(self, target: str) -> Mapping[str, str] | None:
        """The first renames under which `target` has golds that can be read; a column that has this name
        already gets another one."""
        there = columns_of(self._rows)
        away = {target: free_name(target, there)} if target in there else {}
        for old in self._candidates(target, [target], is_prompt=False):
            renames = {old: target, **away}
            renamed = [dict(row) for row in rename_columns(self._rows, renames)]
            if _are_golds(
                renamed, target, self._readers, self._few_bad, may_repeat=_plain(old) in _ELSEWHERE[target]
            ):
                return renames
        return None

    def _candidates(self, target: str, wanted: Sequence[str], *, is_prompt: bool) -> Iterator[str]:
        """The columns that may be meant, the likeliest first."""
        columns = list({name: None for row in self._rows for name in row})
        if is_prompt:
            free = [c for c in columns if _plain(c) not in (*GOLD_COLUMNS, *RESPONSES)]
        else:
            unused = [set(read_row(row, system=None, is_raw=True).columns) for row in self._rows]
            free = [c for c in columns if any(c in names for names in unused)]
        if any(isinstance(row.get("label"), bool) for row in self._rows):
            # A verdict on the answer of the row, which may be a wrong one.
            free = [c for c in free if _plain(c) not in RESPONSES]
        free = [c for c in free if c != target and not _plain(c).endswith(tuple(f"_{end}" for end in _ABOUT))]
        known = (*_ELSEWHERE.get(target, ()), *(GOLD_COLUMNS if not is_prompt else ()))
        ranked = [c for name in known for c in free if _plain(c) == name]
        ranked += [c for c in free if any(name in _plain(c).split("_") for name in wanted)]
        for name in wanted:
            ranked += difflib.get_close_matches(name, free, n=2)
        yield from dict.fromkeys(ranked)


def _plain(column: str) -> str:
    return "_".join(column.lower().split())


def _are_prompts(rows: Rows, *, may_repeat: bool) -> bool:
    """Whether nearly all rows have a prompt, and mostly one of their own."""
    read = [read_row(row, system=None, is_raw=True) for row in rows]
    usable = [repr(row.messages or row.text) for row in read if not row.reason]
    differ = may_repeat or len(rows) < 3 or len(set(usable)) > len(rows) / 2
    return differ and len(usable) >= (1 - _FEW_BAD) * len(rows)


def _are_golds(
    rows: Rows, target: str, readers: Sequence[BuiltIn], few_bad: float, *, may_repeat: bool
) -> bool:
    """Whether nearly all rows have an answer that the rewards can read, and not all the same one."""
    if not all(reader.parses_gold for reader in readers if target in reader.golds):
        return False
    golds = [read_row(row, system=None, is_raw=True).columns.get(target) for row in rows]
    if any(isinstance(gold, bool) for gold in golds):
        return False
    if not may_repeat and len(golds) > _FEW and all(gold == golds[0] for gold in golds):
        return False
    report = check_golds(golds, budget_s=_GOLD_BUDGET_S)
    return len(report.bad) + golds.count(None) <= few_bad * len(golds)
