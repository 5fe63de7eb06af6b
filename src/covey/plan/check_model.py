"""What is wrong with the model, its chat template, its adapters, the device, and missing packages."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from covey.config.schema import Config
from covey.plan.facts import Facts, ModelFault
from covey.plan.problem import problem, warning
from covey.types import Fix, Problem

_COMMIT = re.compile(r"[0-9a-f]{40}")
_BUILT_IN = Fix(text="the built-in model, to try covey out", edits={"model": "quickstart"})
_OTHER = Fix(text="a causal language model with safetensors weights: --model DIR_OR_ID")

_FAULTS: Mapping[ModelFault, tuple[str, str, tuple[Fix, ...]]] = {
    "missing": (
        "E301",
        "A path from another machine or directory, or a download that was cut short.",
        (Fix(text="give the directory that holds config.json, tokenizer.json and *.safetensors"), _BUILT_IN),
    ),
    "kind": ("E311", "Another kind of model, or one newer than the installed transformers.", (_OTHER,)),
    "media": (
        "E312",
        "A model that sees or hears; this version trains models of text only.",
        (Fix(text="the language model of the same family: --model DIR_OR_ID"),),
    ),
    "code": (
        "E318",
        "The architecture is not part of transformers.",
        (
            Fix(
                text="having read that code: --trust_remote_code true, and for a model of a hub "
                "--model_revision COMMIT"
            ),
            _OTHER,
        ),
    ),
    "format": (
        "E320",
        "An older upload, or a checkpoint of a trainer that saves other files.",
        (
            Fix(
                text="convert it once, where you trust the file: AutoModelForCausalLM.from_pretrained(DIR)"
                ".save_pretrained(NEW_DIR)"
            ),
            _BUILT_IN,
        ),
    ),
    "hub": (
        "E321",
        "No network from here, a name that is misspelt, or a model that asks for a login.",
        (
            Fix(text="where there is a network: `hf download NAME`, then the same command offline"),
            Fix(text="for a gated or private model: accept its terms on its page, then `hf auth login`"),
        ),
    ),
    "template": (
        "E313",
        "A base model, whose tokenizer brings no template, or a template for messages of another form.",
        (
            Fix(text="the usual one, as <|im_start|>role ... <|im_end|>", edits={"chat_template": "chatml"}),
            Fix(text="a template of your own: --chat_template FILE.jinja"),
        ),
    ),
}


def model_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what the facts say against the model and how it is to be trained."""
    return [
        *_model(config, facts),
        *_remote_code(config, facts),
        *_targets(config, facts),
        *_adapter_options(config),
        *_device(config, facts),
        *_packages(facts),
        *_plain_prompts(config, facts),
        *_small_model(config, facts),
    ]


def _model(config: Config, facts: Facts) -> list[Problem]:
    if facts.model_problem is None:
        return []
    code, cause, fixes = _FAULTS[facts.model_fault or "missing"]
    option = "chat_template" if facts.model_fault == "template" else "model"
    return [problem(code, option, f"{config.model}: {facts.model_problem}", cause, *fixes)]


def _remote_code(config: Config, facts: Facts) -> list[Problem]:
    if not config.trust_remote_code or _COMMIT.fullmatch(config.model_revision or ""):
        return []
    is_here = facts.model_dir is not None and os.path.normpath(config.model) == facts.model_dir
    if is_here or config.model.startswith(("/", "./", "../", "~")) or config.model == "quickstart":
        return []
    return [
        problem(
            "E115",
            "trust_remote_code",
            f"trust_remote_code is on for {config.model} and model_revision is "
            f"{config.model_revision or 'not set'}.",
            "Without a commit the code that runs is whatever its author uploads next.",
            Fix(text="the full commit whose code you have read: --model_revision COMMIT (40 hex digits)"),
            Fix(text="run no code of the model", edits={"trust_remote_code": False}),
        )
    ]


