"""Episodes: what is asked of an engine, what it gives, and what one draw from the policy did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from covey.types.arrays import ByValue, Versions, bools, floats, ints, joined_ints, num_true
from covey.types.kept import KeptSets
from covey.types.media import Medium
from covey.types.requests import EpisodeId, SamplingParams
from covey.types.turns import Turn, TurnCounts

if TYPE_CHECKING:
    from covey.types.arrays import Bools, Floats, Ints


class Source(StrEnum):
    """Who wrote a run of tokens."""

    PROMPT = "prompt"
    MODEL = "model"
    TOOL = "tool"
    ENVIRONMENT = "environment"


class Finish(StrEnum):
    """Why a turn of the model ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Outcome(StrEnum):
    """What became of an episode.

    `SCORED`: it ended by itself. `TRUNCATED`: at a limit of tokens. `POLICY_FAILURE`: by what the model did,
    such as a call that cannot be parsed; it is data. `INFRASTRUCTURE`: a server, sandbox or environment
    failed; it is no data, and the episode has no sequence. `ABORTED`: it was told to.
    """

    SCORED = "stop"
    TRUNCATED = "length"
    ABORTED = "abort"
    POLICY_FAILURE = "policy_failure"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion(ByValue):
    """Holds the tokens that an engine sampled for one request: ids (n,) int32, logprobs (n,) float32 in nats
    at the sampling temperature, and runs of the policy versions that sampled them. It converts other
    sequences of numbers to these arrays. `kept` has the n sets that filters left, within which the logprobs
    are; None without filters."""

    request_id: int
    token_ids: Ints
    logprobs: Floats
    versions: Versions
    finish: Finish
    seconds: float
    kept: KeptSets | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", ints(self.token_ids))
        object.__setattr__(self, "logprobs", floats(self.logprobs))

    @classmethod
    def aborted(cls, request_id: int) -> Completion:
        """That of a request which was aborted before it had a token."""
        return cls(
            request_id=request_id,
            token_ids=ints(()),
            logprobs=floats(()),
            versions=(),
            finish=Finish.ABORT,
            seconds=0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSequence(ByValue):
    """The tokens of an episode in the order in which the model saw them.

    `token_ids` (L,) int32 and `is_trained` (L,) bool; `logprobs` (n,) float32 and `versions` are of the n
    trained tokens. `sources` are runs of who wrote the tokens, the prompt first where there is one:
    `((Source.PROMPT, 9), (Source.MODEL, 4), (Source.TOOL, 6), (Source.MODEL, 3))` are two turns of the model.
    `media` are its images, in the order of their placeholders. `kept` are the sets that each trained token
    was drawn from, None without filters.
    """

    token_ids: Ints
    is_trained: Bools
    logprobs: Floats
    versions: Versions
    sources: tuple[tuple[Source, int], ...]
    media: tuple[Medium, ...] = ()
    kept: KeptSets | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", ints(self.token_ids))
        object.__setattr__(self, "is_trained", bools(self.is_trained))
        object.__setattr__(self, "logprobs", floats(self.logprobs))

    @classmethod
    def behind(
        cls,
        prompt_length: int,
        *,
        token_ids: Iterable[int],
        is_trained: Iterable[bool],
        logprobs: Iterable[float],
        versions: Versions,
        kept: KeptSets | None = None,
        media: tuple[Medium, ...] = (),
    ) -> TokenSequence:
        """Build a sequence whose tokens behind the prompt all count as the model's."""
        ids = ints(token_ids)
        return cls(
            token_ids=ids,
            is_trained=bools(is_trained),
            logprobs=floats(logprobs),
            versions=versions,
            sources=((Source.PROMPT, prompt_length), (Source.MODEL, len(ids) - prompt_length)),
            media=media,
            kept=kept,
        )

    @classmethod
    def of_turn(
        cls, prompt_ids: Sequence[int], completion: Completion, media: tuple[Medium, ...] = ()
    ) -> TokenSequence:
        """A prompt with one turn of the model behind it."""
        before, written = len(prompt_ids), len(completion.token_ids)
        return cls(
            token_ids=joined_ints([ints(prompt_ids), completion.token_ids]),
            is_trained=bools([False] * before + [True] * written),
            logprobs=completion.logprobs,
            versions=completion.versions,
            sources=((Source.PROMPT, before), (Source.MODEL, written)),
            media=media,
            kept=completion.kept,
        )

    @property
    def length(self) -> int:
        """All tokens."""
        return len(self.token_ids)

    @property
    def num_trained(self) -> int:
        """Tokens that the loss is over."""
        return len(self.logprobs)

    @property
    def logprob_sum(self) -> float:
        """The sum of the sampler's logprobs, in nats."""
        return float(self.logprobs.sum(dtype="float64"))

    @property
    def digest(self) -> int:
        """Return 64 bits of BLAKE2b over the int32 tokens behind the prompt, and the keys of images there:
        equal for equal completions."""
        return digest_of(self.completion_ids, self.media[len(self.prompt_media) :])

    @property
    def prompt_digest(self) -> int:
        """Return 64 bits of BLAKE2b over the int32 tokens of the prompt, and the keys of its images."""
        return digest_of(self.prompt_ids, self.prompt_media)

    @property
    def kept_words(self) -> int:
        """Count the words of the kept sets; -1 without sets."""
        return -1 if self.kept is None else len(self.kept.words)

    @property
    def kept_checksum(self) -> int:
        """Return the checksum of the kept sets; 0 without sets."""
        return 0 if self.kept is None else self.kept.checksum

    @property
    def oldest_version(self) -> int:
        """The policy version of the oldest trained token; -1 without one."""
        return min((version for version, count in self.versions if count), default=-1)

    @property
    def newest_version(self) -> int:
        """The policy version of the newest trained token; -1 without one."""
        return max((version for version, count in self.versions if count), default=-1)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self.sources[0][1] if self.sources and self.sources[0][0] is Source.PROMPT else 0

    @property
    def prompt_ids(self) -> Ints:
        """The tokens of the prompt."""
        return self.token_ids[: self.prompt_length]

    @property
    def prompt_media(self) -> tuple[Medium, ...]:
        """The images of the prompt."""
        room, found = 0, []
        if self.media:
            room = int((self.prompt_ids == self.media[0].token_id).sum())
        for medium in self.media:
            room -= medium.num_tokens
            if room >= 0:
                found.append(medium)
        return tuple(found)

    @property
    def completion_ids(self) -> Ints:
        """The tokens behind the prompt, whoever wrote them."""
        return self.token_ids[self.prompt_length :]

    @property
    def trained_ids(self) -> Ints:
        """The tokens that the loss is over."""
        return self.token_ids[self.is_trained]

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """For each turn of the model the number of tokens up to its end."""
        return tuple(end for end, _ in self.turn_runs)

    @property
    def turn_runs(self) -> tuple[tuple[int, int], ...]:
        """Return for each turn of the model the number of tokens up to its end, and how many it has."""
        ends = accumulate(count for _, count in self.sources)
        pairs = zip(ends, self.sources, strict=True)
        return tuple((end, count) for end, (source, count) in pairs if source is Source.MODEL)


def digest_of(token_ids: Ints, media: Sequence[Medium] = ()) -> int:
    """Return 64 bits of BLAKE2b over int32 tokens, and behind them the keys of images."""
    words = token_ids.tobytes() + " ".join(medium.key for medium in media).encode()
    return int.from_bytes(blake2b(words, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSummary:
    """Describes a sequence on ranks without its tokens; each field equals that of `TokenSequence`.

    `logprob_sum` is in nats, versions are in optimizer steps. The owner counts in `num_unknown` the sampled
    ids that the tokenizer lacks, and marks an episode that repeats itself with `is_repetitive`.
    """

    prompt_length: int
    length: int
    num_trained: int
    logprob_sum: float
    digest: int
    oldest_version: int
    newest_version: int
    prompt_digest: int = 0
    kept_words: int = -1
    kept_checksum: int = 0
    num_unknown: int = 0
    is_repetitive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What one draw from the policy did, in one or several sequences: a turn whose template rewrites what
    stood before begins a new one. An infrastructure failure has none.

    `text` is the decoded output of the model's last turn, for rewards and people; nothing is trained from it.
    `failure` says what failed where the outcome is an infrastructure failure. `owner` is the rank that
    collected the episode and alone has its tokens and its text (None: every rank has them).

    With tools or an environment `turns` holds what each turn did, on the owner alone; every rank knows their
    `counts`. `environment` is the key of one that lives until the episode is scored, `environment_reward`
    what it gave (None: nothing). `prompt_text` and `prompt_messages` are the prompt that an environment has
    made ("" and None: that of the data). `columns` are what a rollout function or a scheduler gave beside
    the tokens, for the rewards, and `messages` the conversation as a scheduler has written it; the owner
    alone has them.
    """

    id: EpisodeId
    sequences: tuple[TokenSequence | SequenceSummary, ...]
    outcome: Outcome
    text: str
    sampling: SamplingParams
    seconds: float = 0.0
    failure: str = ""
    owner: int | None = None
    turns: tuple[Turn, ...] = ()
    counts: TurnCounts = field(default_factory=TurnCounts)
    environment: int | None = None
    environment_reward: float | None = None
    prompt_text: str = ""
    prompt_messages: tuple[Mapping[str, Any], ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] | None = None

    @property
    def tokens(self) -> tuple[TokenSequence, ...]:
        """The sequences, on a rank that has their tokens."""
        return tuple(map(held, self.sequences))

    @property
    def completion_ids(self) -> list[int]:
        """Token ids behind the prompts of all sequences."""
        return [token for s in self.tokens for token in s.completion_ids.tolist()]

    @property
    def trained_ids(self) -> list[int]:
        """The token ids that the loss is over."""
        return [token for s in self.tokens for token in s.trained_ids.tolist()]

    @property
    def num_trained(self) -> int:
        """Tokens that the loss is over."""
        return sum(s.num_trained for s in self.sequences)

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """For each turn of the model the number of trained tokens up to its end."""
        parts = [s.is_trained[end - count : end] for s in self.tokens for end, count in s.turn_runs]
        return tuple(accumulate(map(num_true, parts)))

    @property
    def versions(self) -> set[int]:
        """The oldest and the newest policy version of its trained tokens; empty without one."""
        trained = [s for s in self.sequences if s.num_trained]
        return {v for s in trained for v in (s.oldest_version, s.newest_version)}


def held(sequence: TokenSequence | SequenceSummary) -> TokenSequence:
    """The sequence with its tokens. AssertionError where another rank has them: nobody asks for those."""
    assert isinstance(sequence, TokenSequence), "another rank has these tokens"
    return sequence


def summary_of(sequence: TokenSequence | SequenceSummary) -> SequenceSummary:
    """Return the summary of a sequence; one that is a summary already comes back as it is."""
    if isinstance(sequence, SequenceSummary):
        return sequence
    return SequenceSummary(
        prompt_length=sequence.prompt_length,
        length=sequence.length,
        num_trained=sequence.num_trained,
        logprob_sum=sequence.logprob_sum,
        digest=sequence.digest,
        prompt_digest=sequence.prompt_digest,
        oldest_version=sequence.oldest_version,
        newest_version=sequence.newest_version,
        kept_words=sequence.kept_words,
        kept_checksum=sequence.kept_checksum,
    )
