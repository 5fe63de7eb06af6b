"""How many tokens the filters of sampling left to draw from, over all sampled tokens of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from covey.batching.quantile import exact_quantile
from covey.comm import Comm
from covey.types import Metric, ScoredGroup
from covey.types.episode import held

# The quantile is the least of this share of the tokens, those with the largest sets.
_TOP = 0.01


def kept_metrics(groups: Sequence[ScoredGroup], comm: Comm) -> dict[str, Metric]:
    """Return the mean and the 99th percentile of the ids in a token's kept set, and the share of tokens whose
    set is one id; nothing where no token has a set. Collective: ranks send sums and counts, no tokens.
    """
    episodes = [episode for scored in groups for episode in scored.group.episodes]
    if all(sequence.kept_words < 0 for episode in episodes for sequence in episode.sequences):
        return {}
    own = [episode for episode in episodes if (episode.owner or 0) == comm.rank]
    sets = [held(sequence).kept for episode in own for sequence in episode.sequences]
    counts = np.concatenate([np.zeros(0, np.int32), *(kept.counts for kept in sets if kept is not None)])
    total, singles, num = comm.sum(
        [float(counts.sum(dtype=np.int64)), float((counts == 1).sum()), float(len(counts))]
    )
    # Counts of ids are whole numbers that a float32 holds.
    largest = exact_quantile(torch.from_numpy(counts.astype(np.float32)), _TOP, comm)
    return {
        "kept/mean": Metric(value=total / num if num else None, count=int(num)),
        "kept/p99": Metric(value=largest, count=int(num)),
        "kept/singletons": Metric(value=singles / num if num else None, count=int(num)),
    }
