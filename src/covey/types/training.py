"""From scored trajectories to an optimizer step and its record.

Tensor fields carry axis suffixes:

    T  tokens of a stream        N  trained tokens of a micro-batch      S  sequences of a micro-batch
    U  contexts, the places of a stream that predict a trained token
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from covey.types.arrays import ByValue, Versions, bools, constant_floats, floats, num_true
from covey.types.episode import Outcome, SequenceSummary, TokenSequence, held, summary_of
from covey.types.media import MediaTokens, Medium

if TYPE_CHECKING:
    from torch import Tensor

    from covey.types.arrays import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trainable sequence: a row of the batch.

    `Sample(group=3, sibling=0, episode=24, tokens=sequence, temperature=1.0, outcome=Outcome.SCORED)`.
    `group` and `episode` count within the rollout. An episode has one or several samples, one behind the
    other, which `sequence` counts: a turn whose template rewrites what stood before begins a new one. The
    prompt of sequence 0 is the same for every sibling, unless environments begin differently. `owner` is the
    rank that collected the row (None: every rank has it); other ranks have a summary of its tokens, unless
    they forward it. `age` is how many optimizer steps the policy has taken since the version of the oldest
    token: above 0 its ratio is not 1 before the rollout's first update.
    """

    group: int
    sibling: int
    episode: int
    tokens: TokenSequence | SequenceSummary
    temperature: float
    outcome: Outcome
    sequence: int = 0
    age: int = 0
    owner: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this rank has the tokens."""
        return isinstance(self.tokens, TokenSequence)

    @property
    def summary(self) -> SequenceSummary:
        """Return what a rank keeps that does not forward the row."""
        return summary_of(self.tokens)

    @property
    def token_ids(self) -> Ints:
        """The tokens (L,) int32."""
        return held(self.tokens).token_ids

    @property
    def is_trained(self) -> Bools:
        """Which tokens (L,) the loss is over."""
        return held(self.tokens).is_trained

    @property
    def sampler_logprobs(self) -> Floats:
        """The sampler's logprobs (N,) float32 of the trained tokens, in nats."""
        return held(self.tokens).logprobs

    @property
    def versions(self) -> Versions:
        """Runs of the policy versions of the trained tokens."""
        return held(self.tokens).versions

    @property
    def media(self) -> tuple[Medium, ...]:
        """The images, in the order of their placeholders."""
        return held(self.tokens).media

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self.tokens.prompt_length

    @property
    def length(self) -> int:
        """All tokens."""
        return self.tokens.length

    @property
    def num_trained(self) -> int:
        """Tokens that the loss is over."""
        return self.tokens.num_trained

    @property
    def prompt_key(self) -> Hashable:
        """Equal for the rows that begin with the same prompt at the same temperature."""
        own = (self.sibling, self.sequence) if self.sequence else (self.tokens.prompt_digest,)
        return (self.group, self.temperature, *own)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedSample:
    """A sample with what the learner said of its trained tokens without gradient; None where nothing asked
    for it."""

    sample: Sample
    old_logprob_N: Tensor | None = None
    ref_logprob_N: Tensor | None = None
    entropy_N: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSample(ByValue):
    """An annotated sample with its advantage and its final mask.

    `loss_mask` (N,) bool has one entry per trained token; a False token enters neither numerator nor token
    count. `masked` says why a whole row is out of the loss (its episode still counts), and `needs_forward` is
    False where the row's gradient is exactly zero. `token_advantages` (N,) float32 has one entry per trained
    token where they differ, and `advantage` is their mean then.
    """

    annotated: AnnotatedSample
    advantage: float
    loss_mask: Bools
    masked: str | None = None
    needs_forward: bool = True
    token_advantages: Floats | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss_mask", bools(self.loss_mask))
        if self.token_advantages is not None:
            object.__setattr__(self, "token_advantages", floats(self.token_advantages))

    @property
    def advantages(self) -> Floats:
        """The advantage (N,) float32 of each trained token."""
        if self.token_advantages is not None:
            return self.token_advantages
        return constant_floats(self.advantage, len(self.loss_mask))

    @property
    def num_tokens(self) -> int:
        """Tokens that the loss is over."""
        return num_true(self.loss_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSegment:
    """A run of a stream: tokens [start, start + length), seeing itself causally, and all that the last token
    of segment `parent` sees. What grows from a segment lies right behind it, as a tree is walked."""

    start: int
    length: int
    parent: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """The kept sets of N tokens as tensors: `KeptSets` says what `count_N` and `words_K` (int32) hold.

    A token whose count is 0 was drawn from the whole vocabulary.
    """

    vocab: int
    count_N: Tensor
    words_K: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrompt:
    """Holds what a micro-batch shares with the micro-batch before it (`follows`) or after it (`is_followed`)
    that has the same prompt.

    The last position of the prompt predicts F tokens: the first token of every completion of all these
    micro-batches. `target_F`, `temperature_F` and `kept_F` are theirs. X are the other trained tokens of this
    micro-batch, `own_X` their indices among its N. `index_N` says for each of the N where it stands in the
    F first tokens followed by the X others.
    """

    target_F: Tensor
    temperature_F: Tensor
    own_X: Tensor
    index_N: Tensor
    follows: bool
    is_followed: bool
    kept_F: KeptTokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward pass: a stream of tokens and the trained tokens as flat vectors.

    `context_U` are the stream indices whose hidden states predict something that is trained, each once, and
    `context_N` says which of them predicts token n: with a shared prompt its last position predicts the first
    token of every sibling. Tokens of one context have one temperature. `num_rows` is 1 for a stream; above 1
    the stream is `num_rows` right-padded rows laid end to end. `trained_count_S` is the number of loss tokens
    of each sequence, `episode_count_S` that of its episode over all its sequences, wherever they are
    forwarded, and `group_S` the group it is of, counted within the rollout. `keep_N` is 1 where the policy
    term of a token counts and 0 where it does not (None: all count). `age_N` is how many optimizer steps
    older than the policy the weights are that sampled a token (None: all 0). A prompt whose rows do not fit
    one pass is the first segment of several, one behind the other, and may be computed once for all: `shared`
    is of those. `kept` are the sets that tokens were drawn from, None where all were drawn from the whole
    vocabulary. `media` are the images of the stream, None without any; `positions_T` are (3, T) where the
    model gives images three.
    """

    tokens_T: Tensor
    positions_T: Tensor
    segments: tuple[StreamSegment, ...]
    num_rows: int
    context_U: Tensor
    context_N: Tensor
    target_N: Tensor
    sequence_N: Tensor
    temperature_N: Tensor
    sampler_logprob_N: Tensor
    advantage_N: Tensor
    old_logprob_N: Tensor | None
    ref_logprob_N: Tensor | None
    trained_count_S: Tensor
    episode_count_S: Tensor
    group_S: Tensor
    keep_N: Tensor | None = None
    age_N: Tensor | None = None
    shared: SharedPrompt | None = None
    kept: KeptTokens | None = None
    media: MediaTokens | None = None


class TokenStats(NamedTuple):
    """What the policy says of each trained token, at the temperature it was sampled with.

    The logprob is within the token's kept set where it has one, the entropy that of the whole vocabulary.
    `kept_entropy_N` is the entropy within the sets, without a gradient; None where no token has one. A tuple,
    because wrappers of modules look for tensors in those alone.
    """

    logprob_N: Tensor
    entropy_N: Tensor
    kept_entropy_N: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """What an optimizer step divides by, over all ranks, fixed before its first backward.

    `Denominators(num_episodes=64, num_tokens=711, max_completion_length=1024)`. `num_kept` are the tokens
    of at least the entropy quantile, by which the entropy bonus is divided (None: all).
    """

    num_episodes: int
    num_tokens: int
    max_completion_length: int
    num_kept: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """This rank's share of one optimizer step; `dropped` counts rows left out of the forward pass, by reason.

    `has_signal` says for each micro-batch whether its gradient is certainly not 0 while the ratio is 1. It is
    not certain where the advantages of equal completions cancel, where stale completions may be clipped, and
    for the tokens that a shared prompt predicts: their gradient comes with the last of its micro-batches.
    `num_rows` are the step's rows over all ranks, and `groups` the numbers of its groups.
    """

    micro_batches: tuple[MicroBatch, ...]
    has_signal: tuple[bool, ...]
    denominators: Denominators
    dropped: Mapping[str, int]
    num_rows: int
    groups: range
    rollout: int
    pass_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What a backend says of one optimizer step; norms are of the whole gradient, before and after
    clipping.

    `frac_moved` is the share that changed of the watched weights whose gradient is above AdamW's epsilon
    (None where there are none), and `untouched` names the tensors that have no gradient (first steps only).
    """

    grad_norm: float
    grad_norm_clipped: float
    learning_rate: float
    update_ratio: float
    frac_params_changed: float
    frac_moved: float | None = None
    untouched: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A reduced value and how many tokens, rows or steps it saw; value None is shown as a dash."""

    value: float | None
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientMatch:
    """The gradient of an optimizer step against that of its rows, computed a second time.

    `scale` is the first as a multiple of the second (1 is right). `gap` is ||first - second|| / ||second||
    of the tensor where that is largest, which is `worst`.
    """

    scale: float
    gap: float
    worst: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one update gave, reduced over ranks.

    `silent` counts micro-batches whose backward pass changed no gradient, and `ratio_gap` is the largest
    |logprob - old logprob| of rows that are not stale (None where there are no old ones). `match` is there
    where the gradient was computed twice.
    """

    stats: StepStats | None
    metrics: Mapping[str, Metric]
    skipped: str | None = None
    silent: int = 0
    ratio_gap: float | None = None
    match: GradientMatch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One line of metrics.jsonl: `StepRecord(step=1, rollout=0, pass_index=0, metrics={"reward":
    Metric(value=0.4, count=64)})`."""

    step: int
    rollout: int
    pass_index: int
    metrics: Mapping[str, Metric]
