"""A user's own reward functions: files of ms-swift and of TRL unchanged, and what becomes of those that
fail."""

from __future__ import annotations

import math
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from journeys.helpers import (
    covey,
    events,
    flags,
    metrics,
    rollouts,
    rows,
    small,
    succeed,
    write_jsonl,
)

OLD_PLUGIN = """
    import re
    from typing import List

    from swift.plugin import ORM, orms
    from swift.utils import get_logger

    logger = get_logger()


    class Closed(ORM):

        def __call__(self, completions, **kwargs) -> List[float]:
            pattern = r"^<think>.*?</think>\\s*<answer>.*?</answer>$"
            return [1.0 if re.match(pattern, c, re.DOTALL) else 0.0 for c in completions]


    orms["closed"] = Closed
"""
NEW_PLUGIN = """
    import asyncio

    from swift.rewards import ORM, AsyncORM, orms


    class Right(ORM):

        def __call__(self, completions, solution, **kwargs):
            rewards = []
            for completion, gold in zip(completions, solution):
                rewards.append(2.0 if f"<answer>{gold}</answer>" in completion else 0.0)
            return rewards


    class Judge(AsyncORM):

        async def __call__(self, completions, **kwargs):
            async def one(text):
                await asyncio.sleep(0.001)
                return float(len(text))
            return await asyncio.gather(*[one(c) for c in completions])


    orms["right"] = Right
    orms["judge"] = Judge
"""
TRL_FILE = """
    import asyncio


    def digits(prompts, completions, answer, log_extra=None, log_metric=None, **kwargs):
        rewards = [sum(c.isdigit() for c in completion) / 10 for completion in completions]
        log_extra("gold_length", [len(a) for a in answer])
        log_metric("digits_best", max(rewards))
        return rewards


    async def some(prompts, completions, answer, **kwargs):
        await asyncio.sleep(0)
        return [None if int(a) % 2 else float(len(p)) for a, p in zip(answer, prompts)]
"""


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str) -> str:
    Path(name).write_text(textwrap.dedent(text).lstrip())
    return name


def parts(record: dict[str, Any]) -> dict[str, Any]:
    return {p["name"]: p["value"] for p in record["parts"]}


def test_plugins_and_functions_unchanged(tmp_path: Path) -> None:
    data = [{**row, "solution": row["answer"]} for row in rows(12)]
    write_jsonl(Path("d.jsonl"), data)
    plugins = [write("old.py", OLD_PLUGIN), write("new.py", NEW_PLUGIN)]
    write("mine.py", TRL_FILE)
    funcs = ["accuracy", "closed", "right", "judge", "mine.py:digits", "mine.py:some"]
    weights = [1, 0.5, 0.25, 0.01, 2, 0.001]
    changes = {"reward_funcs": funcs, "reward_weights": weights, "external_plugins": plugins}
    options = small("d.jsonl", "run", **changes, num_generations=2, max_steps=3)
    succeed("train", *flags(options))
    run = tmp_path / "run"
    names = ["accuracy", "closed", "right", "judge", "digits", "some"]
    records = [r for found in rollouts(run) for r in found]
    assert len(records) == 24
    for record in records:
        text, gold = record["text"], record["columns"]["answer"]
        found = parts(record)
        assert list(found) == names
        assert found["closed"] == float(
            bool(re.match(r"^<think>.*?</think>\s*<answer>.*?</answer>$", text, re.DOTALL))
        )
        assert found["right"] == 2.0 * (f"<answer>{gold}</answer>" in text)
        assert found["judge"] == len(text)
        assert found["digits"] == sum(c.isdigit() for c in text) / 10
        assert found["some"] == (None if int(gold) % 2 else len(record["prompt"]))
        assert record["extras"]["gold_length"] == len(gold)
        spoke = [w * v for w, v in zip(weights, found.values(), strict=True) if v is not None]
        assert record["reward"] == pytest.approx(sum(spoke), rel=1e-12)
        assert (record["status"], record["masked"]) == ("ok", None)
    silent = [parts(r)["some"] is None for r in records]
    assert 0 < sum(silent) < 24
    for line, step in zip(metrics(run), rollouts(run), strict=True):
        spoke = [parts(r)["some"] for r in step if parts(r)["some"] is not None]
        assert line["n"]["rewards/some/mean"] == len(spoke)
        best = [max(parts(r)["digits"] for r in step)]
        # Each call logs its best; calls are cut at the borders of prompts.
        assert line["digits_best"] <= max(best) and line["digits_best"] > 0
        assert line["rows/invalid"] == 0


