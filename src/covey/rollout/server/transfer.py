"""The weights of one publish on their way from HTTP to an engine."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from covey.models.adapter_shapes import is_of_adapter
from covey.types import Receipt


class TransferEnded(Exception):
    """Raised where a publish was given up: a newer one took its place, or its run has ended."""


class Transfer:
    """Passes the tensors of `version`, which a run sends, from threads that give them to the one that takes
    them; `form` says which tensors they are.

    One bucket waits at most, so that a server never holds much more than its model and a bucket.
    """

    def __init__(self, run: str, version: int, form: str) -> None:
        self.id = secrets.token_hex(8)
        self.begun = time.monotonic()
        self.run, self.version, self.form = run, version, form
        self._changed = threading.Condition()
        self._bucket: Mapping[str, Tensor] | None = None
        self._is_whole = self._is_ended = False
        self._fault = ""
        self._receipt: Receipt | None = None
        self._num_given = 0
        self._asked: Callable[[], None] | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the engine could not take the weights."""
        return bool(self._fault)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor with its name as it arrives, until the transfer is whole, and run the calls that
        are asked for in between. Raises TransferEnded if the sender stops before the end."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._asked or self._bucket is not None or self._is_whole or self._is_ended
                )
                if self._is_ended:
                    raise TransferEnded
                asked, self._asked = self._asked, None
                if asked is None:
                    if self._bucket is None:
                        return
                    bucket, self._bucket = self._bucket, None
                    self._changed.notify_all()
            if asked is not None:
                asked()
                continue
            # A file of safetensors keeps no order; an adapter's matrices come behind its base.
            yield from sorted(bucket.items(), key=lambda item: is_of_adapter(item[0]))

    def ask(self, call: Callable[[], None]) -> None:
        """Have the engine's thread call something before it takes the next tensors; nobody waits for it."""
        with self._changed:
            self._asked = call
            self._changed.notify_all()

    def give(self, bucket: Mapping[str, Tensor], timeout_s: float) -> None:
        """Hand over tensors; ValueError carries what the engine said of those before."""
        with self._changed:
            self._wait(lambda: self._bucket is None, timeout_s)
            self._bucket = bucket
            self._num_given += len(bucket)
            self._changed.notify_all()

    def finish(self, num_tensors: int, timeout_s: float) -> Receipt:
        """Say that all were given, `num_tensors`, and wait for the engine."""
        with self._changed:
            if num_tensors != self._num_given:
                raise ValueError(f"{num_tensors} tensors were sent and {self._num_given} came")
            self._is_whole = True
            self._changed.notify_all()
            self._wait(lambda: self._receipt is not None, timeout_s)
            assert self._receipt is not None
            return self._receipt

    def _wait(self, is_there: Callable[[], bool], timeout_s: float) -> None:
        def is_over() -> bool:
            return bool(is_there() or self._fault or self._is_ended)

        in_time = self._changed.wait_for(is_over, timeout_s)
        if self._fault:
            raise ValueError(self._fault)
        if self._is_ended:
            raise ValueError("another publish has taken the place of this one, or its run has ended")
        if not in_time:
            raise TimeoutError(f"the engine did not take the weights within {timeout_s:g} s")

    # -- by the engine's thread, and by who ends it

    def succeed(self, receipt: Receipt) -> None:
        """Record the receipt of an engine that serves the version now."""
        with self._changed:
            self._receipt = receipt
            self._changed.notify_all()

    def fail(self, words: str) -> None:
        """Record why the engine cannot take the weights; the first reason stays."""
        with self._changed:
            self._fault = self._fault or words
            self._changed.notify_all()

    def end(self) -> None:
        """Mark the transfer as ended, and wake whoever waits for it."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()
