"""What a model's directory says of itself, and why it cannot be trained; reads no weights and no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

from covey.config.checkpoints import list_checkpoints
from covey.config.quantization import stored_options
from covey.data.config_values import impossible_size
from covey.data.errors import nearest
from covey.data.foreign_checkpoints import STATE_PATTERNS, shards_of
from covey.data.model_types import known_model_types
from covey.media.families import FAMILIES, text_config
from covey.paths import closed_file
from covey.text_files import read_json as read_json
from covey.texts import joined, tr
from covey.weight_files import INDEX, WHOLE, DamagedFileError, stored_tensors, weight_files

_OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json")
_READ = ("*.json", "chat_template*", "*.safetensors")
_SLOW_TOKENIZERS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "consolidated*.bin")
_MEDIA_KEYS = re.compile(
    r"(vision|audio|visual|image|video|speech)(_config|_tower|_token_id|_token_index)|mm_\w+"
)
_CAUSAL, _SEEING = ("ForCausalLM", "LMHeadModel"), ("ForConditionalGeneration",)
_CLASSIFIER, _USUAL_LABELS = "ForSequenceClassification", 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProblem:
    """Why a directory is no model that can be trained: a `kind` to tell cases apart, the words for people,
    the rest of their sentence, which says what to do, and the command that does it."""

    kind: str
    words: str
    advice: str = ""
    command: str = ""

    def __str__(self) -> str:
        return tr("{words}{advice}", words=self.words, advice=self.advice) if self.advice else self.words


def model_problem(
    directory: Path, *, with_weights: bool = True, takes_packed: bool = False
) -> ModelProblem | None:
    """Why a directory is no model that can be trained, or None.

    Kinds: not_a_directory, adapter, run, no_config, closed, bad_config, remote_code, no_model_type,
    unknown_model_type, vision, encoder_decoder, not_causal, quantized, weights, slow_tokenizer, no_tokenizer,
    missing_shards, damaged, shards, pickled_weights, unread_weights, no_weights. With `with_weights` false,
    as for a model on a hub, the last six are not asked. With `takes_packed` bitsandbytes' weights are none.
    """
    asks = partial(_architecture_problem, takes_packed=takes_packed)
    return _problem(directory, asks, with_weights=with_weights)


def classifier_problem(directory: Path, *, with_weights: bool = True) -> ModelProblem | None:
    """Why a directory is no sequence classifier with one label, as a reward model is; kinds as
    `model_problem`, with causal, not_classifier and labels for what it is instead."""
    return _problem(directory, _classifier_problem, with_weights=with_weights)


_Asks = Callable[[Path, Mapping[str, Any]], ModelProblem | None]


def _problem(directory: Path, architecture_problem: _Asks, *, with_weights: bool) -> ModelProblem | None:
    if not isdir(directory):
        return ModelProblem(
            kind="not_a_directory", words=tr("{directory} is not a directory", directory=directory)
        )
    if not isfile(directory / "config.json"):
        return _without_config(directory)
    if (closed := closed_file(directory, _READ if with_weights else _READ[:-1])) is not None:
        file, found = closed
        words = tr("{path} {words}", path=file, words=found.words)
        return ModelProblem(kind="closed", words=words, command=found.command)
    for name in _OBJECTS:
        path = directory / name
        try:
            is_live = not isfile(path) or isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
        except ValueError as error:
            return ModelProblem(
                kind="bad_config", words=tr("{path} is not valid JSON: {error}", path=path, error=error)
            )
        if not is_live:
            return ModelProblem(kind="bad_config", words=tr("{path} is not a JSON object", path=path))
    config = read_json(directory / "config.json")
    fault = _model_type_problem(directory, config) or architecture_problem(directory, config)
    fault = fault or _size_problem(directory, config) or tokenizer_problem(directory)
    return fault or (_weights_problem(directory) if with_weights else None)


def model_context(directory: Path) -> int | None:
    """Positions of the model, from its config.json; None where it does not say."""
    config = text_config(read_json(directory / "config.json"))
    value = config.get("max_position_embeddings", config.get("n_positions"))
    return value if isinstance(value, int) else None


def vocabulary_of(directory: Path) -> int | None:
    """Rows of the model's embedding, from its config.json; None where it does not say."""
    config = read_json(directory / "config.json")
    value = config.get("vocab_size", text_config(config).get("vocab_size"))
    return value if isinstance(value, int) else None


