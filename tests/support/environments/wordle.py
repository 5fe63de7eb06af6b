"""Environments as people write them for TRL: `environment_factory`."""

import asyncio
import random
import time


class Wordle:
    """Guess a word."""

    def __init__(self):
        self.words = ["crane", "slate", "house", "mouse"]

    def reset(self, **kwargs) -> str | None:
        self.secret = random.choice(self.words)
        self.guesses = []
        return f"Guess a word of {len(self.secret)} letters. It begins with {self.secret[0]}."

    def guess(self, word: str) -> str:
        """
        Guess the word.

        Args:
            word: five letters

        Returns:
            How well it fits.
        """
        if len(word) != len(self.secret):
            raise ValueError(f"{word} has {len(word)} letters")
        self.guesses.append(word)
        return "".join("G" if a == b else "-" for a, b in zip(word, self.secret, strict=True))

    def _hidden(self):
        return self.secret

    @property
    def broken(self):
        raise RuntimeError("nobody asked")

    def get_reward(self) -> float:
        return float(self.secret in self.guesses)


class Shop:
    """An async one, with named columns, content blocks and a seed."""

    async def reset(self, prompt, budget: int, seed: int | None = None):
        await asyncio.sleep(0)
        self.loop = asyncio.get_running_loop()
        self.budget, self.seed = budget, seed
        self.draw = random.random()
        return [{"type": "text", "text": f"{prompt[-1]['content']} {budget} {seed} {self.draw}"}]

    async def buy(self, item: str, seconds: float = 0.0) -> dict:
        """Buy a thing.

        Args:
            item: what
            seconds: how long it takes
        """
        await asyncio.sleep(seconds)
        assert self.loop is asyncio.get_running_loop()
        self.budget -= 1
        return {"item": item, "left": self.budget}

    async def stare(self) -> None:
        """Do nothing, and let nobody else do anything."""
        time.sleep(20)

    async def get_reward(self):
        return self.budget / 10

    async def close(self):
        self.budget = None


def seen(environments, prompts, log_metric=None, **kwargs):
    """A reward that looks at the environments."""
    log_metric("environments", len(environments))
    return [len(e.guesses) + len(p) for e, p in zip(environments, prompts, strict=True)]


async def budgets(environments, completions):
    """An async reward that asks them."""
    return [(await e.buy("last"))["left"] for e in environments]


def slow(environments, completions):
    time.sleep(20)


def wrong(environments, completions):
    return [e.nothing for e in environments]