def test_messages_in_the_prompt_column(tmp_path: Path) -> None:
    """TRL's form: a prompt column of messages gives prompts and completions as messages."""
    data = [{"prompt": [{"role": "user", "content": r["question"]}], "answer": r["answer"]} for r in rows(8)]
    write_jsonl(Path("d.jsonl"), data)
    write(
        "mine.py",
        """
        def right(prompts, completions, answer, **kwargs):
            assert [p[-1]["role"] for p in prompts] == ["user"] * len(prompts)
            texts = [c[0]["content"] for c in completions]
            return [1.0 if f"<answer>{a}</answer>" in t else 0.0 for t, a in zip(texts, answer)]
        """,
    )
    succeed("train", *flags(small("d.jsonl", "run", reward_funcs=["mine.py:right"], max_steps=1)))
    for record in rollouts(tmp_path / "run")[0]:
        gold = record["columns"]["answer"]
        assert parts(record)["right"] == float(f"<answer>{gold}</answer>" in record["text"])


def odd(text: str) -> bool:
    """What the reward below raises on: about a third of what the model writes, and no bare answer."""
    return "<think>" in text and sum(map(ord, text)) % 3 == 0


RAISING = """
    def picky(completions, answer, **kwargs):
        for text in completions:
            if "<think>" in text and sum(map(ord, text)) % 3 == 0:
                raise ValueError("no word on this one")
        return [float(a in c) for c, a in zip(completions, answer)]
"""


def test_rows_on_which_a_reward_raises_are_invalid(tmp_path: Path) -> None:
    write_jsonl(Path("d.jsonl"), rows(8))
    write("mine.py", RAISING)
    succeed("train", *flags(small("d.jsonl", "run", reward_funcs=["mine.py:picky", "format"])))
    run = tmp_path / "run"
    for line, step in zip(metrics(run), rollouts(run), strict=True):
        broken = [r for r in step if odd(r["text"])]
        assert 0 < len(broken) < 8
        assert line["rows/invalid"] == len(broken) / 8 or line["rows/invalid"] == len(broken)
        for record in step:
            if record in broken:
                assert (record["status"], record["reward"], record["masked"]) == ("error", None, "invalid")
                assert parts(record)["picky"] is None
                assert "ValueError: no word on this one (mine.py, line 4" in record["message"]
            else:
                assert (record["status"], record["masked"]) == ("ok", None)
                assert record["reward"] is not None
        scored = [r["reward"] for r in step if r["reward"] is not None]
        assert line["reward"] == pytest.approx(sum(scored) / len(scored), rel=1e-12)
        assert line["n"]["reward"] == len(scored)


def test_a_reward_that_fails_throughout_stops_the_run(tmp_path: Path) -> None:
    write_jsonl(Path("d.jsonl"), rows(8))
    write(
        "mine.py",
        """
        def judge(completions, **kwargs):
            raise ConnectionError("the judge does not answer")
        """,
    )
    options = small("d.jsonl", "run", reward_funcs=["mine.py:judge", "format"], reward_trial=False)
    done = covey("train", *flags(options))
    run = tmp_path / "run"
    assert done.code == 3
    for words in ("F107", "judge", "8 of 8", "the judge does not answer", "--resume_from_checkpoint latest"):
        assert words in done.err
    assert [e["code"] for e in events(run, "finding")] == ["F107"]
    assert not (run / "metrics.jsonl").exists()
    # Nothing was scored 0 or learnt; what was said to do then works.
    write("mine.py", "def judge(completions, **kwargs):\n    return [float(len(c)) for c in completions]\n")
    succeed("train", "run/config.yaml", "--resume_from_checkpoint", "latest")
    assert [m["step"] for m in metrics(run)] == [1, 2]
    assert all(m["rows/invalid"] == 0 for m in metrics(run))


