"""The order of prompts, as a pure function of seed and position: a resumed run takes what would have come
next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`num_prompts` prompts, taken `per_rollout` at a time; an epoch's last partial rollout is left out.

    `levels`, one a prompt or none at all, sorts what an epoch takes: low ones first, equal ones in the order
    that they would have without.
    """

    num_prompts: int
    per_rollout: int
    seed: int
    shuffle: bool
    levels: tuple[int, ...] = ()

    @property
    def rollouts_per_epoch(self) -> int:
        """Whole rollouts in one pass over the prompts."""
        return self.num_prompts // self.per_rollout

    def take(self, rollout: int) -> tuple[int, list[int]]:
        """The epoch of a rollout and the prompt numbers it takes.

        `Order(num_prompts=5, per_rollout=2, seed=0, shuffle=False).take(2)` is `(1, [0, 1])`.
        """
        epoch, index = divmod(rollout, self.rollouts_per_epoch)
        start = index * self.per_rollout
        numbers = self._permutation(epoch)[start : start + self.per_rollout]
        return epoch, [int(i) for i in numbers]

    def _permutation(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        numbers = np.arange(self.num_prompts)
        if self.shuffle:
            numbers = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.num_prompts)
        if not self.levels:
            return numbers
        # The prompts that an epoch leaves out are dropped before sorting, or they would be of the last level
        # in every epoch.
        taken = numbers[: self.rollouts_per_epoch * self.per_rollout]
        return taken[np.argsort(np.asarray(self.levels)[taken], kind="stable")]
