"""Finds faults in a model that cannot be read or trained, or with its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from covey.checks.model.quantization import quantized_model_fixes
from covey.media.families import FAMILIES
from covey.options.schema import Config
from covey.plan.facts import FaultDetails, ModelFacts, ModelFault, TemplateFacts
from covey.plan.layout import Layout
from covey.plan.problem import problem
from covey.texts import Whole, filled, tr
from covey.types import Fix, Problem

_BUILT_IN = Fix(text=tr("use the built-in model, to try covey"), edits={"model": "quickstart"})
_BUILT_IN_THAT_SEES = replace(_BUILT_IN, edits={"model": "quickstart-shapes"})
_OTHER = Fix(text=tr("name a causal language model with safetensors weights: --model DIR_OR_ID"))

_FAULTS: Mapping[ModelFault, tuple[str, str, tuple[Fix, ...]]] = {
    "missing": (
        "E301",
        "",
        (
            Fix(text=tr("give the directory that holds config.json, tokenizer.json and *.safetensors")),
            _BUILT_IN,
        ),
    ),
    "kind": ("E311", "", (_OTHER,)),
    "media": (
        "E312",
        tr("It is a vision or audio model; most families have a text model too."),
        (Fix(text=tr("use the text model of the same family: --model DIR_OR_ID")),),
    ),
    "code": (
        "E318",
        tr("The architecture is not part of transformers."),
        (
            Fix(
                text=tr(
                    "read the code, then add --trust_remote_code true, and for a model from a hub "
                    "--model_revision COMMIT"
                )
            ),
            _OTHER,
        ),
    ),
    "format": (
        "E320",
        "",
        (_BUILT_IN,),
    ),
    "shards": ("E385", "", ()),
    "hub": (
        "E321",
        tr("There is no network, the name is misspelt, or the model requires a login."),
        (Fix(text=tr("for a gated or private model: accept its terms on its page, then `hf auth login`")),),
    ),
    "weights": (
        "E372",
        "",
        (
            Fix(
                text=tr(
                    "download or save the model again; config.json and weights must come from the same save"
                )
            ),
        ),
    ),
    "quantized": (
        "E373",
        "",
        (
            Fix(
                text=tr(
                    "use the model before it was quantized: --model DIR_OR_ID, with QLoRA if "
                    "memory is short (--tuner_type lora --quant_bits 4)"
                )
            ),
        ),
    ),
    "template": (
        "E313",
        tr("Many base models have no chat template."),
        (
            Fix(
                text=tr("use the common format <|im_start|>role ... <|im_end|>"),
                edits={"chat_template": "chatml"},
            ),
            Fix(text=tr("use your own template: --chat_template FILE.jinja")),
        ),
    ),
}


_WHOLE_DIRECTORY = tr("give the directory that holds config.json, tokenizer.json and *.safetensors")
_NO_TOKENIZER = (
    tr("The checkpoint was saved without its tokenizer."),
    tr("copy tokenizer.json, tokenizer_config.json and chat_template.jinja from the base model to {model}"),
)

# What is likely the cause and what to do, where more is known than the kind; `model` is what the user typed.
_CAUSES: Mapping[str, tuple[str, str]] = {
    "missing_shards": (
        tr("The download or the copy was interrupted."),
        tr("download the missing files; `hf download ID --local-dir {model}` continues where it stopped"),
    ),
    "damaged": (
        tr("The download or the copy was interrupted, or the file is not in safetensors format."),
        tr("download or copy that file again"),
    ),
    "no_tokenizer": _NO_TOKENIZER,
    "slow_tokenizer": _NO_TOKENIZER,
    "no_weights": (
        tr("The directory has only the tokenizer, or its weights were never downloaded."),
        _WHOLE_DIRECTORY,
    ),
    "headers": (
        tr("For other model families, covey plan reads the sizes from the headers of the weight files."),
        tr(
            "download the weight files too, the model's *.safetensors and model.safetensors.index.json: "
            "`hf download ID --include '*.safetensors*' --local-dir {model}`"
        ),
    ),
    "no_config": (
        tr("It may be the directory above or below the model; a checkpoint of a run is RUN/checkpoint-N."),
        _WHOLE_DIRECTORY,
    ),
    "file": ("", _WHOLE_DIRECTORY),
    "adapter": (
        tr("It is the directory of a LoRA adapter, not of a model."),
        tr("give the base model as --model and the adapter's directory as --adapters"),
    ),
    "unknown_model_type": (
        tr("The model is newer than the installed transformers, or config.json has an error."),
        tr("`pip install -U transformers`, and try again"),
    ),
    "offline": (
        tr("HF_HUB_OFFLINE is set, so nothing is downloaded, and this model is not complete in the cache."),
        tr(
            "on a machine with network access: `unset HF_HUB_OFFLINE`, or download it once with `hf "
            "download {model}`"
        ),
    ),
    "unreadable_template": ("", tr("name an existing file: --chat_template FILE.jinja")),
    "broken_template": ("", tr("correct it, or use another one: --chat_template FILE.jinja")),
    "refusing_template": (
        tr(
            "The template expects messages of another form, for example no system message, or user and "
            "assistant strictly in turn."
        ),
        tr("use a template that accepts these messages: --chat_template FILE.jinja"),
    ),
}
_CONVERT = tr(
    'where you trust the file, write the weights anew beside it: `python -c "from transformers '
    "import AutoModelForCausalLM as M; M.from_pretrained('{model}').save_pretrained('{model}')\"`"
)


def model_fault_problems(
    config: Config, model: ModelFacts, template: TemplateFacts, layout: Layout
) -> list[Problem]:
    """Return why the model cannot be read or trained, and why its chat template cannot be used."""
    problems = []
    if model.problem is not None:
        fault = model.fault or "missing"
        problems.append(_fault(config, model, layout, fault, model.problem, model.details))
    if template.problem is not None:
        problems.append(_fault(config, model, layout, "template", template.problem, template.details))
    return problems


def _fault(
    config: Config, model: ModelFacts, layout: Layout, fault: ModelFault, words: str, details: FaultDetails
) -> Problem:
    if fault == "hub" and (_looks_local(config.model) or details.cause == "file"):
        fault = "missing"
    code, cause, fixes = _FAULTS[fault]
    if details.cause in _CAUSES:
        cause, advice = _CAUSES[details.cause]
        first = Fix(text=filled(advice, model=config.model.removeprefix("hf::")))
        fixes = (first, *(fix for fix in fixes if fix.edits))
    if fault == "code":
        if details.subject == config.model:
            fixes = (
                Fix(text=tr("run this code, once you have read it"), edits={"trust_remote_code": True}),
                _OTHER,
            )
    elif details.cause == "closed" and details.command:
        fixes = (
            Fix(text=tr("`{command}`", command=Whole(details.command))),
            *fixes,
        )
    elif details.cause == "run":
        cause, fixes = "", (Fix(text=tr("use this checkpoint"), edits={"model": details.command}),)
    elif fault == "format":
        fixes = (Fix(text=filled(_CONVERT, model=config.model)), _BUILT_IN)
    elif fault == "shards":
        fixes = (_gathered(details.command),)
    elif fault == "quantized":
        fixes = (*quantized_model_fixes(model), *fixes)
    elif fault == "hub" and details.cause != "offline":
        get = f"hf download {config.model.removeprefix('hf::')}"
        fixes = (
            Fix(text=tr("on a machine with network access run `{get}`, then this command again", get=get)),
            *fixes,
        )
    if not layout.is_here:
        # Whoever plans for another machine asks about this model and no other.
        fixes = tuple(fix for fix in fixes if fix is not _BUILT_IN)
    if model.type in FAMILIES:
        fixes = tuple(_BUILT_IN_THAT_SEES if fix is _BUILT_IN else fix for fix in fixes)
    return problem(
        code,
        "chat_template" if fault == "template" else "model",
        words
        if details.subject in (config.model, "chat_template")
        else tr("{model}: {words}", model=config.model, words=words),
        cause,
        *fixes,
    )


def _gathered(command: str) -> Fix:
    """Return the way from a trainer's shards to weights."""
    again = tr(
        "then copy config.json and the files of the tokenizer there, and give that directory as --model"
    )
    return Fix(text=tr("if you trust the files: `{command}`; {again}", command=Whole(command), again=again))


def _looks_local(name: str) -> bool:
    """Return whether a name can only be a path: an id of a hub has one slash at most, and none in front."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