def test_the_trial_finds_it_before_anything_is_written(tmp_path: Path) -> None:
    write_jsonl(Path("d.jsonl"), rows(8))
    write("mine.py", "def judge(completions, **kwargs):\n    return completions[99]\n")
    done = covey("train", *flags(small("d.jsonl", "run", reward_funcs=["mine.py:judge"])))
    assert done.code == 2
    assert "E316" in done.err and "IndexError" in done.err and "line 2" in done.err
    assert not (tmp_path / "run").exists()


def test_a_call_that_does_not_end(tmp_path: Path) -> None:
    """A call past its limit makes its rows invalid, and no others; the worker is replaced."""
    data = write_jsonl(Path("d.jsonl"), rows(2))
    slow = rows(2)[1]["answer"]
    write(
        "mine.py",
        f"""
        import time

        def judge(completions, answer, trainer_state, **kwargs):
            if "{slow}" in answer and trainer_state.global_step == 0:
                time.sleep(60)
            return [float(len(c)) for c in completions]
        """,
    )
    options = small(data, "run", reward_funcs=["mine.py:judge"], reward_timeout_s=0.5, reward_workers=2)
    succeed("train", *flags(options))
    first, second = rollouts(tmp_path / "run")
    for record in first:
        late = record["columns"]["answer"] == slow
        assert record["status"] == ("timeout" if late else "ok")
        assert (record["reward"] is None) == late
        assert not late or "within 0.5 s" in record["message"]
    assert {r["status"] for r in second} == {"ok"}
    assert [m["n"]["reward"] for m in metrics(tmp_path / "run")] == [4, 8]


@pytest.mark.parametrize("name", ["reward", "step"])
def test_a_metric_of_the_user_takes_no_place(name: str, tmp_path: Path) -> None:
    """What covey itself records under a name is what stands there."""
    write_jsonl(Path("d.jsonl"), rows(8))
    write(
        "mine.py",
        f"""
        def size(completions, log_metric, **kwargs):
            log_metric("{name}", -123.0)
            return [float(len(c)) for c in completions]
        """,
    )
    succeed("train", *flags(small("d.jsonl", "run", reward_funcs=["mine.py:size"])))
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    for line, step in zip(lines, rollouts(tmp_path / "run"), strict=True):
        assert line["reward"] == pytest.approx(sum(len(r["text"]) for r in step) / len(step), rel=1e-12)
        assert line[f"user/{name}"] == -123.0


TURNING = """
    def ratio(completions, trainer_state, answer, **kwargs):
        values = [float(len(c)) for c in completions]
        if trainer_state.global_step >= 1:
            values[2] = VALUE
        return values
"""


@pytest.mark.parametrize(("value", "said"), [("float('nan')", "nan"), ("-float('inf')", "-inf")])
def test_one_value_that_is_no_number_stops_the_run(value: str, said: str, tmp_path: Path) -> None:
    """In the second step, on one completion: the function and the row are named, the first step is kept."""
    write_jsonl(Path("d.jsonl"), rows(8))
    write("mine.py", TURNING.replace("VALUE", value))
    options = small("d.jsonl", "run", reward_funcs=["format", "mine.py:ratio"], reward_workers=1)
    done = covey("train", *flags(options))
    assert done.code == 3, done.out + done.err
    assert [e["code"] for e in events(tmp_path / "run", "finding")] == ["F107"]
    (finding,) = events(tmp_path / "run", "finding")
    named = re.fullmatch(
        rf"the reward ratio returned {said} instead of a finite number or None: row (\d) of the data, "
        r"completion 3 of 4, '.+'?",
        finding["seen"],
    )
    assert named and 1 <= int(named[1]) <= 8
    assert said in done.err and "--resume_from_checkpoint latest" in done.err
    assert [m["step"] for m in metrics(tmp_path / "run")] == [1]
    write("mine.py", TURNING.replace("VALUE", "0.0"))
    succeed("train", "run/config.yaml", "--resume_from_checkpoint", "latest")
    assert [m["step"] for m in metrics(tmp_path / "run")] == [1, 2]


