"""Filters of sampling on vLLM: the kept sets that it lists are those of the learner's own logits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from covey.rollout.filters import filters_of, kept_tokens
from covey.rollout.vllm.engine import VllmEngine
from covey.rollout.vllm.running import Running
from covey.types import Completion, GenerationRequest
from on_vllm.test_train import GAP, RUN, covey, largest, metrics
from support.engines import sampled
from support.vllm_learner import Learner, prompts, request_of

pytestmark = pytest.mark.vllm

CLOSE = 1e-4
FILTERS = [
    {"top_k": 1, "temperature": 1.3},
    {"top_k": 20, "temperature": 1.3},
    {"top_k": 50, "top_p": 0.9, "temperature": 1.3},
    {"top_k": 200, "top_p": 0.5, "min_p": 0.01, "temperature": 2.0},
    # More than there are.
    {"top_k": 320, "top_p": 0.95, "temperature": 2.0},
]


@pytest.fixture(scope="module")
def served(start, learner: Learner):
    with start() as engine:
        engine.publish(learner.weights(), 0)
        yield engine


def logits_of(learner: Learner, request: GenerationRequest, completion: Completion) -> torch.Tensor:
    """What each token was drawn by (n, V), over the temperature."""
    ids = torch.tensor([[*request.prompt_token_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = learner.policy.model(input_ids=ids).logits[0]
    first = len(request.prompt_token_ids) - 1
    own = logits[first : first + len(completion.token_ids)].float() / request.sampling.temperature
    return own.index_fill(1, torch.tensor(request.sampling.banned_token_ids, dtype=torch.long), -torch.inf)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_sets_and_logprobs_are_those_of_the_learner(filters, served: VllmEngine, learner: Learner) -> None:
    requests = [request_of(p, i, **filters) for i, p in enumerate(prompts())]
    numbers = {served.submit(request): request for request in requests}
    same = total = 0
    for completion in served.results():
        request, kept = numbers[completion.request_id], completion.kept
        assert kept is not None and len(kept) == len(completion.token_ids)
        assert kept.lacks(completion.token_ids) == []
        scaled_nV = logits_of(learner, request, completion)
        given = filters_of([request.sampling] * len(scaled_nV), scaled_nV.device)
        for ids, due, logits, token, logprob in zip(
            kept,
            kept_tokens(scaled_nV, given),
            scaled_nV,
            completion.token_ids,
            completion.logprobs,
            strict=True,
        ):
            total, same = total + 1, same + (set(ids.tolist()) == set(due.nonzero()[:, 0].tolist()))
            within = logits[torch.tensor(ids).long()].log_softmax(0)
            assert abs(float(within[ids.tolist().index(token)]) - float(logprob)) < CLOSE
    # A token at the border of top_p falls by rounding.
    assert total > 50 and same >= 0.98 * total


@pytest.mark.parametrize("temperature", [1e-6, 0.7, 1.5])
@pytest.mark.parametrize("filters", [{}, {"top_k": 12}], ids=str)
def test_banned_tokens_have_no_part(filters, temperature, served: VllmEngine, learner: Learner) -> None:
    free = sampled(served, [request_of(p, i, temperature=temperature) for i, p in enumerate(prompts())])
    banned = tuple(sorted({token for completion in free for token in completion.token_ids})[:40])
    own = {"temperature": temperature, "banned_token_ids": banned, **filters}
    numbers = {(r := request_of(p, i, **own)) and served.submit(r): r for i, p in enumerate(prompts())}
    for completion in served.results():
        assert not {*banned} & {*completion.token_ids.tolist()}
        logits_nV = logits_of(learner, numbers[completion.request_id], completion)
        for place, (token, logprob) in enumerate(
            zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True)
        ):
            if temperature < 0.1:
                assert token == int(logits_nV[place].argmax()) and logprob == 0.0
                continue
            ids = slice(None) if completion.kept is None else [*completion.kept][place].tolist()
            assert completion.kept is None or not {*banned} & {*ids}
            due = logits_nV[place][token] - logits_nV[place][ids].logsumexp(0)
            assert abs(float(due) - logprob) < CLOSE


def test_a_request_without_filters_beside_one_with_them(served: VllmEngine) -> None:
    plain, filtered = request_of([1, 2, 3], 0), request_of([1, 2, 3], 1, top_k=5)
    numbers = [served.submit(request) for request in (plain, filtered)]
    found = {c.request_id: c.kept for c in served.results()}
    assert found[numbers[0]] is None and set(found[numbers[1]].counts.tolist()) == {5}


def test_what_it_cannot_list_is_refused(served: VllmEngine) -> None:
    with pytest.raises(ValueError, match="top_k"):
        sampled(served, [request_of([1, 2, 3], top_p=0.9)])


def test_more_equals_than_are_listed_are_an_error() -> None:
    request = request_of([1, 2, 3], top_k=2)
    at = {token: SimpleNamespace(logprob=-1.0) for token in range(4)}
    new = SimpleNamespace(token_ids=[0], logprobs=[at])
    with pytest.raises(RuntimeError, match="equally probable"):
        Running(request, 0.0, listed=4, vocab=300).take(new, 0)
    whole = Running(request, 0.0, listed=4, vocab=4)
    whole.take(new, 0)
    assert whole.sets == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    "filters",
    [
        # As in ms-swift's scripts.
        "--temperature 1.0 --top_p 0.9 --top_k 50 --beta 0.001",
        "--temperature 1.0 --top_p 0.85 --top_k 80 --tuner_type lora",
    ],
)
def test_a_run(filters: str, tmp_path) -> None:
    """Its canary, a greedy evaluation and training: within the sets the ratio is 1, and KL 0 at the start."""
    words = f"{RUN} {filters} --val_dataset quickstart#8 --eval_steps 2 --eval_temperature 0 --max_steps 3"
    done = covey(f"train {words}", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    found = metrics(tmp_path / "out")
    assert [m["step"] for m in found] == [1, 2, 3] and any("eval_reward" in m for m in found)
    assert all(m["kept/mean"] > 1.0 and m["entropy_kept"] < m["entropy"] for m in found)
    assert found[0]["kl"] in (0.0, None) and largest(GAP, tmp_path / "out") < 1e-4
    assert 0.0 < largest("publish/canary_gap", tmp_path / "out") < 1e-3
