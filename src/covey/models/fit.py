"""Whether the tensors of a model's files are those of the model that its config.json describes.

For families whose layers are known from config.json alone the answer yes takes no more than that. Everything
else is asked of transformers, which is told names and shapes in the place of weights: what it would load, and
what it would start from random numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.media.families import auto_class
from covey.models.adapter_shapes import HEAD_LEAVES, TOKEN_LEAVES
from covey.models.config_shapes import shapes_of_config
from covey.texts import counted, joined, tr
from covey.weight_files import StoredTensor, same_bytes

_TRAINED_DTYPES = ("F64", "F32", "F16", "BF16")
_SHOWN = 3
# A head that is a copy of the embedding is no tensor that is left over.
_HARMLESS = frozenset({"lm_head.weight"})
_OF_A_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+\..*(weight|bias)$")

_NOT_JOINED = tr(
    "weights that are loaded together, such as the experts of a layer, are incomplete or have shapes that "
    "do not match"
)

CAUSAL, CLASSIFIER = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
"""The classes of transformers that load a policy and a reward model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Why the files do not hold the model of config.json, in words, or None; and the tensors of the files
    that the model has no use for."""

    problem: str | None = None
    unused: tuple[str, ...] = ()


def fit_of(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    *,
    auto: str | None = None,
) -> Fit:
    """Hold the tensors of a model's files to its config.json; `auto` is the class of transformers that loads
    it (None: that of a policy)."""
    auto = auto or auto_class(config.get("model_type"))
    if not tensors:
        return Fit(problem=tr("the weight files contain no tensor"))
    odd = {n: t.dtype for n, t in tensors.items() if n.endswith("weight") and t.dtype not in _TRAINED_DTYPES}
    if odd:
        name, dtype = next(iter(odd.items()))
        words = tr(
            "{weights} in the files cannot be trained: {name} is stored as {dtype}",
            weights=counted(len(odd), "weight"),
            name=name,
            dtype=dtype,
        )
        return Fit(problem=words)
    separate = _separate_head(config, tensors)
    if separate is not None:
        return Fit(problem=separate)
    text = config.get("text_config")
    sizes = text if isinstance(text, Mapping) else config
    layers = sizes.get("num_hidden_layers", sizes.get("n_layer"))
    if isinstance(layers, int) and layers > len(tensors):
        # Building so many would take long, and each layer has a tensor at least.
        words = tr(
            "config.json says {layers} layers, but the files have {tensors}",
            layers=layers,
            tensors=counted(len(tensors), "tensor"),
        )
        return Fit(problem=words)
    if auto == CAUSAL and _is_known_to_fit(config, tensors):
        return Fit()
    return _asked_of_transformers(directory, tensors, auto)


def unfit_words(
    name: str, missing: Sequence[str], mismatched: Sequence[tuple[str, Any, Any]], unused: Sequence[str] = ()
) -> str | None:
    """What transformers says of a load, in words; None where every tensor was found, and every layer of the
    files is one of the model."""
    parts = []
    lost = sorted({*missing} - {n for n, _, _ in mismatched})
    if lost:
        parts.append(
            tr(
                "the weight files lack {tensors} of a {name}: {some}",
                tensors=counted(len(lost), "tensor"),
                name=name,
                some=_some(lost),
            )
        )
    if mismatched:
        shapes = [
            tr(
                "{n} is {shape}, but config.json says {expected}",
                n=n,
                shape=_shape(held),
                expected=_shape(asked),
            )
            for n, held, asked in mismatched
        ]
        parts.append(
            tr("shapes in the files differ from those in config.json: {some}", some=_some(shapes, "; "))
        )
    layers = [n for n in unused if _OF_A_LAYER.search(n)]
    if layers:
        more = tr(
            "{tensors} of layers that config.json does not have: {some}",
            tensors=counted(len(layers), "tensor"),
            some=_some(layers),
        )
        parts.append(tr("the files contain {more}", more=more))
    return joined("; ", parts) if parts else None


def _separate_head(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> str | None:
    """Where config.json says that head and embedding are one, and the files hold another head."""
    if config.get("tie_word_embeddings") is not True:
        return None
    head, embedding = (_weight_of(leaves, tensors) for leaves in (HEAD_LEAVES, TOKEN_LEAVES))
    if head is None or embedding is None or same_bytes(tensors[head], tensors[embedding]):
        return None
    return tr(
        "config.json says tie_word_embeddings: true, but in the files {head} differs from {embedding}",
        head=head,
        embedding=embedding,
    )


def _weight_of(leaves: tuple[str, ...], tensors: Mapping[str, StoredTensor]) -> str | None:
    """The weight of a module that has one of these names."""
    endings = tuple(f".{leaf}.weight" for leaf in leaves)
    return next((name for name in tensors if f".{name}".endswith(endings)), None)


def _is_known_to_fit(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> bool:
    try:
        expected = shapes_of_config(config)
        if expected is None or not _is_buildable(config):
            return False
    except (TypeError, ValueError, ZeroDivisionError):
        return False
    others = {n for n in tensors if n not in expected.tensors and n not in _HARMLESS}
    fits = all(n in tensors and tensors[n].shape == shape for n, shape in expected.tensors.items())
    return fits and not others


def _is_buildable(config: Mapping[str, Any]) -> bool:
    """Whether numbers of config.json that no shape shows are such that the model can be built."""
    heads, keys, words = (
        config["num_attention_heads"],
        config.get("num_key_value_heads"),
        config["vocab_size"],
    )
    pad = config.get("pad_token_id")
    divides = config.get("head_dim") or not config["hidden_size"] % heads
    return bool(divides) and not heads % (keys or heads) and (pad is None or -words <= pad < words)


def _asked_of_transformers(directory: Path, tensors: Mapping[str, StoredTensor], auto: str) -> Fit:
    import torch
    import transformers
    from transformers.utils import logging

    def empty(tensor: StoredTensor) -> torch.Tensor:
        dtype = getattr(torch, _DTYPES.get(tensor.dtype, "uint8"))
        return torch.empty(tensor.shape, dtype=dtype, device="meta")

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        described = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        with torch.device("meta"):
            model = type(getattr(transformers, auto).from_config(described))
    # What a wrong value of config.json raises depends on the model.
    except Exception as error:  # noqa: BLE001
        return Fit(
            problem=tr("the model that config.json describes cannot be built: {first}", first=_first(error))
        )
    else:
        try:
            _, report = model.from_pretrained(
                None,
                config=described,
                state_dict={name: empty(tensor) for name, tensor in tensors.items()},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                device_map={"": "meta"},
            )
        except RuntimeError:
            # transformers writes what it was to its log, as a table.
            return Fit(problem=_NOT_JOINED)
    finally:
        logging.set_verbosity(before)
    unused = sorted(report["unexpected_keys"])
    said = unfit_words(model.__name__, report["missing_keys"], sorted(report["mismatched_keys"]), unused)
    return Fit(problem=said, unused=tuple(unused))


_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64"}


def _first(error: Exception) -> str:
    """The kind of an error, and its first and last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [tr("no error message")]
    return joined(" ", [f"{type(error).__name__}:", *dict.fromkeys((lines[0], lines[-1]))])


def _some(names: Sequence[str], joint: str = ", ") -> str:
    more = tr(" and {num_names} more", num_names=len(names) - _SHOWN) if len(names) > _SHOWN else ""
    return joined("", [joined(joint, names[:_SHOWN]), more])


def _shape(shape: Sequence[int]) -> str:
    return "x".join(str(side) for side in shape) or tr("a scalar")
