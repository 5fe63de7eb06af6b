"""Paths that cannot be read, by every option and every verb that takes one, as a user who is not root."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from covey.cli.verbs import VERBS
from covey.options import verbs
from covey.options.declare import facts_of
from covey.options.schema import Config
from covey.quickstart.task import MODEL_DIR
from faults.case import SUMS
from support.users import covey_as_nobody, import_what_they_need

BASE = {
    "model": "quickstart",
    "dataset": "quickstart#64",
    "reward_funcs": "accuracy",
    "output_dir": "out",
    "learning_rate": "1e-4",
}
# What an option needs beside it.
BESIDE = {
    "val_dataset": ["--eval_strategy", "steps"],
    "judge_prompt": [
        "--reward_funcs",
        "judge",
        "--judge_base_url",
        "http://127.0.0.1:1",
        "--judge_model",
        "m",
    ],
}
ON_WORDS = {
    "eval": "E301",
    "export": "E413",
    "verify": "E413",
    "doctor": "E408",
    "mismatch": "E408",
    "replay": "E408",
}
"""Verbs whose first word is a path, with the code that they have for it."""

OWN = {"export": verbs.ExportOptions, "rollout": verbs.RolloutOptions, "selftest": verbs.SelftestOptions}
OF_RUNS = {name: facts.path for name, facts in facts_of(Config).items() if facts.path is not None}
OF_VERBS = {
    (verb, name): facts.path
    for verb, declares in OWN.items()
    for name, facts in facts_of(declares).items()
    if facts.path is not None
}


@pytest.fixture(scope="module")
def here() -> Iterator[Path]:
    """A directory that everybody can enter, with what nobody but its owner can read."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    try:
        yield _laid_out(folder, _files("rows.jsonl", "metrics.jsonl", "events.jsonl")(folder, "read"))
    finally:
        subprocess.run(["chmod", "-R", "u+rwx", folder], check=True)
        shutil.rmtree(folder)


def _laid_out(folder: Path, read: Path) -> Path:
    import_what_they_need(
        ["plan", *_of_run("dataset", str(read / "rows.jsonl")), "--model", str(MODEL_DIR)],
        ["plan", *_of_run("dataset", str(read))],
        ["eval", "gone", "--val_dataset", "quickstart#8", "--reward_funcs", "accuracy"],
        *([verb, "gone"] for verb in ("export", "verify")),
        ["doctor", str(read)],
        *([verb, "gone"] for verb in ("mismatch", "replay")),
        ["rollout", "--model", "gone"],
        ["selftest", "--model", "gone"],
    )
    for name in ("closed", "locked", "listed", "entered"):
        shutil.copytree(MODEL_DIR, folder / name)
        (folder / name / "rows.jsonl").write_text(SUMS)
    for name in ("file.jsonl", "locked.jsonl"):
        (folder / name).write_text(SUMS)
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("gone")
    subprocess.run(["chmod", "-R", "go+rX", folder], check=True)
    folder.chmod(0o777)
    (folder / "closed").chmod(0)
    (folder / "locked").chmod(0)
    (folder / "listed").chmod(0o444)
    (folder / "entered").chmod(0o111)
    (folder / "locked.jsonl").chmod(0)
    return folder


PLACES = {
    "in a closed directory": ("closed/inside", "permission to enter the directory", "closed"),
    "a file in a closed directory": ("closed/rows.jsonl", "permission to enter the directory", "closed"),
    "a closed directory": ("locked", "permission", "locked"),
    "a directory that can only be listed": ("listed", "permission to list and open", "listed"),
    "a directory that can only be entered": ("entered", "permission to list and open", "entered"),
    "a closed file": ("locked.jsonl", "permission to read it", "locked.jsonl"),
}
NO_PATHS = {
    "a long name": ("x" * 300, "has 300 bytes"),
    "a long path": ("x/" * 2100, "takes paths of less than 4,096"),
    "a link to itself": ("loop", "leads back to itself"),
    "a link to nothing": ("dangling", "is a link to gone, which does not exist"),
    "below a file": ("file.jsonl/inside", "is a file, not a directory"),
}


def _of_run(option: str, value: str) -> list[str]:
    options = {**BASE, option: value}
    return [*(w for name, of in options.items() for w in (f"--{name}", of)), *BESIDE.get(option, ())]


def _heads(text: str) -> list[tuple[str, str]]:
    """Code and option of every problem that was said."""
    return re.findall(r"^(E\d{3}) (\S+)", text, re.MULTILINE)


def test_the_options_are_those_that_are_declared() -> None:
    """A new option is covered as soon as it is declared; a new verb has to be looked at."""
    assert len(OF_RUNS) == 21 and len(OF_VERBS) == 10
    assert {*ON_WORDS, *OWN} | {"train", "rlhf", "plan", "rehearse", "quickstart", "explain"} == VERBS.keys()


