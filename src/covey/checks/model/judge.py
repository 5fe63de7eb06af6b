"""Finds faults in the tokens of the model, its code, its adapters, the device, and missing packages."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from covey.checks.check import Check
from covey.checks.model.codes import CODES
from covey.checks.model.faults import model_fault_problems
from covey.checks.model.quantization import quantization_problems
from covey.checks.model.template import template_problems
from covey.config.objects import is_live
from covey.config.quickstart import BUILT_IN_NAMES
from covey.options.schema import Config
from covey.plan.check_stop_words import stop_word_problems
from covey.plan.facts import Facts, LoraFacts, MachineFacts, ModelFacts
from covey.plan.problem import problem, warning
from covey.plan.versions import TRIED, VLLM_ON_CPU
from covey.texts import counted, joined, plural, tr
from covey.types import Fix, Problem

_COMMIT = re.compile(r"[0-9a-f]{40}")


def model_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what the facts say against the model and how it is to be trained."""
    return [
        *model_fault_problems(config, facts.model, facts.template, facts.layout),
        *_tokens(config, facts.model),
        *_unused(config, facts.model),
        *_remote_code(config, facts.model),
        *_targets(config, facts.lora),
        *_device(config, facts.machine),
        *_packages(facts.machine),
        *template_problems(config, facts.template, facts.prompts),
        *stop_word_problems(config, facts.template),
        *_small_model(config, facts.model),
    ]


def _tokens(config: Config, model: ModelFacts) -> list[Problem]:
    if not model.tokens_beyond or model.embedding_rows is None:
        return []
    count, rows = len(model.tokens_beyond), model.embedding_rows
    shown = ", ".join(f"{token!r} ({i})" for token, i in model.tokens_beyond[:3])
    more = tr(" and {count} more", count=count - 3) if count > 3 else ""
    highest = model.tokens_beyond[-1][1]
    return [
        problem(
            "E374",
            "model",
            tr(
                "The tokenizer of {model} has {tokens} without a row in the embedding, which has "
                "{rows} rows (vocab_size in config.json): {shown}{more}.",
                model=config.model,
                tokens=counted(count, "token"),
                rows=rows,
                shown=shown,
                more=more,
            ),
            "",
            Fix(
                text=tr(
                    "enlarge the embedding: load the model with transformers, call "
                    "`model.resize_token_embeddings({highest})`, and save it; the new rows are "
                    "untrained",
                    highest=highest + 1,
                )
            ),
            Fix(text=tr("use the tokenizer that the model was trained with: copy its tokenizer.json")),
        )
    ]


def _unused(config: Config, model: ModelFacts) -> list[Problem]:
    if not model.unused_tensors or model.problem is not None:
        return []
    count = len(model.unused_tensors)
    more = tr(" and {count} more", count=count - 3) if count > 3 else ""
    return [
        warning(
            "W151",
            "model",
            plural(
                count,
                "{tensors} of {model} is not loaded: {names}{more}.",
                "{tensors} of {model} are not loaded: {names}{more}.",
                tensors=counted(count, "tensor"),
                model=config.model,
                names=joined(", ", model.unused_tensors[:3]),
                more=more,
            ),
            "",
            Fix(text=tr("no action is needed if these tensors belong to another task, such as a value head")),
        )
    ]


def _remote_code(config: Config, model: ModelFacts) -> list[Problem]:
    if not config.trust_remote_code or _COMMIT.fullmatch(config.model_revision or ""):
        return []
    if is_live(config.model):
        return []
    is_here = model.directory is not None and os.path.normpath(config.model) == model.directory
    if is_here or config.model.startswith(("/", "./", "../", "~")) or config.model in BUILT_IN_NAMES:
        return []
    return [
        Problem(
            code="E115",
            option="trust_remote_code",
            seen=tr(
                "trust_remote_code is on for {model}, which needs a full commit as model_revision; "
                "model_revision is {model_revision}.",
                model=config.model,
                model_revision=config.model_revision or tr("not set"),
            ),
            why=tr("Without a commit, the code that runs is whatever the author uploads next."),
            fixes=(
                Fix(
                    text=tr(
                        "name the full commit whose code you have read: --model_revision COMMIT (40 hex "
                        "digits)"
                    )
                ),
                Fix(text=tr("do not run code of the model"), edits={"trust_remote_code": False}),
            ),
        )
    ]


