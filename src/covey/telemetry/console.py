"""The terminal's view of a run: a line for each step, or for about 20 of many steps.

On a terminal a live line below them shows the steps between.

Nothing here may stop a run. An error while rendering ends the view with one word about it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self, TextIO

import rich.console
from rich.errors import ConsoleError
from rich.live import Live
from rich.text import Text

from covey.telemetry.line import format_duration, format_line
from covey.texts import counted, tr, visible
from covey.texts.language import spoken
from covey.texts.terminal import say
from covey.types import StepRecord

# What a closed pipe, a terminal without the letters, or a record of an unforeseen shape raises while it is
# drawn.
_RENDERING_ERRORS = (OSError, ValueError, TypeError, LookupError, ArithmeticError, ConsoleError)
_PLAIN_LINES = 20

logger = logging.getLogger(__name__)


class Terminal(rich.console.Console):
    """A terminal that reports a reader who has gone; rich itself would end the whole process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(tr("the terminal was closed"))


class Console:
    """Shows step records as they come.

    `every` is the number of steps between lines; at 1 a long run is thinned to about 20 of them, the first
    and the last always among them. `terminal` stands in for the one that is found on `stream`
    (standard output).

        with Console(total_steps=400, every=1) as console:
            console.say("sampling on cpu")
            console.step(record)
    """

    def __init__(
        self,
        total_steps: int,
        every: int = 1,
        stream: TextIO | None = None,
        *,
        terminal: Terminal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._every = every if every > 1 else max(1, total_steps // _PLAIN_LINES)
        self._stream = stream if stream is not None else sys.stdout
        self._terminal = terminal
        self._clock = clock
        self._live: Live | None = None
        self._off = False
        self._started = clock()
        self._first: tuple[int, float] | None = None
        self._record: StepRecord | None = None
        self._is_printed = True

    def __enter__(self) -> Self:
        self._started = self._clock()
        with self._edge():
            self._terminal = self._terminal or _find_terminal(self._stream)
            if self._terminal is not None:
                self._live = Live(
                    console=self._terminal, get_renderable=self._render, auto_refresh=False, transient=True
                )
                self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def step(self, record: StepRecord) -> None:
        """Show a step: print its line where this step is due, and redraw the live one."""
        if self._off:
            return
        with self._edge():
            self._record, self._is_printed = record, False
            if self._first is None:
                self._first = (record.step, self._clock())
            if self._is_due(record.step):
                self._print_step(record)
            if self._live is not None:
                self._live.refresh()

    def say(self, text: str) -> None:
        """Show a text above the live line."""
        if self._off:
            logger.warning("%s", text)
            return
        with self._edge():
            if self._live is not None:
                self._print_last()
                self._live.console.print(Text(visible(text)), soft_wrap=True)
            else:
                self._print(text)

    def close(self) -> None:
        """Take the live line away and give the terminal back; a second call does nothing."""
        with self._edge():
            if self._live is not None:
                self._print_last()
            live, self._live = self._live, None
            if live is not None:
                live.stop()

    def _is_due(self, step: int) -> bool:
        first = self._first is not None and self._first[0] == step
        return first or step % self._every == 0 or step == self._total

    def _print_step(self, record: StepRecord) -> None:
        self._is_printed = True
        if self._live is None or self._terminal is None:
            self._print(self._line(record, width=None))
        else:
            line = self._line(record, width=self._terminal.width)
            self._live.console.print(Text(visible(line), no_wrap=True, overflow="ellipsis"))

    def _print_last(self) -> None:
        """Print the step that only the live line has shown, before anything else comes."""
        if self._record is not None and not self._is_printed:
            self._print_step(self._record)

    def _render(self) -> Text:
        if self._terminal is None or self._record is None:
            waiting = tr(
                "{steps} in all; the first rollout is being sampled", steps=counted(self._total, "step")
            )
            return Text(spoken(waiting), no_wrap=True, overflow="ellipsis")
        if self._is_printed:
            if self._record.step >= self._total:
                return Text("")
            running = tr("step {step}/{total} is running", step=self._record.step + 1, total=self._total)
            return Text(spoken(running), no_wrap=True, overflow="ellipsis")
        line = self._line(self._record, width=self._terminal.width)
        return Text(line, no_wrap=True, overflow="ellipsis")

    def _line(self, record: StepRecord, width: int | None) -> str:
        line = format_line(record, self._total, elapsed=self._elapsed(), left=self._left(record), width=width)
        return line if _can_encode(self._stream, "–") else line.replace("–", "-")

    def _elapsed(self) -> str:
        return format_duration(self._clock() - self._started)

    def _left(self, record: StepRecord) -> str:
        """Return the time that the remaining steps take at the pace of those after the first.

        The first step also pays for whatever happens once, so nothing is said of the pace before the second.
        """
        num_left = max(self._total - record.step, 0)
        num_steps = 0 if self._first is None else record.step - self._first[0]
        if self._first is None or (num_steps < 1 and num_left):
            return "–"
        pace = (self._clock() - self._first[1]) / max(num_steps, 1)
        return format_duration(num_left * pace)

    def _print(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        say(text.encode(encoding, "replace").decode(encoding), self._stream)

    @contextlib.contextmanager
    def _edge(self) -> Iterator[None]:
        """Run a rendering; its first error turns the view off and is said once."""
        try:
            yield
        except _RENDERING_ERRORS as error:
            self._off = True
            live, self._live = self._live, None
            with contextlib.suppress(*_RENDERING_ERRORS):
                if live is not None:
                    live.stop()
            logger.warning(
                tr("the terminal view is off (%s: %s); the run continues"), type(error).__name__, error
            )


def _find_terminal(stream: TextIO) -> Terminal | None:
    """Return a terminal that can redraw a line, or None for files, pipes and dumb terminals."""
    if not stream.isatty():
        return None
    terminal = Terminal(file=stream, force_terminal=True, highlight=False)
    return None if terminal.is_dumb_terminal else terminal


def _can_encode(stream: TextIO, text: str) -> bool:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