def test_a_value_that_is_no_number_in_an_evaluation_stops_the_run_too(tmp_path: Path) -> None:
    write_jsonl(Path("d.jsonl"), rows(8))
    write_jsonl(Path("v.jsonl"), [{**row, "held": True} for row in rows(4)])
    write(
        "mine.py",
        """
        def ratio(completions, held=None, **kwargs):
            return [float("nan") if held and held[0] else float(len(c)) for c in completions]
        """,
    )
    options = small("d.jsonl", "run", reward_funcs=["mine.py:ratio"], val_dataset=["v.jsonl"])
    done = covey("train", *flags(options))
    assert done.code == 3, done.out + done.err
    said = "returned nan instead of a finite number or None"
    where = "row 1 of the data, completion 1 of 1"
    assert f"the reward ratio {said}: {where}" in " ".join(done.err.split())
    typed = {"val_dataset": ["v.jsonl"], "reward_funcs": ["mine.py:ratio"], "reward_trial": False}
    done = covey("eval", "quickstart", *flags(typed))
    assert done.code == 3, done.out + done.err
    assert said in " ".join(done.err.split())


def test_built_in_rewards_with_their_options(tmp_path: Path) -> None:
    """What each scored follows from the ids and the text that stand beside it in the rollout files."""
    write_jsonl(Path("d.jsonl"), rows(8))
    funcs = [
        "accuracy",
        "cosine",
        "soft_overlong",
        "get_repetition_penalty_reward",
        "repetition",
        "tag_count",
    ]
    given = {"cosine_max_len": 12, "cosine_min_len_value_wrong": -2.0, "repetition_n_grams": 1}
    given |= {"repetition_max_penalty": -3.0, "soft_max_length": 12, "soft_cache_length": 8}
    weights = [1, 0.5, 0.25, 0.1, 0.1, 2]
    succeed("train", *flags(small("d.jsonl", "run", reward_funcs=funcs, reward_weights=weights, **given)))
    records = [r for step in rollouts(tmp_path / "run") for r in step]
    assert len(records) == 16
    for record in records:
        found, ids, text = parts(record), record["completion_ids"], record["text"]
        wave = (1 + math.cos(math.pi * min(len(ids) / 12, 1))) / 2
        expected = 0.5 + 0.5 * wave if found["accuracy"] else -2.0 * wave
        assert found["cosine"] == pytest.approx(expected, abs=1e-12)
        assert found["soft_overlong"] == pytest.approx(-min(max(len(ids) - 4, 0) / 8, 1))
        assert found["get_repetition_penalty_reward"] == pytest.approx(-3 * (1 - len(set(ids)) / len(ids)))
        words = text.lower().split()
        assert found["repetition"] == pytest.approx(
            -3 * (1 - len(set(words)) / max(len(words), 1)) * bool(words)
        )
        tags = ("<think>", "</think>", "<answer>", "</answer>")
        assert found["tag_count"] == sum(text.count(t) == 1 for t in tags) / 4
        total = sum(w * v for w, v in zip(weights, found.values(), strict=True))
        assert record["reward"] == pytest.approx(total, rel=1e-12)
    config = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    assert "soft_cache_length: 8" in config and "cosine_max_len: 12" in config
    again = succeed("plan", "run/config.yaml", "--output_dir", "other")
    assert "W108" not in again.out + again.err
