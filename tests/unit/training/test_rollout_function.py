"""Runs whose episodes a function makes: the run without it where it only samples, and what guards see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from covey import train
from covey.errors import ConfigError, GuardStop, RunFailed
from covey.telemetry.rollouts import read_rollouts
from journeys.helpers import covey, metrics, small
from support.rollout_functions import functions_file
from support.runs import options, train_and_watch, train_in_processes

EVALUATED = {
    "val_dataset": ["quickstart#8"],
    "eval_strategy": "steps",
    "eval_steps": 1,
    "num_generations_eval": 2,
}


@pytest.fixture
def opts(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Options of a run of two steps with a function by its name, "" for none; each has its own directory."""

    def make(name: str, **changes: Any) -> dict[str, Any]:
        own = {"rollout_func": f"{functions_file(tmp_path)}:{name}"} if name else {}
        steps = {"max_steps": 2, "learning_rate": 1e-4, "mask_truncated_completions": False}
        return options(Path("quickstart"), tmp_path / (name or "engine"), **{**steps, **own, **changes})

    return make


def records(given: dict[str, Any]) -> list[dict[str, Any]]:
    """The rollouts of a run, without what a clock says."""
    rollouts = read_rollouts(Path(given["output_dir"]) / "rollouts")
    return [{**record, "seconds": 0.0} for _, found in rollouts for record in found]


# -- the same run


@pytest.mark.parametrize(
    "changes",
    [{**EVALUATED, "num_iterations": 2, "beta": 0.02}, {"engine": "generate", "top_p": 0.9}],
    ids=["evaluated", "generate under filters"],
)
def test_a_function_that_only_samples_is_the_run_without_it(
    changes: dict[str, Any], opts: Callable[..., dict[str, Any]]
) -> None:
    ours, theirs = opts("once", **changes), opts("", **changes)
    one, other = train_and_watch(ours), train_and_watch(theirs)
    assert one.after.keys() == other.after.keys()
    assert all(torch.equal(one.after[name], other.after[name]) for name in other.after)
    assert any(not torch.equal(one.before[name], one.after[name]) for name in one.after)
    assert records(ours) == records(theirs) != []
    assert metrics(Path(ours["output_dir"])) == metrics(Path(theirs["output_dir"])) != []


