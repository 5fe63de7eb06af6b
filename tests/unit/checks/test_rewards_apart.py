"""What is said of reward models and of the reward judge."""

from __future__ import annotations

from typing import Any

import pytest

from covey.checks.rewards.apart import judge_problems
from covey.plan.facts import JudgeFacts, RewardFacts, RewardModelFacts
from covey.plan.memory import LIBRARIES, memory_plan, reward_model_bytes
from support.checks import GOOD, SIZES, Case, assert_fixes_mend, assert_says, changed, config, facts, found

MODEL: dict[str, Any] = {
    "entry": "models/rm",
    "name": "rm",
    "directory": "models/rm",
    "parameters": 1_000_000,
    "file_bytes": 2_000_000,
    "hidden": 64,
    "intermediate": 96,
    "context": 4096,
    "has_template": True,
}
NO_SCORE = "models/rm is a LlamaForCausalLM, which writes text and gives no score"
NO_GROUP = "it has 0 groups, and the reward is what its one group has"
WITH = {"reward_model": ["models/rm"]}
JUDGE = {
    "reward_funcs": ["judge"],
    "judge_base_url": "http://127.0.0.1:8000/v1",
    "judge_model": "m",
    "judge_prompt": "Rate {completion}.",
}


def model(**changes: Any) -> RewardModelFacts:
    return RewardModelFacts(**{**MODEL, **changes})


def of(**changes: Any) -> Any:
    return facts(rewards={"models": (model(**changes),)}, prompts={"are_text": False})


CASES = [
    Case(code="E337", option="reward_model", options=WITH,
         facts=of(problem=NO_SCORE, fault="causal"), words=f"{NO_SCORE}."),
    Case(code="E337", option="reward_funcs", options={"reward_funcs": ["models/rm"]},
         facts=of(problem="models/rm has no tokenizer.json", fault="no_tokenizer"),
         words="models/rm has no tokenizer.json."),
    Case(code="E338", option="reward_model", options=WITH, facts=of(has_template=False),
         words="models/rm has no chat template, but the prompts are messages."),
    Case(code="E339", option="reward_model_revision", facts=of(directory="/cache/rm"),
         options={**WITH, "reward_model_revision": ["v1", "v2"]},
         words="reward_model_revision has 2 entries, but reward_model "
               "has 1; give one revision for each model."),
    Case(code="E339", option="reward_model_revision", facts=of(),
         options={**WITH, "reward_model_revision": ["v1"]},
         words="models/rm is a directory, and a directory has only the revision main."),
    Case(code="W125", option="reward_model", facts=of(context=500), options=WITH,
         words="models/rm reads at most 500 tokens, but a prompt with its completion may have "),
    Case(code="E340", option="judge_base_url", facts=facts(rewards={"judge": JudgeFacts()}),
         options={"reward_funcs": ["judge"], "judge_model": "m"},
         words="The reward judge is used, but these options are missing: judge_base_url, judge_prompt."),
    Case(code="E341", option="judge_prompt", options=JUDGE,
         facts=facts(rewards={
             "judge": JudgeFacts(prompt_problem="judge_prompt has no {completion}: 'Rate it.'")}),
         words="judge_prompt has no {completion}: 'Rate it.'."),
    Case(code="E341", option="judge_prompt", options=JUDGE,
         facts=facts(rewards={"judge": JudgeFacts(unknown=("sollution",))},
                     data={"columns": ("question", "solution")}),
         words="judge_prompt has {sollution}, but the data has no such "
               "column; its columns are question, solution"),
    Case(code="E342", option="judge_regex", options={**JUDGE, "judge_regex": "Reward"},
         facts=facts(rewards={"judge": JudgeFacts(regex_problem=NO_GROUP)}),
         words=f"judge_regex is 'Reward': {NO_GROUP}."),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_messages(case: Case) -> None:
    assert_says(case)


@pytest.mark.parametrize("case", [c for c in CASES if c.code in ("E339", "W125")], ids=str)
def test_fixes_mend(case: Case) -> None:
    assert_fixes_mend(case)


def test_what_is_right_says_nothing() -> None:
    assert found(of(), **WITH) == []
    assert found(facts(rewards={"judge": JudgeFacts()}), **JUDGE) == []


def test_a_model_without_a_template_reads_prompts_that_are_text() -> None:
    plain = facts(rewards={"models": (model(has_template=False),)}, prompts={"are_text": True})
    assert [p.code for p in found(plain, **WITH)] == ["W109"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:8000/v1", "does not have the form"),
        ("ftp://host/v1", "does not have the form"),
        ("http:///v1", "does not have the form"),
        ("http://host:99999/v1", "is not an address: Port out of range"),
        ("http://host:0/v1", "port 0"),
        ("https://me:sk-secret@host/v1", "keys and passwords must not be in it"),
        ("https://host/v1?key=sk-secret", "keys and passwords must not be in it"),
    ],
)
def test_an_address_is_looked_at_and_no_key_of_it_repeated(url: str, words: str) -> None:
    (fault,) = judge_problems(
        config(**{**JUDGE, "judge_base_url": url}), GOOD.data, RewardFacts(judge=JudgeFacts())
    )
    assert judge_problems(config(judge_base_url=url), GOOD.data, GOOD.rewards) == [fault]
    assert (fault.code, fault.option) == ("E340", "judge_base_url")
    assert words in fault.seen and "sk-secret" not in fault.seen


def test_weights_are_counted_over_functions_and_models() -> None:
    three = {"reward_funcs": ["format", "models/rm"], "reward_model": ["other/rm2"]}
    (fault,) = found(facts(), **three, reward_weights=[1.0, 0.5])
    assert fault.code == "E307" and "2 weights for 3 rewards" in fault.seen
    assert found(facts(), **three, reward_weights=[1.0, 0.5, 0.2]) == []
    (twice,) = found(
        facts(), reward_funcs=["format"], reward_model=["a/b", "a/b"], reward_weights=[1.0, 2.0, 3.0]
    )
    assert twice.fixes[0].edits == {
        "reward_funcs": ["format"],
        "reward_model": ["a/b"],
        "reward_weights": [1.0, 5.0],
    }


def test_a_reward_model_counts_in_the_memory() -> None:
    """On a CPU 4 bytes a weight; on a GPU what its files hold; and 8,192 tokens of a layer's outputs."""
    width = 8192 * (6 * 64 + 3 * 96)
    assert reward_model_bytes(model(), cuda=False) == LIBRARIES + 4_000_000 + 4 * width
    assert reward_model_bytes(model(), cuda=True) == LIBRARIES + 2_000_000 + 2 * width
    known = facts(
        model={"sizes": SIZES}, prompts={"longest": 10}, machine={"cuda": False, "free_memory_bytes": 10**12}
    )
    one, two = (
        memory_plan(config(**WITH), changed(known, rewards={"models": (model(),) * n})) for n in (1, 2)
    )
    assert two.phases
    each = reward_model_bytes(model(), cuda=False)
    for fewer, more in zip(one.phases, two.phases, strict=True):
        assert more.num_bytes - fewer.num_bytes == each == fewer.parts["reward models"], more.name
    assert two.needed_bytes - one.needed_bytes == each
