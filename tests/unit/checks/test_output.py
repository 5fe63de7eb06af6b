"""Why an output directory cannot be written: a file, permissions, a read-only or a full file system."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from covey.checks.output.look import unwritable
from covey.checks.run.look import output_state


def test_a_directory_that_can_be_made_is_no_fault(tmp_path: Path) -> None:
    assert unwritable(tmp_path / "a" / "b") == ""
    assert output_state(tmp_path / "a" / "b") == "free"
    assert [*tmp_path.iterdir()] == []


def test_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert unwritable(file) == "it is a file, but a run needs a directory"
    assert unwritable(file / "run") == f"{file} is a file, not a directory"
    assert output_state(file) == output_state(file / "run") == "not_writable"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, "you have no permission to write into {where}"),
        (errno.EPERM, "you have no permission to write into {where}"),
        (errno.EROFS, "{where} is on a file system that is mounted read-only"),
        (errno.ENOSPC, "no space is left for you in {where}"),
        (errno.EDQUOT, "no space is left for you in {where}"),
        (errno.EIO, "{where}: Input/output error"),
    ],
)
def test_what_the_system_says_is_told_apart(
    number: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    assert unwritable(tmp_path / "run") == words.format(where=tmp_path)
    assert output_state(tmp_path / "run") == "not_writable"
