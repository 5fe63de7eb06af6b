"""Gives a rollout function what it samples with: the engine of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from types import SimpleNamespace
from typing import Any

from covey.activity import Activity
from covey.data.text import TextCodec
from covey.errors import EngineLost
from covey.models.policy import Policy
from covey.options.schema import Config
from covey.rollout.engine import Engine
from covey.rollout.function_rows import FunctionRow
from covey.rollout.slots import Slot
from covey.texts import joined, tr
from covey.types import Completion, GenerationRequest, Medium, Prompt, SamplingParams

_LENGTHS = ("max_completion_length", "max_tokens", "max_new_tokens")


@dataclass(frozen=True, kw_only=True)
class RolloutFunction:
    """Holds a function that makes the episodes of a rollout, and what it may read of the run.

    `call(prompts, context)` returns what TRL's `rollout_func` does. `policy` is the model, whose weights are
    those of the step while the function runs; `model_context` the most tokens that it can hold (None: no
    limit is known).
    """

    call: Callable[[list[Any], Any], Any]
    args: Config
    policy: Policy
    load_tokenizer: Callable[[], Any]
    model_context: int | None

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers, which takes a second to load: only functions that ask for it
        wait."""
        return self.load_tokenizer()


def given(prompt: Prompt) -> Any:
    """Return a prompt as a rollout function is given it: a list of messages, or text that no template has
    touched."""
    return [dict(message) for message in prompt.messages] if prompt.messages else prompt.text


