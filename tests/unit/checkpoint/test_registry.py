from __future__ import annotations

import pytest

from covey.checkpoint.registry import Registry, State
from covey.errors import CheckpointError


class Counter:
    def __init__(self, name: str, value: int = 0) -> None:
        self.name = name
        self.value = value

    def state(self) -> State:
        return State(json={"value": self.value})

    def load_state(self, state: State) -> None:
        self.value = state.json["value"]  # type: ignore[assignment]


def registry_of(*components: Counter) -> Registry:
    registry = Registry()
    for component in components:
        registry.register(component)
    return registry


def test_states_of_one_registry_restore_another() -> None:
    saved = registry_of(Counter("cursor", 7), Counter("rng/0", 9)).states()
    cursor, rng = Counter("cursor"), Counter("rng/0")
    registry_of(rng, cursor).load(saved)
    assert (cursor.value, rng.value) == (7, 9)


def test_a_later_component_stays_as_it_is_where_an_older_checkpoint_lacks_it() -> None:
    cursor, signs = Counter("cursor"), Counter("signs", 5)
    registry = registry_of(cursor)
    registry.register(signs, is_later=True)
    registry.load({"cursor": State(json={"value": 7})})
    assert (cursor.value, signs.value) == (7, 5)
    registry.load({"cursor": State(json={"value": 8}), "signs": State(json={"value": 3})})
    assert (cursor.value, signs.value) == (8, 3)
    with pytest.raises(CheckpointError, match="no state for 'cursor'"):
        registry.load({"signs": State(json={"value": 3})})


def test_a_name_stands_once() -> None:
    registry = registry_of(Counter("cursor"))
    with pytest.raises(CheckpointError, match="'cursor'"):
        registry.register(Counter("cursor"))
    assert registry.names == ("cursor",)


def test_an_expected_component_that_nobody_registered_is_refused_by_name() -> None:
    registry = registry_of(Counter("cursor"))
    registry.expect(["cursor", "schedule"])
    with pytest.raises(CheckpointError, match="cannot save yet: register 'schedule'"):
        registry.states()
    with pytest.raises(CheckpointError, match="cannot load yet: register 'schedule'"):
        registry.load({"cursor": State(json={"value": 1})})
    registry.register(Counter("schedule", 3))
    assert registry.states()["schedule"].json == {"value": 3}


@pytest.mark.parametrize(
    ("names", "refused"),
    [(("cursor",), "no state for 'rng'"), (("cursor", "rng", "queue"), "state for 'queue'")],
)
def test_missing_and_surplus_states_are_refused_before_anything_changes(
    names: tuple[str, ...], refused: str
) -> None:
    cursor, rng = Counter("cursor", 1), Counter("rng", 2)
    with pytest.raises(CheckpointError, match=refused):
        registry_of(cursor, rng).load({name: State(json={"value": 99}) for name in names})
    assert (cursor.value, rng.value) == (1, 2)
