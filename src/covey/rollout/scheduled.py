"""Tells a scheduler of each turn, and finishes the episode that it has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from covey.environments.histories import Following
from covey.rollout.running import Running
from covey.texts import tr
from covey.types import Completion, Episode, Finish, Turn
from covey.types.arrays import ints
from covey.types.episode import digest_of


def told_scheduler(one: Running, completion: Completion, length: int) -> dict[str, Any]:
    """Return a turn as a scheduler is given it; `length` tokens stood in front of it."""
    return {
        "text": one.said.opened + one.said.sampled,
        "token_ids": completion.token_ids.tolist(),
        "logprobs": completion.logprobs.tolist(),
        "finish": str(completion.finish),
        "length": length,
    }


def no_turn() -> dict[str, Any]:
    """Return what a scheduler is given where there is no room for another turn: one that was cut at once."""
    return {"text": "", "token_ids": [], "logprobs": [], "finish": str(Finish.LENGTH), "length": 0}


def as_gone_on(turn: Turn, going_on: Following, sampled: Sequence[int]) -> Turn:
    """Return the last turn, of these tokens, with what followed it, or with what stays of it where it goes
    on."""
    if going_on.kept is None:
        return replace(turn, answer=going_on.messages)
    stays, cut = sampled[: going_on.kept], tuple(sampled[going_on.kept :])
    return replace(turn, text=going_on.written, digest=digest_of(ints(stays)), cut_ids=cut)


def rewritten_note(why: str) -> str:
    """Return what is said once of a conversation whose next turn cannot go on from the tokens of the last."""
    return tr(
        "{why}, so that a new row of the episode begins; each sampled token is trained once, behind the "
        "tokens that it was sampled behind",
        why=why,
    )


def trained_as_asked(one: Running, *, trains_last: bool) -> None:
    """Train what the scheduler has left to be trained; with `trains_last` the last turn alone, of each of its
    outputs, unless it has masked tokens itself."""
    draft, ended = one.draft, one.ended
    assert draft is not None
    lengths = draft.turn_lengths()
    masks = [[True] * length for length in lengths]
    if ended is not None:
        # What was cut of a turn is not there.
        masks = [list(mask[:length]) for mask, length in zip(ended.masks, lengths, strict=True)]
    if trains_last and not (ended is not None and ended.is_masked):
        last = (len(lengths) - 1,) if ended is None else ended.last_turns
        masks = [mask if n in last else [False] * len(mask) for n, mask in enumerate(masks)]
    draft.leave_out(masks)
    pairs = zip(one.turns, masks, strict=True)
    one.turns = [replace(turn, num_left_out=mask.count(False)) for turn, mask in pairs]


def with_ended(one: Running, episode: Episode) -> Episode:
    """Return an episode with what its scheduler noted for rewards."""
    ended = one.ended
    if ended is None:
        return episode
    name = episode.id.turn_id().text
    columns: Mapping[str, Any] = {
        "request_id": name,
        "rollout_infos": dict(ended.infos),
        "trajectory_inputs": {"request_id": name, "outputs": [*ended.outputs]},
    }
    return replace(episode, columns=columns, messages=ended.messages)