def _targets(config: Config, lora: LoraFacts) -> list[Problem]:
    problems = []
    for unmatched in lora.unmatched_targets:
        option = _typed_in(config, unmatched.target)
        working = _working(config, lora, option)
        near = unmatched.nearest[0] if unmatched.nearest else None
        text = tr("the module with the nearest name is {near}", near=near)
        fixes = [Fix(text=text, edits={option: working})] if near is not None else []
        if option == "target_modules":
            fixes.append(Fix(text=tr("adapt every linear layer"), edits={"target_modules": ["all-linear"]}))
        else:
            fixes.append(Fix(text=tr("train the LoRA matrices only: leave out --modules_to_save")))
        problems.append(
            problem(
                "E317",
                option,
                tr(
                    "{option} {target} matches no module of {model}. Nearest: {nearest}.",
                    option=option,
                    target=unmatched.target,
                    model=config.model,
                    nearest=joined(", ", unmatched.nearest) or "none",
                ),
                tr("The modules of other model families have other names."),
                *fixes,
            )
        )
    for name, why in lora.untrainable_targets:
        option = _typed_in(config, name)
        working = ["all-linear"] if name == "all-linear" else _working(config, lora, option)
        if not working and option == "target_modules":
            working = ["all-linear"]
        text = tr("leave it out") if working else tr("leave out --{option}", option=option)
        if working == ["all-linear"]:
            text = tr("adapt every linear layer")
        problems.append(
            problem(
                "E317",
                option,
                tr("{option} {name} cannot be trained this way: {why}.", option=option, name=name, why=why),
                tr("The list may have been written for another model, or names every layer."),
                Fix(text=text, edits={option: working} if working else {}),
            )
        )
    return problems


def _typed_in(config: Config, name: str) -> str:
    return "target_modules" if name in config.target_modules else "modules_to_save"


def _working(config: Config, lora: LoraFacts, option: str) -> list[str]:
    """Return the names of an option that the model has and that can be trained, those that it has not by the
    nearest name."""
    refused = {name for name, _ in lora.untrainable_targets}
    nearest = {u.target: u.nearest[:1] for u in lora.unmatched_targets}
    typed = [name for name in getattr(config, option) if name not in refused]
    return list(dict.fromkeys(n for name in typed for n in nearest.get(name, (name,))))


def _device(config: Config, machine: MachineFacts) -> list[Problem]:
    dtype = config.torch_dtype
    automatic = Fix(
        text=tr("use the dtype that this device computes fastest in"), edits={"torch_dtype": "auto"}
    )
    if dtype == "float16":
        seen = tr("torch_dtype is float16, but this version cannot train in float16.")
        cause = tr("float16 gradients vanish without loss scaling, which covey does not have.")
        return [problem("E319", "torch_dtype", seen, cause, automatic)]
    if dtype != "bfloat16":
        return []
    if machine.cuda and machine.has_bfloat16 is False:
        seen = tr("torch_dtype is bfloat16, but this GPU does not support it.")
        cause = tr("NVIDIA GPUs support bfloat16 from Ampere (2020) on.")
        return [problem("E319", "torch_dtype", seen, cause, automatic)]
    if machine.cuda is False and machine.has_bfloat16 is False:
        seen = tr("torch_dtype is bfloat16, but this CPU has no instructions for it.")
        cause = ""
        return [warning("W102", "torch_dtype", seen, cause, automatic)]
    return []


# Of some packages more than the name: this one is built against the torch that is there.
_INSTALL: Mapping[str, str] = {
    "flash-attn": "flash-attn --no-build-isolation",
    "openai": "'covey[judge]'",
    "bitsandbytes": "'covey[qlora]'",
    "deepspeed": "'covey[deepspeed]'",
    "ray": "'covey[ray]'",
    "vllm": "'covey[vllm]'",
    VLLM_ON_CPU: f"{VLLM_ON_CPU}=={TRIED[VLLM_ON_CPU].newest}",
}


def _packages(machine: MachineFacts) -> list[Problem]:
    return [
        problem(
            "E116",
            option,
            tr("{option} needs {package}, which is not installed.", option=option, package=package),
            tr("vLLM needs it for models that see images.")
            if package == "torchvision"
            else tr("The package is an optional dependency of covey."),
            Fix(text=tr("`pip install {install}`", install=_INSTALL.get(package, package))),
            # Other options of vLLM turn it on, too.
            Fix(text=tr("sample with covey's own engine"), edits={"use_vllm": False})
            if option == "use_vllm"
            else Fix(text=tr("leave out --{option}", option=option)),
        )
        for option, package in machine.missing_packages
    ]


_SMALL, _SMALL_RATE, _USUAL_RATE = 50_000_000, 1e-5, 1e-4


def _small_model(config: Config, model: ModelFacts) -> list[Problem]:
    count = model.num_parameters
    if count is None or count >= _SMALL or not 0 < config.learning_rate < _SMALL_RATE:
        return []
    return [
        warning(
            "W112",
            "learning_rate",
            tr(
                "learning_rate is {learning_rate:g} and the model has {count:.2f} M parameters.",
                learning_rate=config.learning_rate,
                count=count / 1e6,
            ),
            tr("The value is the default, or was chosen for a model of billions of parameters."),
            Fix(text=tr("use a learning rate for models of this size"), edits={"learning_rate": _USUAL_RATE}),
        )
    ]


CHECK = Check(place=20, judge=lambda config, facts, _: model_problems(config, facts), codes=CODES)
PACKED = Check(place=40, judge=lambda config, facts, _: quantization_problems(config, facts))
