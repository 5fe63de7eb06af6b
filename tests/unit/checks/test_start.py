"""What is said of the adapter that a run starts from, and of its reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covey.checks.start import start_problems
from covey.config import from_dict
from covey.plan.facts import AdapterFacts, Facts, ResumeFacts
from support.adapters import add_trainer_state, edit_adapter, make_adapter
from support.checks import changed, facts, surveyed
from support.models import save_model

KL: dict[str, Any] = {"beta": 0.1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(model, tmp_path_factory.mktemp("adapter") / "sft")


def said(tmp_path: Path, **options: Any) -> dict[str, list[Any]]:
    """Problems and warnings of a run by their codes."""
    codes: dict[str, list[Any]] = {}
    for problem in surveyed(tmp_path, **options):
        codes.setdefault(problem.code, []).append(problem)
    return codes


def test_an_adapter_of_another_model_is_refused_before_weights_load(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    other = save_model("gpt2", tmp_path / "gpt2")
    (problem,) = said(tmp_path, model=str(other), adapters=str(adapter))["E383"]
    assert "no module down_proj, q_proj" in problem.seen
    head = make_adapter(model, tmp_path / "head", modules_to_save=["embed_tokens"])
    (problem,) = said(tmp_path, model=str(model), adapters=str(head))["E383"]
    assert "the head and the embedding of this model are one tensor" in problem.seen
    short = edit_adapter(make_adapter(model, tmp_path / "short"), r=8)
    (problem,) = said(tmp_path, model=str(model), adapters=str(short))["E383"]
    assert "layers.0.mlp.down_proj.lora_A.weight has the shape 4 x 96" in problem.seen


def test_gpt2s_turned_matrices_fit(tmp_path: Path) -> None:
    base = save_model("gpt2", tmp_path / "gpt2")
    path = make_adapter(base, tmp_path / "sft", target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    assert "E383" not in said(tmp_path, model=str(base), adapters=str(path))


def test_all_linear_is_no_difference_where_the_adapter_lies_on_all(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    whole = make_adapter(model, tmp_path / "all", target_modules="all-linear")
    typed = {"model": str(model), "tuner_type": "lora", "target_modules": ["all-linear"]}
    assert "E382" not in said(tmp_path, adapters=str(whole), **typed)
    (problem,) = said(tmp_path, adapters=str(adapter), **typed)["E382"]
    assert problem.option == "target_modules"


def test_another_base_and_a_quantized_one_are_warned_of(model: Path, adapter: Path, tmp_path: Path) -> None:
    twin = save_model("qwen2", tmp_path / "twin", seed=2)
    (warning,) = said(tmp_path, model=str(twin), adapters=str(adapter))["W152"]
    assert warning.fixes[0].edits == {"model": str(model)}
    assert "W152" not in said(tmp_path, model=str(model), adapters=str(adapter))
    quantized = add_trainer_state(make_adapter(model, tmp_path / "q"), is_swift=True)
    (quantized / "args.json").write_text('{"quant_method": "bnb", "quant_bits": 4}')
    (warning,) = said(tmp_path, model=str(model), adapters=str(quantized))["W152"]
    assert "bnb, 4 bits" in warning.seen
    for name in (
        "Qwen/Qwen2.5-0.5B",
        "/c/hub/models--Qwen--Qwen2.5-0.5B/snapshots/1",
        "/m/Qwen/Qwen2___5-0___5B",
    ):
        named = edit_adapter(make_adapter(model, tmp_path / "n"), base_model_name_or_path=name)
        moved = tmp_path / "Qwen2.5-0.5B"
        if not moved.exists():
            moved.symlink_to(model)
        assert "W152" not in said(tmp_path, model=str(moved), adapters=str(named))


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        ({"r": 8}, "E384", "lora_rank 8"),
        ({"lora_alpha": 16}, "E384", "lora_alpha 16"),
        ({"target_modules": ["q_proj"]}, "E384", "other modules"),
        ({"bias": "lora_only"}, "E381", "bias lora_only"),
        ({}, None, ""),
    ],
)
def test_a_reference_of_another_shape_is_refused(
    make: dict[str, Any], code: str | None, words: str, model: Path, adapter: Path, tmp_path: Path
) -> None:
    other = make_adapter(model, tmp_path / "other", seed=5, **make)
    typed = {"model": str(model), "adapters": str(adapter), "ref_adapters": str(other)}
    found = said(tmp_path, **typed, **KL)
    if code is None:
        assert not {"E380", "E381", "E384"} & found.keys()
        return
    (problem,) = found[code]
    assert problem.option == "ref_adapters"
    assert words in problem.seen
    assert [fix.edits for fix in problem.fixes] == [{"ref_adapters": "start"}, {"ref_adapters": "base"}]


def test_a_reference_without_an_adapter_to_start_from(adapter: Path, model: Path, tmp_path: Path) -> None:
    """A directory is refused, with both options as the fix; the words mean what happens anyway."""
    typed = {"model": str(model), "tuner_type": "lora", **KL}
    (problem,) = said(tmp_path, ref_adapters=str(adapter), **typed)["E384"]
    assert problem.fixes[0].edits == {"adapters": str(adapter)}
    assert "E384" not in said(tmp_path, ref_adapters="base", **typed)
    with_both = said(tmp_path, ref_adapters=str(adapter), adapters=str(adapter), model=str(model), **KL)
    assert "E384" not in with_both
    (warning,) = said(tmp_path, ref_adapters=str(adapter), adapters=str(adapter), model=str(model))["W108"]
    assert warning.option == "ref_adapters"


def test_a_base_that_follows_is_refused(model: Path, adapter: Path, tmp_path: Path) -> None:
    typed = {
        "model": str(model),
        "adapters": str(adapter),
        "ref_adapters": "base",
        "sync_ref_model": True,
        **KL,
    }
    (problem,) = said(tmp_path, **typed)["E384"]
    assert problem.fixes[0].edits == {"ref_adapters": "start"}


@pytest.mark.parametrize(
    ("changes", "now", "is_refused"),
    [
        ({}, "a" * 64, False),
        ({}, "b" * 64, True),
        ({}, None, True),
        ({"allow_changes": True}, "b" * 64, False),
        ({"beta": 0.0}, None, False),
    ],
)
def test_a_resume_holds_the_reference_to_its_digest(
    changes: dict[str, Any], now: str | None, is_refused: bool, adapter: Path
) -> None:
    options = {"model": "m", "dataset": ["d"], "reward_funcs": ["accuracy"], "adapters": str(adapter), **KL}
    config = from_dict({**options, **changes}).config
    given: Facts = changed(
        facts(),
        lora={"start": AdapterFacts(digest=now)},
        output={"resume": ResumeFacts(path="r/checkpoint-2", step=2, reference="a" * 64)},
    )
    assert [p.code for p in start_problems(config, given.lora, given.output, ())] == ["E419"] * is_refused
