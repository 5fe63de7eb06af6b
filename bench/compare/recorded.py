"""Written completions, handed to another trainer in place of what it would generate."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path


class Recorded:
    """The completions of one rollout file by their prompts' tokens, each given once, in their order.

    A prompt that was tokenized in another way is not found: `take` raises KeyError.
    """

    def __init__(self, rollouts: Path) -> None:
        self._waiting: dict[tuple[int, ...], deque[list[int]]] = defaultdict(deque)
        for line in (rollouts / "rollout-000000.jsonl").read_text().splitlines():
            record = json.loads(line)
            self._waiting[tuple(record["prompt_ids"])].append(record["completion_ids"])

    def take(self, prompt_ids: Sequence[int]) -> list[int]:
        """The next completion of a prompt."""
        key = tuple(prompt_ids)
        if not self._waiting.get(key):
            raise KeyError(f"no written completion of a prompt of {len(key)} tokens that begins {key[:8]}")
        return self._waiting[key].popleft()
