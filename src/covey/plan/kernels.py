"""Finds faults in the kernels that are asked for: on a CPU, for a data type, for a model."""

from __future__ import annotations

from covey.options.schema import Config
from covey.plan.facts import MachineFacts, ModelFacts
from covey.plan.problem import problem
from covey.texts import tr
from covey.types import Fix, Problem

LIGER_FAMILIES: frozenset[str] = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""The `model_type`s whose norms and gated layers covey gives liger-kernel's kernels to."""

_OTHERS_CPU = tr("The command was written for a GPU, or CUDA_VISIBLE_DEVICES hides the GPUs.")
_AUTO = Fix(text=tr("use the best one for this device and model"))


def kernel_problems(config: Config, model: ModelFacts, machine: MachineFacts) -> list[Problem]:
    """Return what the facts say against attn_impl, use_liger_kernel and activation_offloading."""
    return [*_on_cpu(config, machine), *_flash(config, machine), *_liger(config, model, machine)]


def _fix(option: str) -> Fix:
    return Fix(text=_AUTO.text, edits={option: "auto"})


def _on_cpu(config: Config, machine: MachineFacts) -> list[Problem]:
    if machine.cuda is not False:
        return []
    refused = []
    if config.attn_impl == "flash_attn":
        refused.append(("attn_impl", tr("attn_impl is flash_attn, whose kernels run only on GPUs.")))
    elif config.attn_impl == "flex":
        refused.append(("attn_impl", tr("attn_impl is flex, which has no backward pass on a CPU in torch.")))
    if config.use_liger_kernel == "true":
        refused.append(
            (
                "use_liger_kernel",
                tr("use_liger_kernel is true, but the kernels of liger-kernel run only on GPUs."),
            )
        )
    problems = [problem("E117", option, seen, _OTHERS_CPU, _fix(option)) for option, seen in refused]
    if config.activation_offloading:
        seen = tr(
            "activation_offloading is on, but on a CPU activations are in the machine's memory already."
        )
        off = Fix(text=tr("leave it out"), edits={"activation_offloading": False})
        problems.append(problem("E117", "activation_offloading", seen, _OTHERS_CPU, off))
    return problems


def _flash(config: Config, machine: MachineFacts) -> list[Problem]:
    if config.attn_impl != "flash_attn" or machine.cuda is not True:
        return []
    if machine.has_bfloat16 is False:
        seen = tr("attn_impl is flash_attn, but this GPU does not support bfloat16.")
        return [
            problem(
                "E118",
                "attn_impl",
                seen,
                tr("NVIDIA GPUs support bfloat16 from Ampere (2020) on."),
                _fix("attn_impl"),
            )
        ]
    if config.torch_dtype == "float32":
        seen = tr("attn_impl is flash_attn, which has no kernels for torch_dtype float32.")
        lower = Fix(text=tr("compute in bfloat16"), edits={"torch_dtype": "bfloat16"})
        cause = ""
        return [problem("E118", "attn_impl", seen, cause, _fix("attn_impl"), lower)]
    return []


def _liger(config: Config, model: ModelFacts, machine: MachineFacts) -> list[Problem]:
    kind = model.type
    if config.use_liger_kernel != "true" or machine.cuda is False or kind is None or kind in LIGER_FAMILIES:
        return []
    known = ", ".join(sorted(LIGER_FAMILIES))
    seen = tr(
        "use_liger_kernel is true, but covey has no liger kernels for the model type {kind} of "
        "{model}. Supported types: {known}.",
        model=config.model,
        kind=kind,
        known=known,
    )
    cause = tr("Other model types compute norms or gated layers in another way.")
    return [problem("E118", "use_liger_kernel", seen, cause, _fix("use_liger_kernel"))]
