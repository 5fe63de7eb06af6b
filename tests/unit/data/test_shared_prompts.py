"""Prompts of large files: the same as those of a table that holds them, made once a machine, and few bytes of
memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from covey.data import rows as rows_module
from covey.data import shared_files
from covey.data.lazy_rows import JsonLines
from covey.data.pass_rates import checksum
from covey.data.prompts import LazyPrompts, chosen, fields_of, rated
from covey.data.rows import PromptOptions, PromptTable, prompt_table
from covey.data.shared_files import shared_file
from covey.data.sources import load_source, parse_source
from covey.data.text import TextCodec
from covey.types import Origin
from unit.data.test_forms import FORMS

ROWS: list[dict[str, Any]] = [
    *FORMS.values(),
    {"prompt": "12", "solution": 3, "none": None, "yes": True, "number": 0.1, "list": [1, 1.0, [None, {}]]},
    {"prompt": "34", "solution": "题", "dict": {"b": [{"a": -0.0}], "a": "\u2028 \U0001f600"}, "big": 2**80},
    {"prompt": "", "solution": "1"},
    {"messages": [{"role": "critic", "content": "Q?"}]},
    {"question": "Q?", "image": "a.png"},
    {"question": "half \ud83d"},
    {"question": "12345678901234567890" * 5, "kind": 7},
    {"question": "Q?", "kind": " sums "},
]


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for temporary files, and tables of one row that are worth a file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(rows_module, "_SHARED_ROWS", 1)
    yield tmp_path


def lines(path: Path, rows: list[dict[str, Any]]) -> JsonLines:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return JsonLines(path)


def files(directory: Path) -> list[Path]:
    return sorted(path for folder in directory.glob("covey-shared-*") for path in folder.iterdir())


def hundred_bytes(path: Path) -> None:
    path.write_bytes(b"x" * 100)


def fields_but_entries(table: PromptTable) -> dict[str, Any]:
    return {name: getattr(table, name) for name in PromptTable.__slots__ if name != "entries"}


def typed(value: Any) -> Any:
    """A value in which 1, 1.0 and True differ, and so do lists and tuples."""
    return repr(value)


OPTIONS = [
    {},
    {"max_length": 60},
    {"max_length": 60, "truncation_strategy": "left"},
    {"system": "Be brief.", "apply_chat_template": True, "task_column": "kind", "first_id": 7},
]


@pytest.mark.parametrize("given", OPTIONS, ids=["plain", "short", "cut", "system"])
def test_a_shared_table_is_the_one_that_is_held(
    given: dict[str, Any], tmp_path: Path, codec: TextCodec
) -> None:
    sizes = {name: given[name] for name in ("first_id",) if name in given}
    options = PromptOptions(**{n: v for n, v in given.items() if n not in ("max_length", "first_id")})
    length = given.get("max_length")
    held = prompt_table(ROWS, codec, max_length=length, options=options, **sizes)
    assert isinstance(held.entries, tuple) and len(held.entries) > len(FORMS) - 3
    for _ in ("made", "found"):
        rows = lines(tmp_path / "rows.jsonl", ROWS)
        shared = prompt_table(rows, codec, max_length=length, options=options, **sizes)
        assert isinstance(shared.entries, LazyPrompts)
        assert fields_but_entries(shared) == fields_but_entries(held)
        assert [typed(asdict(p)) for p in shared.entries] == [typed(asdict(p)) for p in held.entries]
        assert [shared.entries[n] for n in range(len(held.entries))] == [*held.entries]
        assert shared.entries[-1] == held.entries[-1] and shared.entries[1:4] == held.entries[1:4]
        assert shared.longest == held.longest
        assert [checksum(p) for p in shared.entries] == [checksum(p) for p in held.entries]
        origin = Origin(epoch=1, rollout=2)
        assert shared.take(2, origin) == held.take(2, origin)
        with pytest.raises(IndexError):
            shared.entries[len(held.entries)]
    assert len(files(tmp_path)) == 1


def test_prompts_are_chosen_and_rated_alike(tmp_path: Path, codec: TextCodec) -> None:
    held = prompt_table(ROWS, codec, max_length=None).entries
    shared = prompt_table(lines(tmp_path / "rows.jsonl", ROWS), codec, max_length=None).entries
    rates = [None if n % 3 == 0 else n / len(held) for n in range(len(held))]
    numbers = [4, 0, 2, 5]
    found = [chosen(chosen(rated(prompts, rates), numbers), [3, 1, 0]) for prompts in (held, shared)]
    assert [*found[1]] == [*found[0]] and [p.pass_rate for p in found[1]] == [rates[5], None, rates[4]]
    for name in ("id", "token_ids", "columns", "task", "pass_rate"):
        for here, there in zip((held, found[0]), (shared, found[1]), strict=True):
            assert [*fields_of(there, name)] == [*fields_of(here, name)]  # type: ignore[arg-type]


def test_another_row_option_or_template_is_another_table(
    tmp_path: Path, codec: TextCodec, model_dir: Callable[..., Path]
) -> None:
    from covey.data.text import load_codec

    told: list[int] = []

    def table(rows: list[dict[str, Any]], codec: TextCodec = codec, **options: Any) -> PromptTable:
        path = lines(tmp_path / "rows.jsonl", rows)
        progress = lambda done, total: told.append(total)  # noqa: E731
        return prompt_table(path, codec, max_length=None, options=PromptOptions(**options), progress=progress)

    rows = [{"question": "1+1="}, {"question": "1+2="}]
    table(rows)
    table(rows)
    assert told == [2]
    other = load_codec(model_dir(template="{{ messages[0]['content'] }}!"))
    assert table(rows, other).entries[0].text == "1+1=!"
    assert "brief" in table(rows, system="brief").entries[0].text
    assert "1+3=" in table([rows[0], {"question": "1+3="}]).entries[1].text
    assert told == [2, 2, 2, 2]


def test_a_damaged_file_is_made_again(tmp_path: Path, codec: TextCodec) -> None:
    made = prompt_table(lines(tmp_path / "r.jsonl", ROWS), codec, max_length=None)
    (file,) = files(tmp_path)
    whole, prompts = file.read_bytes(), [*made.entries]
    file.unlink()
    file.write_bytes(whole[: len(whole) // 2])
    found = prompt_table(lines(tmp_path / "r.jsonl", ROWS), codec, max_length=None)
    assert isinstance(found.entries, LazyPrompts) and [*found.entries] == prompts
    assert fields_but_entries(found) == fields_but_entries(made) and file.read_bytes() == whole


def test_what_json_does_not_hold_is_held(tmp_path: Path, codec: TextCodec) -> None:
    """Text of a Python list may hold a tuple, which JSON would make a list."""
    turns = "[{'role': 'user', 'content': 'Q?', 'marks': (1, 2)}]"
    found = prompt_table(lines(tmp_path / "r.jsonl", [{"messages": turns}] * 3), codec, max_length=None)
    assert isinstance(found.entries, tuple)
    assert found.entries[0].messages[0]["marks"] == (1, 2)  # type: ignore[index]
    assert [path.suffix for path in files(tmp_path)] == [".failed"]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet"])
def test_rows_of_every_format_are_read_as_they_are_asked_for(
    suffix: str, tmp_path: Path, codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gzip

    import pandas

    monkeypatch.setattr("covey.data.sources._LARGE", 0)
    rows = [{"question": f"1+{n}=", "solution": f"a{n}"} for n in range(50)]
    path, frame = tmp_path / f"rows{suffix}", pandas.DataFrame(rows)
    match suffix:
        case ".jsonl":
            lines(path, rows)
        case ".jsonl.gz":
            path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
        case ".json":
            path.write_text(json.dumps(rows, indent=1))
        case ".csv":
            frame.to_csv(path, index=False)
        case ".parquet":
            frame.to_parquet(path)
    found = load_source(parse_source(str(path)), use_hf=True, seed=0, shuffle=False).rows
    assert not isinstance(found, list) and found == rows and found[7] == rows[7] and found[3:5] == rows[3:5]
    some = load_source(parse_source(f"{path}#9"), use_hf=True, seed=3, shuffle=True).rows
    assert len(some) == 9 and [*some] == sorted(some, key=lambda r: int(r["solution"][1:]))
    assert isinstance(prompt_table(some, codec, max_length=None).entries, LazyPrompts)


def test_rows_of_a_program_are_held(codec: TextCodec) -> None:
    assert isinstance(prompt_table([{"prompt": "1"}] * 3, codec, max_length=None).entries, tuple)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    rows = lines(tmp_path / "r.jsonl", [{"prompt": "1"}, {"prompt": "2"}])
    (tmp_path / "r.jsonl").write_text('{"prompt": "100"}\n')
    with pytest.raises(ValueError, match="was changed while it was read"):
        list(rows)


# -- the files ---------------------------------------------------------------------------------------------


def test_one_process_writes_and_the_others_wait(tmp_path: Path) -> None:
    code = (
        "import sys, time, tempfile, pathlib\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "from covey.data.shared_files import shared_file\n"
        "def write(path):\n"
        "    with open(sys.argv[1] + '/writers', 'a') as file: file.write('x')\n"
        "    time.sleep(0.5)\n"
        "    path.write_text('whole')\n"
        "print(shared_file('name', write).read_text())\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [child.communicate(timeout=120)[0] for child in children] == ["whole\n"] * 3
    assert (tmp_path / "writers").read_text() == "x"
    assert [path.name for path in files(tmp_path)] == ["name"]


def test_who_waits_for_a_process_that_fails_does_without(tmp_path: Path) -> None:
    code = (
        "import sys, time, tempfile\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "from covey.data.shared_files import shared_file\n"
        "def write(path):\n"
        "    open(sys.argv[1] + '/writing', 'w').close()\n"
        "    time.sleep(1)\n"
        "    raise ValueError\n"
        "shared_file('name', write)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "writing").exists():
        assert child.poll() is None
        time.sleep(0.02)
    assert shared_file("name", lambda path: pytest.fail("was asked to write")) is None
    assert "ValueError" in child.communicate(timeout=60)[1]
    # Who comes later tries again.
    path = shared_file("name", hundred_bytes)
    assert path is not None and [p.name for p in files(tmp_path)] == ["name"]


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    code = (
        "import os, sys, tempfile\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "from covey.data.shared_files import shared_file\n"
        "shared_file('name', lambda path: os.kill(os.getpid(), 9))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60)
    assert any(path.suffix == ".part" for path in files(tmp_path))
    assert shared_file("other", lambda path: path.touch()) is not None
    assert [path.name for path in files(tmp_path)] == ["other"]


def test_old_files_and_too_many_bytes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_files, "_KEPT_BYTES", 250)
    made = {}
    for age, name in ((4 * 24 * 3600, "old"), (300, "third"), (200, "second"), (100, "first")):
        made[name] = shared_file(name, hundred_bytes)
        then = time.time() - age
        assert made[name] is not None
        os.utime(made[name], (then, then))
    assert [path.name for path in files(tmp_path)] == ["first", "second"]
    # A use is what counts.
    assert shared_file("second", lambda path: pytest.fail("is there")) == made["second"]
    shared_file("new", hundred_bytes)
    assert [path.name for path in files(tmp_path)] == ["new", "second"]


def test_without_a_directory_or_space_each_process_holds_its_own(
    tmp_path: Path, codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = lines(tmp_path / "r.jsonl", [{"prompt": "1"}, {"prompt": "2"}])
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        assert isinstance(prompt_table(rows, codec, max_length=None).entries, tuple)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rows_module, "write_prompts", full)
    assert isinstance(prompt_table(rows, codec, max_length=None).entries, tuple)
    folder = files(tmp_path)[0].parent
    for path in files(tmp_path):
        path.unlink()
    folder.chmod(0o755)
    assert shared_file("name", lambda path: path.touch()) is None


# -- memory ------------------------------------------------------------------------------------------------

_MEASURED = """
import json, sys, tempfile
from pathlib import Path
tempfile.tempdir = sys.argv[1]
from covey.data.lazy_rows import JsonLines
from covey.data.rows import prompt_table
from covey.data.text import load_codec
from covey.quickstart.task import MODEL_DIR
import covey.data.rows

def own():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1000

codec = load_codec(MODEL_DIR)
def table(name):
    return prompt_table(JsonLines(Path(sys.argv[1]) / name), codec, max_length=None)

table(sys.argv[2])  # what libraries take, and what the first rows need to be tokenised
before = own()
found = table("rows.jsonl")
print(len(found.entries), own() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux says what is mapped")
def test_a_large_table_takes_little_memory(tmp_path: Path) -> None:
    """Of 4,000 rows, which take 40 MB and more where they are held: in the process that makes the table,
    and in the next one."""
    for name, size in (("few.jsonl", 1_000), ("few_more.jsonl", 1_001), ("rows.jsonl", 4_000)):
        rows = [
            {"messages": [{"role": "user", "content": f"{n} " + "12+34=" * 200}], "solution": str(n)}
            for n in range(size)
        ]
        lines(tmp_path / name, rows)
    taken = []
    for few in ("few.jsonl", "few_more.jsonl"):
        command = [sys.executable, "-c", _MEASURED, str(tmp_path), few]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        number, megabytes = done.stdout.split()
        assert int(number) == 4_000
        taken.append(float(megabytes))
    assert taken[0] < 20 and taken[1] < 10, taken
