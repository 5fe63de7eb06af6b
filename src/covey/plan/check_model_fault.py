"""What is wrong with a model that cannot be read or trained, or with its chat template."""

from __future__ import annotations

from collections.abc import Mapping

from covey.options.schema import Config
from covey.plan.check_quantization import quantized_model_fixes
from covey.plan.facts import Facts, FaultDetails, ModelFault
from covey.plan.problem import problem
from covey.texts import filled, tr
from covey.types import Fix, Problem

_BUILT_IN = Fix(text=tr("the built-in model, to try covey out"), edits={"model": "quickstart"})
_OTHER = Fix(text=tr("a causal language model with safetensors weights: --model DIR_OR_ID"))

_FAULTS: Mapping[ModelFault, tuple[str, str, tuple[Fix, ...]]] = {
    "missing": (
        "E301",
        tr("A path from another machine or directory, or a download that was cut short."),
        (
            Fix(text=tr("give the directory that holds config.json, tokenizer.json and *.safetensors")),
            _BUILT_IN,
        ),
    ),
    "kind": ("E311", tr("An encoder, a classifier or a reward model."), (_OTHER,)),
    "media": (
        "E312",
        tr("A vision or audio model, which many families have beside the one of text."),
        (Fix(text=tr("the language model of the same family: --model DIR_OR_ID")),),
    ),
    "code": (
        "E318",
        tr("The architecture is not part of transformers."),
        (
            Fix(
                text=tr(
                    "having read that code: --trust_remote_code true, and for a model of a hub "
                    "--model_revision COMMIT"
                )
            ),
            _OTHER,
        ),
    ),
    "format": (
        "E320",
        tr("An older upload, or a checkpoint of a trainer that saves other files."),
        (_BUILT_IN,),
    ),
    "shards": ("E385", "", ()),
    "hub": (
        "E321",
        tr("No network from here, a name that is misspelt, or a model that asks for a login."),
        (Fix(text=tr("for a gated or private model: accept its terms on its page, then `hf auth login`")),),
    ),
    "weights": (
        "E372",
        "",
        (Fix(text=tr("fetch or save the model again; config.json and weights have to come from one save")),),
    ),
    "quantized": (
        "E373",
        "",
        (
            Fix(
                text=tr(
                    "the model before it was quantized: --model DIR_OR_ID, with QLoRA where "
                    "memory is short (--tuner_type lora --quant_bits 4)"
                )
            ),
        ),
    ),
    "template": (
        "E313",
        tr("A base model, whose tokenizer brings no template, or a template for messages of another form."),
        (
            Fix(
                text=tr("the usual one, as <|im_start|>role ... <|im_end|>"),
                edits={"chat_template": "chatml"},
            ),
            Fix(text=tr("a template of your own: --chat_template FILE.jinja")),
        ),
    ),
}


_WHOLE_DIRECTORY = tr("give the directory that holds config.json, tokenizer.json and *.safetensors")
_NO_TOKENIZER = (
    tr("A checkpoint that was saved without its tokenizer."),
    tr("copy tokenizer.json, tokenizer_config.json and chat_template.jinja from the base model to {model}"),
)

# What is likely the cause and what to do, where more is known than the kind; `model` is what the user typed.
_CAUSES: Mapping[str, tuple[str, str]] = {
    "missing_shards": (
        tr("A download or a copy that was cut short."),
        tr("fetch the missing files; `hf download ID --local-dir {model}` goes on where it stopped"),
    ),
    "damaged": (
        tr("A download or a copy that was cut short, or a file that is no safetensors."),
        tr("fetch or copy that file again"),
    ),
    "no_tokenizer": _NO_TOKENIZER,
    "slow_tokenizer": _NO_TOKENIZER,
    "no_weights": (
        tr("A directory that has the tokenizer alone, or whose weights were never fetched."),
        _WHOLE_DIRECTORY,
    ),
    "no_config": (
        tr("A directory above or below the one of the model: a checkpoint of a run is RUN/checkpoint-N."),
        _WHOLE_DIRECTORY,
    ),
    "adapter": (
        tr("The directory of a LoRA run: it holds what was added to a model, not the model."),
        tr("give the base model as --model, and the adapter's directory as --adapters"),
    ),
    "unknown_model_type": (
        tr("A model newer than the installed transformers, or a typing error in config.json."),
        tr("`pip install -U transformers`, and try again"),
    ),
    "offline": (
        tr("HF_HUB_OFFLINE keeps every command off the network, and this model was never fetched whole."),
        tr("with a network: `unset HF_HUB_OFFLINE`, or once `hf download {model}`"),
    ),
    "unreadable_template": (
        tr("A misspelt path, or one relative to another directory."),
        tr("a file that is there: --chat_template FILE.jinja"),
    ),
    "broken_template": (
        tr("A template that was edited by hand, or written for another template language than Jinja."),
        tr("mend it, or give another one: --chat_template FILE.jinja"),
    ),
    "refusing_template": (
        tr("A template for messages of another form: without a system message, say, or strictly in turns."),
        tr("a template that takes these messages: --chat_template FILE.jinja"),
    ),
}
_CONVERT = tr(
    'where you trust the file, write the weights anew beside it: `python -c "from transformers '
    "import AutoModelForCausalLM as M; M.from_pretrained('{model}').save_pretrained('{model}')\"`"
)


def model_fault_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return why the model cannot be read or trained, and why its chat template cannot be used."""
    problems = []
    if facts.model_problem is not None:
        fault = facts.model_fault or "missing"
        problems.append(_fault(config, facts, fault, facts.model_problem, facts.model_details))
    if facts.template_problem is not None:
        problems.append(_fault(config, facts, "template", facts.template_problem, facts.template_details))
    return problems


def _fault(config: Config, facts: Facts, fault: ModelFault, words: str, details: FaultDetails) -> Problem:
    if fault == "hub" and _looks_local(config.model):
        fault = "missing"
    code, cause, fixes = _FAULTS[fault]
    if details.cause in _CAUSES:
        cause, advice = _CAUSES[details.cause]
        first = Fix(text=filled(advice, model=config.model.removeprefix("hf::")))
        fixes = (first, *(fix for fix in fixes if fix.edits))
    if fault == "code":
        if details.subject == config.model:
            fixes = (Fix(text=tr("having read that code"), edits={"trust_remote_code": True}), _OTHER)
    elif fault == "format":
        fixes = (Fix(text=filled(_CONVERT, model=config.model)), _BUILT_IN)
    elif fault == "shards":
        fixes = (_gathered(details.command),)
    elif fault == "quantized":
        fixes = (*quantized_model_fixes(facts), *fixes)
    elif fault == "hub" and details.cause != "offline":
        get = f"hf download {config.model.removeprefix('hf::')}"
        fixes = (Fix(text=tr("where there is a network `{get}`, then this command again", get=get)), *fixes)
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
    return Fix(text=tr("where you trust the files: `{command}`; {again}", command=command, again=again))


def _looks_local(name: str) -> bool:
    """Return whether a name can only be a path: an id of a hub has one slash at most, and none in front."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
