"""A policy sees images as its model does, however rows are laid out and cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from covey.media_positions import placeholders, positions_of
from covey.models.policy import Policy
from covey.models.prefix import share_prompt
from covey.models.probe import micro_of, widest_stream
from covey.token_streams import Row
from covey.types.arrays import ints
from support.vision import FAMILIES, IMAGE, gradients, medium, own_logprobs, pixels_of, policy_of, row

BOUND = 1e-5
CAT, DOG, WIDE = medium("cat", 2, 3), medium("dog", 2, 3), medium("wide", 1, 5)


def rows() -> list[Row]:
    """Return siblings of three prompts: of two images and one, one image, and none; and one of a prompt that
    differs in its image alone."""
    both = [5, CAT, 6, WIDE, 7, 8]
    return [
        row(both, [20, 21, 22, 23], "both"),
        row(both, [20, 24, 25], "both"),
        row([9, DOG, 10], [30, 31, 32, 33, 34], "dog"),
        row([9, CAT, 10], [30, 31, 32, 33, 34], "cat"),
        row([11, 12, 13, 14], [40, 41, 42], "text"),
    ]


def stats(policy: Policy, micros: Sequence[Any]) -> torch.Tensor:
    return torch.cat([policy(micro).logprob_N for micro in micros])


@pytest.mark.parametrize("kind", ["padded", "packed", "prefix"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_model(family: str, kind: Any) -> None:
    """In one pass, one row a pass, and pair by pair."""
    policy = policy_of(family)
    expected = torch.cat([own_logprobs(policy, one) for one in rows()])
    policy.use_stream(kind)
    for size in (len(rows()), 1, 2):
        cut = [rows()[i : i + size] for i in range(0, len(rows()), size)]
        found = stats(policy, [micro_of(part, kind, policy.device) for part in cut])
        assert float((found - expected).abs().max()) < BOUND, size
    dog, cat = expected[7:12], expected[12:17]
    assert float((dog - cat).abs().max()) > 0.01, "the image matters"


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_do_not_depend_on_layout_or_cut(family: str) -> None:
    """Those of the vision tower among them."""
    policy = policy_of(family)

    def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
        assert found.keys() == expected.keys()
        assert any("visual" in name for name in found)
        for name, grad in expected.items():
            gap = float((found[name] - grad).norm() / grad.norm().clamp_min(1e-3))
            assert gap < 3e-5, (name, gap)

    single = [[one] for one in rows()]
    expected = gradients(policy, "padded", single)
    for kind in ("packed", "prefix"):
        compare(gradients(policy, kind, single), expected)
    siblings = [[rows()[0]], [rows()[1]]]
    alone = gradients(policy, "padded", siblings)
    compare(gradients(policy, "prefix", siblings, shares=True), alone)


def test_the_tower_runs_once_for_a_prompt_and_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of("qwen2_5_vl")
    asked: list[list[str]] = []

    def read(media: Any) -> Any:
        asked.append([one.key for one in media])
        return pixels_of(media)

    assert policy.vision is not None
    policy.vision.read = read
    for kind in ("packed", "prefix", "padded"):
        policy.use_stream(kind)
        policy(micro_of(rows(), kind, policy.device))
    assert asked == [["cat", "wide", "dog"]] * 3
    asked.clear()
    policy.use_stream("prefix")
    for micro in share_prompt([micro_of([one], "prefix", policy.device) for one in rows()[:2]]):
        policy(micro)
    assert asked == [["cat", "wide"]]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_finds_the_widest_layout(family: str) -> None:
    kind, shares, results = widest_stream(policy_of(family))
    assert (kind, shares) == ("prefix", True), results


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_of_the_model(family: str) -> None:
    model: Any = policy_of(family).model
    for one in rows():
        ids = torch.tensor([one.token_ids.tolist()])
        grids = torch.tensor([m.grid for m in one.media]) if one.media else None
        expected, _ = model.model.get_rope_index(ids, (ids == IMAGE).int(), image_grid_thw=grids)
        assert positions_of(one.token_ids, one.media).tolist() == expected[:, 0].tolist()


def test_positions_by_hand() -> None:
    """Two tokens, an image of two by three, and two behind it."""
    ids = ints([5, 6, *[IMAGE] * 6, 7, 8])
    assert positions_of(ids, [medium("x", 2, 3)]).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


@pytest.mark.parametrize("num", [5, 7])
def test_placeholders_of_no_image_are_refused(num: int) -> None:
    with pytest.raises(ValueError, match=f"6 tokens, but {num}"):
        placeholders(ints([1, *[IMAGE] * num, 2]), [medium("x", 2, 3)])
    assert placeholders(ints([1, 2]), []).tolist() == np.empty(0).tolist()
