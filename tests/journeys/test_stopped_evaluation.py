"""A guard that stops a run in an evaluation: the step is taken and recorded, and the evaluation is made when
the run goes on, as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from journeys.helpers import covey, events, flags, metrics, rows, small, succeed, write_jsonl

# After a step the evaluation is the first to ask; the more steps, the better.
REWARD = """
from pathlib import Path

def judge(completions, trainer_state, **kwargs):
    step = trainer_state.global_step
    if Path(f"fails-{step}").exists():
        return [float("nan")] * len(completions)
    return [len(str(c)) + 100.0 * step for c in completions]
"""


@pytest.mark.parametrize("step", [2, 4])
def test_it_goes_on_with_the_evaluation(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("train.jsonl"), rows(20))
    write_jsonl(Path("held.jsonl"), rows(3, start=100))
    Path("mine.py").write_text(REWARD)
    told, mark = {}, Path(f"fails-{step}")
    for name in ("plain", "stopped"):
        options = small("train.jsonl", name, reward_funcs=["mine.py:judge"], val_dataset=["held.jsonl"])
        options |= {"max_steps": 4, "eval_steps": 2, "eval_on_start": False, "reward_trial": False}
        if name == "stopped":
            mark.touch()
            ended = covey("train", *flags(options))
            assert ended.code == 3 and "F107" in ended.err, ended.out + ended.err
            assert [line["step"] for line in metrics(Path(name))] == list(range(1, step + 1))
            assert Path(name, f"checkpoint-{step}").is_dir()
            mark.unlink()
            options["resume_from_checkpoint"] = "latest"
        told[name] = succeed("train", *flags(options)).out
    plain, stopped = metrics(Path("plain")), metrics(Path("stopped"))
    assert [line["reward"] for line in stopped] == [line["reward"] for line in plain]
    (event,) = events(Path("stopped"), "evaluated")
    assert event["step"] == step and event["eval_reward"] == plain[step - 1]["eval_reward"]
    ends = [
        [line.replace(name, "") for line in said.splitlines() if line.startswith("best")]
        for name, said in told.items()
    ]
    assert ends[0] == ends[1] and "step 4" in ends[0][0]
    files = [Path(name, "checkpoint-4", "model.safetensors") for name in told]
    weights, expected = (load_file(file) for file in reversed(files))
    assert all(weights[name].equal(tensor) for name, tensor in expected.items())
