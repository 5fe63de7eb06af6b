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
    return completions * config.most_sampled * set_bytes(config, model)


def rollout_set_parts(config: Config, model: ModelSizes, *, cuda: bool) -> dict[str, int]:
    """Return what a process holds of a rollout's kept sets: with GPUs they are in the machine's memory."""
    num_bytes = rollout_set_bytes(config, model)
    return {"kept sets": num_bytes} if num_bytes and not cuda else {}


def pass_set_parts(config: Config, model: ModelSizes, trained: int) -> dict[str, int]:
    """Return what a forward pass of `trained` tokens holds of their kept sets."""
    num_bytes = trained * set_bytes(config, model)
    return {"kept sets of a pass": num_bytes} if num_bytes else {}


def filtering_bytes(config: Config, model: ModelSizes, *, cuda: bool) -> int:
    """Return what an engine filters a row with, and the bitmaps that it records it in."""
    if not filters_of(config):
        return 0
    bitmaps = (_STRIDE if cuda else 1) * _WORD * bitmap_words(model.vocabulary)
    return bitmaps + _FILTERED_BYTES[cuda] * model.vocabulary
