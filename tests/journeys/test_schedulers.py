"""Runs with schedulers and gym environments that are written for ms-swift, by its own command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from journeys.helpers import Done, completions, covey, events, flags, metrics, rollouts, succeed, tensors

LAKE = '''"""A frozen lake of one row: each digit that the model writes is a step."""

import random
import re

from swift.infer_engine.protocol import RolloutInferRequest
from swift.rollout.gym_env import Env, envs
from swift.template import Messages
from swift.utils import get_logger

logger = get_logger()


class LakeEnv(Env):
    def __init__(self, env_config: dict):
        super().__init__(env_config)
        self.draw = random.Random(env_config.get("seed"))

    async def reset(self, config: RolloutInferRequest):
        self.place = self.draw.randrange(10)
        return f"{self.place}+{self.draw.randrange(10)}=", {}, "Walk."

    async def step(self, action: Messages):
        steps = re.findall("[0-9]", action[-1]["content"])
        self.place += int(steps[-1]) if steps else 0
        done = self.place > 12
        return f"{self.place}+{self.draw.randrange(10)}=", 0.1 * len(steps), done, {}

    async def close(self):
        pass


envs["lake"] = LakeEnv
'''
TIPS = '''"""A scheduler that doubts an answer, once; and a reward that looks at both."""

from swift.rewards import ORM, orms
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns


class Doubts(MultiTurnScheduler):
    doubt = " Wait, "

    def check_finished(self, infer_request, response_choice, current_turn):
        return self.doubt in infer_request.messages[-1]["content"] or super().check_finished(
            infer_request, response_choice, current_turn
        )

    def step(self, infer_request, response_choice, current_turn):
        ids = list(response_choice.token_ids)
        infer_request.messages[-1]["content"] += self.doubt
        return {
            "infer_request": infer_request,
            "response_token_ids": ids,
            "response_loss_mask": [0] + [1] * (len(ids) - 1),
            "rollout_infos": {"doubted": len(ids)},
        }


class Longer(ORM):
    def __call__(self, completions, **kwargs):
        inputs, ids = kwargs["trajectory_inputs"], kwargs["request_id"]
        texts = [inputs[one][-1]["messages"][-1]["content"] for one in ids]
        assert texts == completions
        assert all(inputs[one][0]["solution"] for one in ids)
        return [len(text) % 7 + 0.1 * infos.get("doubted", 0) for text, infos in zip(
            texts, kwargs["rollout_infos"], strict=True)]


class Shouts(MultiTurnScheduler):
    """Writes what the model said in another way, and asks again."""

    def check_finished(self, infer_request, response_choice, current_turn):
        return current_turn == 2

    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages[-1]["content"] += "!"
        infer_request.messages.append({"role": "user", "content": "7+8="})
        return {"infer_request": infer_request}


multi_turns["shouts"] = Shouts
orms["longer"] = Longer
multi_turns["doubts"] = Doubts
'''
OF_LAKE = {
    "external_plugins": "lake.py",
    "multi_turn_scheduler": "gym_scheduler",
    "gym_env": "lake",
    "use_gym_env": True,
    "max_turns": 3,
    "vllm_server_pass_dataset": True,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lake.py").write_text(LAKE)
    (tmp_path / "tips.py").write_text(TIPS)
    lake = [{"messages": [{"role": "user", "content": "-"}], "env_config": {"seed": n}} for n in range(16)]
    tips = [{"query": f"{n}+{n + 2}=", "solution": f"{2 * n + 2}"} for n in range(8)]
    for name, rows in (("lake", lake), ("tips", tips)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def swift(output: str, **given: Any) -> Done:
    """`swift rlhf` with covey's command: 2 prompts x 4 completions a step."""
    options = {
        "rlhf_type": "grpo",
        "model": "quickstart",
        "tuner_type": "full",
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": 32,
        "learning_rate": 1e-3,
        "torch_dtype": "float32",
        "reward_trial": False,
        "output_dir": output,
    }
    return succeed("rlhf", *flags({**options, **given}))


def lake(output: str, **given: Any) -> Done:
    return swift(output, dataset="lake.jsonl", **{**OF_LAKE, "max_steps": 2, **given})


def turns_of(run: str) -> list[Any]:
    """What was sampled and answered, without times."""
    return [
        [{k: v for k, v in turn.items() if k != "seconds"} for turn in record["turns"]]
        for records in rollouts(Path(run))
        for record in records
    ]