def _all_of_run(path: str) -> list[str]:
    """Every option that takes a path, with this one."""
    options = {**BASE, **dict.fromkeys(OF_RUNS, path)}
    return [*(w for name, of in options.items() for w in (f"--{name}", of)), *BESIDE["val_dataset"]]


@pytest.mark.parametrize("place", ["a file in a closed directory", "a closed file"])
def test_options_of_a_run_without_permission(place: str, here: Path) -> None:
    """All of them together, each with the command that mends it."""
    path, words, mended = PLACES[place]
    said = covey_as_nobody(["plan", *_all_of_run(path)], here)
    assert (said.code, said.raised) == (2, "")
    assert set(_heads(said.err)) == {(kind.code, name) for name, kind in OF_RUNS.items()}, said.err
    assert said.text.count(words) >= len(OF_RUNS)
    assert len(re.findall(rf"`chmod \w\+\w+ \S*{mended}`", said.text)) >= len(OF_RUNS), said.err


@pytest.mark.parametrize("place", ["a long name", "a link to nothing"])
def test_options_of_a_run_with_what_is_no_path(place: str, here: Path) -> None:
    path, words = NO_PATHS[place]
    said = covey_as_nobody(["plan", *_all_of_run(path)], here)
    assert (said.code, said.raised) == (2, "")
    paths = {(kind.code, name) for name, kind in OF_RUNS.items() if not kind.or_text}
    assert paths <= set(_heads(said.err)) and said.text.count(words) >= len(paths), said.err


@pytest.mark.parametrize("place", ["a long name", "a link to itself"])
@pytest.mark.parametrize("option", [name for name, kind in OF_RUNS.items() if kind.or_text])
def test_an_option_that_takes_text_takes_what_is_no_path(option: str, place: str, here: Path) -> None:
    """What is wrong with it, if anything, is not that it cannot be read."""
    said = covey_as_nobody(["plan", *_of_run(option, NO_PATHS[place][0])], here)
    assert said.raised == "" and NO_PATHS[place][1] not in said.text


def test_nul_comes_from_a_file_of_options(here: Path) -> None:
    options = {**BASE, **dict.fromkeys(OF_RUNS, '"a\\0b"')}
    (here / "run.yaml").write_text("".join(f"{name}: {of}\n" for name, of in options.items()))
    said = covey_as_nobody(["plan", "run.yaml"], here)
    assert (said.code, said.raised) == (2, "") and "\0" not in said.out + said.err
    paths = {(kind.code, name) for name, kind in OF_RUNS.items() if not kind.or_text}
    assert paths <= set(_heads(said.err)) and said.text.count("the character NUL") >= len(paths)


@pytest.mark.parametrize("place", ["in a closed directory", "a directory that can only be listed"])
@pytest.mark.parametrize(("verb", "option"), OF_VERBS)
def test_an_option_of_a_verb_without_permission(verb: str, option: str, place: str, here: Path) -> None:
    path, words, mended = PLACES[place]
    said = covey_as_nobody([verb, f"--{option}", path], here)
    assert (said.code, said.raised) == (2, "")
    assert (OF_VERBS[verb, option].code, option) in _heads(said.err)
    assert words in said.text and re.search(rf"`chmod \w\+\w+ \S*{mended}`", said.text), said.err


WORDS = [("verify", place) for place in (*PLACES, *NO_PATHS)]
WORDS += [(verb, place) for verb in ON_WORDS for place in ("a closed directory", "in a closed directory")]
WORDS += [(verb, place) for verb in ON_WORDS for place in ("a long name", "a link to itself")]


@pytest.mark.parametrize(("verb", "place"), dict.fromkeys(WORDS))
def test_the_word_of_a_verb(verb: str, place: str, here: Path) -> None:
    path, words, *_ = (PLACES | NO_PATHS)[place]
    rest = EVALUATED if verb == "eval" else []
    said = covey_as_nobody([verb, path, *rest], here)
    assert (said.code, said.raised) == (2, "")
    assert [code for code, _ in _heads(said.err)] == [ON_WORDS[verb]], said.err
    assert words in said.text


@pytest.mark.parametrize("place", ["in a closed directory", "a long name"])
def test_the_results_of_an_evaluation_go_nowhere_else(place: str, here: Path) -> None:
    path, words, *_ = (PLACES | NO_PATHS)[place]
    rest = ["--val_dataset", "quickstart#4", "--reward_funcs", "accuracy", "--output_dir", path]
    said = covey_as_nobody(["eval", "quickstart", *rest], here)
    assert (said.code, said.raised, _heads(said.err)) == (2, "", [("E403", "output_dir")])
    assert words in said.text


@pytest.mark.parametrize("path", ["closed/run.yaml", "locked.jsonl", "x" * 300, "loop"])
def test_a_file_of_options(path: str, here: Path) -> None:
    said = covey_as_nobody(["train", "--config", path], here)
    assert (said.code, said.raised) == (2, "") and _heads(said.err)[0][0] == "E107"


