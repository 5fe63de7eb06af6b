"""What is wrong with the kernels that are asked for: on a CPU, for a data type, for a model."""

from __future__ import annotations

from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.plan.problem import problem
from covey.texts import tr
from covey.types import Fix, Problem

LIGER_FAMILIES: frozenset[str] = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""The `model_type`s whose norms and gated layers covey gives liger-kernel's kernels to."""

_OTHERS_CPU = tr("A command written for a GPU, or GPUs hidden by CUDA_VISIBLE_DEVICES.")
_AUTO = Fix(text=tr("the best that is there for device and model"))


def kernel_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what the facts say against attn_impl, use_liger_kernel and activation_offloading."""
    return [*_on_cpu(config, facts), *_flash(config, facts), *_liger(config, facts)]


def _fix(option: str) -> Fix:
    return Fix(text=_AUTO.text, edits={option: "auto"})


def _on_cpu(config: Config, facts: Facts) -> list[Problem]:
    if facts.cuda is not False:
        return []
    refused = []
    if config.attn_impl == "flash_attn":
        refused.append(("attn_impl", tr("attn_impl is flash_attn, whose kernels run on GPUs alone.")))
    elif config.attn_impl == "flex":
        refused.append(("attn_impl", tr("attn_impl is flex, which on a CPU has no backward pass in torch.")))
    if config.use_liger_kernel == "true":
        refused.append(
            (
                "use_liger_kernel",
                tr("use_liger_kernel is true, and liger-kernel's kernels run on GPUs alone."),
            )
        )
    problems = [problem("E117", option, seen, _OTHERS_CPU, _fix(option)) for option, seen in refused]
    if config.activation_offloading:
        seen = tr("activation_offloading is on, and activations are in the machine's memory already.")
        off = Fix(text=tr("without it"), edits={"activation_offloading": False})
        problems.append(problem("E117", "activation_offloading", seen, _OTHERS_CPU, off))
    return problems


def _flash(config: Config, facts: Facts) -> list[Problem]:
    if config.attn_impl != "flash_attn" or facts.cuda is not True:
        return []
    if facts.has_bfloat16 is False:
        seen = tr("attn_impl is flash_attn, and this GPU does not compute in bfloat16.")
        return [problem("E118", "attn_impl", seen, tr("A GPU from before 2020."), _fix("attn_impl"))]
    if config.torch_dtype == "float32":
        seen = tr("attn_impl is flash_attn and torch_dtype is float32, for which it has no kernels.")
        lower = Fix(text=tr("compute in bfloat16"), edits={"torch_dtype": "bfloat16"})
        cause = tr("Kernels of another command, kept with a more exact data type.")
        return [problem("E118", "attn_impl", seen, cause, _fix("attn_impl"), lower)]
    return []


def _liger(config: Config, facts: Facts) -> list[Problem]:
    kind = facts.model_type
    if config.use_liger_kernel != "true" or facts.cuda is False or kind is None or kind in LIGER_FAMILIES:
        return []
    known = ", ".join(sorted(LIGER_FAMILIES))
    seen = tr(
        "use_liger_kernel is true, and {model} is a model of type {kind}. Known are {known}.",
        model=config.model,
        kind=kind,
        known=known,
    )
    cause = tr("Another family, whose norms or gated layers are computed in another way.")
    return [problem("E118", "use_liger_kernel", seen, cause, _fix("use_liger_kernel"))]
