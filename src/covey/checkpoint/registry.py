"""The state registry: every component that a resumed run needs, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from covey.checkpoint.exact import JSON
from covey.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What one component needs to go on: `State(json={"epoch": 1}, tensors={"moment": tensor})`."""

    json: Mapping[str, JSON] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class Stateful(Protocol):
    """A component whose state belongs in a checkpoint."""

    @property
    def name(self) -> str:
        """The name under which the state is kept; "/" nests, as in "rng/0"."""

    def state(self) -> State:
        """Return what `load_state` needs to continue exactly here."""

    def load_state(self, state: State) -> None:
        """Continue from `state`."""


class Registry:
    """The components of this run, and the names that must be among them before anything is saved."""

    def __init__(self) -> None:
        self._components: dict[str, Stateful] = {}
        self._expected: set[str] = set()
        self._later: set[str] = set()

    def register(self, component: Stateful, *, is_later: bool = False) -> None:
        """Add a component; a name that is taken is a CheckpointError.

        `is_later` says that older checkpoints have no state for it: it then stays as it is.
        """
        if component.name in self._components:
            raise CheckpointError(f"two components are called {component.name!r}; each name stands once")
        self._components[component.name] = component
        if is_later:
            self._later.add(component.name)

    def expect(self, names: Iterable[str]) -> None:
        """Declare names that must be registered by the time of a save or a load."""
        self._expected.update(names)

    @property
    def names(self) -> tuple[str, ...]:
        """The registered names, in the order in which they came."""
        return tuple(self._components)

    def states(self) -> dict[str, State]:
        """Return the state of every component; one that is expected and absent is a CheckpointError."""
        self._require_expected("saved")
        return {name: component.state() for name, component in self._components.items()}

    def load(self, states: Mapping[str, State]) -> None:
        """Give every component its state.

        The names must match, but for those of later components. All of them are compared before the first
        component changes, so a refused load leaves every component as it was.
        """
        self._require_expected("loaded")
        missing = sorted(set(self._components) - set(states) - self._later)
        if missing:
            raise CheckpointError(f"the checkpoint has no state for {_quoted(missing)}")
        surplus = sorted(set(states) - set(self._components))
        if surplus:
            raise CheckpointError(
                f"the checkpoint has state for {_quoted(surplus)}, which nothing in this run takes"
            )
        for name, component in self._components.items():
            if name in states:
                component.load_state(states[name])

    def _require_expected(self, action: str) -> None:
        missing = sorted(self._expected - set(self._components))
        if missing:
            raise CheckpointError(f"nothing can be {action}: {_quoted(missing)} must be registered first")


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
