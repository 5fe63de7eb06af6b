"""The tensor file of kept sets beside the records of a rollout: what comes back is what went in, or it is
named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from covey.errors import CoveyError
from covey.rollout.records import episode_of, groups_of, to_record, with_sets_as_text
from covey.telemetry.files import RunFiles
from covey.telemetry.rollout_log import RolloutLimits, RolloutLog
from covey.telemetry.rollouts import read_rollouts
from covey.training.source import ReplaySource
from covey.types import Episode, KeptSets, SamplingParams, Score, Source
from support.groups import episode, prompt, sequence

VOCAB = 100
SCORE = Score(total=1.0, parts=())
FILTERED = SamplingParams(
    temperature=1.0, max_new_tokens=8, stop_token_ids=(), top_p=0.9, top_k=50, min_p=0.1
)


def sampled(sibling: int, kept: bool = True) -> Episode:
    """An episode of two sequences, the first with a tool between two turns; sets are lists and bitmaps."""
    first = sequence((9,), (Source.MODEL, (sibling, 3), 0), (Source.TOOL, (7,), 0), (Source.MODEL, (4,), 0))
    other = sequence((9, 8), (Source.MODEL, (5, sibling), 0))
    sets = [{sibling, 90}, {3}, set(range(2, 80))], [{5, 6, 7}, set(range(VOCAB))]
    both = [
        replace(row, kept=KeptSets.of(own, VOCAB) if kept else None)
        for row, own in zip((first, other), sets, strict=True)
    ]
    plain = episode((9,), (1,), sibling=sibling, sampling=FILTERED)
    return replace(plain, sequences=tuple(both))


EPISODES = [sampled(0), sampled(1, kept=False), sampled(2), sampled(3)]


def records(episodes=EPISODES):
    return [to_record(prompt(), one, SCORE, group=0) for one in episodes]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("compress_after", [None, 0])
def test_sets_come_back_exactly(world: int, compress_after: int | None, tmp_path: Path) -> None:
    for rank in range(world):
        limits = RolloutLimits(compress_after=compress_after)
        log = RolloutLog(tmp_path, limits, rank=rank, world=world)
        log.write(12, records(EPISODES[rank::world]))
    (rollout,) = list(read_rollouts(tmp_path, with_sets=True))
    assert [episode_of(record) for record in rollout[1]] == EPISODES
    (group,) = ReplaySource(tmp_path, {}).next(0).groups
    assert group.group.episodes == tuple(EPISODES)
    # Without them no tensor is looked at.
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert "kept" not in next(read_rollouts(tmp_path))[1][0]


def test_a_file_stands_beside_records_with_sets_alone(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path)
    log.write(0, records([sampled(0, kept=False)]))
    log.write(1, records())
    assert names(tmp_path) == [f"rollout-00000{n}" for n in ("0.jsonl", "1.jsonl", "1.kept.safetensors")]
    line = json.loads((tmp_path / "rollout-000001.jsonl").read_text().splitlines()[0])
    assert (line["top_p"], line["top_k"], line["min_p"]) == (0.9, 50, 0.1)
    found = load_file(tmp_path / "rollout-000001.kept.safetensors")
    whole = KeptSets.joined([row.kept for one in EPISODES for row in one.tokens if row.kept is not None])
    assert (found["counts"] == whole.counts).all() and (found["words"] == whole.words).all()


def test_records_without_filters_are_read_as_such() -> None:
    record = records([replace(sampled(0, kept=False), sampling=replace(FILTERED, top_k=0))])[0]
    for name in ("top_p", "top_k", "min_p"):
        del record[name]
    assert episode_of(record).sampling == SamplingParams(temperature=1.0, max_new_tokens=8, stop_token_ids=())


def test_sets_go_through_the_json_of_a_checkpoint() -> None:
    text = json.dumps([with_sets_as_text(record) for record in records()])
    (group,) = groups_of(json.loads(text))
    assert group.group.episodes == tuple(EPISODES)


def written_anew(
    change: Callable[[dict[str, np.ndarray]], None], vocab: int = VOCAB
) -> Callable[[Path], None]:
    """The file with other tensors."""

    def write(path: Path) -> None:
        tensors = {name: tensor.copy() for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path, {"vocab": str(vocab)})

    return write


def a_token_less(tensors: dict[str, np.ndarray]) -> None:
    """The first set {0, 90} has another id in place of the sampled 0."""
    tensors["words"][0] = 1


def another_id(tensors: dict[str, np.ndarray]) -> None:
    """It has another id in place of the other one."""
    tensors["words"][1] = 91


def longer(tensors: dict[str, np.ndarray]) -> None:
    tensors["counts"] = np.append(tensors["counts"], np.int32(1))
    tensors["words"] = np.append(tensors["words"], np.int32(3))


def no_sets(tensors: dict[str, np.ndarray]) -> None:
    tensors["ids"] = tensors.pop("words")


def of_fewer_words(tensors: dict[str, np.ndarray]) -> None:
    tensors["words"] = tensors["words"][:-1].copy()


def below_zero(tensors: dict[str, np.ndarray]) -> None:
    tensors["counts"][0] = -1


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


WRONG = {
    "missing": (Path.unlink, "kept.safetensors, which holds the tokens that filters kept, is missing"),
    "torn": (cut, "bytes long, but its header describes"),
    "empty": (lambda path: path.write_bytes(b""), "has no header"),
    "of a token less": (
        written_anew(a_token_less),
        "does not list token 0 among those that filters kept, though it was sampled",
    ),
    "of another id": (written_anew(another_id), "was written for other records: its checksum differs"),
    "of another vocabulary": (written_anew(lambda tensors: None, 101), "its checksum differs"),
    "longer": (
        written_anew(longer),
        "has what filters kept for 16 tokens, but its records have 15 such tokens",
    ),
    "of other tensors": (written_anew(no_sets), "is not a file of what filters kept"),
    "of no vocabulary": (written_anew(lambda tensors: None, 0), "is not a file of what filters kept"),
    "of fewer words": (written_anew(of_fewer_words), "words of kept sets, where their counts need"),
    "below zero": (written_anew(below_zero), "is not a file of what filters kept"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_is_not_that_of_its_records(what: str, tmp_path: Path) -> None:
    RolloutLog(tmp_path).write(3, records())
    change, words = WRONG[what]
    change(tmp_path / "rollout-000003.kept.safetensors")
    with pytest.raises(CoveyError) as raised:
        list(read_rollouts(tmp_path, with_sets=True))
    assert str(raised.value).startswith("rollout 3: ") and words in str(raised.value)
    assert len(next(read_rollouts(tmp_path))[1]) == 4


def test_sets_count_and_go_with_their_records(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, RolloutLimits(compress_after=1))
    for rollout in range(3):
        log.write(rollout, records())
    num_bytes = sum(path.stat().st_size for path in tmp_path.iterdir())
    for again in (log, RolloutLog(tmp_path, RolloutLimits(compress_after=1))):
        again.limits = RolloutLimits(compress_after=1, max_gb=(num_bytes - 1) / 1e9)
        assert again.oldest_kept() == 1
        again.limits = RolloutLimits(compress_after=1, max_gb=num_bytes / 1e9)
        assert again.oldest_kept() == 0
    deleted = {path.name for path in RolloutLog(tmp_path).delete_before(2)}
    assert deleted == {f"rollout-00000{n}.{end}" for n in (0, 1) for end in ("jsonl.gz", "kept.safetensors")}
    assert names(tmp_path) == ["rollout-000002.jsonl", "rollout-000002.kept.safetensors"]


def test_a_resume_puts_sets_aside_too(tmp_path: Path) -> None:
    """Also those of a rollout whose records were not yet written."""
    files = RunFiles(tmp_path)
    log = RolloutLog(files.rollouts_dir)
    for rollout in range(3):
        log.write(rollout, records())
    (files.rollouts_dir / "rollout-000002.jsonl").unlink()
    found = files.supersede_after(4, 0)
    assert found is not None and found.num_rollouts == 2
    assert names(files.rollouts_dir) == ["rollout-000000.jsonl", "rollout-000000.kept.safetensors"]
    assert names(found.directory / "rollouts") == [
        *("rollout-000001.jsonl", "rollout-000001.kept.safetensors"),
        "rollout-000002.kept.safetensors",
    ]
