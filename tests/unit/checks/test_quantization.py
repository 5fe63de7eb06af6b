"""What is refused of quantization, what its weights take, and where it is proposed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from covey.config.quantization import Quantization, options_of, quantization_of
from covey.config.resolve import from_dict
from covey.plan.activations import Training, weight_bytes
from covey.plan.fitting import fitting_fixes
from covey.plan.layout import THIS_MACHINE
from covey.plan.memory import limit_of, memory_plan
from covey.types import Severity
from support.checks import BASE, SIZES, config, facts, found

QLORA: dict[str, Any] = {"tuner_type": "lora", "quant_bits": "4"}
# Qwen 2.5 of 7 B: 28 layers of 3584, keys of 512, 18944 between; embedding and head of 152064 rows.
SEVEN = replace(
    SIZES,
    layers=28,
    hidden=3584,
    heads=28,
    kv_heads=4,
    head_width=128,
    intermediate=18944,
    vocabulary=152064,
    tied=False,
    parameters=7_615_616_512,
    adapter_parameters=40_370_176,
    packable_parameters=28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944),
)


def codes(**options: Any) -> dict[str, str]:
    given = options.pop("given", facts())
    return {p.code: p.option for p in found(given, **options) if p.severity is Severity.ERROR}


@pytest.mark.parametrize(
    ("typed", "bits"),
    [
        ({"quant_method": "bnb", "quant_bits": 4}, 4),
        ({"quant_bits": 8}, 8),
        ({"load_in_4bit": "true"}, 4),
        ({"load_in_8bit": True, "load_in_4bit": False}, 8),
        ({"load_in_4bit": False}, None),
        ({"quant_method": "none"}, None),
        ({}, None),
    ],
)
def test_names_of_trl_and_ms_swift(typed: dict[str, Any], bits: int | None) -> None:
    resolved = from_dict({**BASE, "tuner_type": "lora", **typed})
    assert all(p.severity is not Severity.ERROR for p in resolved.problems)
    quantization = quantization_of(resolved.config)
    assert (quantization.bits if quantization else None) == bits


def test_what_decides_the_bits() -> None:
    resolved = from_dict(
        {
            **BASE,
            **QLORA,
            "use_bnb_nested_quant": False,
            "bnb_4bit_quant_type": "fp4",
            "bnb_4bit_compute_dtype": "torch.bfloat16",
            "bnb_4bit_quant_storage": "torch.uint8",
        }
    )
    asked = quantization_of(resolved.config)
    assert asked == Quantization(bits=4, kind="fp4", is_nested=False, compute_dtype="bfloat16")
    assert asked is not None and asked.bits_per_weight == 4.5
    assert Quantization(bits=4).bits_per_weight == pytest.approx(4.127, abs=1e-3)
    for one in (asked, Quantization(bits=8), Quantization(bits=4, storage="bfloat16")):
        again = quantization_of(from_dict({**BASE, **(options_of(one.as_json()) or {})}).config)
        assert again == replace(one, compute_dtype="auto")
    assert options_of({"quant_method": "gptq", "bits": 4}) is None


@pytest.mark.parametrize("method", ["hqq", "eetq", "quanto", "gptq", "awq", "fp8"])
def test_other_methods_are_refused_by_name(method: str) -> None:
    (problem,) = [p for p in found(tuner_type="lora", quant_method=method, quant_bits=4) if p.code == "E386"]
    assert method in problem.seen
    assert codes(tuner_type="lora", **{**problem.fixes[0].edits}) == {}


def test_runs_that_cannot_hold_packed_weights() -> None:
    assert codes(**QLORA) == {}
    assert codes(quant_bits="4") == {"E387": "quant_bits"}
    assert codes(tuner_type="lora", quant_method="bnb") == {"E386": "quant_bits"}
    assert codes(**QLORA, bnb_4bit_compute_dtype="float16") == {"E319": "bnb_4bit_compute_dtype"}
    split = facts(layout=replace(THIS_MACHINE, fsdp=True, zero_stage=3))
    assert codes(**QLORA, fsdp="full_shard", given=split)["E387"] == "fsdp"
    zero = facts(
        layout=replace(THIS_MACHINE, num_gpus=8, gpu_bytes=80 << 30, zero_stage=3),
        launch={"num_processes": 8},
    )
    assert codes(**QLORA, deepspeed="zero3", given=zero)["E387"] == "deepspeed"
    # A whole model in each process, without DeepSpeed.
    assert codes(**QLORA, deepspeed="zero0") == {}
    lacking = facts(machine={"missing_packages": (("quant_bits", "bitsandbytes"),)})
    (problem,) = [p for p in found(lacking, **QLORA) if p.code == "E116"]
    assert "covey[qlora]" in problem.fixes[0].text


def test_a_model_that_is_stored_packed_decides() -> None:
    said = {"quant_bits": "4", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False}
    stored = facts(model={"stored_quantization": said})
    assert codes(**QLORA, given=stored) == {"E386": "bnb_4bit_use_double_quant"}
    (problem,) = [p for p in found(stored, **QLORA) if p.code == "E386"]
    assert codes(**{**QLORA, **problem.fixes[0].edits}, given=stored) == {}
    plain = facts(
        model={
            "stored_quantization": said,
            "problem": "models/tiny holds quantized weights",
            "fault": "quantized",
        }
    )
    (problem,) = [p for p in found(plain, tuner_type="lora") if p.code == "E373"]
    assert problem.fixes[0].edits == {"tuner_type": "lora", **said}


def test_what_packed_weights_take() -> None:
    """Of 7 B: 15.2 GB in bfloat16, 5.5 in 4 bits, of which embedding and head are 2.2."""
    how = Training(element=2, full=False, recompute="none", rank=16, dora=False, cuda=True, offload=False)
    assert weight_bytes(SEVEN, how) == 2 * SEVEN.parameters
    four = weight_bytes(SEVEN, replace(how, packed_bits=Quantization(bits=4).bits_per_weight))
    assert four == pytest.approx(5.54e9, rel=0.01)
    assert weight_bytes(SEVEN, replace(how, packed_bits=8.0)) == pytest.approx(8.7e9, rel=0.01)


def test_where_it_is_proposed() -> None:
    """On a card of 12 GB a model of 7 B fits in no other way."""
    card = facts(model={"sizes": SEVEN}, machine={"free_memory_bytes": 12 * 10**9}, prompts={"longest": 200})
    small = {"max_completion_length": 128, "num_generations": 2, "per_device_train_batch_size": 2}
    weights = {
        bits: memory_plan(config(tuner_type="lora", **small, **given), card).phases[-1].parts["weights"]
        for bits, given in {"": {}, "4": {"quant_bits": "4"}, "8": {"quant_bits": "8"}}.items()
    }
    assert weights["4"] < weights["8"] < weights[""]
    limit = limit_of(card)
    assert limit is not None
    for tuner in ("full", "lora"):
        options = {"tuner_type": tuner, **small}
        assert memory_plan(config(**options), card).needed_bytes > limit
        edits = dict(fitting_fixes(config(**options), card, set(small), limit)[0].edits)
        assert edits.items() >= {"quant_bits": "4"}.items()
        assert memory_plan(config(**options | edits), card).needed_bytes <= limit
    split = replace(card, layout=replace(THIS_MACHINE, fsdp=True, zero_stage=3))
    fixes = fitting_fixes(config(tuner_type="lora", **small), split, set(small), limit)
    assert all("quant_bits" not in fix.edits for fix in fixes)
