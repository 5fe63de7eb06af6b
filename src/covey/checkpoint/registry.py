"""The state registry: every component that a resumed run needs, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from covey.checkpoint.exact import JSON
from covey.checkpoint.shards import SavedShards, Shard
from covey.errors import CheckpointError
from covey.texts import tr

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
        """Return the name under which the state is kept; "/" nests, as in "rng/0"."""

    def state(self) -> State:
        """Return what `load_state` needs to continue exactly here."""

    def load_state(self, state: State) -> None:
        """Continue from `state`."""


class ShardedState(Protocol):
    """A component whose tensors are too large for one rank. Each rank writes its own shards of them."""

    @property
    def name(self) -> str:
        """Return the name under which the shards are kept."""

    def shards(self) -> Iterable[Shard]:
        """Return this rank's shards; those of all ranks together hold every row once."""

    def load_shards(self, saved: SavedShards) -> None:
        """Continue from what any number of ranks has saved."""


class Registry:
    """Holds the components of this run, and the names that must be among them before anything is saved."""

    def __init__(self) -> None:
        self._components: dict[str, Stateful] = {}
        self._sharded: dict[str, ShardedState] = {}
        self._expected: set[str] = set()
        self._later: set[str] = set()
        self._has_some: dict[str, Callable[[], bool]] = {}

    def register(self, component: Stateful, *, is_later: bool = False) -> None:
        """Add a component; a name that is taken is a CheckpointError.

        `is_later` says that older checkpoints have no state for it: it then stays as it is.
        """
        self._refuse_taken(component.name)
        self._components[component.name] = component
        if is_later:
            self._later.add(component.name)

    def register_sharded(
        self, component: ShardedState, *, has_some: Callable[[], bool] | None = None
    ) -> None:
        """Add a component that every rank writes its own shards of.

        With `has_some` it is written where that holds, as it does on all ranks or none, and a checkpoint
        without it leaves it as it is.
        """
        self._refuse_taken(component.name)
        self._sharded[component.name] = component
        if has_some is not None:
            self._has_some[component.name] = has_some
            self._later.add(component.name)

    def _refuse_taken(self, name: str) -> None:
        if name in self.names:
            raise CheckpointError(tr("two components are called {name!r}; names must be unique", name=name))

    def expect(self, names: Iterable[str]) -> None:
        """Declare names that must be registered by the time of a save or a load."""
        self._expected.update(names)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the registered names, in the order in which they came; those in shards last."""
        return (*self._components, *self._sharded)

    def states(self) -> dict[str, State]:
        """Return the state of every component but those in shards; one that is expected and absent is a
        CheckpointError."""
        if unregistered := self._unregistered():
            raise CheckpointError(tr("cannot save yet: register {quoted} first", quoted=unregistered))
        return {name: component.state() for name, component in self._components.items()}

    def shards(self) -> dict[str, Iterable[Shard]]:
        """Return this rank's shards of the components that have them."""
        return {
            name: component.shards()
            for name, component in self._sharded.items()
            if name not in self._has_some or self._has_some[name]()
        }

    def load(self, states: Mapping[str, State], shards: Mapping[str, SavedShards] | None = None) -> None:
        """Give every component its state, or the shards that all ranks have saved of it.

        The names must match, but for those of later components. All of them are compared before the first
        component changes, so a refused load leaves every component as it was.
        """
        if unregistered := self._unregistered():
            raise CheckpointError(tr("cannot load yet: register {quoted} first", quoted=unregistered))
        saved = {**states, **(shards or {})}
        missing = sorted(set(self.names) - set(saved) - self._later)
        if missing:
            raise CheckpointError(tr("the checkpoint has no state for {quoted}", quoted=_quoted(missing)))
        surplus = sorted(set(saved) - set(self.names))
        if surplus:
            raise CheckpointError(
                tr(
                    "the checkpoint has state for {quoted}, but no component of this run uses it",
                    quoted=_quoted(surplus),
                )
            )
        for name, component in self._components.items():
            if name in states:
                component.load_state(states[name])
        for name, parts in (shards or {}).items():
            self._sharded[name].load_shards(parts)

    def _unregistered(self) -> str:
        """Return the expected components that are not registered yet, quoted; empty where all of them are."""
        return _quoted(sorted(self._expected - set(self.names)))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
