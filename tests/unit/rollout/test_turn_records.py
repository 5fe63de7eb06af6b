"""What is kept of episodes of several turns: kept sets, counts, records, scores, and how a group began."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from covey.activity import Activity
from covey.batching.samples import to_samples
from covey.comm import LocalComm
from covey.data.text import TextCodec, load_codec
from covey.environments.protocol import Lost, Opened, Stepped
from covey.environments.template_calls import format_of
from covey.errors import GuardStop
from covey.health.guards.rollout import RolloutFacts
from covey.health.guards.turns import check_turns
from covey.quickstart.task import MODEL_DIR
from covey.rewards.registry import build, score_rows
from covey.rollout.collect import collect
from covey.rollout.records import groups_of, records_of, with_sets_as_text
from covey.rollout.scripted import Script, ScriptedEngine
from covey.rollout.slots import CollectPlan, slots_of
from covey.rollout.turns import TurnLoop
from covey.training.measure import outcome_metrics, turn_metrics
from covey.types import (
    AnnotatedSample,
    Episode,
    Group,
    Outcome,
    Score,
    ScoredGroup,
    ScorePart,
    ToolCall,
    TrainSample,
)
from covey.types.turns import TurnCounts
from support.agents import CALL, SCHEMA, AnsweringTools, agents_for, plan_of, prompt_of
from support.turn_hosts import Environments, Filtering, asks

USER = {"role": "user", "content": "What is 2*3?"}
# It takes a mark out of earlier turns, so that each begins a new sequence.
REWRITES = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' }}"
    "{{- m['content'] | replace('six', '6') if not loop.last else m['content'] }}{{- '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
FACTS = RolloutFacts(
    step=1,
    num_generations=4,
    num_episodes=4,
    scaled_by=None,
    is_over_rollout=False,
    version=0,
    makes_prompts=True,
)


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return load_codec(MODEL_DIR, chat_template="chatml-tools")


@pytest.fixture(scope="module")
def rewriting(tmp_path_factory) -> TextCodec:
    path = tmp_path_factory.mktemp("template") / "rewrites.jinja"
    path.write_text(REWRITES)
    return load_codec(MODEL_DIR, chat_template=str(path))


def played(
    codec: TextCodec,
    script: Script = lambda turn: f"It is six, {turn.sibling}.",
    environment: Environments | None = None,
    tools: AnsweringTools | None = None,
    *,
    engine: Any = ScriptedEngine,
    split: str = "train",
) -> list[Episode]:
    """Four siblings."""
    plan = plan_of(codec, 4, split)
    prompt = prompt_of(codec, [USER], [SCHEMA] if tools else ())
    agents = agents_for(codec, tools, environment)
    loop = TurnLoop(slots_of([prompt], plan), engine(codec, script), codec, agents, Activity())
    return [episode for _, episode in sorted(loop.episodes(), key=lambda pair: pair[0])]


def scored(codec: TextCodec, episodes: list[Episode]) -> ScoredGroup:
    scores = tuple(
        Score(total=e.environment_reward, parts=(ScorePart(name="r", value=e.environment_reward),))
        for e in episodes
    )
    group = Group(prompt=prompt_of(codec, [USER]), episodes=tuple(episodes), planned=len(episodes))
    return ScoredGroup(group=group, scores=scores)


def rows_of(groups: list[ScoredGroup], advantage: float = 0.5) -> list[TrainSample]:
    return [
        TrainSample(
            annotated=AnnotatedSample(sample=sample, old_logprob_N=None, ref_logprob_N=None),
            advantage=advantage,
            loss_mask=(True,) * sample.num_trained,
        )
        for sample in to_samples(groups)
    ]


# -- kept sets and counts


def test_rows_to_train_on_have_the_sets_of_every_turn_and_those_of_an_evaluation_none(codec, rewriting):
    for split in ("train", "eval/held out"):
        for own, several in ((codec, False), (rewriting, True)):
            for episode in played(
                own, environment=Environments(step_=asks(3)), engine=Filtering, split=split
            ):
                assert len(episode.tokens) == (3 if several else 1)
                for sequence in episode.tokens:
                    assert (sequence.kept is not None) == (split == "train")
                    if sequence.kept is not None:
                        assert len(sequence.kept) == sequence.num_trained
                        assert sequence.kept.lacks(sequence.trained_ids) == []


def test_counts_and_metrics_of_turns(codec):
    """Siblings 0 to 3 have 1 to 4 turns: 0 + 1 + 2 + 3 calls, one of which has no tool, of 10 turns."""
    form, wrong = format_of(codec), ToolCall(name="search", arguments={})
    assert form is not None

    def script(turn) -> str:
        if turn.turn == turn.sibling:
            return "Six."
        return form.write([wrong if (turn.sibling, turn.turn) == (3, 2) else CALL])

    episodes = played(codec, script, tools=AnsweringTools())
    assert [(e.counts.num_turns, e.counts.num_calls, e.counts.num_failed_calls) for e in episodes] == [
        *((1, 0, 0), (2, 1, 0), (3, 2, 0), (4, 3, 1)),
    ]
    tokens = sum(e.num_trained for e in episodes)
    found = {name: (metric.value, metric.count) for name, metric in turn_metrics(episodes).items()}
    assert found == {
        "num_turns": (2.5, 4),
        "turn_length": (tokens / 10, 10),
        "tools/call_frequency": (1.5, 4),
        "tools/failure_frequency": (pytest.approx(1 / 6), 6),
    }
    # A lost episode is in none of these.
    lost = replace(episodes[3], outcome=Outcome.INFRASTRUCTURE, sequences=(), turns=())
    assert turn_metrics([*episodes[:3], lost])["num_turns"].value == 2.0
    assert outcome_metrics([*episodes[:3], lost])["outcome/infrastructure"].value == 1
    # Without tools and environment there is nothing to count.
    assert turn_metrics([replace(episodes[0], turns=(), counts=TurnCounts())]) == {}


# -- records


@pytest.mark.parametrize("kind", ["one sequence", "a sequence each", "tools", "no room"])
def test_turns_come_back_from_records(kind, codec, rewriting):
    form = format_of(codec)
    assert form is not None
    if kind == "tools":
        calls = lambda turn: "Six." if turn.turn else f"é\u2028{form.write([CALL, CALL])}"  # noqa: E731
        episodes = played(codec, calls, tools=AnsweringTools())
    elif kind == "no room":
        lost = Environments(reset=lambda n: Lost(words="no sandbox") if n else Opened(), step_=asks(2))
        episodes = played(codec, environment=lost)
    else:
        own = codec if kind == "one sequence" else rewriting
        opened = Environments(reset=lambda n: Opened(added=" Think."), step_=asks(3))
        episodes = played(own, environment=opened, engine=Filtering)
    before = scored(codec, episodes)
    lines = [json.dumps(with_sets_as_text(record)) for record in records_of([before])]
    (after,) = groups_of([json.loads(line) for line in lines])
    assert [len(e.sequences) for e in after.group.episodes] == [len(e.sequences) for e in episodes]
    for one, other in zip(episodes, after.group.episodes, strict=True):
        assert other.sequences == one.sequences
        assert (other.turns, other.counts) == (one.turns, one.counts)
        assert (other.outcome, other.text, other.failure) == (one.outcome, one.text, one.failure)
    assert [s.total for s in after.scores] == [s.total for s in before.scores]
    # What is read again passes the guard of turns, as what was sampled does.
    for groups in ([before], [after]):
        check_turns(groups, rows_of(groups), FACTS)


# -- how a group began


def test_episodes_of_a_group_begin_alike_unless_they_may_differ(codec):
    differ = Environments(reset=lambda n: Opened(added=f" Word {n % 2}."), step_=asks(1))
    groups = [scored(codec, played(codec, environment=differ))]
    with pytest.raises(GuardStop) as stop:
        check_turns(groups, rows_of(groups), FACTS)
    assert stop.value.finding.code == "F143"
    assert "the 4 episodes of group 0 began in 2 different ways" in stop.value.finding.seen
    check_turns(groups, rows_of(groups), replace(FACTS, starts_differ=True))
    alike = Environments(reset=lambda n: Opened(added=" Word."), step_=asks(1))
    groups = [scored(codec, played(codec, environment=alike))]
    check_turns(groups, rows_of(groups), FACTS)
    # One that was lost has not begun.
    lost = Environments(reset=lambda n: Opened() if n else Lost(words="gone"), step_=asks(1))
    groups = [scored(codec, played(codec, environment=lost))]
    check_turns(groups, rows_of(groups), FACTS)


def test_each_sequence_has_one_row_and_all_of_an_episode_one_advantage(rewriting):
    groups = [scored(rewriting, played(rewriting, environment=Environments(step_=asks(3))))]
    rows = rows_of(groups)
    assert len(rows) == 12
    check_turns(groups, rows, FACTS)
    for wrong, code in (
        (rows[:-1], "F111"),
        ([*rows, rows[0]], "F111"),
        ([replace(rows[0], advantage=-0.5), *rows[1:]], "F113"),
    ):
        with pytest.raises(GuardStop) as stop:
            check_turns(groups, wrong, FACTS)
        assert stop.value.finding.code == code


# -- scores


@pytest.mark.parametrize("keeps", [False, True])
def test_an_environments_rewards_are_scores_and_the_lost_have_none(keeps, codec):
    """Where rewards read environments, these live until their group is scored."""

    def step(number: int, turn: Any) -> Any:
        return Lost(words="gone") if number == 2 else Stepped(is_done=True, reward=float(number))

    environment = Environments(step_=step)
    agents = replace(agents_for(codec, None, environment), keeps_environments=keeps)
    released: list[list[int]] = []

    def score(rows):
        released.append(sorted(environment.released))
        return lambda: score_rows(build(["environment"]), [1.0], rows)

    plan = CollectPlan(
        num_generations=4,
        sampling=plan_of(codec).sampling,
        seed=1,
        weights={"environment": 1.0},
    )
    engine = ScriptedEngine(codec, lambda turn: "Six.")
    found = collect([prompt_of(codec, [USER])], engine, score, codec, plan, LocalComm(), agents)
    (group,) = found.groups
    assert [s.total for s in group.scores] == [0.0, 1.0, None, 3.0]
    assert group.group.lost == {2}
    assert released == [[2] if keeps else [0, 1, 2, 3]]
    assert sorted(environment.released) == [0, 1, 2, 3]
    keys = [e.environment for e in group.group.episodes]
    assert [key is not None for key in keys] == [keeps, keeps, False, keeps]


def test_rows_share_a_prompt_where_it_is_the_same(codec):
    """A layout computes the prompt of rows with one key once."""
    for differs, num_keys in ((False, 1), (True, 2)):
        word = lambda n, d=differs: Opened(added=f" Word {n % 2 * d}.")  # noqa: E731
        group = scored(codec, played(codec, environment=Environments(reset=word, step_=asks(1))))
        samples = to_samples([group])
        assert len({sample.prompt_key for sample in samples}) == num_keys
        # A rank without the tokens has the same keys.
        elsewhere = [replace(sample, tokens=sample.summary) for sample in samples]
        assert [s.prompt_key for s in elsewhere] == [s.prompt_key for s in samples]
