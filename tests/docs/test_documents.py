"""The documents do what they say: every snippet runs, every link, option, code and make target is there.

A document's blocks run in order in one process and one temporary directory: Python blocks share a namespace,
and lines of shell blocks that begin with `covey` are run as commands. What a console block shows after a
command has to be in its output, in this order; a line of three dots stands for anything. A comment before
a block says that it is something else:

    <!-- file: PATH -->     a file of the repository, whole
    <!-- write: PATH -->    written to that file, for the commands that follow
    <!-- not run: WHY -->   not run; Python in it compiles, and its covey commands have no wrong option
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from covey.cli.verbs import VERBS
from covey.options.declare import fields_of
from covey.options.verbs import PLAN_WORDS, RolloutOptions
from support.processes import run_in_processes

ROOT = Path(__file__).parents[2]
PAGES = tuple(sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
DOCUMENTS = ("README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md", *PAGES)
# These speak of the options of other tools.
ON_OTHERS = (
    *("docs/options.md", "docs/from-ms-swift.md", "docs/from-trl.md", "docs/plan.md"),
    "docs/trl-fields.md",
)
VERB_FLAGS = {
    *("help", "version", "json", "merge", "base", "rlhf_type", "lang", "device", "live", "task", "rollout"),
    *("group", "checkpoint", "sample"),
    *(*PLAN_WORDS, *fields_of(RolloutOptions)),
}
OTHER_COMMANDS = (
    *("make", "pip", "git", "hf", "source", "torchrun", "swift", "trl", "accelerate", "python"),
    *("deepspeed", "srun", "mpirun", "export", "kubectl", "sbatch"),
)
# Those of torchrun, accelerate, deepspeed and Slurm, on the page about launchers.
LAUNCHER_FLAGS = {
    "config_file",
    *("nnodes", "node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_id", "rdzv_endpoint"),
    *("multi_gpu", "num_processes", "num_gpus", "module", "local_rank", "kill-on-bad-exit"),
    *("shutdown_timeout", "signal", "requeue", "open-mode", "cpus-per-task"),
}
# Those of vLLM, on the page about servers.
VLLM_FLAGS = {"api-key", "hf-overrides", "load-format", "logprobs-mode"}
LANGUAGES = {"python", "bash", "console", "text", "yaml", "json"}

_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>file|write|not run): (?P<value>[^\n]+) -->\n)?"
    r"```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line of its first line, and the comment in front of it."""

    language: str
    text: str
    line: int
    mark: str | None = None
    value: str = ""


def blocks(text: str) -> Iterator[Block]:
    for match in _BLOCK.finditer(text):
        line = text[: match.start("text")].count("\n") + 1
        yield Block(match["language"], match["text"], line, match["mark"], match["value"] or "")


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
    """Run a command as `covey` does, in this process: torch is imported once a document."""
    from covey.cli.main import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(command.words[1:])
    output = said.getvalue()
    assert code == command.code, f"{where}: exit code {code}\n{output}"
    missing = missing_lines(command.shown, output)
    assert not missing, f"{where}: not in the output: {missing}\n{output}"