def test_the_command_that_is_printed_mends_it(here: Path) -> None:
    """Typed by the owner, one after the other, until the path can be read."""
    folder = here / "mended"
    (folder / "in").mkdir(parents=True)
    shutil.copy(here / "file.jsonl", folder / "in" / "rows.jsonl")
    for path in (folder / "in" / "rows.jsonl", folder / "in", folder):
        path.chmod(0)
    typed = []
    for _ in range(4):
        said = covey_as_nobody(["plan", *_of_run("dataset", f"{folder}/in/rows.jsonl@train#8")], here)
        command = re.search(r"`(chmod [^`]*)`", said.text)
        if command is None:
            break
        typed.append(command[1])
        subprocess.run(command[1], shell=True, check=True)
    assert [line.split()[-1] for line in typed] == [
        str(folder),
        str(folder / "in"),
        str(folder / "in/rows.jsonl"),
    ]
    assert "rows.jsonl" in said.text and "permission" not in said.text  # it has no split


def test_a_message_for_the_system_is_a_text_where_no_file_is_called_so(here: Path) -> None:
    for text in ("x" * 300, "closed/rows.jsonl\nis a line of a text", "Answer in one word.", "loop"):
        said = covey_as_nobody(["plan", *_of_run("system", text)], here)
        assert (said.code, said.raised) == (0, ""), said.err
    shutil.copy(here / "file.jsonl", here / "system.txt")
    os.chmod(here / "system.txt", 0)
    said = covey_as_nobody(["plan", *_of_run("system", "system.txt")], here)
    assert said.code == 2 and _heads(said.err) == [("E302", "system")]


def _model(here: Path, name: str) -> Path:
    shutil.copytree(MODEL_DIR, here / name)
    return here / name


def _adapter(here: Path, name: str) -> Path:
    folder = here / name
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def _files(*names: str) -> Callable[[Path, str], Path]:
    def laid_out(here: Path, name: str) -> Path:
        for file in names:
            (here / name / file).parent.mkdir(parents=True, exist_ok=True)
            (here / name / file).write_text(SUMS if "jsonl" in file else "{}")
        return here / name

    return laid_out


WITHIN: dict[str, tuple[Callable[[Path, str], Path], str, str, Callable[[str], list[str]]]] = {
    "model": (_model, "*", "E301", lambda path: ["plan", *_of_run("model", path)]),
    "eval": (_model, "*", "E301", lambda path: ["eval", path, *EVALUATED]),
    "selftest": (_model, "*", "E301", lambda path: ["selftest", "--model", path]),
    "reward_model": (_model, "config.json", "E337", lambda path: ["plan", *_of_run("reward_model", path)]),
    "adapters": (_adapter, "*", "E380", lambda path: ["plan", *_of_run("adapters", path)]),
    "dataset": (
        _files("rows.jsonl", "sub/more.jsonl"),
        "**/*",
        "E302",
        lambda path: ["plan", *_of_run("dataset", path)],
    ),
    "replay": (
        _files("rollout-000000.jsonl"),
        "*",
        "E406",
        lambda path: ["plan", *_of_run("replay_rollouts", path)],
    ),
    "resume": (
        _files("config.yaml", "checkpoint-2/manifest.json"),
        "checkpoint-2/**",
        "E404",
        lambda path: ["plan", *_of_run("output_dir", path), "--resume_from_checkpoint", "latest"],
    ),
    "doctor": (
        _files("metrics.jsonl", "events.jsonl"),
        "*",
        "E408",
        lambda path: ["doctor", path],
    ),
}
EVALUATED = ["--val_dataset", "quickstart#8", "--reward_funcs", "accuracy"]


@pytest.mark.parametrize("kind", WITHIN)
def test_a_closed_file_within(kind: str, here: Path) -> None:
    """Each file and directory in turn is named, with what is missing."""
    lay_out, pattern, code, command = WITHIN[kind]
    folder = lay_out(here, f"within-{kind}")
    subprocess.run(["chmod", "-R", "go+rX", folder], check=True)
    closed = sorted(folder.glob(pattern))
    assert closed
    for path in closed:
        mode = path.stat().st_mode
        path.chmod(0)
        said = covey_as_nobody(command(folder.name), here)
        path.chmod(mode)
        assert (said.code, said.raised) == (2, ""), path
        assert code in [found for found, _ in _heads(said.err)], said.err
        assert path.name in said.text and "ermission" in said.text, said.err


def test_verify_names_a_closed_file(here: Path) -> None:
    folder = _model(here, "verified")
    subprocess.run(["chmod", "-R", "go+rX", folder], check=True)
    (folder / "model.safetensors").chmod(0)
    said = covey_as_nobody(["verify", "verified"], here)
    assert (said.code, said.raised) == (1, "")
    assert "model.safetensors" in said.out and "permission" in said.out
