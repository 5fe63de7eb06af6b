"""Rows of which some have images: a step is that of one process, whatever ranks share the model.

Proven on three sampled steps of a small Qwen2.5-VL of random weights, all of which are trained, with a KL
term: the same completions, gradients and weights on two ranks of each backend. In the first two steps only
some rows and forward passes have images, in the third none. Some images are files, others lie in the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.config.resolve import from_dict
from covey.errors import ConfigError
from covey.telemetry.rollouts import read_rollouts
from covey.training.run import train
from support.exactness import assert_same_steps
from support.image_runs import image_data, image_options, image_rows, looking
from support.models import save_model as save_text_model
from support.runs import Result, options, train_and_watch, train_in_processes

BACKENDS: Mapping[str, Mapping[str, Any]] = {
    "ddp": {},
    "fsdp2": {"fsdp": "full_shard"},
    "zero2": {"deepspeed": "zero2"},
    "zero3": {"deepspeed": "zero3"},
}


def records(run: Path) -> list[dict[str, Any]]:
    return [record for _, found in read_rollouts(run / "rollouts") for record in found]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_data(tmp_path_factory.mktemp("images"))


def opts(data: Path, output: Path, **changes: Any) -> dict[str, Any]:
    return image_options(data / "model", data / "rows.jsonl", output, **changes)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    output = tmp_path_factory.mktemp("whole") / "run"
    return output, train_and_watch(opts(data, output))


def test_images_are_where_they_should_be(whole: tuple[Path, Result]) -> None:
    """The comparison is not blind: steps with images in some rows, and one with none."""
    found = [[len(r.get("media", ())) for r in rows] for _, rows in read_rollouts(whole[0] / "rollouts")]
    assert found == [[1] * 4 + [0] * 4, [2] * 4 + [1] * 4, [0] * 8]
    assert min(whole[1].forwards) > 1
    for step, gradient in enumerate(whole[1].gradients):
        tower = [g for name, g in gradient.items() if ".visual." in name]
        assert len(tower) > 10 and all(bool((g != 0).any()) == (step < 2) for g in tower)


@pytest.mark.multi
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_are_one(backend: str, data: Path, whole: tuple[Path, Result], tmp_path: Path) -> None:
    run = opts(data, tmp_path / "run", per_device_train_batch_size=4, **BACKENDS[backend])
    (two,) = train_in_processes([run], tmp_path / "work")
    for name in ("prompt_id", "completion_ids", "reward", "advantage", "media"):
        assert [r.get(name) for r in records(tmp_path / "run")] == [r.get(name) for r in records(whole[0])]
    assert_same_steps(two, whole[1])
    gap = max(float((two.after[name] - weight).abs().max()) for name, weight in whole[1].after.items())
    assert gap < 2e-6


@pytest.fixture(scope="module", params=["gemma3", "smolvlm"])
def squares(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The data and one process of a model whose tower takes squares."""
    data = image_data(tmp_path_factory.mktemp(request.param), request.param)
    return data, train_and_watch(opts(data, data / "whole" / "run"))


@pytest.mark.multi
@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero3"])
def test_two_ranks_are_one_for_squares(backend: str, squares: tuple[Path, Result], tmp_path: Path) -> None:
    data, whole = squares
    seeing = [n for n in whole.gradients[0] if "vision_" in n or "connector" in n or "multi_modal" in n]
    assert len(seeing) > 10 and all(bool(whole.gradients[0][name].any()) for name in seeing)
    run = opts(data, tmp_path / "run", per_device_train_batch_size=4, **BACKENDS[backend])
    (two,) = train_in_processes([run], tmp_path / "work")
    assert_same_steps(two, whole)


@pytest.mark.multi
def test_rows_that_move_have_their_images(data: Path, tmp_path: Path) -> None:
    """Only one group of a step has signal, so that two ranks share its rows."""
    changes = {"reward_name": "half", "beta": 0.0}
    one = train_and_watch(opts(data, tmp_path / "one", **changes))
    run = opts(data, tmp_path / "two", per_device_train_batch_size=4, **changes)
    (two,) = train_in_processes([run], tmp_path / "work")
    assert any(bool(g.any()) for name, g in two.gradients[1].items() if ".visual." in name)
    assert_same_steps(two, one)


