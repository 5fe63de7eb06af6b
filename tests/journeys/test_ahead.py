"""Runs whose servers sample while the model trains: nothing of what is trained on is older than they may be,
in another order, there twice or lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.checkpoint.read import read_states
from covey.models.policy import Policy
from journeys.helpers import covey, flags, metrics, rollouts, succeed, tensors
from support.servers import QUICKSTART, Running, policy_of_server, running, slow_server, token_file
from support.servers import covey as covey_apart


@pytest.fixture(scope="module")
def policies() -> list[Policy]:
    return [policy_of_server() for _ in range(2)]


@pytest.fixture
def server(policies: list[Policy]) -> Iterator[Running]:
    with running(policies[0], **QUICKSTART) as found:
        yield found
        assert found.failed == []


@pytest.fixture
def slow(policies: list[Policy]) -> Iterator[Running]:
    with slow_server(policies[1]) as found:
        yield found


APART: dict[str, Any] = {"rollout_servers": None, "rollout_token_file": None, "max_staleness": 1}
"""A run that names no server."""


def options(server: Running, folder: Path, **changes: Any) -> list[str]:
    values: dict[str, Any] = {
        "model": "quickstart",
        "dataset": "quickstart#64",
        "reward_funcs": "accuracy",
        "num_generations": 4,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "max_completion_length": 24,
        "learning_rate": 1e-4,
        "max_steps": 6,
        "save_steps": 100,
        "reward_trial": False,
        "rollout_servers": server.address,
        "rollout_token_file": str(token_file(folder)),
        "output_dir": str(folder / "run"),
        "report_to": "none",
    }
    return flags({n: v for n, v in {**values, **changes}.items() if v is not None})


def lasting(record: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the clock or on how the rollout was awaited."""
    passing = ("time/", "throughput/", "memory/", "ahead/", "age/", "n")
    return {name: value for name, value in record.items() if not name.startswith(passing)}


def test_nothing_ahead_is_the_run_that_samples_in_turn(server: Running, tmp_path: Path) -> None:
    """Bit for bit, though a thread of its own samples."""
    for name, own in (("turn", {}), ("ahead", {"async_generate": True, "max_staleness": 0})):
        succeed("train", *options(server, tmp_path, output_dir=tmp_path / name, **own))
    turn, ahead = metrics(tmp_path / "turn"), metrics(tmp_path / "ahead")
    assert [lasting(r) for r in ahead] == [lasting(r) for r in turn]
    of_turn, of_ahead = (
        tensors(tmp_path / "turn" / "checkpoint-6"),
        tensors(tmp_path / "ahead" / "checkpoint-6"),
    )
    assert all(torch.equal(of_ahead[name], of_turn[name]) for name in of_turn)
    assert all(r["age/max"] == 0.0 for r in ahead)


@pytest.mark.parametrize(("most", "steps"), [(1, 1), (3, 2)])
def test_no_token_is_older_than_it_may_be(most: int, steps: int, slow: Running, tmp_path: Path) -> None:
    """Versions change while completions run, and the first probabilities behind it are the learner's."""
    batch = {"per_device_train_batch_size": 8, "steps_per_generation": steps, "max_steps": 6 * steps}
    succeed("train", *options(slow, tmp_path, max_staleness=most, **batch))
    found = rollouts(tmp_path / "run")
    ages = []
    for number, records in enumerate(found):
        learns = number * steps
        versions = [v for r in records for v in r["versions"]]
        assert learns - most * steps <= min(versions) and max(versions) <= learns
        ages.append(learns - min(versions))
        assert all(list(r["versions"]) == sorted(r["versions"]) for r in records)
    assert ages[0] == 0 and max(ages) > 0
    assert any(len(set(r["versions"])) > 1 for records in found for r in records), "no swap in the middle"
    for record in metrics(tmp_path / "run"):
        shares = [record[f"age/share_{n}"] for n in range(most + 1)]
        assert sum(shares) == pytest.approx(1.0)
        assert record["age/max"] <= most
        gap = record["sampling/sampling_logp_difference/mean"]
        assert gap is None or gap < 1e-5


def test_prompts_come_in_their_order_and_once(server: Running, tmp_path: Path) -> None:
    for name, own in (("turn", {}), ("ahead", {"max_staleness": 4})):
        words = options(server, tmp_path, output_dir=tmp_path / name, max_steps=10, **own)
        succeed("train", *words)
    prompts = [
        [[r["prompt_id"] for r in records] for records in rollouts(tmp_path / name)]
        for name in ("turn", "ahead")
    ]
    assert prompts[0] == prompts[1] and len(prompts[0]) == 10