@pytest.mark.usefixtures("here")
def test_a_gym_environment() -> None:
    done = lake("run", reward_trial=True)
    assert "scheduler gym_scheduler makes the episodes" in done.out + done.err
    assert "an episode has 3 turns, each up to 32 tokens" in done.out + done.err
    first, second = rollouts(Path("run"))
    for record in (*first, *second):
        infos, turns = record["rollout_infos"], record["turns"]
        assert infos["num_turns"] == len(turns) == len(infos["step_rewards"]) <= 3
        assert record["reward"] == pytest.approx(sum(infos["step_rewards"]))
        assert [part["name"] for part in record["parts"]] == ["environment"]
        assert record["prompt"].startswith("<|im_start|>system\nWalk.<|im_end|>\n<|im_start|>user\n")
        assert len(record["prompt_ids"]) and record["trained_mask"].count(1) == len(record["versions"])
    starts = {(r["rollout"], r["group"], r["prompt"]) for r in (*first, *second)}
    assert len(starts) == 4
    (line, _) = metrics(Path("run"))
    assert line["outcome/scored"] == 8 and line["num_turns"] > 1.5
    assert line["sampling/sampling_logp_difference/mean"] < 1e-5 and line["grad_norm"] > 0
    assert [e["code"] for e in events(Path("run"), "finding") if e["code"] == "W158"] == []


@pytest.mark.usefixtures("here")
def test_a_scheduler_and_a_reward_that_reads_its_trajectory() -> None:
    done = swift(
        "run",
        dataset="tips.jsonl",
        external_plugins="tips.py",
        multi_turn_scheduler="doubts",
        reward_funcs="longer",
        max_turns=2,
        max_steps=2,
    )
    assert done.code == 0
    records = [record for found in rollouts(Path("run")) for record in found]
    doubted = [r for r in records if "doubted" in r["rollout_infos"]]
    assert len(doubted) > 8
    for record in doubted:
        (turn, last), sources = record["turns"], record["sources"]
        assert turn["num_left_out"] == 1 and turn["cut_ids"] and last["opened"].endswith(" Wait, ")
        assert sources[0] == ["model", 1, 0, 0]
        assert "environment" in [source for source, *_ in sources]
        assert "sequences" not in record
    (line, _) = metrics(Path("run"))
    assert line["sampling/sampling_logp_difference/mean"] < 1e-5 and line["grad_norm"] > 0


@pytest.mark.usefixtures("here")
def test_a_history_that_is_written_anew_is_said_once() -> None:
    given = {"dataset": "tips.jsonl", "external_plugins": "tips.py", "reward_funcs": "longer"}
    done = swift("run", multi_turn_scheduler="shouts", max_turns=2, max_steps=2, **given)
    (found,) = [e for e in events(Path("run"), "finding") if e["code"] == "W158"]
    assert found["seen"].startswith(
        "The scheduler: it writes earlier turns in another way, so that a new row of the episode begins; "
    )
    assert (found["step"], found["severity"]) == (0, "warning") and "W158" in done.out + done.err
    records = [record for each in rollouts(Path("run")) for record in each]
    assert all(len(record["sequences"]) == 1 for record in records)
    (line, _) = metrics(Path("run"))
    assert line["sampling/sampling_logp_difference/mean"] < 1e-5


@pytest.mark.usefixtures("here")
def test_a_resumed_run_is_the_same() -> None:
    """Also in the middle of a rollout that two steps learn from."""
    steps = {"max_steps": 4, "save_steps": 1, "steps_per_generation": 2}
    lake("whole", **steps)
    lake("cut", stop_after_steps=3, **steps)
    lake("cut", resume_from_checkpoint="latest", **steps)
    assert completions(Path("whole")) == completions(Path("cut"))
    assert turns_of("whole") == turns_of("cut")
    one, other = (tensors(Path(run) / "checkpoint-4") for run in ("whole", "cut"))
    names = [name for name in one if "optimizer" in name or "trainer" not in name]
    assert len(names) > 50 and [name for name in names if not torch.equal(one[name], other[name])] == []


@pytest.mark.multi
@pytest.mark.usefixtures("here")
def test_two_processes_make_the_same_episodes() -> None:
    """Each has a scheduler of its own."""
    lake("one")
    lake("two", nproc_per_node=2, per_device_train_batch_size=4)
    assert turns_of("one") == turns_of("two")
    for one, two in zip(metrics(Path("one")), metrics(Path("two")), strict=True):
        for name in ("reward", "num_turns", "completions/mean_length"):
            assert one[name] == pytest.approx(two[name], rel=1e-6)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)


@pytest.mark.usefixtures("here")
def test_the_episodes_are_replayed_without_the_scheduler() -> None:
    lake("run", max_steps=1)
    options = {"replay_rollouts": "run/rollouts", "reward_funcs": "format", "max_steps": 1}
    done = covey(
        *("train", "--model", "quickstart", "--dataset", "lake.jsonl", "--num_generations", "4"),
        *("--per_device_train_batch_size", "8", "--output_dir", "again", "--max_completion_length", "32"),
        *flags(options),
    )
    assert done.code == 0, done.err
    (first,), (second,) = metrics(Path("run")), metrics(Path("again"))
    assert first["reward"] == second["reward"] and first["num_turns"] == second["num_turns"]
