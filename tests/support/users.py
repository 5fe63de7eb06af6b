"""What a user who is not root gets from the command, who may not read what the tests close."""

from __future__ import annotations

import contextlib
import io
import json
import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from covey.cli.main import main

# The user of whatever belongs to nobody.
NOBODY = 65534


@dataclass(frozen=True, slots=True)
class Answer:
    """What the command said, and its exit code; `raised` is the traceback of an error that it did not
    foresee."""

    code: int
    out: str
    err: str
    raised: str

    @property
    def text(self) -> str:
        """Standard error in one line."""
        return " ".join(self.err.split())


def import_what_they_need(*commands: Sequence[str]) -> None:
    """Run commands in this process, quietly: a child that is another user may not be able to read Python's
    own modules."""
    for words in commands:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main(list(words))


def covey_as_nobody(words: Sequence[str], here: Path) -> Answer:
    """Run the command in a child of this process, in a directory, as a user who is not root."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "w", encoding="utf-8") as answer:
            answer.write(json.dumps(_answer(words, here)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as answer:
        said = json.loads(answer.read())
    os.waitpid(child, 0)
    return Answer(**said)


def _answer(words: Sequence[str], here: Path) -> dict[str, object]:
    out, err = io.StringIO(), io.StringIO()
    code, raised = -1, ""
    try:
        os.chdir(here)
        if os.geteuid() == 0:
            os.setgroups([])
            os.setegid(NOBODY)
            os.seteuid(NOBODY)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(words))
    except BaseException:  # noqa: BLE001 (what is raised is the answer)
        raised = traceback.format_exc()
    return {"code": code, "out": out.getvalue(), "err": err.getvalue(), "raised": raised}
