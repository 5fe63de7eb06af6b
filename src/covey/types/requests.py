"""Which draw an episode or a turn is, and what an engine is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from covey.types.media import Medium


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Says how a completion is drawn: `SamplingParams(temperature=1.0, max_new_tokens=64,
    stop_token_ids=(257,))`. It ends with one of the tokens, or with the one that completes a stop string.

    `banned_token_ids` (ascending) have no part in any probability: neither the softmax that draws nor the one
    that learns has them. Filters leave out tokens behind the temperature, in this order: those of less than
    `min_p` times the largest probability (0: none), all but the `top_k` most probable ones and their equals
    (0: none), and all but the fewest that hold `top_p` of what is left (1: none).
    """

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    banned_token_ids: tuple[int, ...] = ()

    @property
    def has_filters(self) -> bool:
        """Return whether tokens may be left out, so that the engine records what was kept."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeId:
    """Which draw an episode is: one draw, one id, wherever and whenever it is made.

    `EpisodeId(seed=42, split="train", rollout=12, attempt=0, prompt_id=7, sibling=3)`. `attempt` counts the
    further prompts that were taken for the same rollout.
    """

    seed: int
    split: str
    rollout: int
    attempt: int
    prompt_id: int
    sibling: int

    def turn_id(self, number: int = 0) -> TurnId:
        """The id of a turn of the model in this episode, counted from 0."""
        return TurnId(**{name: getattr(self, name) for name in EpisodeId.__dataclass_fields__}, turn=number)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnId(EpisodeId):
    """Which turn of which episode: the id of a request, and what the noise of its tokens is a pure function
    of, together with position and token id."""

    turn: int = 0

    @property
    def episode(self) -> EpisodeId:
        """The episode that the turn is of."""
        return EpisodeId(**{name: getattr(self, name) for name in EpisodeId.__dataclass_fields__})

    @property
    def text(self) -> str:
        """The id as text: the same turn has the same one on every engine, server and machine."""
        words = f"{self.seed}/{self.split}/{self.rollout}/{self.attempt}/{self.prompt_id}/{self.sibling}"
        return f"{words}/{self.turn}" if self.turn else words


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Asks an engine for one turn. An engine that can prefills requests with an equal `prefix` once.

    `extends` names the turn that the prompt goes on from: where it begins with that turn's prompt and all of
    its sampled tokens, an engine that still has their keys and values computes what is behind them alone.
    `may_go_on` says that another request may extend this one. Both only save work: neither changes what is
    sampled. `media` are the images of the prompt, in the order of their placeholders.
    """

    turn: TurnId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    media: tuple[Medium, ...] = ()
    extends: TurnId | None = None
    may_go_on: bool = False

    @property
    def prefix(self) -> tuple[tuple[int, ...], tuple[Medium, ...]]:
        """Return the key of a cache of keys and values: the tokens of the prompt, and its media."""
        return self.prompt_token_ids, self.media
