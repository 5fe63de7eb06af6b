"""The memory of kept sets: what filters of sampling left to draw each token from."""

from __future__ import annotations

from covey.config.filters import filters_of
from covey.options.schema import Config
from covey.plan.facts import ModelSizes
from covey.types.kept import bitmap_words

_WORD = 4
# Tokens that a GPU decodes before the host reads them.
_STRIDE = 8
# Of each logit that is filtered: a GPU sorts them all, with ids and masses of eight bytes; a CPU has masses.
_FILTERED_BYTES = {True: 40, False: 24}


def set_bytes(config: Config, model: ModelSizes) -> int:
    """Return the bytes of a token's kept set at the most: its count, with top_k ids (those as probable as the
    last one not counted) or a bitmap of the vocabulary, whichever is smaller. 0 without filters."""
    if not filters_of(config):
        return 0
    bitmap = _WORD * bitmap_words(model.vocabulary)
    return _WORD + (min(_WORD * config.top_k, bitmap) if config.top_k > 0 else bitmap)


def rollout_set_bytes(config: Config, model: ModelSizes) -> int:
    """Return the bytes of the kept sets of all completions that a process samples for a rollout."""
    completions = config.per_device_train_batch_size * config.steps_per_generation
    return completions * config.max_completion_length * set_bytes(config, model)


def kept_set_parts(config: Config, model: ModelSizes, *, cuda: bool) -> dict[str, int]:
    """Return the part of a process's memory that the kept sets of a rollout take where it computes; with GPUs
    they are in the machine's memory."""
    num_bytes = 0 if cuda else rollout_set_bytes(config, model)
    return {"kept sets": num_bytes} if num_bytes else {}


def pass_set_parts(config: Config, model: ModelSizes, num_tokens: int) -> dict[str, int]:
    """Return the part that the kept sets of a forward pass over so many trained tokens take."""
    num_bytes = set_bytes(config, model) * num_tokens
    return {"kept sets of a pass": num_bytes} if num_bytes else {}


def filtering_bytes(config: Config, model: ModelSizes, *, cuda: bool) -> int:
    """Return what an engine filters a row with, and the bitmaps that it records it in."""
    if not filters_of(config):
        return 0
    bitmaps = (_STRIDE if cuda else 1) * _WORD * bitmap_words(model.vocabulary)
    return bitmaps + _FILTERED_BYTES[cuda] * model.vocabulary
