"""What a scheduler asked for that is done in another way is said once, whichever rank has noted it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from covey.comm import LocalComm
from covey.environments.agents import Notes
from covey.texts import packed, tr
from covey.training.health import Health


class TwoRanks(LocalComm):
    """The other rank has noted one thing in its first rollout."""

    def __init__(self) -> None:
        self._other = [["The mask is odd"]]

    def gather_json(self, value: Any) -> list[Any]:
        others = self._other.pop(0) if self._other else []
        return [value, [packed(words) for words in others]]


def health(notes: Notes | None, comm: LocalComm) -> Health:
    given: Any = SimpleNamespace(comm=comm)
    return Health(rules=given, watch=given, guards=given, notes=notes)


def test_notes_of_all_ranks_are_said_once_each() -> None:
    notes = Notes()
    own = health(notes, TwoRanks())
    for _ in range(2):
        notes.add(tr("run() asks for more turns than there is room for, and does not end"))
    notes.add("The mask is odd")
    found = own._new_notes(3)
    assert [finding.seen for finding in found] == [
        "The scheduler: run() asks for more turns than there is room for, and does not end.",
        "The scheduler: The mask is odd.",
    ]
    assert {(finding.code, str(finding.severity), finding.step) for finding in found} == {
        ("W158", "warning", 3)
    }
    notes.add("The mask is odd")
    assert own._new_notes(4) == []
    notes.add("Another one")
    assert [finding.seen for finding in own._new_notes(5)] == ["The scheduler: Another one."]


def test_a_run_without_a_scheduler_notes_nothing() -> None:
    assert health(None, LocalComm())._new_notes(1) == []