def _without_config(directory: Path) -> ModelProblem:
    if isfile(directory / "adapter_config.json"):
        words = tr(
            "{directory} is an adapter of {base}, not a model: give {base} as --model, or "
            "merge the two with `covey export --merge`",
            directory=directory,
            base=_base_of(directory),
        )
        return ModelProblem(kind="adapter", words=words)
    if (shards := _shards_problem(directory)) is not None:
        return shards
    if checkpoints := list_checkpoints(directory):
        return _run(directory, str(checkpoints[-1]))
    return ModelProblem(kind="no_config", words=tr("{directory} has no config.json", directory=directory))


def _run(directory: Path, newest: str) -> ModelProblem:
    words = tr(
        "{directory} is the directory of a run, not of a model; its newest checkpoint is {newest}",
        directory=directory,
        newest=newest,
    )
    return ModelProblem(kind="run", words=words, command=newest)


def _base_of(directory: Path) -> str:
    try:
        return str(
            read_json(directory / "adapter_config.json").get("base_model_name_or_path") or tr("its base")
        )
    except ValueError:
        return tr("its base")


def _model_type_problem(directory: Path, config: Mapping[str, Any]) -> ModelProblem | None:
    name, known = config.get("model_type"), known_model_types()
    if not known or name in known:
        return None
    if "auto_map" in config:
        return ModelProblem(
            kind="remote_code",
            words=tr(
                "{directory} is a model that comes with its own code (auto_map in config.json)",
                directory=directory,
            ),
            advice=tr(
                ", and covey does not run such code: use a model that transformers supports itself",
            ),
        )
    if not isinstance(name, str):
        return ModelProblem(
            kind="no_model_type",
            words=tr("{directory}/config.json does not name a model_type", directory=directory),
        )
    return ModelProblem(
        kind="unknown_model_type",
        words=tr(
            "{directory}/config.json has model_type {name!r}, which the installed transformers does not "
            "support{nearest}: a newer version may support it (pip install -U transformers)",
            directory=directory,
            name=name,
            nearest=nearest(name, sorted(known)),
        ),
    )


def _architecture_problem(
    directory: Path, config: Mapping[str, Any], *, takes_packed: bool = False
) -> ModelProblem | None:
    sees = config.get("model_type") in FAMILIES
    media = sorted(key for key in config if _MEDIA_KEYS.fullmatch(key) and config[key] is not None)
    if media and not sees:
        words = tr(
            "{directory} is a model for images or audio ({media} in config.json), and not one of the "
            "families that covey trains: {known}",
            directory=directory,
            known=joined(", ", FAMILIES),
            media=joined(", ", media[:3]),
        )
        return ModelProblem(kind="vision", words=words)
    if config.get("is_encoder_decoder"):
        return ModelProblem(
            kind="encoder_decoder",
            words=tr(
                "{directory} is an encoder-decoder model ({config}), but covey trains only decoder-only "
                "models",
                directory=directory,
                config=config.get("model_type"),
            ),
        )
    names = config.get("architectures") or []
    ends = _SEEING if sees else _CAUSAL
    if names and not any(str(n).endswith(ends) for n in names):
        return ModelProblem(
            kind="not_causal",
            words=tr(
                "{directory} is a {names}, which does not generate text: covey trains models of a class "
                "…ForCausalLM",
                directory=directory,
                names=names[0],
            ),
        )
    is_taken = takes_packed and stored_options(config) is not None
    method = None if is_taken else quantization(config)
    if method is not None:
        words = tr(
            "{directory} contains quantized weights: config.json has a quantization_config of {method}",
            directory=directory,
            method=method,
        )
        return ModelProblem(kind="quantized", words=words)
    return None


def quantization(config: Mapping[str, Any]) -> str | None:
    """The method by which the weights of a model are quantized, by its config.json; None where they are
    not."""
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    for part in parts:
        for key in ("quantization_config", "compression_config"):
            said = part.get(key)
            if isinstance(said, Mapping) and said:
                widths = [n.removeprefix("load_in_") for n in ("load_in_4bit", "load_in_8bit") if said.get(n)]
                bits = said.get("bits")
                widths += [tr("{bits} bits", bits=bits)] if isinstance(bits, int) else []
                method = str(said.get("quant_method") or tr("an unnamed method"))
                return (
                    tr("{method} ({widths})", method=method, widths=joined(", ", widths))
                    if widths
                    else method
                )
    return None


