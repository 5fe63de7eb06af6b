"""`covey replay RUN --rollout N [--group G] [--checkpoint NAME] [--sample] [--json]`: a group once more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from os.path import isdir, isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.cli.recorded import chosen_rollout, named_run
from covey.config.argv import read_words
from covey.config.checkpoints import list_checkpoints
from covey.errors import ConfigError, CoveyError
from covey.options.verbs import ReplayOptions
from covey.plan.problem import problem
from covey.telemetry.rollouts import list_rollouts, read_rollout
from covey.texts import Text, joined, tr
from covey.texts.language import spoken
from covey.texts.terminal import say, say_json
from covey.types import Fix, Problem

if TYPE_CHECKING:
    from covey.training.replay import Replay, ReplayedEpisode
    from covey.training.replay_differences import Difference, Drawn

# Characters of a text that a difference shows.
_MOST_SHOWN = 200


def replay(argv: Sequence[str]) -> int:
    """Print a group and what a replay says of it; ConfigError where there is none, or it cannot be drawn."""
    options, words = read_words("replay", argv, ReplayOptions)
    run = named_run("replay", words)
    number, faults = chosen_rollout("replay", run, options.rollout)
    checkpoint, more = _checkpoint(run, options.checkpoint)
    records: Sequence[Mapping[str, Any]] = []
    try:
        if number >= 0:
            records = read_rollout(list_rollouts(run / "rollouts")[number], with_sets=True)
        group, others = _group(number, records, options.group)
        if problems := [*faults, *more, *others]:
            raise ConfigError(problems)
        from covey.training.replay import replay as replayed

        found = replayed(run, number, records, group, checkpoint, draws=options.sample)
    except ConfigError:
        raise
    except CoveyError as error:
        other = Fix(text=tr("give another rollout or another run"))
        raise ConfigError([*faults, *more, problem("E408", "replay", f"{error}", "", other)]) from error
    if options.json_:
        say_json({**asdict(found), "num_flips": found.num_flips})
    else:
        say("\n".join(map(spoken, _lines(found))))
    return 0


def _checkpoint(run: Path, name: str | None) -> tuple[Path | None, list[Problem]]:
    """Return the directory of a checkpoint that a person names, and what stands against it."""
    if name is None:
        return None, []
    for path in (run / name, Path(name)):
        if any(isfile(path / file) for file in ("config.json", "adapter_config.json")):
            return path, []
    kept = [path.name for path in list_checkpoints(run) if isdir(path)]
    seen = tr("{name} is neither a checkpoint of {run} nor the directory of a model.", name=name, run=run)
    known = tr("give one of {kept}", kept=joined(", ", kept)) if kept else tr("give the directory of a model")
    return None, [problem("E408", "checkpoint", seen, "", Fix(text=known))]


def _group(
    rollout: int, records: Sequence[Mapping[str, Any]], number: int | None
) -> tuple[int, list[Problem]]:
    """Return the number of a group of the rollout, the first for None, and what stands against it."""
    numbers = sorted({record["group"] for record in records})
    if rollout < 0:
        return -1, []
    if not numbers:
        seen = tr("Rollout {rollout} has no records.", rollout=rollout)
        return -1, [problem("E408", "rollout", seen, "", Fix(text=tr("give another rollout")))]
    if number is None:
        return numbers[0], []
    if number in numbers:
        return number, []
    seen = tr("Rollout {rollout} has no group {number}.", rollout=rollout, number=number)
    known = tr("give one of {first} to {last}", first=numbers[0], last=numbers[-1])
    return -1, [problem("E408", "group", seen, "", Fix(text=known))]


def _lines(found: Replay) -> Iterator[str]:
    first, last = found.groups[0], found.groups[-1]
    yield tr(
        "rollout {rollout}, group {group} of {first} to {last}: {num} completions of step {version}",
        rollout=found.rollout,
        group=found.group,
        first=first,
        last=last,
        num=len(found.episodes),
        version=found.version,
    )
    if found.weights:
        yield tr("scored again by {weights}", weights=found.weights)
    yield from (tr("note  {words}", words=words) for words in found.notes)
    for episode in found.episodes:
        yield ""
        yield from _episode_lines(episode)
    drawn = [one.drawn for one in found.episodes if one.drawn is not None]
    if drawn:
        yield ""
        yield tr(
            "drawn again: {same} of {num} completions have the same tokens, {flips} have others",
            same=len(drawn) - found.num_flips,
            num=len(drawn),
            flips=found.num_flips,
        )


def _episode_lines(one: ReplayedEpisode) -> Iterator[str]:
    parts = [joined(" ", [name, _number(value, "g")]) for name, value in one.parts.items()]
    yield tr(
        "completion {sibling}: reward {reward} ({parts}), advantage {advantage:+.4g}, end {outcome}",
        sibling=one.sibling,
        reward=_number(one.reward, "g"),
        parts=joined(", ", parts),
        advantage=one.advantage,
        outcome=one.outcome,
    )
    if one.masked:
        yield tr("  out of the loss: {why}", why=one.masked)
    if one.failure:
        yield tr("  failed: {failure}", failure=one.failure)
    for version, count in one.versions:
        yield tr("  trained tokens of step {version}: {count}", version=version, count=count)
    if one.rendering is not None:
        yield from _compared(tr("  rendering: the same tokens"), one.rendering)
    if one.environment is not None:
        yield from _compared(tr("  tools and environment: the same answers"), one.environment)
    if one.scored is not None:
        yield tr(
            "  |sampler - weights| in nats: mean {mean:.2e}, largest {largest:.2e}",
            mean=one.scored.mean,
            largest=one.scored.largest,
        )
    if one.drawn is not None:
        yield _drawn_words(one.drawn)
    if one.conversation:
        yield Text(one.conversation)


def _compared(same: str, differences: Sequence[Difference]) -> Iterator[str]:
    if not differences:
        yield same
    for one in differences:
        yield tr(
            "  {words}\n    recorded  {recorded!r}\n    now       {now!r}",
            words=_words(one),
            recorded=one.recorded[:_MOST_SHOWN],
            now=one.now[:_MOST_SHOWN],
        )


def _words(one: Difference) -> str:
    turn = one.turn
    match one.part:
        case "text":
            return tr("rendering: the tokens of turn {turn} are not those of its text:", turn=turn)
        case "tokens":
            where = {"sequence": one.sequence, "token": one.token}
            return tr("rendering: sequence {sequence} differs from token {token} on:", **where)
        case "begin":
            return tr("environment: another prompt:")
        case "result":
            return tr("tools: another result of a call of turn {turn}:", turn=turn)
        case "answer":
            return tr("environment: another answer to turn {turn}:", turn=turn)
        case "reward":
            return tr("environment: another reward for turn {turn}:", turn=turn)
        case "end":
            return tr("environment: another end behind turn {turn}:", turn=turn)
        case "final_reward":
            return tr("environment: another reward of the episode:")
        case "failure":
            return tr("environment: it failed:")


def _drawn_words(one: Drawn) -> str:
    if one.same:
        return tr("  drawn again: the same tokens")
    return tr(
        "  drawn again: turn {turn}, token {token} is {now!r}, was {recorded!r}; logprobs {gap} apart",
        turn=one.turn,
        token=one.token,
        now=one.now,
        recorded=one.recorded,
        gap=_number(one.logprob_gap, ".2e"),
    )


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"
