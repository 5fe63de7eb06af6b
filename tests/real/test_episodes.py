"""Two turns with Qwen 3's own template, which takes the thinking out of history: such a turn begins a new
sequence, one that only grows goes on with the same, and both train as a slow loop says.

The engine samples both turns, the second as a longer one of the first where the template lets it.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import transformers

from covey.algorithm.losses import LossConfig
from covey.batching.needs import Needs
from covey.batching.pack import pack
from covey.comm import LocalComm
from covey.data.text import load_codec
from covey.learner.annotate import annotate_and_credit
from covey.learner.backends.single import SingleBackend
from covey.learner.update import accumulate
from covey.models.policy import Policy
from covey.rollout.native.engine import NativeEngine
from covey.selftest.compare import far
from covey.types import (
    Completion,
    Episode,
    EpisodeId,
    GenerationRequest,
    Group,
    Origin,
    Outcome,
    Prompt,
    SamplingParams,
    Score,
    ScoredGroup,
    Source,
    TokenSequence,
)
from covey.types.arrays import bools, floats, ints, joined_runs
from support.options import credit
from support.real import real
from support.steps import OPTIMIZER, plan_of

GROUPS, SIBLINGS, VERSION = 2, 4, 3
WORDS = ("</think>", "<|im_end|>", " yes", " no", " maybe", " seven", " three", " ten", " sure", " why")
ASKED, MORE = "What is 12+34?", "Are you sure?"


@pytest.fixture(scope="module")
def codec():
    return load_codec(real("qwen3"))


@pytest.fixture(scope="module")
def model(codec):
    """A random model of the family that says a few words of the vocabulary."""
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        vocab_size=151_680,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=False,
    )
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in made.model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    said = torch.tensor([i for word in WORDS for i in codec.encode([word])[0]])
    with torch.no_grad():
        # Logits that are all equal would be summed with the same rounding 150,000 times.
        made.lm_head.weight.normal_(std=0.1)
        made.lm_head.weight[said] = 3.0 * torch.randn(len(said), 32)
    return made


class Conversation:
    """An episode of two turns, whose second prompt is what the template makes of the first answer."""

    def __init__(self, codec, group: int, sibling: int) -> None:
        self._codec = codec
        self.id = EpisodeId(seed=1, split="train", rollout=0, attempt=0, prompt_id=group, sibling=sibling)
        self._messages = [{"role": "user", "content": f"{group}: {ASKED}"}]
        self.sampling = SamplingParams(
            temperature=1.0, max_new_tokens=12, stop_token_ids=tuple(codec.stop_token_ids)
        )
        self.prompts: list[tuple[int, ...]] = []
        self.completions: list[Completion] = []

    def request(self) -> GenerationRequest:
        """The next turn."""
        number = len(self.completions)
        if number:
            said = self._codec.decode(self.completions[-1].token_ids.tolist())
            for end in ("<|im_end|>", "<|endoftext|>"):
                said = said.removesuffix(end)
            self._messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": MORE},
            ]
        self.prompts.append(tuple(self._codec.encode([self._codec.render(self._messages)])[0]))
        return GenerationRequest(
            turn=self.id.turn_id(number),
            prompt_token_ids=self.prompts[-1],
            sampling=self.sampling,
            extends=self.id.turn_id(number - 1) if number and self.goes_on else None,
            may_go_on=not number,
        )

    @property
    def goes_on(self) -> bool:
        """Whether the second prompt begins with exactly the tokens of the first turn."""
        before = [*self.prompts[0], *self.completions[0].token_ids.tolist()]
        return list(self.prompts[1][: len(before)]) == before

    def episode(self) -> Episode:
        first, second = self.completions
        sequences = [TokenSequence.of_turn(self.prompts[0], first)]
        if self.goes_on:
            start = len(sequences[0].token_ids)
            between = self.prompts[1][start:]
            sequences = [
                TokenSequence(
                    token_ids=ints([*self.prompts[1], *second.token_ids.tolist()]),
                    is_trained=bools(
                        [*sequences[0].is_trained, *[False] * len(between), *[True] * len(second.token_ids)]
                    ),
                    logprobs=floats([*first.logprobs, *second.logprobs]),
                    versions=joined_runs([first.versions, second.versions]),
                    sources=(
                        *sequences[0].sources,
                        (Source.ENVIRONMENT, len(between)),
                        (Source.MODEL, len(second.token_ids)),
                    ),
                )
            ]
        else:
            sequences.append(TokenSequence.of_turn(self.prompts[1], second))
        return Episode(
            id=self.id,
            sequences=tuple(sequences),
            outcome=Outcome(second.finish),
            text=self._codec.decode(second.token_ids.tolist()),
            sampling=self.sampling,
        )


@pytest.fixture(scope="module")
def groups(codec, model):
    engine = NativeEngine(Policy(copy.deepcopy(model), stream="prefix").eval())
    engine.publish(iter(()), VERSION)
    talks = [Conversation(codec, g, s) for g in range(GROUPS) for s in range(SIBLINGS)]
    for _ in range(2):
        by_number = {engine.submit(talk.request()): talk for talk in talks}
        for completion in engine.results():
            by_number[completion.request_id].completions.append(completion)
    episodes = [talk.episode() for talk in talks]
    made = []
    for group in range(GROUPS):
        own = tuple(episodes[group * SIBLINGS : (group + 1) * SIBLINGS])
        prompt = Prompt(
            id=group,
            messages=None,
            text="",
            token_ids=talks[group * SIBLINGS].prompts[0],
            columns={},
            origin=Origin(epoch=0, rollout=0),
        )
        scores = tuple(Score(total=float(n % 3) + 0.5 * group * n, parts=()) for n in range(SIBLINGS))
        made.append(ScoredGroup(group=Group(prompt=prompt, episodes=own, planned=SIBLINGS), scores=scores))
    return made


def test_the_template_decides_whether_a_turn_begins_a_sequence(groups, codec):
    close = codec.encode(["</think>"])[0][0]
    episodes = [e for g in groups for e in g.group.episodes]
    thought = [close in e.sequences[0].completion_ids[:12].tolist() for e in episodes]
    assert {len(e.sequences) for e in episodes} == {1, 2}
    for episode, has_thought in zip(episodes, thought, strict=True):
        if has_thought:
            assert len(episode.sequences) == 2
        for sequence in episode.sequences:
            assert len(sequence.turn_ends) == 3 - len(episode.sequences)
            assert len(sequence.logprobs) == int(sequence.is_trained.sum())


def looped(groups, model, loss_type):
    """The loss of rows forwarded one by one in float64, by the table of weights; every ratio is 1."""
    model = copy.deepcopy(model).double()
    episodes = [(g, i) for g in groups for i in range(SIBLINGS)]
    tokens = [sum(len(s.logprobs) for s in g.group.episodes[i].sequences) for g, i in episodes]
    loss = torch.zeros((), dtype=torch.float64)
    for (scored, i), own in zip(episodes, tokens, strict=True):
        totals = torch.tensor([s.total for s in scored.scores], dtype=torch.float64)
        advantage = float((totals[i] - totals.mean()) / (totals.std() + 1e-4))
        weight = 1 / (len(episodes) * own) if loss_type == "grpo" else 1 / sum(tokens)
        for sequence in scored.group.episodes[i].sequences:
            ids = torch.tensor(sequence.token_ids).long()
            logprob_T = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
            places = torch.tensor(sequence.is_trained).nonzero()[:, 0]
            logprob_N = logprob_T[places - 1, ids[places]]
            loss = loss - weight * advantage * (logprob_N - logprob_N.detach()).exp().sum()
    loss.backward()
    found = {f"model.{n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), found


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_they_train_as_the_loop_says(loss_type, groups, model):
    expected_loss, expected = looped(groups, model, loss_type)
    whole = replace(plan_of(), completions_per_rank=GROUPS * SIBLINGS)
    config = LossConfig(loss_type=loss_type, epsilon=0.2, epsilon_high=0.2)
    for changes in ({}, {"max_tokens": 1}, {"stream": "packed", "max_tokens": 90}, {"stream": "padded"}):
        plan = replace(whole, **changes)
        backend = SingleBackend(Policy(copy.deepcopy(model), stream=plan.stream).train(), OPTIMIZER)
        rows = annotate_and_credit(
            groups,
            backend,
            credit=credit(),
            needs=Needs(old=False, reference=False, may_skip_rows=True),
            plan=plan,
            comm=LocalComm(),
            version=VERSION,
        )
        assert len(rows) > GROUPS * SIBLINGS and {r.annotated.sample.age for r in rows} == {0}
        (batch,) = pack(rows, plan, rollout=0)
        sums = accumulate(batch, backend, config, LocalComm())
        assert sums.totals()["loss"] == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)
        # What the engine said of its tokens is what the learner says, whatever came before the turn.
        assert sums.agreement()[1] < 1e-3
        found = backend.masters.gradients()
        assert far(found, expected) <= 3e-4
        for factor in (0.0, -1.0, 2.0):
            assert far({n: factor * g for n, g in found.items()}, expected) > 0.5
