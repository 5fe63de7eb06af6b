"""The stateful components of a run, each giving JSON and tensors to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covey.checkpoint.pieces import Piece, SavedPieces
from covey.checkpoint.registry import State
from covey.comm import Comm
from covey.errors import CheckpointError
from covey.health.rewards import RewardWatch
from covey.health.rules import Rules
from covey.health.words import broken
from covey.learner.backends.base import Backend
from covey.learner.reference import MovingReference
from covey.texts import tr
from covey.training.guards import Guards
from covey.types import AnnotatedSample, Finish, Fix, Metric, Sample, TrainSample


class Progress:
    """Where the run stands: optimizer steps taken, rollouts finished, and running totals.

    `upcoming` gives a rollout's prompts as row and checksum; a resumed run compares them with those that the
    stopped one would have taken next. None: nothing can be said of them beforehand. `may_differ` is where
    they, or their order, have been changed by the user's word.
    """

    name = "progress"

    def __init__(
        self, upcoming: Callable[[int], list[list[int]]] | None = None, *, may_differ: bool = False
    ) -> None:
        self._upcoming = upcoming
        self._may_differ = may_differ
        self.step = 0
        self.rollout = 0
        self.num_tokens = 0
        self.began: int | None = 0
        """Optimizer steps taken when the current rollout began; None where a checkpoint does not say."""

    def state(self) -> State:
        """The counters."""
        counts = {"step": self.step, "rollout": self.rollout, "num_tokens": self.num_tokens}
        counts |= {} if self.began is None else {"began": self.began}
        coming = None if self._upcoming is None else self._upcoming(self.rollout)
        return State(json={**counts, "upcoming": coming})

    def load_state(self, state: State) -> None:
        """Go on from these counters. GuardStop (F126) where other prompts come next."""
        values: Any = state.json
        self.step, self.rollout = values["step"], values["rollout"]
        self.num_tokens, self.began = values["num_tokens"], values.get("began")
        before = values.get("upcoming")
        if before is None or self._upcoming is None or self._may_differ:
            return
        now = self._upcoming(self.rollout)
        if now != before:
            rows, former = ([row + 1 for row, _ in prompts[:4]] for prompts in (now, before))
            seen = tr(
                "the next prompts are the rows {rows}, but in the stopped run they were {former}",
                rows=rows,
                former=former,
            )
            if rows == former:
                seen = tr(
                    "the text of the next prompts (rows {rows}) differs from that in the stopped run",
                    rows=rows,
                )
            cause = tr("The dataset has other rows than before, or they are drawn in another order.")
            fix = Fix(text=tr("resume with the data of the stopped run, or start a new run"))
            raise broken("F126", self.step, seen, cause, fix)


def check_position(progress: Progress, buffer: RolloutBuffer) -> None:
    """Raise GuardStop (F126) where a resumed run would go on at another step of its rollout."""
    if progress.began is None or progress.step - progress.began == buffer.done:
        return
    taken = progress.step - progress.began
    seen = tr(
        "{taken} steps of the rollout were taken, but the resumed run would continue after {done} of them",
        taken=taken,
        done=buffer.done,
    )
    cause = tr("Parts of the checkpoint were saved at different steps.")
    raise broken("F126", progress.step, seen, cause, Fix(text=tr("resume from another checkpoint")))


class OptimizerState:
    """AdamW's moments and the masters, through the backend."""

    name = "optimizer"

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def pieces(self) -> Iterable[Piece]:
        """The tensors that the backend holds on this rank."""
        return self._backend.pieces()

    def load_pieces(self, saved: SavedPieces) -> None:
        """Give the backend what all ranks have saved."""
        self._backend.load_pieces(saved)


class ReferenceState:
    """A reference that follows the policy."""

    name = "reference"

    def __init__(self, moving: MovingReference, comm: Comm) -> None:
        self._moving, self._comm = moving, comm

    def pieces(self) -> Iterable[Piece]:
        """This rank's part of its tensors, which every rank holds."""
        return self._moving.pieces(self._comm.rank, self._comm.world)

    def load_pieces(self, saved: SavedPieces) -> None:
        """Give them back."""
        self._moving.load_pieces(saved)


