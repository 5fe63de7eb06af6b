"""Which parts of a vision language model are trained: what is said, what is counted, and its memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.checks.judge import checks
from covey.checks.model.checkpoint_sizes import checkpoint_sizes
from covey.checks.model.memory import model_sizes
from covey.checks.model.parts import part_facts
from covey.config import from_dict
from covey.models.adapter_shapes import LoraSettings, facts_of, read_shapes, settings_of
from covey.plan.activations import Training
from covey.plan.facts import Facts, PartFacts
from covey.plan.layout import Layout
from covey.plan.memory_training import held_parts, weights_of
from covey.plan.report_parts import part_lines
from covey.types import Problem, Severity
from covey.types.media import PARTS, Part
from support.checks import BASE, facts
from support.vision import model_of, save_model

LORA: dict[str, Any] = {"tuner_type": "lora"}


def seeing(*trained: Part, has_images: bool | None = True) -> Facts:
    """Facts of a model that sees, of which these parts are trained."""
    parts = tuple(PartFacts(part=part, num_parameters=100, is_trained=part in trained) for part in PARTS)
    return facts(model={"type": "qwen2_5_vl", "parts": parts}, prompts={"has_images": has_images})


def said(options: dict[str, Any], given: Facts) -> list[Problem]:
    resolved = from_dict({**BASE, **options})
    names = {"freeze_vit", "freeze_aligner", "freeze_llm", "vit_lr", "aligner_lr"}
    return [p for p in checks(resolved.config, given, resolved.typed_names) if p.option in names]


TEXT = facts(model={"type": "qwen2"})
TEXT_ALONE = seeing("vit", "aligner", "llm", has_images=False)


@pytest.mark.parametrize(
    ("options", "given", "code", "option", "words"),
    [
        ({"freeze_vit": True}, TEXT, "W108", "freeze_vit", "has no vision tower that covey knows"),
        ({"vit_lr": 1e-5, "aligner_lr": 1e-5}, TEXT, "W108", "vit_lr", "are set, but"),
        (
            dict.fromkeys(("freeze_vit", "freeze_aligner", "freeze_llm"), True),
            seeing(),
            "E115",
            "freeze_llm",
            "",
        ),
        ({**LORA, "freeze_llm": True}, seeing(), "E115", "freeze_llm", "nothing would be trained"),
        ({"rlhf_type": "grpo", "freeze_llm": True}, seeing(), "E115", "freeze_llm", "are all on"),
        ({**LORA, "vit_lr": 1e-5}, seeing("llm"), "E115", "vit_lr", "no weight of the vision tower is"),
        ({**LORA, "aligner_lr": 1e-5}, seeing("llm"), "E115", "aligner_lr", "no weight of the aligner is"),
        ({"vit_lr": 1e-5, "freeze_vit": True}, seeing("llm"), "W108", "vit_lr", "no weight of the vision"),
        (
            {**LORA, "vit_lr": 1e-5, "target_modules": ["q_proj"]},
            seeing("llm"),
            "W108",
            "vit_lr",
            "no weight of the vision tower is trained",
        ),
        (
            {**LORA, "freeze_llm": True, "target_modules": ["q_proj"]},
            seeing("llm"),
            "W108",
            "freeze_llm",
            "the adapter lies on the modules that target_modules names",
        ),
        ({"vit_lr": 1e-5, "learning_rate": 0.0}, seeing(*PARTS), "E115", "vit_lr", "learning_rate is 0"),
        ({}, TEXT_ALONE, "W108", "freeze_vit", "would change the vision tower and aligner"),
        ({"freeze_llm": True}, seeing("vit", has_images=False), "E115", "freeze_llm", "the vision tower."),
    ],
)
def test_what_cannot_work_is_said(
    options: dict[str, Any], given: Facts, code: str, option: str, words: str
) -> None:
    (problem,) = said(options, given)
    assert (problem.code, problem.option) == (code, option) and words in problem.seen
    assert (problem.severity is Severity.ERROR) == code.startswith("E")
    for fix in problem.fixes:
        if fix.edits and not options.keys() & {"vit_lr", "aligner_lr"}:
            trained = [part for part in PARTS if not {**options, **fix.edits}.get(f"freeze_{part}", False)]
            again = seeing(*trained, has_images=given.prompts.has_images)
            assert code not in [p.code for p in said({**options, **fix.edits}, again)]


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({}, seeing(*PARTS)),
        ({"vit_lr": 1e-5, "aligner_lr": 1e-5}, seeing(*PARTS)),
        (LORA, seeing("llm")),
        ({**LORA, "freeze_vit": True}, TEXT),
        ({"rlhf_type": "grpo", "tuner_type": "full"}, TEXT),
        ({"freeze_llm": False, "freeze_vit": False}, TEXT),
        (LORA, seeing("llm", has_images=False)),
        ({}, seeing(*PARTS, has_images=None)),
        ({"freeze_vit": True}, facts()),
    ],
)
def test_what_works_is_not_spoken_of(options: dict[str, Any], given: Facts) -> None:
    assert said(options, given) == []


def test_vllm_applies_no_adapter_to_what_sees() -> None:
    assert from_dict({**BASE, **LORA}).config.vllm_enable_lora
    for name in ("freeze_vit", "freeze_aligner"):
        assert not from_dict({**BASE, **LORA, name: False}).config.vllm_enable_lora
    typed = {**BASE, **LORA, "use_vllm": True, "vllm_enable_lora": True, "freeze_vit": False}
    config = from_dict(typed).config
    codes = [
        p.code for p in checks(config, seeing("vit", "llm"), tuple(typed)) if p.option == "vllm_enable_lora"
    ]
    assert codes == ["E434"]


# -- counts, memory and the plan ---------------------------------------------------------------------------


def counts(family: str) -> dict[str, int]:
    named = [(n, p.numel()) for n, p in model_of(family).named_parameters()]
    merger = sum(n for name, n in named if "merger" in name)
    tower = sum(n for name, n in named if "visual" in name) - merger
    return {"vit": tower, "aligner": merger, "llm": sum(n for _, n in named) - tower - merger}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_parts_are_counted_as_they_are(family: str, tmp_path: Path) -> None:
    shapes, expected = read_shapes(save_model(family, tmp_path)), counts(family)
    config = from_dict({**BASE, "freeze_vit": True}).config
    found = part_facts(config, shapes, None)
    assert {p.part: p.num_parameters for p in found} == expected
    assert [p.part for p in found if p.is_trained] == ["aligner", "llm"]
    lora = from_dict({**BASE, **LORA, "freeze_aligner": False}).config
    adapted = part_facts(lora, shapes, facts_of(shapes, settings_of(lora.model_dump())))
    assert [p.part for p in adapted if p.is_trained] == ["aligner", "llm"]
    assert part_facts(config, replace(shapes, family="qwen2"), None) == ()


def test_memory_has_gradients_of_what_is_trained_alone(tmp_path: Path) -> None:
    place, expected = save_model("qwen3_vl", tmp_path), counts("qwen3_vl")
    shapes = read_shapes(place)
    lora = facts_of(shapes, LoraSettings(rank=4, alpha=8))
    sizes = {
        frozen: model_sizes(place, shapes, lora, frozen) for frozen in ((), ("vit", "aligner"), ("llm",))
    }
    how = Training(element=2, full=True, recompute="none", rank=4, dora=False, cuda=True, offload=False)
    of: dict[tuple[str, ...], tuple[int, dict[str, int]]] = {}
    for frozen, model in sizes.items():
        assert model is not None and model.parameters == sum(expected.values())
        assert model.seeing_parameters == expected["vit"] + expected["aligner"]
        own = replace(how, frozen_text=model.frozen_text)
        weights = weights_of(model, own)
        held = held_parts(from_dict(BASE).config, model, own, weights, Layout(num_gpus=1, gpu_bytes=0))
        assert held["weights"] == 2 * model.parameters
        assert held["masters"] == 4 * weights.trained and held["moments"] == 8 * weights.trained
        of[frozen] = weights.trained, held
    assert of[()][0] == sum(expected.values())
    assert of[("vit", "aligner")][0] == expected["llm"]
    assert of[("llm",)][0] == expected["vit"] + expected["aligner"]
    assert not replace(how, frozen_text=True).trains_text and how.trains_text


def test_checkpoints_hold_no_moments_of_frozen_parts(tmp_path: Path) -> None:
    place, expected = save_model("qwen2_vl", tmp_path), counts("qwen2_vl")
    shapes = read_shapes(place)

    def sizes(**options: Any) -> Any:
        config = from_dict({**BASE, "torch_dtype": "float32", **options}).config
        return checkpoint_sizes(config, place, shapes, None, num_processes=1, has_bfloat16=False)

    all_of_it, less = sizes(), sizes(freeze_vit=True)
    assert less.model == all_of_it.model
    saved = all_of_it.whole - less.whole
    # Two moments, and the names and step counts of the tensors.
    assert 8 * expected["vit"] < saved < 8 * expected["vit"] + 25_000


def test_the_plan_names_what_is_frozen() -> None:
    config = from_dict({**BASE, "vit_lr": 1e-5}).config
    assert part_lines(config, seeing(*PARTS)) == ["peak learning rate of the vision tower: 1e-05"]
    given = seeing("vit", "llm")
    given = replace(given, model=replace(given.model, num_parameters=300, num_trained=200))
    words = part_lines(from_dict({**BASE, "freeze_aligner": True}).config, given)
    assert words == [
        "trained: vision tower, language model; frozen: aligner; 0.00 M parameters trained (66.67%)"
    ]
    lora = from_dict({**BASE, **LORA}).config
    assert part_lines(lora, seeing("llm")) == [
        "adapters are on: language model; not on: vision tower, aligner"
    ]
    assert part_lines(config, facts()) == []
