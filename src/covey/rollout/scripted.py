"""An engine that says what a script says: to rehearse a run without its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from covey.data.text import TextCodec
from covey.rollout.engine import NO_MEMBERS, Capabilities, NamedWeights, nothing
from covey.types import Completion, Finding, Finish, GenerationRequest, Receipt, TurnId
from covey.types.arrays import constant_floats, ints

Script = Callable[[TurnId], str | Completion | None]
"""Gives the text of a turn, or its tokens; None is a turn that runs into the limit of tokens."""


class ScriptedEngine:
    """Answers each request with the text of a script, and the first end token of the model where the text
    ends with none. Each token has the log-probability 0."""

    capabilities = Capabilities(logprobs=True, noise_keys=True)
    members = NO_MEMBERS
    given_up = ""

    def __init__(self, codec: TextCodec, script: Script) -> None:
        self._codec, self._script = codec, script
        self.on_turn: Callable[[], None] = nothing
        self._waiting: list[tuple[int, GenerationRequest]] = []
        self._next_id = 0
        self.requests: list[GenerationRequest] = []

    def submit(self, request: GenerationRequest) -> int:
        """Queue a request."""
        self._next_id += 1
        self._waiting.append((self._next_id, request))
        self.requests.append(request)
        return self._next_id

    def results(self) -> Iterator[Completion]:
        """Answer one request after the other."""
        while True:
            self.on_turn()
            if not self._waiting:
                return
            yield self._answer(*self._waiting.pop(0))

    def _answer(self, number: int, request: GenerationRequest) -> Completion:
        text, most = self._script(request.turn), request.sampling.max_new_tokens
        if isinstance(text, Completion):
            return replace(text, request_id=number)
        (ids,) = self._codec.encode(["" if text is None else text])
        ends = request.sampling.stop_token_ids or self._codec.stop_token_ids
        if text is None:
            ids = (ids or (0,)) * most
        elif not ids or ids[-1] not in ends:
            ids = (*ids, *ends[:1])
        is_cut = text is None or len(ids) > most
        ids = ids[:most]
        return Completion(
            request_id=number,
            token_ids=ints(ids),
            logprobs=constant_floats(0.0, len(ids)),
            versions=((0, len(ids)),),
            finish=Finish.LENGTH if is_cut else Finish.STOP,
            seconds=0.0,
        )

    def abort(self, ids: Sequence[int]) -> None:
        """Drop requests without an answer."""
        self._waiting = [(number, request) for number, request in self._waiting if number not in ids]

    def publish(self, named_weights: NamedWeights, version: int) -> Receipt:
        """Take no weights: a script has none."""
        return Receipt(version=version)

    def held_base(self) -> str:
        """Return "": a script has no base weights."""
        return ""

    def rest(self) -> None:
        """Do nothing: a script uses no GPU memory."""

    def take_notices(self) -> list[Finding]:
        """Return []: a script reports no findings."""
        return []

    def close(self) -> None:
        """Do nothing: a script starts no process."""
