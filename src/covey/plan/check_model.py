"""What is wrong with the model, its chat template, its adapters, the device, and missing packages."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from covey.config.objects import is_live
from covey.options.schema import Config
from covey.plan.check_quantization import quantized_model_fixes
from covey.plan.check_template import template_problems
from covey.plan.facts import Facts, ModelFault
from covey.plan.problem import problem, warning
from covey.plan.shape import counted
from covey.plan.versions import TRIED, VLLM_ON_CPU
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
    "kind": ("E311", "An encoder, a classifier or a reward model.", (_OTHER,)),
    "media": (
        "E312",
        "A vision or audio model, which many families have beside the one of text.",
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
        (_BUILT_IN,),
    ),
    "shards": ("E385", "", ()),
    "hub": (
        "E321",
        "No network from here, a name that is misspelt, or a model that asks for a login.",
        (Fix(text="for a gated or private model: accept its terms on its page, then `hf auth login`"),),
    ),
    "weights": (
        "E372",
        "",
        (Fix(text="fetch or save the model again; config.json and weights have to come from one save"),),
    ),
    "quantized": (
        "E373",
        "",
        (
            Fix(
                text="the model before it was quantized: --model DIR_OR_ID, with QLoRA where memory is short "
                "(--tuner_type lora --quant_bits 4)"
            ),
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
        *_tokens(config, facts),
        *_unused(config, facts),
        *_remote_code(config, facts),
        *_targets(config, facts),
        *_device(config, facts),
        *_packages(facts),
        *template_problems(config, facts),
        *_small_model(config, facts),
    ]


# (words of the fault, likely cause, what to do), the first that fits; MODEL is what the user typed.
_SPECIAL: tuple[tuple[str, str, str], ...] = (
    (
        "files of weights",
        "A download or a copy that was cut short.",
        "fetch the missing files; `hf download ID --local-dir MODEL` goes on where it stopped",
    ),
    (
        "damaged",
        "A download or a copy that was cut short, or a file that is no safetensors.",
        "fetch or copy that file again",
    ),
    (
        "no tokenizer.json",
        "A checkpoint that was saved without its tokenizer.",
        "copy tokenizer.json, tokenizer_config.json and chat_template.jinja from the base model to MODEL",
    ),
    (
        "no .safetensors",
        "A directory that has the tokenizer alone, or whose weights were never fetched.",
        "give the directory that holds config.json, tokenizer.json and *.safetensors",
    ),
    (
        "no config.json",
        "A directory above or below the one of the model: a checkpoint of a run is RUN/checkpoint-N.",
        "give the directory that holds config.json, tokenizer.json and *.safetensors",
    ),
    (
        "is an adapter",
        "The directory of a LoRA run: it holds what was added to a model, not the model.",
        "give the base model as --model, and the adapter's directory as --adapters",
    ),
    (
        "has model_type",
        "A model newer than the installed transformers, or a typing error in config.json.",
        "`pip install -U transformers`, and try again",
    ),
    (
        "HF_HUB_OFFLINE",
        "HF_HUB_OFFLINE keeps every command off the network, and this model was never fetched whole.",
        "with a network: `unset HF_HUB_OFFLINE`, or once `hf download MODEL`",
    ),
    (
        "cannot be read",
        "A misspelt path, or one relative to another directory.",
        "a file that is there: --chat_template FILE.jinja",
    ),
    (
        "is broken",
        "A template that was edited by hand, or written for another template language than Jinja.",
        "mend it, or give another one: --chat_template FILE.jinja",
    ),
    (
        "refused the messages",
        "A template for messages of another form: without a system message, say, or strictly in turns.",
        "a template that takes these messages: --chat_template FILE.jinja",
    ),
)


def _model(config: Config, facts: Facts) -> list[Problem]:
    faults: list[tuple[ModelFault, str | None]] = [(facts.model_fault or "missing", facts.model_problem)]
    faults.append(("template", facts.template_problem))
    return [_fault(config, facts, fault, words) for fault, words in faults if words is not None]


def _fault(config: Config, facts: Facts, fault: ModelFault, words: str) -> Problem:
    if fault == "hub" and _looks_local(config.model):
        fault = "missing"
    code, cause, fixes = _FAULTS[fault]
    for needle, special, advice in _SPECIAL if fault not in ("weights", "quantized", "shards") else ():
        if needle in words:
            cause = special
            first = Fix(text=advice.replace("MODEL", config.model.removeprefix("hf::")))
            fixes = (first, *(fix for fix in fixes if fix.edits))
            break
    if fault == "code":
        words = words.partition(", and covey runs no such code")[0]
        if words.startswith(f"{config.model} "):
            fixes = (Fix(text="having read that code", edits={"trust_remote_code": True}), _OTHER)
    elif fault == "format":
        words = words.partition("; convert to safetensors")[0]
        fixes = (Fix(text=_CONVERT.format(model=config.model)), _BUILT_IN)
    elif fault == "shards":
        words, _, command = words.partition("; convert them: ")
        again = (
            "then copy config.json and the files of the tokenizer there, and give that directory as --model"
        )
        fixes = (Fix(text=f"where you trust the files: `{command}`; {again}"),)
    elif fault == "quantized":
        fixes = (*quantized_model_fixes(facts), *fixes)
    elif fault == "hub" and "HF_HUB_OFFLINE" not in words:
        get = f"hf download {config.model.removeprefix('hf::')}"
        fixes = (Fix(text=f"where there is a network `{get}`, then this command again"), *fixes)
    option = "chat_template" if fault == "template" else "model"
    says_whose = any(f"{config.model}{mark}" in words for mark in (" ", "/", ":")) or "chat_template" in words
    return problem(code, option, words if says_whose else f"{config.model}: {words}", cause, *fixes)


_CONVERT = (
    'where you trust the file, write the weights anew beside it: `python -c "from transformers import '
    "AutoModelForCausalLM as M; M.from_pretrained('{model}').save_pretrained('{model}')\"`"
)


def _looks_local(name: str) -> bool:
    """Return whether a name can only be a path: an id of a hub has one slash at most, and none in front."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


