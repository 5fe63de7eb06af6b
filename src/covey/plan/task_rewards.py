"""Which rewards score which task, by the names that metrics have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def called(entries: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """What task_rewards may call a reward, to its entry of reward_funcs: the entry itself and its metric's
    name.

    `names` are those of metrics, in the same order; empty where nobody loaded the rewards, whose metrics then
    are called as their functions. `called(["judge.py:kind"], [])` is `{"judge.py:kind": "judge.py:kind",
    "kind": "judge.py:kind"}`.
    """
    if len(names) != len(entries):
        names = [_name(entry) for entry in entries]
    short = {name: entry for name, entry in zip(names, entries, strict=True) if names.count(name) == 1}
    return {**short, **{entry: entry for entry in entries}}


def shown(entries: Sequence[str]) -> list[str]:
    """What messages call rewards: as they were typed, but a function of a file with a whole path, as a
    program gives it, by its name alone, where no other has it.

    `shown(["/data/train.py:length", "format"])` is `["length", "format"]`.
    """
    names = [_name(entry) for entry in entries]
    return [
        name if entry.startswith("/") and ".py:" in entry and names.count(name) == 1 else entry
        for entry, name in zip(entries, names, strict=True)
    ]


def _name(entry: str) -> str:
    if ":" not in entry and "/" in entry:  # a reward model, called as its directory
        return entry.rstrip("/").rpartition("/")[2]
    return entry.rpartition(":")[2].rpartition(".")[2]


def asked(
    task_rewards: Mapping[str, Sequence[str]] | None, entries: Sequence[str], names: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """The metric names of the rewards that score each task; names that stand for no reward are left out."""
    known = called(entries, names)
    metric = dict(zip(entries, names, strict=True))
    return {
        task: tuple(metric[known[name]] for name in listed if name in known)
        for task, listed in (task_rewards or {}).items()
    }
