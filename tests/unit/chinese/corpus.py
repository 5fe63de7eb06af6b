"""The sentences that messages are made of: those written in the source, and those of the pinned refusals."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import covey

ROOT = Path(covey.__file__).parent
MESSAGES = Path(__file__).parents[2] / "faults" / "messages"
WAITING = Path(__file__).parent / "waiting.txt"
CODES_LINE = "# Codes that wait for a Chinese text (COVEY_WRITE_WAITING=1 writes this file)"
SENTENCES = "# Sentences that wait for one"

MAKERS = {"Problem", "Finding", "Fix", "problem", "warning"}
# Their words become what a problem has seen, through the facts.
LOWER = (
    "checkpoint/manifest.py",
    "checkpoint/read.py",
    "config/adapters.py",
    "config/foreign.py",
    "config/values.py",
    "data/foreign_checkpoints.py",
    "data/hub.py",
    "data/mix.py",
    "data/model_files.py",
    "data/sources.py",
    "data/tables.py",
    "data/template.py",
    "data/text.py",
    "models/adapter_shapes.py",
    "rewards/callee.py",
    "rewards/golds.py",
    "rewards/loading.py",
    "rewards/resolve.py",
    "rewards/reward_set.py",
    "training/facts/data.py",
    "training/facts/pass_rates.py",
    "training/facts/rewards.py",
    "training/facts/run.py",
)


def sources() -> list[Path]:
    """The files in which the words of messages stand."""
    return [path for path in sorted(ROOT.rglob("*.py")) if _makes_messages(path)]


def _makes_messages(path: Path) -> bool:
    calls = (n.func for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call))
    names = {call.id for call in calls if isinstance(call, ast.Name)}
    return bool(names & MAKERS) or str(path.relative_to(ROOT)) in LOWER


def templates(path: Path) -> Iterator[str]:
    """Texts of several words in a file, docstrings aside; what a program puts in is written as `X`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    aside = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            aside |= {id(value) for value in node.values}
            aside |= {id(v.format_spec) for v in node.values if isinstance(v, ast.FormattedValue)}
    for node in ast.walk(tree):
        if id(node) in aside:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(v.value if isinstance(v, ast.Constant) else "X" for v in node.values)
        else:
            continue
        if " " in text and re.search(r"[a-z]{2}", text):
            yield text


def pinned() -> Iterator[tuple[str, str, str]]:
    """Code, label and unwrapped text of every part of the pinned messages, but for flags to type."""
    for path in sorted(MESSAGES.glob("*.txt")):
        said = path.read_text(encoding="utf-8").partition("\n\n")[2]
        part: list[str] = []
        code = ""
        for line in [*said.splitlines(), ""]:
            label = re.match(r"  (seen|why|cause|type|do|or) +(.*)", line)
            is_after_flags = bool(part) and part[1].startswith("--")
            if part and (label or not line.startswith(" ") or is_after_flags):
                if not is_after_flags:
                    yield code, part[0], part[1]
                part = []
            if head := re.match(r"[EWF]\d{3}(?= )", line):
                code = head[0]
            if label:
                part = [label[1], label[2]]
            elif part:
                part[1] += f" {line.strip()}"
            elif line.startswith(" ") and is_after_flags:
                part = ["text", line.strip()]


def waiting_codes() -> set[str]:
    """Codes whose title and reason, or whose messages, have no Chinese text yet."""
    return set(WAITING.read_text(encoding="utf-8").partition(SENTENCES)[0].split("\n")[1:]) - {""}


def waiting_sentences() -> list[str]:
    """Sentences of the source without a Chinese text yet, as `file: text`."""
    return [s for s in WAITING.read_text(encoding="utf-8").partition(SENTENCES)[2].splitlines() if s]