def assert_trains_the_same_again(data: Path, run: Path, whole: Result, output: Path) -> None:
    found = [one for record in records(run) for one in record.get("media", ())]
    assert {name for one in found for name in one.keys() & {"path", "row", "data"}} == {"path", "row"}
    again = train_and_watch(opts(data, output, replay_rollouts=str(run / "rollouts")))
    assert [m["loss"] for m in again.metrics] == [m["loss"] for m in whole.metrics]
    assert all(torch.equal(again.after[name], weight) for name, weight in whole.after.items())


def test_its_rollouts_train_the_same_again(data: Path, whole: tuple[Path, Result], tmp_path: Path) -> None:
    """Bit for bit: images are found again at their paths and in the rows of the data."""
    assert_trains_the_same_again(data, *whole, tmp_path / "again")


def test_rollouts_of_squares_train_the_same_again(squares: tuple[Path, Result], tmp_path: Path) -> None:
    data, whole = squares
    assert_trains_the_same_again(data, data / "whole" / "run", whole, tmp_path / "again")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "smolvlm"])
def test_images_of_an_environment_train_the_same_again(family: str, tmp_path: Path) -> None:
    """They lie in the records of the rollouts."""
    data, changes = image_data(tmp_path / "data", family), looking(tmp_path)
    whole = train_and_watch(opts(data, tmp_path / "whole", **changes))
    kinds = {name for record in records(tmp_path / "whole") for one in record["media"] for name in one}
    assert {"path", "row", "data"} <= kinds
    replay = {**changes, "replay_rollouts": str(tmp_path / "whole" / "rollouts")}
    again = train_and_watch(opts(data, tmp_path / "again", **replay))
    assert [m["loss"] for m in again.metrics] == [m["loss"] for m in whole.metrics]
    assert all(torch.equal(again.after[name], weight) for name, weight in whole.after.items())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "smolvlm"])
def test_rounding_to_bfloat16_stops_no_run(family: str, tmp_path: Path) -> None:
    """Also where prompts are computed once for several passes, so that gradients are rounded otherwise."""
    data = image_data(tmp_path / "data", family)
    low = {"torch_dtype": "bfloat16", "max_tokens_per_micro_batch": 48 if family == "smolvlm" else 12}
    result = train_and_watch(opts(data, tmp_path / "run", **low))
    assert len(result.metrics) == 3 and min(result.forwards) > 1
    assert max(m["sampling/logprob_max_gap"] for m in result.metrics) < 0.1


def test_squares_are_sampled_by_the_policy_that_learns(squares: tuple[Path, Result]) -> None:
    """Before an update the sampler's logprob of each token is the learner's, so the ratio is 1."""
    gaps = [metrics["sampling/logprob_max_gap"] for metrics in squares[1].metrics]
    assert len(gaps) == 3 and max(gaps) < 1e-5


def refused(opts: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        train(from_dict(opts, 1))
    (problem,) = [p for p in error.value.problems if p.code == "E406"]
    return str(problem.seen)


def test_images_that_are_no_longer_there_are_named(
    data: Path, whole: tuple[Path, Result], tmp_path: Path
) -> None:
    replay = {"replay_rollouts": str(whole[0] / "rollouts")}
    other = image_rows(tmp_path / "other", first=5)
    changed = image_options(data / "model", other, tmp_path / "run", **replay)
    assert "have another image than row 3 of the data" in refused(changed)
    path = data / "images" / "0.png"
    path.rename(path.with_suffix(".away"))
    try:
        assert f"has the image {path}, which does not exist" in refused(
            opts(data, tmp_path / "run", **replay)
        )
    finally:
        path.with_suffix(".away").rename(path)


def test_a_model_that_sees_none_is_not_trained_on_images(whole: tuple[Path, Result], tmp_path: Path) -> None:
    blind = save_text_model("qwen2", tmp_path / "blind")
    given = options(blind, tmp_path / "run", whole[0] / "rollouts", max_completion_length=6)
    assert "12 episodes have images, but the model sees none" in refused(given)