def _tokens(config: Config, facts: Facts) -> list[Problem]:
    if not facts.tokens_beyond or facts.embedding_rows is None:
        return []
    count, rows = len(facts.tokens_beyond), facts.embedding_rows
    shown = ", ".join(f"{token!r} ({i})" for token, i in facts.tokens_beyond[:3])
    more = f" and {count - 3} more" if count > 3 else ""
    highest = facts.tokens_beyond[-1][1]
    return [
        problem(
            "E374",
            "model",
            f"The tokenizer of {config.model} has {counted(count, 'token')} beyond the {rows} rows of the "
            f"embedding (vocab_size of config.json): {shown}{more}.",
            "",
            Fix(
                text="give the embedding a row for each: load the model with transformers, "
                f"`model.resize_token_embeddings({highest + 1})`, and save it; the new rows are untrained"
            ),
            Fix(text="the tokenizer that the model was trained with: copy its tokenizer.json"),
        )
    ]


def _unused(config: Config, facts: Facts) -> list[Problem]:
    if not facts.unused_tensors or facts.model_problem is not None:
        return []
    count = len(facts.unused_tensors)
    more = f" and {count - 3} more" if count > 3 else ""
    return [
        warning(
            "W151",
            "model",
            f"{counted(count, 'tensor')} of {config.model} {'is' if count == 1 else 'are'} not loaded: "
            f"{', '.join(facts.unused_tensors[:3])}{more}.",
            "",
            Fix(text="nothing, where these are the parts of another task, such as a value head"),
        )
    ]


def _remote_code(config: Config, facts: Facts) -> list[Problem]:
    if not config.trust_remote_code or _COMMIT.fullmatch(config.model_revision or ""):
        return []
    if is_live(config.model):
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
    for unmatched in facts.unmatched_targets:
        option = "target_modules" if unmatched.target in config.target_modules else "modules_to_save"
        typed = getattr(config, option)
        fixes = [
            Fix(
                text=f"the nearest name of a module is {near}",
                edits={option: [near if name == unmatched.target else name for name in typed]},
            )
            for near in unmatched.nearest[:1]
        ]
        if option == "target_modules":
            fixes.append(Fix(text="every linear layer", edits={"target_modules": ["all-linear"]}))
        else:
            fixes.append(Fix(text="train the LoRA matrices only: leave out --modules_to_save"))
        problems.append(
            problem(
                "E317",
                option,
                f"{option} {unmatched.target} matches no module of {config.model}. "
                f"Nearest: {', '.join(unmatched.nearest) or 'none'}.",
                "Names of another model family, or a typing error.",
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


def _device(config: Config, facts: Facts) -> list[Problem]:
    dtype = config.torch_dtype
    automatic = Fix(text="what the device computes best in", edits={"torch_dtype": "auto"})
    if dtype == "float16":
        seen = "torch_dtype is float16, which this version does not train in."
        cause = "A command for GPUs older than bfloat16; float16 gradients vanish without loss scaling."
        return [problem("E319", "torch_dtype", seen, cause, automatic)]
    if dtype != "bfloat16":
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


def _packages(facts: Facts) -> list[Problem]:
    return [
        problem(
            "E116",
            option,
            f"{option} needs {package}, which is not installed.",
            "It is an optional part of covey.",
            Fix(text=f"`pip install {_INSTALL.get(package, package)}`"),
            Fix(text=f"leave out --{option}"),
        )
        for option, package in facts.missing_packages
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
