"""The embedding of the pad token: its gradient is that of transformers' own module, in every layout.

transformers gives the input embedding a `padding_idx` where the configuration names a pad token, and that row
then gets no gradient as an input. A pad token that is also the end token stands inside the rows: behind every
turn of the prompt, and at the end of every completion. As a target it has a gradient in the output embedding,
and so in a tied one.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from covey.models.policy import Policy
from covey.models.prefix import share_prompt
from covey.models.probe import micro_of
from covey.token_streams import Row
from support.models import policy_of

END = 2
FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "gemma2", "gpt2", "mixtral")
PROMPT = (7, 9, END, 8, 5, END, 11)
COMPLETIONS = ((13, 6, END, 14, END), (6, END), (21, 22, 23, END))


def rows_with_ends() -> list[Row]:
    """Siblings of one prompt, and one row of another; every turn and every completion ends with END."""
    found = []
    for key, (prompt, completions) in enumerate(((PROMPT, COMPLETIONS), ((4, END, 6), ((9, END, 3, END),)))):
        for own in completions:
            trained = [False] * len(prompt) + [True] * len(own)
            ids = [*prompt, *own]
            found.append(Row(token_ids=ids, is_trained=trained, prompt_length=len(prompt), prompt_key=key))
    return found


def alone(policy: Policy, rows: Sequence[Row]) -> dict[str, Tensor]:
    """Gradients of transformers' own forward pass and logits, row by row."""
    model = policy.model
    policy.use_stream("padded")
    model.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for row in rows:
        ids = torch.tensor([list(row.token_ids)])
        table = model(input_ids=ids, use_cache=False).logits[0, row.prompt_length - 1 : -1].log_softmax(-1)
        total = total + table.gather(1, ids[0, row.prompt_length :, None]).sum()
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def streamed(policy: Policy, rows: Sequence[Row], kind: str) -> dict[str, Tensor]:
    """Gradients of covey's; "follows" is one prompt over several micro-batches."""
    policy.use_stream("prefix" if kind == "follows" else kind)
    policy.model.zero_grad(set_to_none=True)
    micros = [micro_of(rows, policy.stream, policy.device)]
    if kind == "follows":
        siblings = [micro_of([row], "prefix", policy.device) for row in rows[: len(COMPLETIONS)]]
        micros = [*share_prompt(siblings), micro_of(rows[len(COMPLETIONS) :], "prefix", policy.device)]
    for micro in micros:
        policy(micro).logprob_N.sum().backward()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters()}


@pytest.mark.parametrize("padding", [None, END], ids=["no pad", "pad is end"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_pad_token_has_the_gradient_of_transformers(family: str, padding: int | None) -> None:
    policy = policy_of(family, pad_token_id=padding, initializer_range=0.1)
    inputs = policy.model.get_input_embeddings()
    assert inputs.padding_idx == (None if family == "gpt2" else padding)
    rows = rows_with_ends()
    expected = alone(policy, rows)
    name = next(n for n, p in policy.model.named_parameters() if p is inputs.weight)
    is_tied = policy.model.get_output_embeddings().weight is inputs.weight
    # The oracle itself: no gradient as an input, one as a target where the head has the same weight.
    assert bool(expected[name][END].any()) == (is_tied or inputs.padding_idx is None)
    for kind in ("padded", "packed", "prefix", "follows"):
        got = streamed(policy, rows, kind)
        for part, gradient in expected.items():
            gap = float((got[part] - gradient).norm())
            assert gap <= 1e-4 * float(gradient.norm()) + 1e-6, (kind, part)
        at = float((got[name][END] - expected[name][END]).norm())
        assert at <= 1e-4 * float(expected[name][END].norm()), kind


def test_the_pad_token_matters_there() -> None:
    """With and without a pad token the gradients of that row differ by far more than the bounds above."""
    rows = rows_with_ends()
    parts = []
    for padding in (None, END):
        policy = policy_of("qwen2", pad_token_id=padding, initializer_range=0.1)
        parts.append(alone(policy, rows)["model.embed_tokens.weight"][END])
    assert float((parts[0] - parts[1]).norm()) > 0.05 * float(parts[0].norm())
