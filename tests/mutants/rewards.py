"""Rewards that go wrong in a rollout and not in their trial, one of whose completions is empty."""

import os
import time


def lengths(completions, **columns):
    """A hundredth of the number of characters."""
    return [len(text) / 100 for text in completions]


def _is_trial(completions):
    return not all(completions)


def _is_last_rank():
    return int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1


def sleeps(completions, **columns):
    """Never comes back, on the last rank."""
    if not _is_trial(completions) and _is_last_rank():
        time.sleep(10_000)
    return lengths(completions)


def raises(completions, **columns):
    """Raises on the last rank."""
    if not _is_trial(completions) and _is_last_rank():
        raise ConnectionError("the judge does not answer")
    return lengths(completions)


def swallows(completions, **columns):
    """Returns 0 whatever goes wrong."""
    if _is_trial(completions):
        return lengths(completions)
    try:
        return [float(columns["no_such_column"][i]) for i, _ in enumerate(completions)]
    except LookupError:
        return [0.0] * len(completions)


def gives_nan(completions, **columns):
    """NaN for every completion, as the mean of nothing is."""
    return lengths(completions) if _is_trial(completions) else [float("nan")] * len(completions)