@pytest.mark.slow
@pytest.mark.multi
def test_two_processes_call_it_with_their_own_prompts(
    opts: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    split = {"per_device_train_batch_size": 4}
    ours, theirs = opts("once", **split), opts("", **split)
    alone = opts("numbered", reward_funcs=[f"{functions_file(tmp_path)}:by_place"], **split)
    one, other, numbered = train_in_processes([ours, theirs, alone], tmp_path / "work")
    assert all(torch.equal(one.after[name], other.after[name]) for name in other.after)
    assert records(ours) == records(theirs) != []
    # Each process has numbered four prompts.
    assert [r["reward"] for r in records(alone)][:8] == [1.0, 0.0, 0.0, 1.0] * 2
    assert numbered.after


# -- turns, prompts and columns of its own


def test_columns_of_a_function_reach_the_rewards(opts: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    given = opts("numbered", reward_funcs=[f"{functions_file(tmp_path)}:by_place"])
    train_and_watch(given)
    assert [r["reward"] for r in records(given)] == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0] * 2


def test_turns_are_trained_and_replayed(opts: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    given = opts("turns", reward_funcs=["format", "accuracy"])
    trained = train_and_watch(given)
    (first, *_) = records(given)
    assert [source for source, *_ in first["sources"]] == ["model", "environment", "model"]
    assert 0 < sum(first["trained_mask"]) < len(first["trained_mask"]) and "Again: " in first["text"]
    replay = str(Path(given["output_dir"]) / "rollouts")
    again = train_and_watch({**opts("", reward_funcs=given["reward_funcs"]), "replay_rollouts": replay})
    assert all(torch.equal(trained.after[name], again.after[name]) for name in again.after)


def test_prompts_of_a_group_that_differ_stop_the_run_unless_they_may(
    opts: Callable[..., dict[str, Any]],
) -> None:
    with pytest.raises(GuardStop, match="began in 4 different ways") as caught:
        train_and_watch(opts("own_starts"))
    assert caught.value.finding.code == "F143"
    given = opts("own_starts", environment_starts="differ", overwrite_output_dir=True)
    train_and_watch(given)
    assert [r["prompt"] for r in records(given)][:2] == ["0: what is 1+0? ", "1: what is 1+1? "]


# -- faults


@pytest.mark.parametrize("name", ["cut_and_shifted", "inverted", "unmasked", "encoded_again"])
def test_wrong_logprobs_stop_the_run_at_its_first_step(
    name: str, opts: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    # Rows without signal are not computed.
    reward = f"{functions_file(tmp_path)}:alternating"
    with pytest.raises(GuardStop) as caught:
        train_and_watch(opts(name, reward_funcs=[reward], environment_starts="differ"))
    finding = caught.value.finding
    assert (finding.code, finding.step) == ("F115", 1)
    assert "return from rollout_func what generate() gave" in finding.fixes[0].text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shifted", r"of token 1 of the model is -.*, but generate\(\) gave"),
        ("of_zeros", r"of token 0 of the model is 0, but generate\(\) gave"),
        ("negated", r"of token 0 of the model is .*; it has to be finite and not above 0"),
    ],
)
def test_logprobs_that_are_none_of_generate_are_not_trained(
    name: str, words: str, opts: Callable[..., dict[str, Any]]
) -> None:
    said = f"F145 at step 0: what rollout_func returned cannot be trained: row 0: the log-probability {words}"
    with pytest.raises(RunFailed, match=said):
        train_and_watch(opts(name))


def test_an_error_of_a_function_ends_the_run(opts: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(RunFailed, match="F131 at step 0: the run failed in rollout") as caught:
        train(**opts("raises", save_steps=100))
    assert isinstance(caught.value.__cause__, ConnectionError)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent", "absent"),
        ("number", "it is a int, not a function"),
        ("in_a_loop", "it is an async def"),
        ("of_three", "called as rollout_func\\(prompts, trainer\\), and Python says: missing"),
    ],
)
def test_what_is_no_rollout_function_is_refused(
    name: str, words: str, opts: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        train(**opts(name, save_steps=100))
    assert [(p.code, p.option) for p in caught.value.problems] == [("E390", "rollout_func")]


# -- from a program


def test_a_function_of_a_program(tmp_path: Path) -> None:
    seen: list[tuple[int, int, bool]] = []

    def play(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        seen.append((len(prompts), trainer.state.global_step, trainer.is_eval))
        found = trainer.generate(prompts)
        return {name: [row[name] for row in found] for name in ("prompt_ids", "completion_ids", "logprobs")}

    given = small("quickstart#32", tmp_path / "run", **EVALUATED)
    outcome = train(**given, rollout_func=play)
    assert outcome.exit_code == 0
    rollout, evaluation = (8, False), (16, True)
    assert [(num, is_eval) for num, _, is_eval in seen] == [
        *(evaluation, rollout, evaluation, rollout, evaluation)
    ]
    assert [step for _, step, _ in seen] == [0, 0, 1, 1, 2]
    done = covey(
        "train", "--config", str(tmp_path / "run" / "config.yaml"), "--output_dir", str(tmp_path / "b")
    )
    assert done.code == 2 and "E390 rollout_func" in done.err
    assert "play: it is neither FILE.py:NAME" in " ".join(done.err.split())


def test_an_evaluation_alone_calls_it(opts: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    from covey import evaluate

    file = functions_file(tmp_path)
    common = {"val_dataset": ["quickstart#8"], "reward_funcs": ["accuracy"], "max_completion_length": 16}
    found = [
        evaluate("quickstart", output_dir=str(tmp_path / name), **common, **own)
        for name, own in (("a", {}), ("b", {"rollout_func": f"{file}:once"}))
    ]
    values = [{n: m.value for n, m in e.metrics.items() if not n.startswith("time/")} for e in found]
    assert values[0] == values[1] != {}
    with pytest.raises(ConnectionError, match="no sandbox"):
        evaluate("quickstart", output_dir=str(tmp_path / "c"), **common, rollout_func=f"{file}:raises")
