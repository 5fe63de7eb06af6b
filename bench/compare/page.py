"""The page of the comparison: what was measured, on what, and how it is to be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_TITLE = """\
# Performance

Written by [bench/compare](../bench/compare/cases.py): covey, TRL and ms-swift on the same model directory,
rows, rewards, group size, batch, lengths, loss (dapo, beta 0, clip range 0.2 and 0.28), learning rate, dtype
and seed, in turns, each in a process and an environment of its own. Figures are medians over the runs that
the tables count, each with a seed of its own; cases whose steps take long run less often. Another machine
gives other seconds: `make bench` runs every case and part and writes this page anew. What was not run for it
is not on it. What a GPU measured stands [at the end](#measured-on-an-h100)."""

_TABLE = """\
## Seconds, throughput, memory

Over the steps behind a warm-up. *Rollout* is generation; *update* is what of a step is neither generation nor
rewards. Memory is the peak of the process and of those that it starts. The last column is how many times
covey's seconds a side takes. Unless a case says otherwise: the built-in model of 0.8 M parameters, 64
completions a step, 8 of each prompt, at most 64 tokens, float32."""

_TARGET = """\
## Time to a score

From the first step until the mean of ten steps in a row reaches 0.80 of the answers, with the quickstart's
rewards, one for the answer and one for the form, and its limit of 32 tokens."""

_EQUAL = """\
## Equal work

covey samples a rollout with the rewards it really gets and writes it. Each side then takes its first step on
these very tokens: scores them, and takes its own advantages, denominators and loss. The whole gradient before
clipping is compared with covey's."""

_FLOOR = """\
## How far from the floor

The least that covey's steps can take on this machine: floating-point operations and bytes, each counted once,
over the best rates below; in each phase the slower of the two. Counted are matrix products and attention, and
the bytes of weights, keys and values, gradients and optimizer state. A prompt counts once a group, and once
whatever several completions begin with; rows whose advantage is 0 have no gradient and do not count in the
update; the head counts where something is predicted. Not counted: activations, norms, the softmax, sampling,
rewards, records, Python. The share is floor over measured."""

_RATES = """\
What the machine does at best. A model of up to 32 MB is held to the cache's rates, a larger one to memory's,
and to the fastest of its row; bfloat16 to float32's where that is faster."""

_LENGTHS = """\
## Cost by real tokens

32 completions a step of a model of the built-in one's size with random weights, whose completions have
nothing in common: all of one length, or each with a length of its own, exponential around the mean. With
padding the update of ragged rows would cost as much as *if padded* says. The rollout of ragged rows takes as
many decoding steps as its longest row has tokens. Attention is in the seconds: per token it grows with
length."""

_ACCUMULATION = """\
## Cost by accumulation

The same 64 completions in 1, 4, 32 and 64 micro-batches of B rows: medians over three runs of each, in turns.
*Ragged*: random weights, each completion with a length of its own, 64 tokens in the mean and 256 at most; as
with natural lengths (cases a, g4 and g32) many rows share a pass. *1,000-token prompts*: as in case d; a
prompt is computed once, however many passes its completions take. *All 256 tokens*: random weights, each
completion as long as it may be, so that a pass has room for B of them. *All 32 tokens*: the same with the
built-in model, whose completions have much in common: what they begin with alike is computed once in each
pass that holds some of them. `--max_tokens_per_micro_batch` lets it hold more."""

_MEMORY = """\
## Memory by vocabulary and length

A narrow model under several vocabularies, 16 completions of equal length; megabytes. *Rest* is the peak less
what was there before training and less gradient and moments: what the step itself takes. It does not follow
the logits, which never exist all at once."""

_SOAK = """\
## Memory by steps

64 completions a step; resident after each step, and the slope early and late: the median over all pairs
of steps, which a single jump does not move. A jump, where there is one, is a step whose tensors take more of
the heap than those of all steps before it."""

_SECTIONS: Sequence[tuple[str, str]] = (
    ("table", _TABLE),
    ("why", "A dash has a reason:"),
    ("target", _TARGET),
    ("equal-work", _EQUAL),
    ("floor", _FLOOR),
    ("rates", _RATES),
    ("lengths", _LENGTHS),
    ("accumulation", _ACCUMULATION),
    ("memory", _MEMORY),
    ("soak", _SOAK),
)


_OF_A_GPU = "## Measured on an H100\n"


def kept_of(text: str) -> str:
    """What of an earlier page this does not measure: a GPU, of which `make gpu-check` prints the figures, and
    what stands behind it."""
    _, heading, section = text.partition(_OF_A_GPU)
    return heading + section.rstrip()


def page(report: Mapping[str, Sequence[str]], measured_on: Sequence[str], kept: str = "") -> str:
    """The Markdown page of a report: its sections, in their order, under what was measured on what; then what
    is kept of an earlier page."""
    parts = [_TITLE, "\n".join(measured_on)]
    for name, text in _SECTIONS:
        if name in report:
            parts += [text, "\n".join(report[name])]
    return "\n\n".join([*parts, *([kept] if kept else [])]) + "\n"
