"""What is said of kernels on a CPU, for a data type, for a model; and what gradient_checkpointing means."""

from typing import Any

import pytest

from covey.plan.recompute import KINDS, choose_recompute
from support.checks import Case, assert_fixes_mend, assert_says, facts, found

CPU = facts(machine={"cuda": False})

CASES = [
    Case(code="E118", option="attn_impl", words="does not support bfloat16",
         facts=facts(machine={"has_bfloat16": False}), options={"attn_impl": "flash_attn"}),
    Case(code="E118", option="attn_impl", words="which has no kernels for torch_dtype float32",
         options={"attn_impl": "flash_attn", "torch_dtype": "fp32"}),
    Case(code="E118", option="use_liger_kernel", words="the model type gpt2 of "
                                                       "models/tiny. Supported types: llama",
         facts=facts(model={"type": "gpt2"}), options={"use_liger_kernel": True}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_says_and_mends(case: Case) -> None:
    assert_says(case)
    assert_fixes_mend(case)


def test_the_package_is_built_against_the_torch_that_is_there() -> None:
    lacking = facts(
        machine={"missing_packages": (("attn_impl", "flash-attn"), ("use_liger_kernel", "liger-kernel"))}
    )
    texts = [p.fixes[0].text for p in found(lacking, attn_impl="flash_attn", use_liger_kernel=True)]
    assert texts == ["`pip install flash-attn --no-build-isolation`", "`pip install liger-kernel`"]


@pytest.mark.parametrize(
    "options",
    [
        {"attn_impl": "auto", "use_liger_kernel": "auto", "gradient_checkpointing": "auto"},
        {"attn_impl": "sdpa", "use_liger_kernel": False, "gradient_checkpointing": True},
        {"attn_impl": "eager", "gradient_checkpointing": "selective"},
    ],
)
def test_what_every_device_can_do(options: dict[str, Any]) -> None:
    assert found(CPU, **options) == []
    assert found(**options) == []


def test_what_a_gpu_can_do() -> None:
    for options in ({"attn_impl": "flash_attn"}, {"attn_impl": "flex"}, {"activation_offloading": True}):
        assert found(**options) == []
    assert found(facts(model={"type": "qwen3"}), use_liger_kernel=True) == []
    assert found(facts(model={"type": None}), use_liger_kernel=True) == []
    assert found(facts(machine={"cuda": None}), attn_impl="flash_attn") == []


@pytest.mark.parametrize(
    ("asked", "needed", "free", "wanted"),
    [
        ("true", None, None, "full"),
        ("false", (100, 60, 8), 1, "none"),
        ("selective", None, None, "selective"),
        ("auto", None, None, "none"),
        ("auto", None, 100, "none"),
        ("auto", (100, 60, 8), None, "none"),
        ("auto", (100, 60, 8), 100, "none"),
        ("auto", (100, 60, 8), 99, "selective"),
        ("auto", (100, 60, 8), 60, "selective"),
        ("auto", (100, 60, 8), 59, "full"),
        ("auto", (100, 60, 8), 1, "full"),
        ("auto", (100, 100, 100), 1, "none"),
    ],
)
def test_recomputation(asked: str, needed: tuple[int, ...] | None, free: int | None, wanted: str) -> None:
    by_kind = None if needed is None else dict(zip(KINDS, needed, strict=True))
    assert choose_recompute(asked, by_kind, free) == wanted