def run_document(path: Path) -> None:
    """Run every block of a document in the current directory."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.mark in ("file", "not run"):
            continue
        if block.mark == "write":
            Path(block.value).parent.mkdir(parents=True, exist_ok=True)
            Path(block.value).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            # Line breaks before the text make a traceback name the line of the document.
            exec(compile("\n" * (block.line - 1) + block.text, str(path), "exec"), namespace)
        elif block.language in ("bash", "console"):
            for command in commands(block):
                if command.words[0] == "covey":
                    run_covey(command, f"{path.name}:{block.line}: {shlex.join(command.words)}")


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def runs(document: str) -> bool:
    """Whether a document has anything to run that is not run with another one."""
    found = (b for b in blocks(text_of(document)) if b.mark is None)
    return document != "README.zh.md" and any(b.language in ("python", "bash", "console") for b in found)


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if runs(d)])
def test_snippets_run(document: str, tmp_path: Path) -> None:
    run_in_processes(__file__, ROOT / document, processes=1, timeout=600, folder=tmp_path)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_blocks_are_of_known_kinds(document: str) -> None:
    """Every fence is seen, and every shell line is a command that is run or looked at."""
    text = text_of(document)
    found = list(blocks(text))
    assert 2 * len(found) == len(re.findall(r"^```", text, re.MULTILINE))
    assert {b.language for b in found} <= LANGUAGES
    # A file that no command reads would be shown and never tried.
    assert [b.line for b in found if b.language in ("yaml", "json") and b.mark != "write"] == []
    # Scripts of Slurm are run by tests/docs/test_clusters_page.py.
    shell = [b for b in found if b.language in ("bash", "console") and not b.value.endswith(".sbatch")]
    for command in (c for b in shell for c in commands(b)):
        assert command.words[0] in ("covey", *OTHER_COMMANDS), command.words
        if command.words[0] == "covey":
            assert command.words[1] in VERBS or command.words[1] == "--help"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_is_not_run_could_be(document: str) -> None:
    """Of a block that needs a network, the words are right."""
    from covey.config import parse, resolve
    from covey.config.argv import read_words
    from covey.types import Severity

    for block in (b for b in blocks(text_of(document)) if b.mark == "not run"):
        if block.language == "python":
            compile(block.text, document, "exec")
            continue
        for command in (c for c in commands(block) if c.words[0] == "covey"):
            if command.words[1] == "rollout":
                read_words("rollout", command.words[2:], RolloutOptions, most=0)
                continue
            assert command.words[1] in ("train", "rlhf", "plan")
            parsed = parse([word for word in command.words[2:] if word != "--json"])
            found = resolve(parsed.typed, 1, parsed.problems).problems
            assert [p.seen for p in found if p.severity is Severity.ERROR] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_shown_files_are_the_files(document: str) -> None:
    for block in blocks(text_of(document)):
        if block.mark == "file":
            assert block.text == (ROOT / block.value).read_text(encoding="utf-8"), block.value


def test_both_readmes_show_the_same_code() -> None:
    """What is run for one holds for the other; comments and the tree of a run are translated."""

    def code(document: str) -> list[tuple[str, str]]:
        shown = [b for b in blocks(text_of(document)) if b.language != "text"]
        return [(b.language, re.sub(r" +# .*", "", b.text)) for b in shown]

    def targets(document: str) -> set[str]:
        return set(re.findall(r"\]\(([^)\s]+)\)", text_of(document)))

    assert len(code("README.md")) > 9
    assert code("README.zh.md") == code("README.md")
    assert targets("README.zh.md") ^ targets("README.md") == {
        "#pages",
        "#文档",
        "README.md",
        "README.zh.md",
        "docs/codes.md",
        "docs/codes.zh.md",
    }


def test_the_options_page_is_that_of_the_code() -> None:
    from covey.config.dialect import MS_SWIFT
    from covey.config.reference import markdown
    from covey.options.schema import FACTS

    assert text_of("docs/options.md") == markdown(), "python -m covey.config.reference > docs/options.md"
    for name, value in MS_SWIFT.items():
        shown = str(value).lower() if isinstance(value, bool | str) else f"{value:g}"
        assert FACTS[name].swift in (shown, "epsilon"), name


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
    """An option is ours, or on the pages about other tools one that is answered by name."""
    from covey.config.names import look_up

    # Flags of other commands are their own affair.
    text = re.sub(r"^(?:hf|git|pip|#SBATCH) .*$", "", text_of(document), flags=re.MULTILINE)
    foreign = {"docs/clusters.md": LAUNCHER_FLAGS, "docs/servers.md": VLLM_FLAGS}.get(document, set())
    for name in set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)) - VERB_FLAGS - foreign:
        known = look_up(name)
        is_other = document in ON_OTHERS and (known.moot is not None or known.refused is not None)
        assert known.option is not None or is_other or name.startswith("no_"), name


@pytest.mark.parametrize("document", ["docs/from-ms-swift.md", "docs/from-trl.md"])
def test_what_is_said_of_other_names_is_so(document: str) -> None:
    """Each row of a table says of its names that they are options, accepted anyway, or refused."""
    from covey.config.names import ALIASES, look_up

    section, checked = "", 0
    for line in text_of(document).splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        names = re.findall(r"`(\w+)…?`", line.split("|")[1]) if line.startswith("| `") else []
        for name in names:
            known = look_up(name)
            said = {
                "The same": known.option == name,
                "Renamed": name in ALIASES or (known.moot is not None and bool(known.moot.means)),
                "Accepted without effect": known.moot is not None,
                "Not here": known.refused is not None or (known.moot is not None and bool(known.moot.values)),
            }
            assert said.get(section, True), (section, name)
            checked += section in said
    assert checked > 20


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
    """Every type of covey.types is built, not only named, in the Python blocks of docs/carriers.md."""
    from covey import types

    own = [
        name
        for name, value in vars(types).items()
        if isinstance(value, type) and value.__module__.startswith(f"{types.__name__}.")
    ]
    code = "\n".join(b.text for b in blocks(text_of("docs/carriers.md")) if b.language == "python")
    assert len(own) > 20
    assert [name for name in own if not re.search(rf"\b{name}[(.]", code)] == []


def test_the_layers_are_those_of_the_test() -> None:
    from arch.test_architecture import LAYERS

    rows = re.findall(r"^\| \d+ \| (.*?) \|", text_of("docs/architecture.md"), re.MULTILINE)
    assert tuple(tuple(re.findall(r"`(\w+)`", row)) for row in rows) == LAYERS


def test_every_test_folder_is_described() -> None:
    folders = {f.relative_to(ROOT / "tests").parts[0] for f in (ROOT / "tests").glob("*/**/*.py")}
    assert [name for name in sorted(folders) if f"[tests/{name}]" not in text_of("CONTRIBUTING.md")] == []


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