def _targets(config: Config, facts: Facts) -> list[Problem]:
    problems = []
    for found in facts.unmatched_targets:
        option = "target_modules" if found.target in config.target_modules else "modules_to_save"
        typed = getattr(config, option)
        fixes = [
            Fix(
                text=f"the nearest name of a module is {near}",
                edits={option: [near if name == found.target else name for name in typed]},
            )
            for near in found.nearest[:1]
        ]
        if option == "target_modules":
            fixes.append(Fix(text="every linear layer", edits={"target_modules": ["all-linear"]}))
        else:
            fixes.append(Fix(text="train adapters alone: leave out --modules_to_save"))
        problems.append(
            problem(
                "E317",
                option,
                f"{option} {found.target} matches no module of {config.model}. "
                f"Nearest: {', '.join(found.nearest) or 'none'}.",
                "Names of another model family, or a slip of the hand.",
                *fixes,
            )
        )
    for name, why in facts.untrainable_targets:
        option = "target_modules" if name in config.target_modules else "modules_to_save"
        left = [n for n in getattr(config, option) if n != name]
        usual = {"target_modules": ["all-linear"]} if option == "target_modules" else {}
        if name == "all-linear":
            usual, left = {"target_modules": [name]}, []
        edits = {option: left} if left else usual
        problems.append(
            problem(
                "E317",
                option,
                f"{option} {name} cannot be trained so: {why}.",
                "A list of targets from another model, or one that names every layer.",
                Fix(text="without it" if edits else f"leave out --{option}", edits=edits),
            )
        )
    return problems


def _adapter_options(config: Config) -> list[Problem]:
    if config.tuner_type == "lora":
        return []
    changed = [
        name
        for name in ("modules_to_save", "use_rslora", "use_dora")
        if getattr(config, name) != type(config).model_fields[name].default
    ]
    return [
        problem(
            "E115",
            name,
            f"{name} is set and tuner_type is full: there is no adapter that it could change.",
            "A command for LoRA without its --tuner_type lora, which is the default of `covey rlhf` only.",
            Fix(text="train adapters", edits={"tuner_type": "lora"}),
            Fix(text=f"train all weights: leave out --{name}"),
        )
        for name in changed
    ]


def _device(config: Config, facts: Facts) -> list[Problem]:
    wanted = config.torch_dtype
    automatic = Fix(text="what the device computes best in", edits={"torch_dtype": "auto"})
    if wanted == "float16":
        seen = "torch_dtype is float16, which this version does not train in."
        cause = "float16 gradients vanish without loss scaling; a command for GPUs older than bfloat16."
        return [problem("E319", "torch_dtype", seen, cause, automatic)]
    if wanted != "bfloat16":
        return []
    if facts.cuda and facts.has_bfloat16 is False:
        seen = "torch_dtype is bfloat16, and this GPU does not compute in it."
        cause = "A GPU from before 2020, or a command from a newer one."
        return [problem("E319", "torch_dtype", seen, cause, automatic)]
    if facts.cuda is False and facts.has_bfloat16 is False:
        seen = "torch_dtype is bfloat16, and this CPU has no instructions for it."
        cause = "A command written for a GPU."
        return [warning("W102", "torch_dtype", seen, cause, automatic)]
    return []


def _packages(facts: Facts) -> list[Problem]:
    return [
        problem(
            "E116",
            option,
            f"{option} needs {package}, which is not installed.",
            "It is an optional part of covey.",
            Fix(text=f"`pip install {package}`"),
            Fix(text=f"leave out --{option}"),
        )
        for option, package in facts.missing_packages
    ]


def _plain_prompts(config: Config, facts: Facts) -> list[Problem]:
    if not (facts.prompts_are_text and facts.has_chat_template) or config.apply_chat_template:
        return []
    return [
        warning(
            "W109",
            "apply_chat_template",
            "The column prompt holds text and the model has a chat template, which is not applied.",
            "Prompts written out in full, as TRL takes them, or questions that were meant as messages.",
            Fix(text="put each prompt into the template", edits={"apply_chat_template": True}),
        )
    ]


_SMALL, _SMALL_RATE, _USUAL_RATE = 50_000_000, 1e-5, 1e-4


def _small_model(config: Config, facts: Facts) -> list[Problem]:
    count = facts.num_parameters
    if count is None or count >= _SMALL or not 0 < config.learning_rate < _SMALL_RATE:
        return []
    return [
        warning(
            "W112",
            "learning_rate",
            f"learning_rate is {config.learning_rate:g} and the model has {count / 1e6:.2f} M parameters.",
            "The default, or a rate for a model of billions of parameters.",
            Fix(text="a rate for models of this size", edits={"learning_rate": _USUAL_RATE}),
        )
    ]