class RandomState:
    """torch's generators, one a rank. Sampling needs none of them; dropout, where it is on, does."""

    name = "rng"

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def state(self) -> State:
        """Every rank's generator. Collective."""
        mine = [bytes(torch.get_rng_state().tolist()).hex()]
        if torch.cuda.is_available():
            mine.append(bytes(torch.cuda.get_rng_state().tolist()).hex())
        return State(json={"ranks": self._comm.gather_json(mine)})

    def load_state(self, state: State) -> None:
        """This rank's generator, where the stopped run had as many ranks."""
        ranks: Any = state.json["ranks"]
        if len(ranks) != self._comm.world:
            return
        torch.set_rng_state(_bytes(ranks[self._comm.rank][0]))
        if torch.cuda.is_available() and len(ranks[self._comm.rank]) > 1:
            torch.cuda.set_rng_state(_bytes(ranks[self._comm.rank][1]))


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What a run is judged by: the rules with the start that they compare with, rewards, and guards."""

    rules: Rules
    watch: RewardWatch
    guards: Guards

    @property
    def name(self) -> str:
        """`health`; checkpoints that lack it are of older versions."""
        return "health"

    def state(self) -> State:
        """Counts, streaks and series."""
        parts = {"rules": self.rules.state(), "rewards": self.watch.state(), "guards": self.guards.state()}
        return State(json=parts)

    def load_state(self, state: State) -> None:
        """Judge what comes as the stopped run would have."""
        values: Any = state.json
        self.rules.load_state(values["rules"])
        self.watch.load_state(values["rewards"])
        self.guards.load_state(values["guards"])


# Names of a checkpoint's tensors, and the annotations that they hold.
_ANNOTATIONS = {"old": "old_logprob_N", "ref": "ref_logprob_N", "entropy": "entropy_N"}


class RolloutBuffer:
    """The samples of the rollout being trained on, so that a resume in its middle goes on with the same
    ones."""

    name = "rollout"

    def __init__(self) -> None:
        self.rows: tuple[TrainSample, ...] = ()
        self.metrics: dict[str, Metric] = {}
        self.logged: dict[str, Metric] = {}
        self.done = 0

    def fill(
        self, rows: Sequence[TrainSample], metrics: dict[str, Metric], logged: dict[str, Metric]
    ) -> None:
        """Take a new rollout, none of whose steps is done; `logged` is what the rewards have logged."""
        self.rows, self.metrics, self.logged, self.done = tuple(rows), metrics, logged, 0

    def clear(self) -> None:
        """The rollout's steps are all done."""
        self.fill((), {}, {})

    def state(self) -> State:
        """The samples as JSON, and their annotations as one flat tensor a kind."""
        tensors = {}
        for kind, field in _ANNOTATIONS.items():
            parts = [getattr(r.annotated, field) for r in self.rows]
            present = [p for p in parts if p is not None]
            if present:
                tensors[kind] = torch.cat(present)
        return State(
            json={
                "done": self.done,
                "rows": [_row_json(r) for r in self.rows],
                "metrics": {name: [m.value, m.count] for name, m in self.metrics.items()},
                "logged": {name: [m.value, m.count] for name, m in self.logged.items()},
            },
            tensors=tensors,
        )

    def load_state(self, state: State) -> None:
        """Go on with these samples, `done` of whose steps are taken."""
        values: Any = state.json
        counts = [len(r["sampler_logprobs"]) for r in values["rows"]]
        split: dict[str, list[Tensor | None]] = {}
        for kind, field in _ANNOTATIONS.items():
            if kind in state.tensors and state.tensors[kind].numel() != sum(counts):
                raise CheckpointError(
                    tr("the {kind} log-probabilities of the rollout do not match its samples", kind=kind)
                )
            whole = state.tensors.get(kind)
            split[field] = [None] * len(counts) if whole is None else list(whole.split(counts))
        self.rows = tuple(
            _row(i, r, {field: parts[i] for field, parts in split.items()})
            for i, r in enumerate(values["rows"])
        )
        self.metrics, self.logged = (
            {name: Metric(value=v, count=c) for name, (v, c) in values.get(kind, {}).items()}
            for kind in ("metrics", "logged")
        )
        self.done = values["done"]


def _row_json(row: TrainSample) -> dict[str, Any]:
    sample = row.annotated.sample
    return {
        "group": sample.group,
        "sibling": sample.sibling,
        "episode": sample.episode,
        "token_ids": list(sample.token_ids),
        "prompt_length": sample.prompt_length,
        "is_trained": [int(x) for x in sample.is_trained],
        "sampler_logprobs": list(sample.sampler_logprobs),
        "versions": list(sample.versions),
        "temperature": sample.temperature,
        "finish": str(sample.finish),
        **({"is_stale": True} if sample.is_stale else {}),
        "advantage": row.advantage,
        "loss_mask": [int(x) for x in row.loss_mask],
        "masked": row.masked,
        "needs_forward": row.needs_forward,
        **({} if row.token_advantages is None else {"token_advantages": list(row.token_advantages)}),
    }


def _row(number: int, values: dict[str, Any], annotations: dict[str, Tensor | None]) -> TrainSample:
    sample = Sample(
        group=values["group"],
        sibling=values["sibling"],
        # Checkpoints in which episodes have no number hold one row of each.
        episode=values.get("episode", number),
        token_ids=tuple(values["token_ids"]),
        prompt_length=values["prompt_length"],
        is_trained=tuple(bool(x) for x in values["is_trained"]),
        sampler_logprobs=tuple(values["sampler_logprobs"]),
        versions=tuple(values["versions"]),
        temperature=values["temperature"],
        finish=Finish(values["finish"]),
        is_stale=values.get("is_stale", False),
    )
    tokens = values.get("token_advantages")
    return TrainSample(
        annotated=AnnotatedSample(sample=sample, **annotations),
        advantage=values["advantage"],
        loss_mask=tuple(bool(x) for x in values["loss_mask"]),
        masked=values["masked"],
        needs_forward=values["needs_forward"],
        token_advantages=None if tokens is None else tuple(tokens),
    )
