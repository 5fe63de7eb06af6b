"""The interface of a rollout engine: tokens in, tokens and log-probabilities out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from covey.types import Completion, Finding, GenerationRequest, Receipt

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NamedWeights = Iterator[tuple[str, "Tensor"]]
"""A model's weights by name."""


def nothing() -> None:
    """Do nothing: the default of arguments that are functions to call."""


def refuse_unfit(request: GenerationRequest, banned: Sequence[int]) -> None:
    """Raise ValueError for a request without a prompt, for no token, or with other banned tokens than the
    model that is to answer it."""
    sampling = request.sampling
    if not request.prompt_token_ids or sampling.max_new_tokens < 1:
        num, most = len(request.prompt_token_ids), sampling.max_new_tokens
        raise ValueError(f"a request has {num} prompt tokens and max_new_tokens {most}; both are at least 1")
    if sampling.banned_token_ids != tuple(banned):
        raise ValueError(
            f"a request bans the tokens {list(sampling.banned_token_ids)}, but generation_config.json of the "
            f"model bans {list(banned)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do; `noise_keys` says that the same key draws the same completion whatever its
    batch, `holds_weights` that it samples from a copy of the weights, which is as old as the last publish.

    `dtype` is that of the copy (None: as the learner computes). `is_shared` says that all ranks sample from
    one copy: the first rank publishes to it, and `publish` of the others sends nothing. `forgets`: the copy
    is gone after `rest`, so that the same version has to be published again. `adapter_rank` is the highest
    rank of a LoRA adapter that it applies itself (0: none), beside a base that it has been sent before.
    `num_ranks`: so many consecutive ranks compute each step of it together, so that none of them may leave
    alone; the first of them asks for completions and is given them. `swaps`: it takes a publish while
    requests run. `context` is the most tokens of a request with its completion (None: what the model holds).
    """

    logprobs: bool
    noise_keys: bool
    holds_weights: bool = False
    is_shared: bool = False
    forgets: bool = False
    dtype: torch.dtype | None = None
    adapter_rank: int = 0
    num_ranks: int = 1
    swaps: bool = False
    context: int | None = None

    def is_asked_by(self, rank: int) -> bool:
        """Return whether this rank submits requests: it is the first of those that are one engine."""
        return rank % self.num_ranks == 0


class Engine(Protocol):
    """Samples completions. Groups, environments and rewards are built on it in `collect`, once for all
    engines."""

    on_turn: Callable[[], None]
    """Called between two steps within `results`, by its thread, also before it would return; it may submit,
    abort and publish."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def members(self) -> Mapping[str, Engine]:
        """The engines that requests are dealt out to, by name, each of which can be asked for itself; empty
        where it samples itself."""
        ...

    @property
    def given_up(self) -> str:
        """What the engine goes on without, and why; empty where nothing failed."""
        ...

    def submit(self, request: GenerationRequest) -> int:
        """Take a request and return its id; nothing is computed yet. One that comes while `results` is read,
        between two completions, is sampled beside what runs; what came before the first is sampled the same
        whether others follow or not."""
        ...

    def results(self) -> Iterator[Completion]:
        """Run until nothing is left, giving each completion as it ends; between two of them the caller may
        submit, abort and publish. A row whose request may go on is kept for one that extends it until the
        next publish, the next rest, or until memory is short. Raises EngineLost (F140) where nothing is left
        that could sample: what has not come back is lost."""
        ...

    def abort(self, ids: Sequence[int]) -> None:
        """End requests now; what they have comes from `results` with finish `abort`."""
        ...

    def publish(self, named_weights: NamedWeights, version: int) -> Receipt:
        """Serve these weights as `version` from now on; every sampled token carries it.

        `named_weights` gives tensors under transformers' names, gathered one by one as they are asked for; an
        engine on the learner's own weights asks for none. The receipt says what it holds then: for an engine
        with members, what each of them does.

        Where it `swaps`, rows may run meanwhile: their next tokens are of the new version, and
        `Completion.versions` says which are. Their keys and values are computed again, so that the first
        logprob behind it is that of the new weights. `generate` ends a batch with the weights that it began
        with. A server does as its engine; what one that does not swap was sampling is sampled again. A
        publish that fails leaves no version, and what runs is to be aborted.
        """
        ...

    def held_base(self) -> str:
        """The digest of the base that it holds for adapters, of which it has been given every tensor; empty
        where there is none, and where one of its members has another one."""
        ...

    def rest(self) -> None:
        """Called when a rollout or an evaluation is over: an engine that is built to rest frees its memory
        for what follows."""
        ...

    def take_notices(self) -> list[Finding]:
        """What happened since the last call that people should know and that stops nothing."""
        ...

    def close(self) -> None:
        """Let go of processes and connections; nothing is sampled after it."""
        ...


NO_MEMBERS: Mapping[str, Engine] = MappingProxyType({})
"""The members of an engine that samples itself."""


class SharedEngine(Engine, Protocol):
    """An engine whose members all ranks share: `capabilities.is_shared`."""

    def use_members(self, names: Collection[str]) -> None:
        """Sample from these members alone, until the next publish."""
        ...


class ServedEngine(Engine, Protocol):
    """An engine that a server may stand before: others ask for more while it runs."""

    @property
    def num_computed(self) -> int:
        """Tokens computed since the engine started, those of prompts too: it rises while the engine makes
        progress, however slowly. Read by any thread."""
        ...
