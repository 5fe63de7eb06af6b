"""Collect: groups in order, whatever the number of ranks that drew them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders

from covey.batching.samples import to_samples
from covey.comm import LocalComm
from covey.data.rows import prompt_table
from covey.quickstart import task
from covey.rewards.registry import build, score_rows
from covey.rollout import shares
from covey.rollout.collect import collect, own_slots
from covey.rollout.native.engine import NativeEngine
from covey.rollout.slots import CollectPlan
from covey.types import Origin, SamplingParams, Source
from covey.types.episode import summary_of
from support.rollout_shares import on_counting_ranks


@pytest.fixture(scope="module")
def collected(quickstart_policy, quickstart_codec):
    """Collect a rollout of five prompts by three siblings on `comm`, so many of whose ranks are an engine."""
    table = prompt_table(task.training_rows()[:5], quickstart_codec, max_length=None)
    prompts = [table.take(i, Origin(epoch=0, rollout=3)) for i in range(5)]
    plan = CollectPlan(
        num_generations=3,
        sampling=SamplingParams(
            temperature=1.0, max_new_tokens=16, stop_token_ids=quickstart_codec.stop_token_ids
        ),
        seed=11,
        weights={"accuracy": 1.0, "format": 0.5},
    )

    def score(rows):
        return lambda: score_rows(build(["accuracy", "format"]), [1.0, 0.5], rows)

    def run(comm, *, prompts=prompts, plan=plan, num_ranks=1):
        engine = NativeEngine(quickstart_policy)
        engine.capabilities = replace(engine.capabilities, num_ranks=num_ranks)
        return collect(prompts, engine, score, quickstart_codec, plan, comm).groups

    return run


def test_one_rank(collected, quickstart_codec):
    groups = collected(LocalComm())
    assert [g.group.prompt.id for g in groups] == [0, 1, 2, 3, 4]
    for scored in groups:
        prompt, episodes = scored.group.prompt, scored.group.episodes
        assert scored.group.planned == len(episodes) == len(scored.scores) == 3
        assert [e.id.sibling for e in episodes] == [0, 1, 2]
        for t, s in zip(episodes, scored.scores, strict=True):
            (own,) = t.sequences
            assert tuple(own.prompt_ids.tolist()) == prompt.token_ids
            before, written = len(own.prompt_ids), len(own.completion_ids)
            assert own.sources == ((Source.PROMPT, before), (Source.MODEL, written))
            assert own.is_trained.tolist() == [False] * before + [True] * written
            assert t.text == quickstart_codec.decode(own.completion_ids.tolist())
            key = t.id
            assert (key.seed, key.split, key.rollout, key.attempt, key.prompt_id) == (
                *(11, "train", 3, 0),
                prompt.id,
            )
            right = f"<answer>{prompt.columns['solution']}</answer>" in t.text
            assert {p.name: p.value for p in s.parts}["accuracy"] == float(right)
            assert s.total == s.parts[0].value + 0.5 * s.parts[1].value
    assert len({t.text for g in groups for t in g.group.episodes}) > 5
    assert len({s.total for g in groups for s in g.scores}) > 1


def test_rows_to_train_on_have_kept_sets_and_those_of_an_evaluation_none(collected, quickstart_codec):
    stop = quickstart_codec.stop_token_ids
    sampling = SamplingParams(temperature=1.0, max_new_tokens=16, stop_token_ids=stop, top_p=0.7)
    for split in ("train", "eval/held out"):
        plan = CollectPlan(num_generations=2, sampling=sampling, seed=11, split=split)
        groups = collected(LocalComm(), plan=replace(plan, weights={"accuracy": 1.0, "format": 0.5}))
        rows = [row for g in groups for e in g.group.episodes for row in e.tokens]
        assert len(rows) == 10
        for row in rows:
            assert (row.kept is not None) == (split == "train")
            assert row.kept is None or row.kept.lacks(row.trained_ids) == []


# 15 completions: uneven shares, split groups, ranks without any.
@pytest.mark.parametrize(("world", "num_ranks"), [(2, 1), (4, 1), (20, 1), (2, 2), (4, 2), (40, 2)])
def test_ranks_together_have_what_one_has(world, num_ranks, collected):
    alone = [e for g in collected(LocalComm()) for e in g.group.episodes]
    scores = [s for g in collected(LocalComm()) for s in g.scores]
    results, _ = on_counting_ranks(world, lambda comm: collected(comm, num_ranks=num_ranks))
    owned = []
    for rank, groups in enumerate(results):
        assert [len(g.group.episodes) for g in groups] == [3] * 5
        assert [g.group.prompt.id for g in groups] == [0, 1, 2, 3, 4]
        for number, (scored, sibling) in enumerate((g, i) for g in groups for i in range(3)):
            episode, score, expected = scored.group.episodes[sibling], scored.scores[sibling], alone[number]
            assert episode.id == expected.id and episode.outcome == expected.outcome
            assert score.total == scores[number].total and score.parts == scores[number].parts
            assert same_but_for_rounding(summary_of(*episode.sequences), summary_of(*expected.sequences))
            assert episode.owner % num_ranks == 0
            if episode.owner == rank:
                owned.append(number)
                assert episode.text == expected.text
                assert [t.token_ids.tolist() for t in episode.tokens] == [
                    t.token_ids.tolist() for t in expected.tokens
                ]
            else:
                with pytest.raises(AssertionError, match="another rank"):
                    _ = episode.tokens
    assert sorted(owned) == list(range(15))
    # Ranks among themselves know the same to the last bit.
    known = [[s.summary for s in to_samples(groups)] for groups in results]
    assert all(of_rank == known[0] for of_rank in known)


def test_the_first_rank_of_an_engine_has_the_slots_of_all(collected, quickstart_codec):
    slots = list(range(15))
    engine = replace(NativeEngine.capabilities, num_ranks=2)
    of_ranks, _ = on_counting_ranks(4, lambda comm: own_slots(slots, engine, comm))
    assert [list(own) for own in of_ranks] == [slots[:8], [], slots[8:], []]


def same_but_for_rounding(ours, theirs):
    """A batch of another size sums in another order."""
    return ours.logprob_sum == pytest.approx(theirs.logprob_sum, abs=1e-4) and replace(
        ours, logprob_sum=0.0, num_unknown=0, is_repetitive=False
    ) == replace(theirs, logprob_sum=0.0)


@pytest.mark.parametrize("least_tokens", [1, 10_000])
def test_groups_are_scored_while_others_decode(
    least_tokens, quickstart_policy, quickstart_codec, monkeypatch
):
    monkeypatch.setattr(shares, "_PART_TOKENS", least_tokens)
    table = prompt_table(task.training_rows()[:8], quickstart_codec, max_length=None)
    prompts = [table.take(i, Origin(epoch=0, rollout=0)) for i in range(8)]
    stop = quickstart_codec.stop_token_ids
    plan = CollectPlan(
        num_generations=2,
        sampling=SamplingParams(temperature=1.0, max_new_tokens=16, stop_token_ids=stop),
        seed=11,
    )
    # Three groups decode side by side, so that the first have ended long before the last begin.
    engine = NativeEngine(quickstart_policy, max_rows=6)
    running, handed = [], []

    def score(rows):
        running.append(len(engine._rows) + len(engine._requests))
        handed.append([r.prompt.id for r in rows])
        return lambda: score_rows(build(["accuracy"]), [1.0], rows)

    groups = collect(prompts, engine, score, quickstart_codec, plan, LocalComm()).groups
    if least_tokens == 1:
        assert len(running) > 2
        assert running[0] > 0
    else:
        assert running == [0]
    assert sorted(i for part in handed for i in part) == sorted([*range(8)] * 2)
    assert all(part.count(i) == 2 for part in handed for i in part)
    for scored in groups:
        for t, s in zip(scored.group.episodes, scored.scores, strict=True):
            assert s.total == float(f"<answer>{scored.group.prompt.columns['solution']}</answer>" in t.text)


def test_a_prompt_keeps_its_messages_on_any_number_of_ranks(collected):
    alone = [g.group.prompt for g in collected(LocalComm())]
    together, _ = on_counting_ranks(2, collected)
    assert alone[0].messages
    assert all([g.group.prompt for g in groups] == alone for groups in together)


class _Spaced(NativeEngine):
    """Each completion begins with a space, and so does no text alone of the tokenizer in use."""

    space: int

    def results(self):
        for done in super().results():
            yield replace(done, token_ids=(self.space, *done.token_ids[1:]))


@pytest.mark.parametrize("opened", ["", "The sum is"])
def test_a_space_behind_the_beginning_of_an_answer_is_kept(opened, quickstart_policy, quickstart_codec):
    """Decoders of the Llama family leave the first space out of a text alone."""
    tokenizer = Tokenizer.from_str(quickstart_codec.tokenizer.to_str())
    tokenizer.decoder = decoders.Sequence([tokenizer.decoder, decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    codec = replace(quickstart_codec, tokenizer=tokenizer)
    table = prompt_table(task.training_rows()[:2], codec, max_length=None)
    prompts = [table.take(i, Origin(epoch=0, rollout=0)) for i in range(2)]
    begun = tuple(tokenizer.encode(opened, add_special_tokens=False).ids)
    prompts = [replace(p, token_ids=(*p.token_ids, *begun), opened=opened) for p in prompts]
    sampling = SamplingParams(temperature=1.0, max_new_tokens=8, stop_token_ids=codec.stop_token_ids)
    engine = _Spaced(quickstart_policy)
    (engine.space,) = tokenizer.encode(" ", add_special_tokens=False).ids
    read = []

    def score(rows):
        read.extend(row.text for row in rows)
        return lambda: score_rows(build(["accuracy"]), [1.0], rows)

    collect(
        prompts, engine, score, codec, CollectPlan(num_generations=2, sampling=sampling, seed=1), LocalComm()
    )
    assert len(read) == 4
    assert all(text.startswith(f"{opened} ") is bool(opened) for text in read)


@pytest.mark.parametrize("change", ["seed", "split", "rollout", "attempt"])
def test_another_draw_is_another_rollout(change, collected, quickstart_codec):
    table = prompt_table(task.training_rows()[:3], quickstart_codec, max_length=None)
    origin = Origin(epoch=0, rollout=3)
    plan = CollectPlan(
        num_generations=3,
        sampling=SamplingParams(
            temperature=1.0, max_new_tokens=16, stop_token_ids=quickstart_codec.stop_token_ids
        ),
        seed=11,
    )
    changed_origin, changed_plan = origin, plan
    if change in ("seed", "split"):
        changed_plan = replace(plan, **{change: {"seed": 12, "split": "val"}[change]})
    else:
        changed_origin = replace(origin, **{change: 4})

    def texts(origin, plan):
        prompts = [table.take(i, origin) for i in range(3)]
        groups = collected(LocalComm(), prompts=prompts, plan=plan)
        return [t.text for g in groups for t in g.group.episodes]

    one = texts(origin, plan)
    assert texts(origin, plan) == one
    assert texts(changed_origin, changed_plan) != one
    # The epoch is bookkeeping: it changes no sampled token.
    assert texts(replace(origin, epoch=9), plan) == one


@pytest.mark.parametrize(("split", "spans"), [("train", True), ("train", False), ("eval", True)])
def test_a_signal_waits_for_the_next_step_of_an_engine_of_several_ranks(
    split, spans, quickstart_policy, quickstart_codec
):
    """It raises nothing while ranks compute together, ends the wait for rewards, and no evaluation."""
    table = prompt_table(task.training_rows()[:1], quickstart_codec, max_length=None)
    prompts = [table.take(0, Origin(epoch=0, rollout=0))]
    sampling = SamplingParams(temperature=1.0, max_new_tokens=4, stop_token_ids=())
    weights = {"format": 1.0}
    plan = CollectPlan(num_generations=2, sampling=sampling, seed=11, split=split, weights=weights)

    def run(comm):
        seen = {}

        class Spanning(NativeEngine):
            def results(self):
                seen["sampling"] = comm.activity.may_stop, comm.activity.may_stop_between
                yield from super().results()

        def score(rows):
            def wait():
                seen["rewards"] = comm.activity.may_stop, comm.activity.may_stop_between
                return score_rows(build(["format"]), [1.0], rows)

            return wait

        engine = Spanning(quickstart_policy)
        engine.capabilities = replace(engine.capabilities, num_ranks=1 + spans)
        collect(prompts, engine, score, quickstart_codec, plan, comm)
        assert not comm.activity.may_stop
        return seen

    first, second = on_counting_ranks(2, run)[0]
    is_stopped = split == "train"
    assert first == {
        "sampling": (is_stopped and not spans, is_stopped and spans),
        "rewards": (is_stopped, False),
    }
    assert second == ({"sampling": first["sampling"]} if spans else first)
