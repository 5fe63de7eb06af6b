"""Requests that run on a server that `vllm serve` started: a call of /v1/completions for each."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from tokenizers import Tokenizer

from covey.rollout.server.call import FAULTS, Answer, Caller
from covey.rollout.server.values import WireError, parsed, tokens_of
from covey.rollout.server.wire import LINE_BYTES
from covey.rollout.stop_strings import search_for
from covey.rollout.vllm.library import is_greedy, seed_of
from covey.texts import tr
from covey.types import GenerationRequest

# Seconds after which a caller hears how many tokens have come, and tokens that vLLM sends together.
_ALIVE_S, _TOGETHER = 1.0, 8

Ended = tuple[str, dict[str, Any]]


@dataclass(slots=True)
class Progress:
    """Tokens that a server has sent, over all calls of this process."""

    num_tokens: int = 0


class VllmSampling:
    """`requests` by their ids, `rows` of them side by side. `check` raises where the server has other weights
    than those of `version`; it is called after completions have come and before they are given. `tokenizer`
    finds stop strings."""

    def __init__(
        self,
        caller: Caller,
        model: str,
        requests: Mapping[str, GenerationRequest],
        *,
        version: int,
        rows: int,
        check: Callable[[], None],
        progress: Progress,
        vocab: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._caller, self._model, self._version, self._rows = caller, model, version, rows
        self._check, self._progress = check, progress
        self._vocab, self._tokenizer = vocab, tokenizer
        self._waiting = deque(requests.items())
        self._left = set(requests)
        self._ended: SimpleQueue[Ended | Exception] = SimpleQueue()
        self._lock = threading.Lock()
        self._answers: dict[str, Answer] = {}
        self._is_over = False

    def lines(self) -> Iterator[Mapping[str, Any]]:
        """Completions as they end, as covey's own servers send them; meanwhile the tokens that have come."""
        for _ in range(min(self._rows, len(self._waiting))):
            threading.Thread(target=self._work, name=f"vllm {self._caller.address}", daemon=True).start()
        while self._left and not self._is_over:
            ended = self._taken()
            if not ended:
                yield {"computed": self._progress.num_tokens}
                continue
            self._check()
            for rid, body in ended:
                self._left.discard(rid)
                yield {"id": rid, **body}
        yield {"done": True}

    def _taken(self) -> list[Ended]:
        """What has ended since; nothing where nothing has for a while. Errors of calls are raised."""
        try:
            found = [self._ended.get(timeout=_ALIVE_S)]
            while not self._ended.empty():
                found.append(self._ended.get())
        except Empty:
            return []
        for one in found:
            if isinstance(one, Exception):
                raise one
        return [one for one in found if not isinstance(one, Exception) and one[0] in self._left]

    def end(self, rid: str) -> None:
        """End a request: vLLM does where its connection is closed."""
        self._left.discard(rid)
        with self._lock:
            answer = self._answers.pop(rid, None)
        if answer is not None:
            answer.hang_up()

    def hang_up(self) -> None:
        """End all of them."""
        self._is_over = True
        for rid in list(self._left):
            self.end(rid)

    close = hang_up

    # -- by threads of its own

    def _work(self) -> None:
        while not self._is_over:
            try:
                rid, request = self._waiting.popleft()
            except IndexError:
                return
            if rid not in self._left:
                continue
            try:
                self._ended.put((rid, self._sampled(rid, request)))
            except (*FAULTS, ValueError) as error:
                # A call that was hung up ends somehow.
                if rid in self._left:
                    self._ended.put(error)

    def _sampled(self, rid: str, request: GenerationRequest) -> dict[str, Any]:
        started = time.perf_counter()
        tokens: list[Any] = []
        logprobs: list[Any] = []
        finish, search = None, search_for(request, self._tokenizer)
        with self._caller.open("POST", "/v1/completions", _body(self._model, request)) as answer:
            # It may wait in vLLM's queue for long: progress is that of all calls together.
            answer.wait_for_ever()
            with self._lock:
                self._answers[rid] = answer
            if rid not in self._left:
                raise ConnectionError(tr("it was ended"))
            for choice in _choices(answer):
                new, values = _list(choice.get("token_ids")), choice.get("logprobs")
                tokens += new
                logprobs += _list(values.get("token_logprobs") if isinstance(values, dict) else None)
                finish = choice.get("finish_reason") or finish
                self._progress.num_tokens += len(new)
                number = None if search is None else search.first_end(tokens_of(new, self._vocab))
                if number is not None:
                    # What came behind a stop string is left out; vLLM ends a request that nobody reads.
                    finish = "stop"
                    length = len(tokens) - len(new) + number
                    del tokens[length:], logprobs[length:]
                    break
        with self._lock:
            self._answers.pop(rid, None)
        if is_greedy(request.sampling.temperature):
            # At temperature 0 the likeliest token has all of the probability.
            logprobs = [0.0] * len(tokens)
        return {
            "token_ids": tokens,
            "logprobs": logprobs,
            "versions": [[self._version, len(tokens)]] if tokens else [],
            "finish": finish,
            "seconds": time.perf_counter() - started,
            "kept": None,
        }


def _body(model: str, request: GenerationRequest) -> dict[str, Any]:
    """The whole distribution at the request's temperature, its own seed, an end at its own tokens alone: what
    is not said here would come from the model's generation_config.json."""
    sampling = request.sampling
    return {
        "model": model,
        "prompt": list(request.prompt_token_ids),
        "temperature": 0.0 if is_greedy(sampling.temperature) else sampling.temperature,
        "seed": seed_of(request.turn),
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        **{"top_p": 1.0, "top_k": 0, "min_p": 0.0},
        **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        # The least that its protocol has: e^-100 of the probability.
        **({"logit_bias": {str(i): -100.0 for i in banned}} if (banned := sampling.banned_token_ids) else {}),
        **{"stream": True, "stream_interval": _TOGETHER},
    }


def _choices(answer: Answer) -> Iterator[Mapping[str, Any]]:
    """The parts of a completion as they come, lines of `data: {...}` up to `data: [DONE]`."""
    while line := answer.response.readline(LINE_BYTES):
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        body = parsed(data)
        choices = body.get("choices") if isinstance(body, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise WireError(tr("it ended a completion with {data!r}", data=data[:200]))
        yield choices[0]
    raise ConnectionError(tr("its answer ended early"))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise WireError(
            tr("it sent a part of a completion with {value!r:.60} instead of a list", value=value)
        )
    return value
