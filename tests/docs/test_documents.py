"""The documents do what they say: every snippet runs, every link, option, code and make target is there.

A document's blocks run in order in one process and one temporary directory: Python blocks share a namespace,
and lines of shell blocks that begin with `covey` are run as commands. What a console block shows after a
command has to be in its output, in this order; a line of three dots stands for anything. A block behind
`<!-- file: PATH -->` is that file, whole.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md")
VERBS = ("train", "quickstart", "explain")
VERB_FLAGS = {"help", "version"}

_BLOCK = re.compile(r"^(?:<!-- file: (\S+) -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line of its first line, and the file that it shows."""

    language: str
    text: str
    line: int
    file: str | None


def blocks(text: str) -> Iterator[Block]:
    for match in _BLOCK.finditer(text):
        yield Block(match[2], match[3], text[: match.start(3)].count("\n") + 1, match[1])


@dataclass(frozen=True)
class Command:
    """A command of a shell block, the lines shown for it, and the exit code that it has to have."""

    words: list[str]
    shown: list[str]
    code: int


def commands(block: Block) -> list[Command]:
    """The commands of a block; in a console block they follow a dollar sign, and `echo $?` shows a code."""
    found: list[Command] = []
    is_console = block.language == "console"
    for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
        if not is_console:
            if words := shlex.split(line, comments=True):
                found.append(Command(words, [], 0))
        elif line == "$ echo $?":
            found.append(Command(["echo"], [], 0))
        elif line.startswith("$ "):
            found.append(Command(shlex.split(line[2:], comments=True), [], 0))
        elif found[-1].words == ["echo"]:
            found.pop()
            found[-1] = Command(found[-1].words, found[-1].shown, int(line))
        else:
            found[-1].shown.append(line)
    return found


def missing_lines(shown: list[str], output: str) -> list[str]:
    """The shown lines that the output does not hold in this order."""
    rest = iter(output.splitlines())
    return [line for line in shown if line.strip() != "..." and line not in rest]


def run_covey(command: Command, where: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "covey", *command.words[1:]], capture_output=True, text=True, timeout=120
    )
    output = done.stdout + done.stderr
    assert done.returncode == command.code, f"{where}: exit code {done.returncode}\n{output}"
    missing = missing_lines(command.shown, output)
    assert not missing, f"{where}: not in the output: {missing}\n{output}"


def run_document(path: Path) -> None:
    """Run every block of a document in the current directory."""
    namespace: dict[str, Any] = {"__name__": "document"}
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.file is not None:
            continue
        if block.language == "python":
            # Line breaks before the text make a traceback name the line of the document.
            exec(compile("\n" * (block.line - 1) + block.text, str(path), "exec"), namespace)
        elif block.language in ("bash", "console"):
            for command in commands(block):
                if command.words[0] == "covey":
                    run_covey(command, f"{path.name}:{block.line}: {shlex.join(command.words)}")


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_snippets_run(document: str, tmp_path: Path) -> None:
    # In a process of its own: what a reader runs has imported nothing before.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, __file__, str(ROOT / document)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("document", DOCUMENTS)
def test_blocks_are_of_known_kinds(document: str) -> None:
    """Every fence is seen, and every shell line is a command that is run or looked at."""
    text = text_of(document)
    found = list(blocks(text))
    assert 2 * len(found) == len(re.findall(r"^```", text, re.MULTILINE))
    assert {b.language for b in found} <= {"python", "bash", "console", "text"}
    for command in (c for b in found if b.language in ("bash", "console") for c in commands(b)):
        assert command.words[0] in ("covey", "make", "pip", "git", "hf", "source", "torchrun"), command.words
        if command.words[0] == "covey":
            assert command.words[1] in VERBS or command.words[1] == "--help"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_shown_files_are_the_files(document: str) -> None:
    for block in blocks(text_of(document)):
        if block.file is not None:
            assert block.text == (ROOT / block.file).read_text(encoding="utf-8"), block.file


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    text = _BLOCK.sub("", text_of(document))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), target


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_options_exist(document: str) -> None:
    from covey.config.names import ALIASES
    from covey.config.schema import OPTIONS

    known = {*OPTIONS, *ALIASES, *VERB_FLAGS}
    # Flags of other commands are their own affair.
    text = re.sub(r"^(?:hf|git|pip) .*$", "", text_of(document), flags=re.MULTILINE)
    assert {name for name in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text) if name not in known} == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_codes_exist(document: str) -> None:
    from covey.codes import CODES

    assert set(re.findall(r"\b[EWF]\d{3}\b", text_of(document))) <= CODES.keys()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    text = text_of(document)
    named = re.findall(r"`make (?:[A-Z]+=\S+ )?([a-z-]+)`", text)
    named += re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)
    assert set(named) <= targets


def test_every_carrier_has_an_example() -> None:
    """Every type of covey.types is built, not only named, in the Python blocks of docs/architecture.md."""
    from covey import types

    own = [
        name
        for name, value in vars(types).items()
        if isinstance(value, type) and value.__module__ == types.__name__
    ]
    code = "\n".join(b.text for b in blocks(text_of("docs/architecture.md")) if b.language == "python")
    assert len(own) > 20
    assert [name for name in own if not re.search(rf"\b{name}[(.]", code)] == []


def test_the_layers_are_those_of_the_test() -> None:
    from arch.test_architecture import LAYERS

    rows = re.findall(r"^\| \d+ \| (.*?) \|", text_of("docs/architecture.md"), re.MULTILINE)
    assert tuple(tuple(re.findall(r"`(\w+)`", row)) for row in rows) == LAYERS


def test_every_test_folder_is_described() -> None:
    folders = {f.relative_to(ROOT / "tests").parts[0] for f in (ROOT / "tests").glob("*/**/*.py")}
    assert [name for name in sorted(folders) if f"[tests/{name}]" not in text_of("CONTRIBUTING.md")] == []


def test_the_batch_table_is_right() -> None:
    """The last column of the README's table is what nothing typed gives on one process."""
    from covey.config import from_dict
    from covey.plan import batch_plan

    config = from_dict({"model": "m", "dataset": "d", "reward_funcs": "accuracy"}).config
    plan = batch_plan(config, 1)
    assert (plan.per_device_train_batch_size, plan.gradient_accumulation_steps) == (8, 8)
    assert plan.completions_per_step == plan.completions_per_rollout == 64
    assert (plan.prompts_per_rollout, plan.steps_per_rollout, plan.on_policy) == (8, 1, True)
    assert {(64, 1), (16, 4), (1, 64)} <= set(plan.equivalent_splits())


def test_the_reader_of_documents_is_not_blind(tmp_path: Path) -> None:
    """A snippet that fails, a wrong exit code and a line that is not printed are found."""
    monospace = "`" * 3
    path = tmp_path / "page.md"
    for language, text in (
        ("python", "assert 1 == 2"),
        ("bash", "covey explain E2000"),
        ("console", "$ covey explain E201\nE202 Another title"),
        ("console", "$ covey explain E201\n$ echo $?\n2"),
    ):
        path.write_text(f"{monospace}{language}\n{text}\n{monospace}\n")
        with pytest.raises(AssertionError):
            run_document(path)
    assert missing_lines(["b", "a"], "a\nb") == ["a"]


if __name__ == "__main__":
    run_document(Path(sys.argv[1]))
