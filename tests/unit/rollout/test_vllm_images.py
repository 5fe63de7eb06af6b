"""What vLLM is given for prompts with images, and is started with: a stand-in; the real one is in on_vllm."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from covey.checks.run.look import with_image_packages
from covey.checksums import checksum
from covey.models.vision.tower import Pixels
from covey.rollout.vllm import library
from covey.rollout.vllm.engine import VllmEngine
from covey.rollout.vllm.images import check_prompt
from covey.rollout.vllm.names import Part, adapter_parts_of, layer_of, parts_of
from covey.rollout.vllm.settings import VllmSettings, arguments_of
from covey.training.vllm import with_images
from covey.types import GenerationRequest, Medium
from support.checks import config, facts
from support.vision import IMAGE, medium, pixels_of, row, save_model
from support.vllm_learner import request_of

CAT, DOG = medium("cat", 2, 3), medium("dog", 2, 3)


def settings(**changes: Any) -> VllmSettings:
    given = {"model": "m", "dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 8, "on_gpu": True}
    return VllmSettings(**{**given, "media_limits": {"image": 1, "video": 0}, **changes})


class Asked(list[Any]):
    """What vLLM is given in place of a prompt, of which weak references may be."""


class StandIn:
    """A vLLM that keeps what it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.prompts: list[Any] = []
        self.llm_engine = SimpleNamespace(
            add_request=lambda number, prompt, *a, **k: self.prompts.append(prompt),
            reset_encoder_cache=lambda: self.calls.append("encoder"),
        )
        monkeypatch.setattr(library, "sampling_params", lambda request, listed: None)
        monkeypatch.setattr(library, "image_item", lambda llm, patches, grid: Asked([patches, grid]))
        monkeypatch.setattr(library, "image_prompt", lambda *given: given)

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        self.calls.append(method)
        return [list(args[0])] if method == "covey_load" else [{}]

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        self.calls.append("prefix")
        return True


def asked(parts: Sequence[int | Medium], **changes: Any) -> GenerationRequest:
    prompt = row(parts, [])
    return replace(request_of(prompt.token_ids.tolist()), media=prompt.media, **changes)


def engine_of(llm: StandIn, **changes: Any) -> VllmEngine:
    engine = VllmEngine(settings(**changes), llm, read=pixels_of)
    engine.publish(iter([("a", torch.ones(1))]), 0)
    return engine


def test_a_prompt_goes_with_its_pixels_and_the_places_of_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = StandIn(monkeypatch)
    engine = engine_of(llm)
    engine.submit(asked([5, CAT, 6, DOG]))
    engine.submit(asked([5, 6]))
    (token_ids, items, keys, places), text = llm.prompts
    assert token_ids.count(IMAGE) == 12 and keys == ["cat", "dog"]
    assert [token_ids[begin : begin + number] for begin, number in places] == [[IMAGE] * 6] * 2
    for (patches, grid), one in zip(items, (CAT, DOG), strict=True):
        assert torch.equal(patches, pixels_of([one]).patches_PC.bfloat16()) and grid.tolist() == [[1, 4, 6]]
    assert text == {"prompt_token_ids": [5, 6]}


def test_requests_share_the_pixels_of_an_image_as_long_as_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, read = StandIn(monkeypatch), []

    def counted(media: Sequence[Medium]) -> Pixels:
        read.extend(one.key for one in media)
        return pixels_of(media)

    engine = VllmEngine(settings(), llm, read=counted)
    engine.publish(iter([("a", torch.ones(1))]), 0)
    for parts in ([5, CAT], [6, CAT], [5, DOG]):
        engine.submit(asked(parts))
    assert read == ["cat", "dog"] and llm.prompts[0][1][0] is llm.prompts[1][1][0]
    llm.prompts.clear()
    gc.collect()
    engine.submit(asked([5, CAT]))
    assert read == ["cat", "dog", "cat"]


