"""Gemma 3 and SmolVLM2 see images as their models do, however rows are laid out and cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from covey.models.prefix import share_prompt
from covey.models.probe import micro_of, widest_stream
from covey.token_streams import Row
from covey.types.media import Part
from support.squares import FAMILIES, IMAGE, TOKENS, medium, own_logprobs, policy_of, row, squares_seen
from support.vision import gradients

BOUND = 1e-5


def rows(family: str) -> list[Row]:
    """Return siblings of a prompt of two images, two prompts that differ in their image alone, and text."""
    wide = medium(family, "wide", 1, 2) if family == "smolvlm" else medium(family, "wide")
    cat, dog = medium(family, "cat"), medium(family, "dog")
    both = [5, cat, 6, wide, 7, 8]
    return [
        row(both, [20, 21, 22, 23], "both"),
        row(both, [20, 24, 25], "both"),
        row([9, dog, 10], [30, 31, 32, 33, 34], "dog"),
        row([9, cat, 10], [30, 31, 32, 33, 34], "cat"),
        row([11, 12, 13, 14], [40, 41, 42], "text"),
    ]


def kinds(family: str) -> tuple[Any, ...]:
    return ("padded",) if family == "gemma3" else ("padded", "packed", "prefix")


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_model(family: str) -> None:
    """In one pass, one row a pass, and pair by pair."""
    policy, every = policy_of(family), rows(family)
    expected = torch.cat([own_logprobs(policy, one) for one in every])
    for kind in kinds(family):
        policy.use_stream(kind)
        for size in (len(every), 1, 2):
            micros = [micro_of(every[i : i + size], kind, policy.device) for i in range(0, len(every), size)]
            found = torch.cat([policy(micro).logprob_N for micro in micros])
            assert float((found - expected).detach().abs().max()) < BOUND, (kind, size)
    assert float((expected[7:12] - expected[12:17]).abs().max()) > 0.01, "the image matters"


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_do_not_depend_on_layout_or_cut(family: str) -> None:
    """Every weight has one, those of tower and aligner too."""
    policy, every = policy_of(family), rows(family)
    single = [[one] for one in every]
    expected = gradients(policy, "padded", single)
    assert expected.keys() == {name for name, _ in policy.named_parameters()}
    found = [gradients(policy, kind, single) for kind in kinds(family)[1:]]
    for other in found:
        for name, grad in expected.items():
            assert float((other[name] - grad).norm() / grad.norm().clamp_min(1e-2)) < 3e-5, name
    siblings = [[every[0]], [every[1]]]
    alone = gradients(policy, "padded", siblings)
    if family == "smolvlm":
        for name, grad in gradients(policy, "prefix", siblings, shares=True).items():
            assert float((alone[name] - grad).norm() / grad.norm().clamp_min(1e-2)) < 3e-5, name


@pytest.mark.parametrize("frozen", [(), ("vit", "aligner")], ids=["trained", "frozen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tower_runs_once_for_an_image_and_pass(family: str, frozen: tuple[Part, ...]) -> None:
    """However many prompts and completions hold it: the images of a pass go through the tower together."""
    policy, every = policy_of(family), rows(family)
    policy.freeze(frozen)
    seen = squares_seen(policy)
    images = {
        one.key: one.num_tokens // TOKENS for one in (every[0].media[1], *every[2].media, *every[3].media)
    }
    for kind in kinds(family):
        policy.use_stream(kind)
        policy(micro_of(every, kind, policy.device)).logprob_N.sum().backward()
    assert seen == [sum(images.values())] * len(kinds(family))
    seen.clear()
    if family == "smolvlm":
        policy.use_stream("prefix")
        for micro in share_prompt([micro_of([one], "prefix", policy.device) for one in every[:2]]):
            policy(micro)
        assert seen == [sum(one.num_tokens for one in every[0].media) // TOKENS]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_finds_the_widest_layout(family: str) -> None:
    kind, shares, results = widest_stream(policy_of(family))
    assert (kind, shares) == (("padded", False) if family == "gemma3" else ("prefix", True)), results


def test_tokens_of_an_image_of_gemma_see_each_other() -> None:
    """What the first token of an image gives depends on the last one, through the whole window and beyond."""
    policy = policy_of("gemma3")
    one = rows("gemma3")[2]
    micro = micro_of([one], "padded", policy.device)
    first = int((micro.tokens_T == IMAGE).nonzero()[0])

    def hidden(media: Any) -> torch.Tensor:
        return policy.hidden(micro.tokens_T, micro.positions_T, None, media)  # type: ignore[arg-type]

    before = hidden(micro.media)
    # The last feature of the image alone is another one.
    changed = micro.media.feature_X.clone()
    changed[-1] = changed[0]
    after = hidden(replace(micro.media, feature_X=changed))
    gap_T = (after - before).abs().amax(dim=1)
    assert float(gap_T[:first].max()) == 0.0, "what stands before an image does not see it"
    assert float(gap_T[first]) > 1e-3


@pytest.mark.parametrize("how", ["zeros", "gradients", "pass"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_without_images_give_the_tower_gradients_of_zero(family: str, how: Any) -> None:
    policy = policy_of(family)
    text = micro_of([rows(family)[4]], "padded", policy.device)
    expected = policy(text).logprob_N
    policy.without_images = how
    found = policy(text).logprob_N
    assert float((found - expected).abs().max()) < BOUND
    found.sum().backward()
    seeing = [p for n, p in policy.named_parameters() if policy.part_of(n) != "llm"]
    assert seeing and all(p.grad is not None and not p.grad.any() for p in seeing)
