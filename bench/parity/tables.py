"""The tables, as Markdown: counts, sources, agreement and the list of differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from parity.causes import CAUSES, cause_of
from parity.pairs import NAMES, Pair, Verdict

Sides = Mapping[str, Sequence[Verdict]]


def counts(pairs: Sequence[Pair], sides: Sides) -> Iterator[str]:
    """What each side makes of right answers, of wrong ones and of golds that mean nothing."""
    rights = [pair.right for pair in pairs]
    yield from _head(["", "pairs", *(NAMES[side] for side in sides)])
    for right, value, words in (
        (1.0, 1.0, "right answers that score 1"),
        (1.0, 0.0, "right answers that score 0"),
        (1.0, None, "right answers without a score"),
        (0.0, 0.0, "wrong answers that score 0"),
        (0.0, 1.0, "wrong answers that score 1"),
        (0.0, None, "wrong answers without a score"),
        (None, None, "golds with nothing to compare, no score"),
        (None, 0.0, "golds with nothing to compare, score 0"),
        (None, 1.0, "golds with nothing to compare, score 1"),
    ):
        found = [
            sum(r == right and v.score == value for r, v in zip(rights, verdicts, strict=True))
            for verdicts in sides.values()
        ]
        yield _line([words, rights.count(right), *found])
    same = [_right(pairs, verdicts) for verdicts in sides.values()]
    yield _line(["**the right value**", len(pairs), *(f"**{count:,}**" for count in same)])


def by_source(pairs: Sequence[Pair], sides: Sides) -> Iterator[str]:
    """How many right values each side gives, for each source and right value."""
    yield from _head(["source", "right value", "pairs", *(NAMES[side] for side in sides)])
    keys = sorted({(p.source, -1.0 if p.right is None else p.right) for p in pairs}, key=_by_name)
    for source, number in keys:
        right = None if number < 0 else number
        places = [n for n, p in enumerate(pairs) if (p.source, p.right) == (source, right)]
        found = [sum(verdicts[n].score == right for n in places) for verdicts in sides.values()]
        yield _line([source, "none" if right is None else f"{right:.0f}", len(places), *found])


def agreement(pairs: Sequence[Pair], sides: Sides) -> Iterator[str]:
    """How many pairs get the same value from each two of the sides and the table."""
    columns = {"right value": [p.right for p in pairs]}
    columns |= {NAMES[side]: [v.score for v in verdicts] for side, verdicts in sides.items()}
    yield from _head(["the same value", *columns])
    for name, ours in columns.items():
        yield _line(
            [
                name,
                *(
                    sum(a == b for a, b in zip(ours, theirs, strict=True)) if name != other else "–"
                    for other, theirs in columns.items()
                ),
            ]
        )


def by_cause(pairs: Sequence[Pair], sides: Sides) -> Iterator[str]:
    """Why the sides other than covey differ from the right value: every pair in one row, its cause."""
    others = [side for side in sides if side != "covey"]
    found = {side: [_difference(p, v) for p, v in zip(pairs, sides[side], strict=True)] for side in others}
    yield from _head(["", "cause", *(NAMES[side] for side in others)])
    for what in dict.fromkeys(_DIFFERENCES.values()):
        for cause, words in CAUSES.items():
            counts = [found[side].count((what, cause)) for side in others]
            if any(counts):
                yield _line([what, words, *counts])
        yield _line(
            [what, "**together**", *(sum(d is not None and d[0] == what for d in found[s]) for s in others)]
        )


# Right value and value given: what that is called. A gold with nothing to compare has no right value.
_DIFFERENCES: Mapping[tuple[bool | None, bool | None], str] = {
    (True, False): "right, 0",
    (True, None): "right, no score",
    (False, True): "wrong, 1",
    (False, None): "wrong, no score",
    (None, False): "no gold, scored",
    (None, True): "no gold, scored",
}


def _difference(pair: Pair, verdict: Verdict) -> tuple[str, str] | None:
    if verdict.score == pair.right:
        return None
    right, score = (None if v is None else bool(v) for v in (pair.right, verdict.score))
    return _DIFFERENCES[right, score], cause_of(pair, verdict)


def differences(pairs: Sequence[Pair], sides: Sides) -> Iterator[str]:
    """Every pair on which a side differs from the right value: a block of lines each."""
    for number, pair in enumerate(pairs, start=1):
        verdicts = {side: found[number - 1] for side, found in sides.items()}
        if all(v.score == pair.right for v in verdicts.values()):
            continue
        yield f"{number} {pair.source}: {pair.kind}"
        yield f"  gold        {pair.gold!r}"
        yield f"  completion  {pair.completion!r}"
        yield f"  right       {_shown(pair.right)}"
        for side, verdict in verdicts.items():
            is_right = verdict.score == pair.right
            why = "" if is_right or side == "covey" else f" ({CAUSES[cause_of(pair, verdict)]})"
            line = f"{NAMES[side]:<11} {_shown(verdict.value):<10} {_read(verdict)}{why}"
            yield f"{' ' if is_right else '!'} {line}".rstrip()


def with_tables(page: str, sections: Mapping[str, Sequence[str]]) -> str:
    """The page with the table below each `<!-- table: NAME -->` replaced. A mark that is not there is an
    error: ValueError."""
    for name, lines in sections.items():
        before, mark, after = page.partition(f"<!-- table: {name} -->\n")
        if not mark:
            raise ValueError(f"the page has no mark of the table {name}")
        while after.startswith("|"):
            _, _, after = after.partition("\n")
        page = "".join([before, mark, *(f"{line}\n" for line in lines), after])
    return page


def _read(verdict: Verdict) -> str:
    if verdict.gold is None:
        return ""
    gold, answer = (", ".join(found or ()) or "nothing" for found in (verdict.gold, verdict.answer))
    return f"gold read as {gold}; answer read as {answer}"


def _shown(value: float | str | None) -> str:
    return "none" if value is None else value if isinstance(value, str) else f"{value:g}"


def _right(pairs: Sequence[Pair], verdicts: Sequence[Verdict]) -> int:
    return sum(v.score == p.right for p, v in zip(pairs, verdicts, strict=True))


def _by_name(key: tuple[str, float]) -> tuple[str, float]:
    return key[0], -key[1]


def _head(cells: Sequence[object]) -> list[str]:
    return [_line(cells), "|" + "---|" * len(cells)]


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(f"{c:,}" if isinstance(c, int) else str(c) for c in cells) + " |"