def test_what_cannot_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = StandIn(monkeypatch)
    engine = engine_of(llm)
    whole = asked([5, CAT, 6])
    cut = replace(whole, prompt_token_ids=whole.prompt_token_ids[:-3])
    parted = [5, IMAGE, 7, *[IMAGE] * 5]
    for wrong, words in (
        (cut, "6 tokens, but 5 are"),
        (replace(whole, media=(CAT, DOG)), "12 tokens, but 6"),
        (replace(whole, prompt_token_ids=tuple(parted)), "not side by side"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.submit(wrong)
    blind = VllmEngine(settings(), llm)
    with pytest.raises(ValueError, match="without their pixels"):
        blind.submit(whole)
    assert llm.prompts == []


def test_tokens_that_vllm_was_not_sent_are_refused() -> None:
    request = asked([5, CAT])
    check_prompt(request, None)
    check_prompt(request, list(request.prompt_token_ids))
    with pytest.raises(RuntimeError, match="14 tokens that are not the 9 tokens"):
        check_prompt(request, [*request.prompt_token_ids[:3], *[IMAGE] * 11])


def test_a_publish_empties_the_features_of_images_too(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = StandIn(monkeypatch)
    engine_of(llm)
    assert llm.calls == ["covey_load", "covey_parts", "prefix", "encoder"]
    llm.calls.clear()
    engine_of(llm, media_limits={})
    assert llm.calls == ["covey_load", "covey_parts", "prefix"]


def test_arguments_of_a_model_that_sees_images() -> None:
    """Nothing of them is there for a model of text."""
    plain = arguments_of(settings(media_limits={}))
    found = arguments_of(settings(image_pixels=(64, 4096)))
    assert {n: v for n, v in found.items() if plain.get(n) != v} == {
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": 0,
        "mm_processor_kwargs": {"size": {"shortest_edge": 64, "longest_edge": 4096}},
    }


def test_options_reach_the_settings(tmp_path: Path) -> None:
    model = save_model("qwen2_5_vl", tmp_path)
    plain = settings(media_limits={})
    found = with_images(plain, config(), model)
    assert (found.media_limits, found.image_pixels) == ({"image": 1, "video": 0}, (64, 4096))
    typed = config(vllm_limit_mm_per_prompt={"image": 5, "audio": 1}, max_pixels=1024)
    found = with_images(plain, typed, model)
    assert found.media_limits == {"image": 5, "video": 0, "audio": 1} and found.image_pixels == (64, 1024)


def node(**children: Any) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, nn.Parameter(child) if isinstance(child, Tensor) else child)
    return module


class Renames:
    """Maps names as vLLM's classes of these models do."""

    def get_rename_mapper(self) -> Renames:
        return self

    def map_name(self, name: str) -> str | None:
        parts = {"model.language_model.": "language_model.model.", "model.visual.": "visual."}
        parts |= {"lm_head.": "language_model.lm_head."}
        for begin, other in parts.items():
            if name.startswith(begin):
                return other + name.removeprefix(begin)
        return None if name == "dropped" else name


def test_tensors_are_held_to_the_names_under_which_they_were_sent() -> None:
    """A module that is listed as itself is not fused."""
    qkv, norm, scale = torch.randn(6, 2), torch.randn(3), torch.randn(2)
    model = node(
        visual=node(attn=node(qkv=node(weight=qkv))),
        language_model=node(model=node(norm=node(weight=norm))),
        scale=scale,
    )
    model.hf_to_vllm_mapper = Renames()  # type: ignore[assignment]
    sent = ["model.visual.attn.qkv.weight", "model.language_model.norm.weight", "scale", "dropped"]
    names = library.held_names(model, sent)
    assert names == {"visual.attn.qkv.weight": sent[0], "language_model.model.norm.weight": sent[1]}
    held = parts_of(model, {"qkv": ["qkv"]}, names)
    expected = {sent[0]: qkv, sent[1]: norm, "scale": scale}
    assert held == {name: Part(checksum(tensor), tensor.numel()) for name, tensor in expected.items()}
    assert library.held_names(node(), sent) == {}


def test_matrices_of_an_adapter_are_held_to_the_names_of_their_layers() -> None:
    name = "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.weight"
    assert layer_of(name) == "model.language_model.layers.0.mlp.up_proj"
    matrix_a, matrix_b = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 6, 4)
    layer = SimpleNamespace(lora_a_stacked=(matrix_a,), lora_b_stacked=(matrix_b,))
    path = "language_model.model.layers.0.mlp.up_proj"
    found = adapter_parts_of({path: layer}, {}, 0, 4, {path: layer_of(name)})
    assert found == {
        name: Part(checksum(matrix_a), 32),
        name.replace("lora_A", "lora_B"): Part(checksum(matrix_b), 24),
    }


@pytest.mark.parametrize("is_there", [True, False])
def test_the_package_that_vllm_asks_for_is_named(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    there = {"vllm", *(["torchvision"] if is_there else [])}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name in there else None)
    missing = () if is_there else (("use_vllm", "torchvision"),)
    sampled = config(use_vllm=True, vllm_mode="colocate")
    assert with_image_packages(facts(), sampled).machine.missing_packages == missing
    assert with_image_packages(facts(), config()).machine.missing_packages == ()