def _classifier_problem(directory: Path, config: Mapping[str, Any]) -> ModelProblem | None:
    names = [str(n) for n in config.get("architectures") or ["model that names no architecture"]]
    if any(n.endswith(_CAUSAL) for n in names):
        return ModelProblem(
            kind="causal",
            words=tr(
                "{directory} is a {names}, which generates text and does not give a score",
                directory=directory,
                names=names[0],
            ),
        )
    if not any(n.endswith(_CLASSIFIER) for n in names):
        return ModelProblem(
            kind="not_classifier",
            words=tr(
                "{directory} is a {names}, but a reward model must be a …{classifier} with one label",
                directory=directory,
                names=names[0],
                classifier=_CLASSIFIER,
            ),
        )
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels", _USUAL_LABELS)
    if count != 1:
        return ModelProblem(
            kind="labels",
            words=tr(
                "{directory} is a {names} with {count} labels, but the reward is the logit of a single label",
                directory=directory,
                names=names[0],
                count=count,
            ),
        )
    return None


def _size_problem(directory: Path, config: Mapping[str, Any]) -> ModelProblem | None:
    odd = impossible_size(config)
    if odd is None:
        return None
    return ModelProblem(
        kind="weights", words=tr("{directory}/config.json: {odd}", directory=directory, odd=odd)
    )


def tokenizer_problem(directory: Path) -> ModelProblem | None:
    """Why no tokenizer can be read from a directory, or None; kinds no_tokenizer and slow_tokenizer."""
    if isfile(directory / "tokenizer.json"):
        return None
    slow = next((name for name in _SLOW_TOKENIZERS if isfile(directory / name)), None)
    if slow is None:
        return ModelProblem(
            kind="no_tokenizer", words=tr("{directory} has no tokenizer.json", directory=directory)
        )
    return ModelProblem(
        kind="slow_tokenizer",
        words=tr(
            "{directory} has no tokenizer.json, only {slow}: create one with "
            "AutoTokenizer.from_pretrained('{directory}').save_pretrained('{directory}')",
            directory=directory,
            slow=slow,
        ),
    )


def _weights_problem(directory: Path) -> ModelProblem | None:
    try:
        files = weight_files(directory)
        missing = [file.name for file in files if not isfile(file)]
        if missing:
            return _missing_shards(directory, missing, len(files))
        if files:
            stored_tensors(directory)
            return None
    except DamagedFileError as error:
        return ModelProblem(
            kind="damaged",
            words=tr("the weights of {directory} are damaged: {error}", directory=directory, error=error),
        )
    return _without_weights(directory)


def _without_weights(directory: Path) -> ModelProblem:
    # An adapter beside a config.json is no model's weights.
    if isfile(directory / "adapter_config.json"):
        return _without_config(directory)
    if (shards := _shards_problem(directory)) is not None:
        return shards
    state = {p.name for pattern in STATE_PATTERNS for p in directory.glob(pattern)}
    pickled = sorted({p.name for pattern in _PICKLES for p in directory.glob(pattern)} - state)
    if pickled:
        return ModelProblem(
            kind="pickled_weights",
            words=tr(
                "{directory} has only pickled weights ({pickled}), which can run code when they are "
                "loaded; covey does not read them",
                directory=directory,
                pickled=pickled[0],
            ),
            advice=tr(
                "; convert them to safetensors: "
                "AutoModelForCausalLM.from_pretrained('{directory}').save_pretrained('{directory}')",
                directory=directory,
            ),
        )
    others = sorted(p.name for pattern in ("*.safetensors", "*.gguf") for p in directory.glob(pattern))
    if others:
        return ModelProblem(
            kind="unread_weights",
            words=tr(
                "{directory} has neither {whole} nor {index}, and covey does not read the files it has: "
                "{others}",
                directory=directory,
                whole=WHOLE,
                index=INDEX,
                others=others[0],
            ),
        )
    return ModelProblem(
        kind="no_weights",
        words=tr(
            "{directory} has no .safetensors file; covey reads no other weight format",
            directory=directory,
        ),
    )


def _shards_problem(directory: Path) -> ModelProblem | None:
    found = shards_of(directory)
    if found is None:
        return None
    what, command = found
    words = tr("the weights in {directory} are stored only as {what}", directory=directory, what=what)
    advice = tr("; convert them: {command}", command=command)
    return ModelProblem(kind="shards", words=words, advice=advice, command=command)


def _missing_shards(directory: Path, missing: list[str], count: int) -> ModelProblem:
    more = tr(" and {num_missing} more", num_missing=len(missing) - 3) if len(missing) > 3 else ""
    return ModelProblem(
        kind="missing_shards",
        words=tr(
            "{directory} lacks {num_missing} of {count} weight files: {missing}{more}",
            directory=directory,
            num_missing=len(missing),
            count=count,
            missing=joined(", ", missing[:3]),
            more=more,
        ),
    )