class RolloutContext:
    """Samples for a rollout function, and says how far the run is.

    `generate` is the whole of it for a function that makes turns; TRL's names for the rest are
    `processing_class`, `args`, `num_generations`, `model` and `state.global_step`.
    """

    def __init__(
        self,
        function: RolloutFunction,
        slots: Sequence[Slot],
        engine: Engine,
        codec: TextCodec,
        activity: Activity,
    ) -> None:
        self._function, self._slots = function, slots
        self._engine, self._codec, self._activity = engine, codec, activity
        plan = slots[0].plan
        self._sampling = plan.sampling
        self.num_generations = plan.num_generations
        self.is_eval = plan.split != "train"
        self.step = activity.step
        self.args = function.args
        self.lost: EngineLost | None = None
        """Why nothing is left to sample, where that is so; the function may have caught it."""
        firsts = [slot.prompt for slot in slots if slot.sibling == 0 or slot is slots[0]]
        self._own = [(given(prompt), prompt) for prompt in firsts]
        self._stream = function.policy.stream
        self._num_asked = 0
        # Functions may play their episodes in threads; the engine answers one at a time.
        self._lock = Lock()
        # By the tokens that they were sampled behind.
        self._sampled: dict[tuple[int, ...], list[Completion]] = {}

    @property
    def processing_class(self) -> Any:
        """The tokenizer of the model, as transformers loads it."""
        return self._function.tokenizer

    @property
    def model(self) -> Any:
        """The model of transformers, with the weights that sample."""
        return self._function.policy.model

    @property
    def state(self) -> SimpleNamespace:
        """`global_step`: optimizer steps taken."""
        return SimpleNamespace(global_step=self.step)

    def generate(
        self, prompts: Sequence[Any], *, as_chat: bool | None = None, **overrides: Any
    ) -> list[dict[str, Any]]:
        """Sample a completion behind each prompt with the engine and the sampling options of the run.

        A prompt is a list of messages, which goes through the chat template, a text, or a list of token ids.
        `max_tokens` (also max_completion_length, max_new_tokens) limits a completion, `stop` ends it at a
        text or one of several. Returns dicts of `prompt_ids`, `completion_ids`, `logprobs` (one a token, at
        the temperature of the run) and `text`. Raises ValueError for a prompt or an override that cannot be
        taken.

        Noise is that of the slots in their order, then that of their next turns: a function that samples once
        for each prompt gets the very completions of a run without it.
        """
        if isinstance(prompts, str | Mapping):
            raise ValueError(tr("generate() takes a list of prompts, not a single one"))
        if as_chat is not None and any(_is_chat(prompt) is not as_chat for prompt in prompts):
            raise ValueError(tr("as_chat is {as_chat}, but the prompts say otherwise", as_chat=as_chat))
        with self._lock:
            sampling = self._with(overrides)
            requests = [self._request(prompt, sampling) for prompt in prompts]
            completions = self._sample(requests)
            for request, completion in zip(requests, completions, strict=True):
                self._sampled.setdefault(request.prompt_token_ids, []).append(completion)
        return [self._result(*pair) for pair in zip(requests, completions, strict=True)]

    def drawn(self, row: FunctionRow) -> list[Completion] | None:
        """Return the completions of `generate` that the trained tokens of a row are, in order; None where
        some are no whole completion behind the tokens that it was sampled behind."""
        ids = (*row.prompt_ids, *row.completion_ids)
        is_trained = (*[False] * len(row.prompt_ids), *row.is_trained)
        found: list[Completion] = []
        at = len(row.prompt_ids)
        while at < len(ids):
            if not is_trained[at]:
                at += 1
                continue
            fits = [c for c in self._sampled.get(ids[:at], ()) if _stands_at(at, c, ids, is_trained)]
            if not fits:
                return None
            found.append(max(fits, key=lambda completion: len(completion.token_ids)))
            at += len(found[-1].token_ids)
        return found

    @contextmanager
    def open(self) -> Iterator[RolloutContext]:
        """Have the model run outside of the engine too: its attention takes padded rows, as transformers
        makes them, and the engine has its own while it samples."""
        policy = self._function.policy
        policy.use_stream("padded")
        try:
            yield self
        finally:
            policy.use_stream(self._stream)

    def _sample(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        policy = self._function.policy
        policy.use_stream(self._stream)
        try:
            numbers = [self._engine.submit(request) for request in requests]
            found: dict[int, Completion] = {}
            for completion in self._engine.results():
                self._activity.advance()
                found[completion.request_id] = completion
        except EngineLost as error:
            self.lost = error
            raise
        finally:
            policy.use_stream("padded")
        return [found[number] for number in numbers]

    def _request(self, prompt: Any, sampling: SamplingParams) -> GenerationRequest:
        turn, number = divmod(self._num_asked, len(self._slots))
        ids, media = self._tokens(prompt, self._slots[number].prompt)
        vocab = self._function.policy.vocab
        if not ids or not all(0 <= i < vocab for i in ids):
            raise ValueError(
                tr(
                    "generate() was given a prompt without tokens, or with ids outside of {vocab}",
                    vocab=vocab,
                )
            )
        contexts = (self._function.model_context, self._engine.capabilities.context)
        known = [most for most in contexts if most is not None]
        room = min([sampling.max_new_tokens, *(most - len(ids) for most in known)])
        if room < 1:
            raise ValueError(
                tr(
                    "generate() was given a prompt of {length} tokens, but model and engine hold {most}",
                    length=len(ids),
                    most=min(known),
                )
            )
        self._num_asked += 1
        return GenerationRequest(
            turn=self._slots[number].episode_id.turn_id(turn),
            prompt_token_ids=ids,
            sampling=replace(sampling, max_new_tokens=room),
            media=media,
        )

    def _tokens(self, prompt: Any, next_one: Prompt) -> tuple[tuple[int, ...], tuple[Medium, ...]]:
        """Return the tokens of a prompt; one that the function was given has those of the data."""
        if isinstance(prompt, str) or _is_chat(prompt):
            for shown, own in ((given(next_one), next_one), *self._own):
                if prompt == shown:
                    return tuple(own.token_ids), own.media
        if isinstance(prompt, str):
            return self._codec.encode([prompt], add_special_tokens=True)[0], ()
        entries = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
        if not _is_chat(entries):
            return tuple(map(int, entries)), ()
        if entries[-1].get("role") == "assistant":
            raise ValueError(
                tr("generate() was given messages that end with one of the assistant; give their token ids")
            )
        return self._codec.encode([self._codec.render(entries)])[0], ()

    def _with(self, overrides: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling of the run with these overrides; what would draw from other probabilities than
        the loss is computed from is a ValueError."""
        own = sampling = self._sampling
        fixed = {
            **{name: getattr(own, name) for name in ("temperature", "top_p", "top_k", "min_p")},
            **{"n": 1, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        }
        for name, value in overrides.items():
            if value is None:
                continue
            if name in _LENGTHS:
                if int(value) < 1:
                    raise ValueError(
                        tr("generate() was given {name} {value}; it is at least 1", name=name, value=value)
                    )
                sampling = replace(sampling, max_new_tokens=int(value))
            elif name == "stop":
                texts = (value,) if isinstance(value, str) else tuple(value)
                sampling = replace(sampling, stop_strings=tuple(dict.fromkeys((*own.stop_strings, *texts))))
            elif name not in fixed:
                known = joined(", ", (*_LENGTHS, "stop"))
                raise ValueError(
                    tr("generate() does not take {name}; it takes {known}", name=name, known=known)
                )
            elif not math.isclose(max(value, 0), fixed[name], abs_tol=1e-6):
                raise ValueError(
                    tr(
                        "generate() was given {name} {value}, but the run samples with {own:g}: the ratios "
                        "of the loss are those of the probabilities that the options of the run give",
                        name=name,
                        value=value,
                        own=fixed[name],
                    )
                )
        return sampling

    def _result(self, request: GenerationRequest, completion: Completion) -> dict[str, Any]:
        ids = completion.token_ids.tolist()
        return {
            "prompt_ids": list(request.prompt_token_ids),
            "completion_ids": ids,
            "logprobs": completion.logprobs.tolist(),
            "text": self._codec.decode(ids),
        }


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)


def _stands_at(at: int, completion: Completion, ids: Sequence[int], is_trained: Sequence[bool]) -> bool:
    """Return whether the tokens from a place on begin with a completion, and all of it is trained."""
    length = len(completion.token_ids)
    return tuple(ids[at : at + length]) == tuple(completion.token_ids.tolist()) and all(
        is_trained[at : at + length]
    )
