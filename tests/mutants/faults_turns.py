"""Faults of episodes of several turns: what is trained of them, and how their turns are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from covey.environments import draft
from covey.learner import annotate
from covey.rollout import turns
from covey.rollout.native import engine, kept
from covey.types import Completion, EpisodeId, Source, TokenSequence
from covey.types.arrays import joined_floats, joined_ints
from mutants.faults import Patch, Plant, before, changed
from mutants.harness import Mutant, nothing

_HERE = Path(__file__).parent

# Three turns an episode: all in one sequence, or each in a sequence of its own.
EXTENDED = {
    "environment_factory": str(_HERE / "turns.py:Sums"),
    "reward_funcs": ["environment"],
    "num_generations": 4,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 96,
    "max_tokens_per_micro_batch": 1000,
}
REWRITTEN = {**EXTENDED, "chat_template": str(_HERE / "rewrites.jinja")}
# The rehearsal would refuse it before the run.
UNSEEDED = {**EXTENDED, "environment_factory": str(_HERE / "turns.py:Unseeded"), "reward_trial": False}

# A scheduler of ms-swift that leaves out the first token of the first of two turns.
MASKED = {
    "external_plugins": [str(_HERE / "swift_plugin.py")],
    "multi_turn_scheduler": "masked",
    "num_generations": 4,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "max_tokens_per_micro_batch": 1000,
    "max_turns": 2,
}


def _trains(wanted: Source) -> Plant:
    """The tokens that somebody else wrote are trained like those of the model, with logprobs of 0."""

    def also(found: TokenSequence, *args: Any) -> TokenSequence:
        sources = [source for source, count in found.sources for _ in range(count)]
        return _with_mask(found, found.is_trained | np.array([source is wanted for source in sources]))

    return changed(draft.SequenceDraft, "sequence", also)


def _with_mask(found: TokenSequence, is_trained: Any) -> TokenSequence:
    logprobs = np.zeros(len(is_trained), np.float32)
    logprobs[found.is_trained] = found.logprobs
    versions = ((found.versions[0][0], int(is_trained.sum())),)
    return replace(found, is_trained=is_trained, logprobs=logprobs[is_trained], versions=versions)


def _masks_otherwise(change: Callable[[list[bool]], list[bool]]) -> Plant:
    """The draft is given another mask of the first turn than the scheduler asked for."""
    return before(
        draft.EpisodeDraft, "leave_out", lambda self, masks: (self, [change([*masks[0]]), *masks[1:]])
    )


def _said(change: Callable[[Completion], Completion]) -> Plant:
    """The draft is given other tokens of a turn than were sampled."""
    return before(draft.EpisodeDraft, "say", lambda self, drawn, spoken: (self, change(drawn), spoken))


def _encoded_again(drawn: Completion) -> Completion:
    """Ids as another tokenizer would have them: the first one differs."""
    ids = drawn.token_ids.copy()
    ids[0] = (ids[0] + 1) % 256
    return replace(drawn, token_ids=ids)


def _with_end(drawn: Completion) -> Completion:
    """The end of the turn as the template writes it, behind the one that was sampled."""
    return replace(
        drawn,
        token_ids=joined_ints([drawn.token_ids, drawn.token_ids[-1:]]),
        logprobs=joined_floats([drawn.logprobs, drawn.logprobs[-1:]]),
        versions=(*drawn.versions, (drawn.versions[-1][0], 1)),
    )


def _drops_a_turn(found: TokenSequence, *args: Any) -> TokenSequence:
    """The sequence is without the tokens of its second turn."""
    models = [n for n, (source, _) in enumerate(found.sources) if source is Source.MODEL]
    if len(models) < 2:
        return found
    (end, count), is_kept = found.turn_runs[1], np.ones(len(found.token_ids), bool)
    is_kept[end - count : end] = False
    own = is_kept[found.is_trained]
    return replace(
        found,
        token_ids=found.token_ids[is_kept],
        is_trained=found.is_trained[is_kept],
        logprobs=found.logprobs[own],
        versions=((found.versions[0][0], int(own.sum())),),
        sources=tuple(run for n, run in enumerate(found.sources) if n != models[1]),
    )


def _stale_later_turn(patch: Patch) -> None:
    """A turn behind the first one has tokens of the first weights."""
    real = engine.NativeEngine._completion

    def completion(self: Any, row: Any, finish: Any) -> Any:
        done = real(self, row, finish)
        is_first = row.request.turn.turn == 0
        return done if is_first else replace(done, versions=((0, len(done.token_ids)),))

    patch.setattr(engine.NativeEngine, "_completion", completion)


def _of_another_turn(found: Any, *args: Any) -> Any:
    """Other keys and values; in another order of tokens they would give the same attention."""
    if found is None:
        return None
    parts = [replace(part, layers={n: own.flip(3) for n, own in part.layers.items()}) for part in found.parts]
    return replace(found, parts=parts)


def _first_row_alone(credits: list[Any], groups: Any, samples: Any, *args: Any) -> list[Any]:
    """Later sequences of an episode have no advantage, as those of nobody."""
    return [
        replace(c, advantage=c.advantage if s.sequence == 0 else -c.advantage)
        for c, s in zip(credits, samples, strict=True)
    ]


def _drops_later_rows(rows: list[Any], *args: Any) -> list[Any]:
    return [row for row in rows if row.sequence != 1]


MUTANTS = (
    Mutant(
        "trains what an environment wrote", "F110", 1, _trains(Source.ENVIRONMENT), EXTENDED, "environment"
    ),
    Mutant("trains the prompt of an episode", "F110", 1, _trains(Source.PROMPT), REWRITTEN, "prompt"),
    Mutant(
        "asks for each turn under the first one's id",
        "F144",
        1,
        before(EpisodeId, "turn_id", lambda self, number=0: (self, 0)),
        EXTENDED,
        "[0, 0, 0]",
    ),
    Mutant("encodes a turn again", "F110", 1, _said(_encoded_again), EXTENDED, "turn 1 has other tokens"),
    Mutant(
        "encodes a turn again, each in a sequence",
        "F110",
        1,
        _said(_encoded_again),
        REWRITTEN,
        "turn 1 has other tokens",
    ),
    Mutant(
        "encodes a turn again as it comes back",
        "F115",
        1,
        before(turns.TurnLoop, "_take_turn", lambda self, n, drawn: (self, n, _encoded_again(drawn))),
        EXTENDED,
    ),
    Mutant("trains the template's end of a turn", "F110", 1, _said(_with_end), EXTENDED),
    Mutant(
        "drops a turn",
        "F111",
        1,
        changed(draft.SequenceDraft, "sequence", _drops_a_turn),
        EXTENDED,
        "3 turns were sampled, but 2",
    ),
    Mutant(
        "trains a token that a scheduler left out",
        "F110",
        1,
        _masks_otherwise(lambda mask: [True, *mask[1:]]),
        MASKED,
        "sampled tokens would be trained",
    ),
    Mutant(
        "leaves out one token more than a scheduler",
        "F110",
        1,
        _masks_otherwise(lambda mask: [*mask[:-1], False]),
        MASKED,
        "sampled tokens would be trained",
    ),
    Mutant(
        "drops the last sequence of an episode",
        "F111",
        1,
        changed(draft.EpisodeDraft, "sequences", lambda found, *a: found[:-1] or found),
        REWRITTEN,
        "3 turns were sampled, but",
    ),
    Mutant(
        "drops a sequence on its way to the rows",
        "F111",
        1,
        changed(annotate, "to_samples", _drops_later_rows),
        REWRITTEN,
        "3 sequences, but the rows [0, 2]",
    ),
    Mutant(
        "gives later sequences another advantage",
        "F113",
        1,
        changed(annotate, "row_credits", _first_row_alone),
        REWRITTEN,
        "3 rows have different advantages",
    ),
    Mutant("begins siblings differently", "F143", 1, nothing, UNSEEDED, "began in 4 different ways"),
    Mutant("has a later turn of former weights", "F114", 2, _stale_later_turn, EXTENDED),
    Mutant(
        "goes on from other keys and values",
        "F115",
        1,
        changed(kept.KeptRows, "take", _of_another_turn),
        EXTENDED,
    ),
)
