"""The pages about the inside of covey speak of what is there: every path and every name that CONTRIBUTING.md
and docs/architecture.md put in backticks is in the tree."""

from __future__ import annotations

import ast
import builtins
import functools
import keyword
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("CONTRIBUTING.md", "docs/architecture.md")
# Where a path on these pages may begin.
BASES = (ROOT, ROOT / "src" / "covey")
# Programs of other projects, which the tree does not have.
PROGRAMS = {"apt-get", "conda", "dnf"}
# Signatures and options of others are no names of this tree: what they are about is.
NOT_HERE = {
    "torch.load": "a rule forbids it",
    "f(*, completions, <column>, …) -> list[float | None]": "a signature that users write",
}

_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_NAMED_IN = re.compile(r"`(\w+)`,? (?:in|of) (?:a |the )?\[[^\]]*\]\(([^)#]+)\)")


@dataclass
class Tree:
    """The names of the source, the tests and the benchmarks, but for local variables; what can be called; the
    members of each class; string constants, also the parts of those with values in them; modules."""

    names: set[str] = field(default_factory=set)
    callables: set[str] = field(default_factory=set)
    members: dict[str, set[str]] = field(default_factory=dict)
    strings: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)


@functools.cache
def tree() -> Tree:
    found = Tree()
    for folder in ("src/covey", "tests", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            if path != Path(__file__):
                parsed = ast.parse(path.read_text(encoding="utf-8"))
                found.names |= defined(parsed.body)
                texts = {id(node.value) for node in ast.walk(parsed) if isinstance(node, ast.Expr)}
                for node in ast.walk(parsed):
                    if id(node) not in texts:
                        take(found, node)
    for path in (ROOT / "src").rglob("*.py"):
        found.modules.add(".".join(path.relative_to(ROOT / "src").with_suffix("").parts))
    return found


def take(found: Tree, node: ast.AST) -> None:
    """Add what a node defines or uses; expressions that are docstrings do not come here."""
    match node:
        case ast.ClassDef():
            found.names.add(node.name)
            found.callables.add(node.name)
            found.members.setdefault(node.name, set()).update(defined(node.body))
            found.names |= found.members[node.name]
        case ast.FunctionDef():
            found.names.add(node.name)
            found.callables.add(node.name)
        case ast.Call(func=ast.Attribute(attr=name)):
            found.callables.add(name)
        case ast.Import(names=aliases):
            found.modules |= {alias.name for alias in aliases}
            found.names |= {alias.asname or alias.name for alias in aliases}
        case ast.ImportFrom(module=module, names=aliases):
            found.modules.add(module or "")
            found.names |= {alias.asname or alias.name for alias in aliases}
        case ast.Constant(value=str(text)):
            found.strings.add(text)
        case ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
            found.names.add(name)


@functools.cache
def written() -> set[str]:
    """The parts of paths in string constants."""
    return {part for text in tree().strings for part in re.split(r"[/{}]", text)}


def defined(body: Iterable[ast.stmt]) -> set[str]:
    """The names that statements define in their scope, assigned attributes of `self` among them."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        for inner in [node] if not isinstance(node, ast.FunctionDef) else ast.walk(node):
            targets = inner.targets if isinstance(inner, ast.Assign) else []
            targets = [inner.target] if isinstance(inner, ast.AnnAssign) else targets
            for target in (t for top in targets for t in ast.walk(top)):
                if isinstance(target, ast.Name) and inner is node:
                    found.add(target.id)
                elif isinstance(target, ast.Attribute):
                    found.add(target.attr)
    return found


def spans(text: str) -> list[str]:
    """What stands in backticks, outside of blocks."""
    return sorted(set(_SPAN.findall(_BLOCK.sub("", text))))


def is_there(span: str) -> bool:
    """Whether the tree has what a span names: a command, an option, a path, a file of a run, or names."""
    if span in NOT_HERE or span.split()[0] in PROGRAMS:
        return True
    if re.match(r"(?:make|covey|python|\.venv/bin/python) ", span):
        return is_command(span)
    if span.startswith("--"):
        return is_option(span.split()[0])
    if re.fullmatch(r"[A-Z][A-Z_]+(=\d+)?", span) and span.partition("=")[0] in tree().strings:
        return True
    if is_path(span) or is_file_of_a_run(span):
        return True
    if re.fullmatch(r"[\w./-]*(?:/|\.(?:py|md|po|mo|txt|json|jsonl|yaml|png))[\w./-]*", span):
        return False
    return has_names(span)


def is_command(span: str) -> bool:
    """Whether the target, the verb or the module of a command is there, and every path that it is given."""
    from covey.cli.verbs import VERBS

    program, *words = shlex.split(span)
    if program == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        return {word for word in words if "=" not in word} <= targets
    if program == "covey":
        return words[0] in VERBS
    if words[0] == "-m":
        is_known = words[1] == "pytest" or is_module(words[1])
        return is_known and all(is_path(word) for word in words[2:] if "/" in word)
    return is_path(words[0])


def is_module(name: str) -> bool:
    base = ROOT / "src" / name.replace(".", "/")
    return base.with_suffix(".py").is_file() or (base / "__init__.py").is_file()


def is_option(flag: str) -> bool:
    from covey.config.names import look_up

    return flag == "--help" or look_up(flag[2:]).option is not None


def is_path(text: str) -> bool:
    """Whether the repository has a file or folder of this path, or makes it (.gitignore)."""
    if not re.fullmatch(r"[\w.-]+(?:/[\w.-]+)*/?", text) or not re.search(r"[./]", text):
        return False
    ignored = (ROOT / ".gitignore").read_text().split()
    return (
        any((base / text).exists() for base in BASES) or f"{text.rstrip('/')}/" in ignored or text in ignored
    )


def is_file_of_a_run(text: str) -> bool:
    """Whether covey writes such a file: each part of its path, up to a number, is a text in the source."""
    if not re.fullmatch(r"[\w.-]+(?:/[\w.-]+)*/?", text) or not re.search(r"[./]", text):
        return False
    parts = [re.split(r"\d", part)[0] for part in text.strip("/").split("/")]
    return all(part in written() or part == "" for part in parts)


def has_names(span: str) -> bool:
    """Whether every name in a span of code is one of the tree. A dotted one is a module or the member of a
    class."""
    code = re.sub(r"\"[^\"]*\"", "", span).replace("...", "")
    found = re.findall(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*", code)
    if set(re.findall(r"(\w+)\(", code)) - tree().callables - set(dir(builtins)):
        return False
    return bool(found or re.search(r"\w", span)) and all(map(is_name, found))


def is_name(name: str) -> bool:
    first, *rest = name.split(".")
    if not rest:
        known = tree().names | tree().strings | set(dir(builtins)) | set(keyword.kwlist)
        # A beginning or an end that names share, as in `num_` and `_bytes`.
        is_affix = name.strip("_") != name and any(
            other != name and (other.startswith(name) or other.endswith(name)) for other in tree().names
        )
        return name in known or is_affix or any(part == name for m in tree().modules for part in m.split("."))
    if is_module(f"covey.{name}") or is_module(name) or name in tree().modules or name in tree().strings:
        return True
    if first in tree().members:
        return rest[0] in tree().members[first]
    return all(is_name(part) for part in (first, *rest))


@pytest.mark.parametrize("page", PAGES)
def test_what_stands_in_backticks_is_there(page: str) -> None:
    found = spans((ROOT / page).read_text(encoding="utf-8"))
    assert len(found) > 50
    assert [span for span in found if not is_there(span)] == []


@pytest.mark.parametrize("page", PAGES)
def test_what_is_named_in_a_file_is_defined_there(page: str) -> None:
    found = named_in((ROOT / page).read_text(encoding="utf-8"), (ROOT / page).parent)
    assert found or page == "CONTRIBUTING.md"
    assert [pair for pair in found if not is_defined(*pair)] == []


def named_in(text: str, folder: Path) -> list[tuple[str, Path]]:
    """Names with the linked file that they are said to be in: "`A` of [b.py](src/b.py)"."""
    plain = " ".join(_BLOCK.sub("", text).split())
    return [(name, folder / path) for name, path in _NAMED_IN.findall(plain) if path.endswith(".py")]


def is_defined(name: str, path: Path) -> bool:
    if not path.is_file():
        return False
    body = ast.parse(path.read_text(encoding="utf-8")).body
    inner = {n for node in body if isinstance(node, ast.ClassDef) for n in defined(node.body)}
    return name in defined(body) | inner


def test_each_exception_is_used() -> None:
    known = {span for page in PAGES for span in spans((ROOT / page).read_text(encoding="utf-8"))}
    assert NOT_HERE.keys() <= known
    assert {span.split()[0] for span in known} >= PROGRAMS


@pytest.mark.parametrize(
    "made_up",
    [
        *("health/bach.py", "src/covey/chinese/codes.txt", "kernels/tpu", "telemetri/", "metricz.jsonl"),
        *("register_in_pieces", "token_weightz", "Split.untt", "covey.codez", "training.fakts", "pieces()"),
        *(
            "make tset",
            "covey trian",
            "--kernelz auto",
            "python -m covey.confik.reference",
            "python benc/compare",
        ),
        *("COVEY_WRITE_MESAGES=1", "tests/unit/baching", "with publisher.sirve(version) as engine", "_bites"),
        *("(LossInputz, LossConfig) -> LossOutput", 'trr("...", name=value)', "Backend.weightz"),
    ],
)
def test_a_made_up_path_or_name_is_found(made_up: str) -> None:
    assert not is_there(made_up)


def test_a_name_in_the_wrong_file_is_found() -> None:
    text = (
        "to `LOSSES` in [a test](../tests/invariance/test_split.py), and `KINDS` of\n[b](../tests/arch/x.py)"
    )
    (right, other) = named_in(text, ROOT / "docs")
    assert is_defined(*right) and not is_defined(*other)
    assert not is_defined("LOSSEZ", right[1]) and not is_defined("LOSSES", ROOT / "tests/conftest.py")
