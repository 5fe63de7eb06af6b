"""What the files of a reward model say of it, and what a judge's question has in it; no weights are read."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from covey.checks.judge import checks
from covey.checks.rewards import models as reward_models
from covey.checks.rewards.models import usable_models, with_judge, with_reward_models
from covey.config.resolve import from_dict
from covey.data.hub import ModelFiles
from covey.options.schema import Config
from covey.plan.facts import Facts, RewardModelFacts
from covey.quickstart.task import MODEL_DIR
from covey.rewards.targets import is_model, model_name
from support.checks import changed
from support.reward_models import write_reward_model


def config(**options: Any) -> Config:
    return from_dict(
        {"model": "quickstart", "dataset": ["quickstart"], "reward_funcs": ["format"], **options}
    ).config


def described(directory: Path | str, **options: Any) -> RewardModelFacts:
    found = with_reward_models(Facts(), config(reward_model=[str(directory)], **options), offline=True)
    (facts,) = found.rewards.models
    return facts


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("rm") / "tiny-rm")


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "copy"
    directory.mkdir()
    for file in whole.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def edit(directory: Path, **changes: Any) -> Path:
    file = directory / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({n: v for n, v in values.items() if v is not None}))
    return directory


def test_a_whole_one(whole: Path) -> None:
    facts = described(whole)
    assert (facts.name, facts.problem, facts.context, facts.has_template) == ("tiny-rm", None, 512, True)
    # 320 x 64 of the embedding; 3 layers of 2 x 64 x 64, 2 x 64 x 32, 3 x 64 x 96 and 2 norms; norm; head.
    assert facts.parameters == 320 * 64 + 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 128) + 64 + 64
    assert (facts.hidden, facts.intermediate) == (64, 96)


@pytest.mark.parametrize(
    ("changes", "fault", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "causal", "is a LlamaForCausalLM, which generates text"),
        (
            {"architectures": ["LlamaModel"]},
            "not_classifier",
            "is a LlamaModel, but a reward model must be a …For",
        ),
        ({"architectures": None}, "not_classifier", "is a model that names no architecture"),
        ({"id2label": {"0": "A", "1": "B", "2": "C"}}, "labels", "with 3 labels"),
        ({"id2label": None}, "labels", "with 2 labels"),
        ({"model_type": "own", "auto_map": {"AutoModel": "x.Y"}}, "remote_code", "does not run such code"),
    ],
)
def test_what_is_no_reward_model(copy: Path, changes: dict[str, Any], fault: str, words: str) -> None:
    facts = described(edit(copy, **changes))
    assert facts.fault == fault and words in str(facts.problem)


def test_a_policy_that_is_called_a_classifier_has_no_head(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    assert "but its weights have no head with one output" in str(described(copy).problem)
    assert described(MODEL_DIR).fault == "causal"


def test_what_its_files_lack(copy: Path, tmp_path: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    assert not described(copy).has_template
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    assert described(copy).fault == "pickled_weights"
    (copy / "tokenizer.json").unlink()
    assert described(copy).fault == "no_tokenizer"
    assert "neither a directory on this machine nor the id" in str(described("./gone").problem)
    assert described("nobody/no-such-rm").fault == "hub"


def test_entries_of_reward_funcs_that_are_models(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole.parent)
    assert all(map(is_model, ("tiny-rm", str(whole), "owner/name", "ms::owner/name", "../x")))
    assert not any(map(is_model, ("accuracy", "a/b.py:f", "a/b.py", "pkg.module.f", "pkg.module:f")))
    assert [model_name(n) for n in ("a/b/rm/", "ms::o/rm", "rm")] == ["rm", "rm", "rm"]
    found = with_reward_models(Facts(), config(reward_funcs=["format", "tiny-rm", "judge"]), offline=True)
    assert [m.entry for m in found.rewards.models] == ["tiny-rm"]


def test_each_model_of_a_hub_has_its_revision(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def located(name: str, *, revision: str | None, **others: Any) -> ModelFiles:
        asked.append((name, revision))
        return ModelFiles(directory=whole, revision="0" * 40)

    monkeypatch.setattr(reward_models, "locate_model", located)
    options = config(reward_funcs=["o/a"], reward_model=["o/b", "o/c"], reward_model_revision=["v1", "v2"])
    found = with_reward_models(Facts(), options, offline=True)
    assert asked == [("o/a", None), ("o/b", "v1"), ("o/c", "v2")]
    assert [m.name for m in found.rewards.models] == ["a", "b", "c"]
    assert list(usable_models(options, found.prompts, found.rewards)) == ["o/a", "o/b", "o/c"]


def test_a_question_of_a_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ask.md").write_text("{prompt} {completion} {gold}")
    usual = {"reward_funcs": ["judge"], "judge_prompt": str(tmp_path / "ask.md")}
    facts = changed(Facts(), data={"columns": ("question", "gold")})
    judge = with_judge(facts, config(**usual)).rewards.judge
    assert judge is not None and (judge.prompt_problem, judge.unknown, judge.regex_problem) == (
        None,
        (),
        None,
    )
    other = with_judge(changed(Facts(), data={"columns": ("question",)}), config(**usual)).rewards.judge
    assert other is not None and other.unknown == ("gold",)
    for prompt, words in (("gone.md", "gone.md, which does not exist"), ("Rate it.", "no {completion}")):
        judge = with_judge(facts, config(**{**usual, "judge_prompt": prompt})).rewards.judge
        assert judge is not None and words in str(judge.prompt_problem)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    without = with_judge(facts, config(**usual))
    assert without.machine.missing_packages == (("reward_funcs", "openai"),)
    (lacking,) = [p for p in checks(config(**usual), without) if p.code == "E116"]
    assert "`pip install 'covey[judge]'`" in lacking.fixes[0].text
    judge = with_judge(facts, config(**usual, judge_regex="(")).rewards.judge
    assert judge is not None and "is not a valid regular expression: missing )" in str(judge.regex_problem)
