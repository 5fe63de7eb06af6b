"""The Python stacks of this process, as text, while its threads go on."""

from __future__ import annotations

import faulthandler
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_LIBRARY = str(Path(threading.__file__).parent)
_DEBUGGERS = ("bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy", "ipdb", "pudb")


def write_stacks(path: Path, heading: str, main_thread: int) -> None:
    """Write the stacks of all threads to a file: the frames alone, then with names and source lines.

    The frames come first and from faulthandler, which reads no file: where the disk is what hangs they are
    there.
    """
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{heading}\n\nframes, innermost first\n")
        file.flush()
        faulthandler.dump_traceback(file)
        file.write("\nsource lines, innermost last\n")
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        for ident in sorted(frames, key=lambda ident: ident != main_thread):
            word = " (the one that trains)" if ident == main_thread else ""
            file.write(f"\nthread {names.get(ident, ident)}{word}\n")
            file.writelines(traceback.format_stack(frames[ident]))


def top_frame(main_thread: int) -> str:
    """Where a thread stands: "judge.py:12 in ask", or "threading.py:331 in wait, from judge.py:12 in ask"
    where the standard library was called; "" where it has ended."""
    words: list[str] = []
    for frame in _frames(main_thread):
        is_library = (
            frame.f_code.co_filename.startswith(_LIBRARY) and "-packages" not in frame.f_code.co_filename
        )
        if not words or not is_library:
            words.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}")
        if not is_library:
            break
    return ", from ".join(words)


def is_debugged(main_thread: int) -> bool:
    """Whether a debugger holds or traces the thread: a person looks at it already."""
    return any(
        frame.f_trace is not None or str(frame.f_globals.get("__name__")).split(".")[0] in _DEBUGGERS
        for frame in _frames(main_thread)
    )


def _frames(ident: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(ident)
    while frame is not None:
        yield frame
        frame = frame.f_back