def test_a_stopped_run_goes_on_with_the_next_prompts(server: Running, tmp_path: Path) -> None:
    """And with what it had sampled of them, by the weights that sampled it."""
    words = options(server, tmp_path, max_staleness=3, max_steps=8)
    succeed("train", *words, "--stop_after_steps", "3")
    kept = read_states(tmp_path / "run" / "checkpoint-3")["ahead"].json["episodes"]
    assert {record["rollout"] for record in kept} <= {3, 4, 5} and len(kept) > 16
    succeed("train", *words, "--resume_from_checkpoint", "latest")
    trained = {key_of(r): r["completion_ids"] for records in rollouts(tmp_path / "run") for r in records}
    assert all(trained[key_of(record)] == record["completion_ids"] for record in kept)
    assert {v for record in kept for v in record["versions"]} <= {0, 1, 2, 3}
    succeed("train", *options(server, tmp_path, max_steps=8, output_dir=tmp_path / "whole"))
    ids = [
        [[r["prompt_id"] for r in records] for records in rollouts(tmp_path / n)] for n in ("run", "whole")
    ]
    assert ids[0] == ids[1]
    assert [r["step"] for r in metrics(tmp_path / "run")] == list(range(1, 9))


def key_of(record: dict[str, Any]) -> tuple[int, int, int]:
    return record["rollout"], record["prompt_id"], record["sibling"]


def test_a_resume_with_less_ahead_drops_what_is_too_old(server: Running, tmp_path: Path) -> None:
    words = options(server, tmp_path, max_steps=8)
    succeed("train", *words, "--max_staleness", "4", "--stop_after_steps", "2")
    more = ["--max_staleness", "1", "--resume_from_checkpoint", "latest"]
    succeed("train", *words, *more)
    found = metrics(tmp_path / "run")
    assert [r["step"] for r in found] == list(range(1, 9))
    assert max(r["age/max"] for r in found[2:]) == 1.0
    # Without any, the run goes on in turn.
    succeed("train", *words, "--max_steps", "10", "--resume_from_checkpoint", "latest")
    assert metrics(tmp_path / "run")[-1]["policy_age"] == 0


def test_evaluations_and_further_prompts_are_sampled_beside_what_runs(slow: Running, tmp_path: Path) -> None:
    """Of the present weights alone; groups without signal are replaced."""
    more = {"val_dataset": "quickstart#8", "eval_steps": 2, "dynamic_sample": True, "max_resample_times": 2}
    succeed("train", *options(slow, tmp_path, max_staleness=2, max_steps=4, **more))
    found = metrics(tmp_path / "run")
    assert [r["step"] for r in found if r.get("eval_reward") is not None] == [2, 4]
    assert sum(r["select/attempts"] for r in found) > 0
    assert all(r["age/max"] <= 2 for r in found)


def test_what_the_thread_fails_with_ends_the_run(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from covey.rollout import shares

    def fails(self: Any, number: int, episode: Any) -> None:
        raise RuntimeError("the thread has failed")

    monkeypatch.setattr(shares.Share, "take", fails)
    done = covey("train", *options(server, tmp_path, max_staleness=1))
    assert done.code == 1 and "the thread has failed" in done.err


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({**APART, "use_vllm": True}, "E115"),
        ({**APART, "launcher": "ray"}, "E115"),
        ({"max_staleness": 1, "use_decoupled_loss": True}, "E115"),
        ({"max_staleness": -1}, "E109"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, Any], code: str, server: Running, tmp_path: Path) -> None:
    done = covey("train", *options(server, tmp_path, **more))
    assert done.code == 2 and code in done.err
    assert not (tmp_path / "run").exists()


# -- a server that the run starts for itself ---------------------------------------------------------------


def num_servers() -> int:
    """How many processes serve a run that has started them."""
    commands = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            commands.append(file.read_bytes().replace(b"\0", b" "))
    return sum(b"covey rollout" in command and b"covey-sampler-" in command for command in commands)


def until(holds: Callable[[], bool], said: Path) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, said.read_text()
        time.sleep(0.05)


def test_a_run_without_servers_starts_one_and_ends_it(server: Running, tmp_path: Path) -> None:
    """Its configuration names none, and a resume starts another. That of a run that is killed ends too."""
    words = options(server, tmp_path, **APART)
    succeed("train", *words, "--stop_after_steps", "3")
    assert num_servers() == 0
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert "max_staleness: 1" in text and "http://127" not in text
    succeed("train", str(tmp_path / "run" / "config.yaml"), "--resume_from_checkpoint", "latest")
    assert [r["step"] for r in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert max(r["age/max"] for r in metrics(tmp_path / "run")) == 1.0
    assert num_servers() == 0
    again = options(server, tmp_path, **APART, max_steps=1000, output_dir=tmp_path / "killed")
    process, said = covey_apart(tmp_path, "train", *again)
    try:
        until(lambda: (tmp_path / "killed" / "metrics.jsonl").is_file(), said)
        assert num_servers() == 1
    finally:
        process.kill()
        process.join()
    until(lambda: num_servers() == 0, said)
