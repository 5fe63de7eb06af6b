"""What a LoRA adapter would be on a model, read from the headers of its weight files; torch-free.

Which modules the names match, which names match nothing, which may not be adapted, and how many parameters
the adapter holds.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.config.adapters import AdapterFileError, read_adapter
from covey.errors import CheckpointError
from covey.media.families import text_config
from covey.media.parts import frozen_parts, is_frozen, name_in_model
from covey.texts import joined, tr
from covey.types.media import Part
from covey.weight_files import StoredTensor, stored_tensors

ALL_LINEAR = "all-linear"

ADAPTER = "default"
"""peft gives this name to the only adapter of a model."""

PEFT = "base_model.model."
"""peft writes this prefix before the name of each module of a model."""

TOKEN_LEAVES = ("embed_tokens", "wte", "embed_in", "word_embeddings")
"""What models call the embedding of their tokens."""

HEAD_LEAVES = ("lm_head", "embed_out")
"""What models call their head."""

_EMBEDDING_LEAVES = (*TOKEN_LEAVES, "wpe", "embed_positions")
# Positions of patches in a vision tower.
_PATCH_LEAVES = ("pos_embed", "position_embedding")
# peft reads these names, on a model with experts, as the experts' fused tensors, wherever the module lies.
_EXPERT_LEAVES = ("w1", "w2", "w3", "gate_proj", "up_proj", "down_proj", "gate", "router")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """An adapter as it was asked for: `update = scaling * B @ A` on every module that `target_modules` match.

    Names match a module or the end of its path: `q_proj` or `layers.0.self_attn.q_proj`; `all-linear` stands
    alone, and leaves out the `frozen` parts of a model that sees images. Modules of `modules_to_save` are
    trained whole, in a copy that the adapter carries.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    modules_to_save: tuple[str, ...] = ()
    use_rslora: bool = False
    use_dora: bool = False
    frozen: frozenset[Part] = frozenset()

    @property
    def scaling(self) -> float:
        """alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """The tensors of a model by name, its vocabulary, whether head and embedding are one tensor, and its
    `model_type`."""

    tensors: Mapping[str, tuple[int, ...]]
    vocab_size: int | None
    tied: bool
    family: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFacts:
    """What the settings come to on a model.

    `unmatched` has each name that fits no module, with the nearest module names; `refused` each name that
    fits something an adapter would not reach, with the reason. The counts are of parameters: `num_lora` of
    the matrices (and DoRA's magnitudes), `num_saved` of the whole copies, `num_base` of the model,
    `num_packable` of the linear layers without those copies, which quantization would pack.
    """

    targets: tuple[str, ...]
    saved: tuple[str, ...]
    unmatched: Mapping[str, tuple[str, ...]]
    refused: Mapping[str, str]
    num_lora: int
    num_saved: int
    num_base: int
    num_packable: int


def lora_facts(directory: Path, settings: LoraSettings) -> LoraFacts:
    """What `settings` come to on the model of a directory, from the headers of its weight files."""
    return facts_of(read_shapes(directory), settings)


def read_shapes(directory: Path) -> ModelShapes:
    """Names and shapes of a model's tensors. ValueError names a weight file that is damaged."""
    stored = stored_tensors(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    family = config.get("model_type")
    tensors = {name_in_model(name, family): tensor.shape for name, tensor in stored.items()}
    text = config.get("text_config") or {}
    heads = [name for name in tensors if _leaf(_module(name)) in HEAD_LEAVES]
    if config.get("tie_word_embeddings", text.get("tie_word_embeddings")) is True:
        # A copy of the embedding, which some programs save beside it.
        tensors = {name: shape for name, shape in tensors.items() if name not in heads}
        heads = []
    # A head that is no tensor of its own is the embedding, whatever the config says or leaves unsaid.
    return ModelShapes(
        tensors=tensors,
        vocab_size=config.get("vocab_size", text_config(config).get("vocab_size")),
        tied=bool(tensors) and not heads,
        family=family,
    )


def facts_of(shapes: ModelShapes, settings: LoraSettings) -> LoraFacts:
    """What `settings` come to on a model of these shapes."""
    modules = {_module(name) for name in shapes.tensors} | ({"lm_head"} if shapes.tied else set())
    saved, unmatched, refused = _saved(shapes, modules, settings.modules_to_save)
    linear = _linear(shapes)
    targets: set[str] = set()
    for name in settings.target_modules:
        if name == ALL_LINEAR:
            if len(settings.target_modules) > 1:
                refused[name] = tr(
                    "it already takes every linear layer and cannot be combined with other names"
                )
            targets |= {
                m
                for m in linear
                if not (_has_experts(shapes) and _leaf(m) in _EXPERT_LEAVES)
                and not is_frozen(m, shapes.family, settings.frozen)
            }
            continue
        found = {m for m in modules if matches(m, name)}
        allowed = found & linear
        if not found:
            unmatched[name] = nearest(name, linear)
        elif reason := _why_not(shapes, found - allowed, found):
            refused[name] = reason
        targets |= allowed
    targets -= {m for m in targets if _is_within(m, saved)}
    return LoraFacts(
        targets=tuple(sorted(targets)),
        saved=tuple(sorted(saved)),
        unmatched=unmatched,
        refused=refused,
        num_lora=sum(_num_lora(shapes, m, settings) for m in targets),
        num_saved=sum(_numel(shapes, m) for m in saved),
        num_base=sum(math.prod(s) for s in shapes.tensors.values()),
        num_packable=sum(
            math.prod(shapes.tensors[f"{m}.weight"]) for m in linear if not _is_within(m, saved)
        ),
    )


def _is_within(module: str, others: Iterable[str]) -> bool:
    return any(module == other or module.startswith(f"{other}.") for other in others)


def matches(module: str, name: str) -> bool:
    """Whether a name means a module: its path or the end of it, whole words only."""
    return module == name or module.endswith("." + name)


def nearest(name: str, modules: Iterable[str]) -> tuple[str, ...]:
    """The module words most like a name that fits nothing: `nearest("q_poj", ...)` is ("q_proj", ...)."""
    words = sorted({_leaf(m) for m in modules})
    return tuple(difflib.get_close_matches(_leaf(name), words, n=3, cutoff=0.5))


def adapter_settings(directory: Path) -> tuple[LoraSettings, Path]:
    """The settings of a saved adapter, and where its base model lies by its own word.

    CheckpointError where adapter_config.json is no plain LoRA.
    """
    try:
        saved = read_adapter(directory)
    except AdapterFileError as error:
        raise CheckpointError(str(error)) from error
    return settings_of(saved.options), Path(saved.base)


def settings_of(options: Mapping[str, Any]) -> LoraSettings:
    """The adapter that options of a run describe."""
    return LoraSettings(
        rank=options["lora_rank"],
        alpha=options["lora_alpha"],
        dropout=options["lora_dropout"],
        target_modules=tuple(options["target_modules"]),
        modules_to_save=tuple(options["modules_to_save"]),
        use_rslora=options["use_rslora"],
        use_dora=options["use_dora"],
        frozen=frozen_parts(options),
    )


def adapter_fault(
    tensors: Mapping[str, StoredTensor], shapes: ModelShapes, settings: LoraSettings
) -> str | None:
    """Why the tensors of a saved adapter are not those of an adapter with these settings on this model, in
    words; None where they are.

    Names are compared from the list of layers on, since a file may have other words in front than the model
    in memory has.
    """
    facts = facts_of(shapes, settings)
    for name, why in facts.refused.items():
        return tr("{name} cannot be adapted on this model: {why}", name=name, why=why)
    if facts.unmatched:
        return tr("the model has no module {unmatched}", unmatched=joined(", ", facts.unmatched))
    held = {_within(n): t.shape for n, t in tensors.items()}
    own = _own_shapes(shapes, facts, settings)
    missing, more = sorted(own.keys() - held.keys()), sorted(held.keys() - own.keys())
    if missing:
        return tr(
            "{num_missing} of the {num_own} tensors that this model needs are missing; the first is "
            "{missing}",
            num_missing=len(missing),
            num_own=len(own),
            missing=missing[0],
        )
    if more:
        return tr(
            "{num_more} of its tensors do not belong to this model; the first is {more}",
            num_more=len(more),
            more=more[0],
        )
    odd = next((name for name, shape in own.items() if held[name] != shape), None)
    if odd is not None:
        return tr(
            "its {odd} has the shape {words}, but this model needs {needed}",
            odd=odd,
            words=_words(held[odd]),
            needed=_words(own[odd]),
        )
    return None


def _own_shapes(shapes: ModelShapes, facts: LoraFacts, settings: LoraSettings) -> dict[str, tuple[int, ...]]:
    """The tensors of an adapter of these settings."""
    found: dict[str, tuple[int, ...]] = {}
    for module in facts.targets:
        out, into = _sides(shapes, module)
        found[_within(f"{module}.lora_A.weight")] = (settings.rank, into)
        found[_within(f"{module}.lora_B.weight")] = (out, settings.rank)
        if settings.use_dora:
            found[_within(f"{module}.lora_magnitude_vector")] = (out,)
    saved = tuple(f"{module}." for module in facts.saved)
    return found | {_within(n): shape for n, shape in shapes.tensors.items() if n.startswith(saved)}


def _within(tensor: str) -> str:
    """A tensor's name from the list of layers on, as `layers.0.mlp.up_proj.lora_A.weight`; outside of layers
    from its module on."""
    start = tensor.find(".lora_")
    start = tensor.rfind(".") if start < 0 else start
    words = tensor[:start].split(".")
    first = next((i for i, word in enumerate(words) if word.isdigit()), len(words))
    return ".".join(words[max(0, first - 1) :]) + tensor[start:]


def _words(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _saved(
    shapes: ModelShapes, modules: set[str], names: tuple[str, ...]
) -> tuple[set[str], dict[str, tuple[str, ...]], dict[str, str]]:
    refusals = {m: why for m in modules if (why := _why_not_saved(shapes, m)) is not None}
    saved: set[str] = set()
    unmatched: dict[str, tuple[str, ...]] = {}
    refused: dict[str, str] = {}
    for name in names:
        found = {m for m in modules if matches(m, name)}
        if not found:
            unmatched[name] = nearest(name, modules - set(refusals))
        elif whys := [refusals[m] for m in sorted(found) if m in refusals]:
            refused[name] = whys[0]
        else:
            saved |= found
    return saved, unmatched, refused


def _why_not_saved(shapes: ModelShapes, module: str) -> str | None:
    """Why no whole copy of a module can be trained beside it; None where one can."""
    if shapes.tied and _is_vocab(shapes, module):
        return tr(
            "the head and the embedding of this model are one tensor; adapting a copy of one would "
            "separate them"
        )
    if ".experts." in f".{module}.":
        return tr("the experts are fused tensors; a single module cannot be copied from them")
    return None


def _why_not(shapes: ModelShapes, left: set[str], found: set[str]) -> str | None:
    """Why modules that a name matched get no adapter; None where they all get one."""
    if any(_is_vocab(shapes, m) for m in left):
        return tr(
            "an adapter on the embedding or the head has no effect, because the loss uses their weights "
            "directly; {advice}",
            advice=tr("as they are one tensor here, modules_to_save cannot train them either")
            if shapes.tied
            else tr("use modules_to_save to train them completely"),
        )
    experts = _has_experts(shapes) and any(_leaf(m) in _EXPERT_LEAVES for m in found)
    if experts or any(".experts." in f".{m}." for m in left):
        return tr(
            "experts and router are fused tensors, not linear layers; name the attention projections instead"
        )
    return tr("not a linear layer: only weights with two dimensions can have an adapter") if left else None


def _linear(shapes: ModelShapes) -> set[str]:
    """Modules with a weight of two axes, but embeddings, head, experts and routers."""
    routed = {m.split(".experts.")[0] for m in map(_module, shapes.tensors) if ".experts." in f"{m}."}
    return {
        module
        for name, shape in shapes.tensors.items()
        if name.endswith(".weight") and len(shape) == 2
        for module in (_module(name),)
        if not _is_vocab(shapes, module)
        and _leaf(module) not in _PATCH_LEAVES
        and ".experts." not in f"{module}."
        and not (_leaf(module) in ("gate", "router") and module.rpartition(".")[0] in routed)
    }


def _has_experts(shapes: ModelShapes) -> bool:
    return any(".experts." in f"{_module(name)}." for name in shapes.tensors)


def _is_vocab(shapes: ModelShapes, module: str) -> bool:
    """Embeddings, of tokens or positions, and the head."""
    if _leaf(module) in (*_EMBEDDING_LEAVES, *HEAD_LEAVES):
        return True
    shape = shapes.tensors.get(f"{module}.weight", ())
    return len(shape) == 2 and shape[0] == shapes.vocab_size


def _num_lora(shapes: ModelShapes, module: str, settings: LoraSettings) -> int:
    out, into = _sides(shapes, module)
    return settings.rank * (out + into) + (out if settings.use_dora else 0)


def _sides(shapes: ModelShapes, module: str) -> tuple[int, int]:
    """The outputs and the inputs of a linear layer."""
    one, other = shapes.tensors[f"{module}.weight"]
    # GPT-2 holds its matrices turned round; the bias tells which side is the output.
    is_turned = shapes.tensors.get(f"{module}.bias", (one,)) != (one,)
    return (other, one) if is_turned else (one, other)


def _numel(shapes: ModelShapes, module: str) -> int:
    return sum(math.prod(s) for n, s in shapes.tensors.items() if n.startswith(f"{module}."))


def _module(tensor: str) -> str:
    """The module that a tensor belongs to: its name without the last word."""
    return tensor.rpartition(".")[0]


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def is_of_adapter(name: str) -> bool:
    """Whether a tensor's name is that of an adapter's matrix."""
    return ".lora_" in name


def plain_name(name: str) -> str:
    """The name that a parameter beside an adapter has in a model without one."""
    for part in (f".modules_to_save.{ADAPTER}.", ".original_module.", ".base_layer."):
        name = name.replace(part, ".")
    return name


def saved_name(name: str) -> str:
    """The name that peft saves a tensor of an adapted model by; a tensor that the adapter trains has one."""
    for part, saved in (
        (f".modules_to_save.{ADAPTER}.", "."),
        (f".lora_magnitude_vector.{ADAPTER}.weight", ".lora_magnitude_vector"),
        (f".{ADAPTER}.", "."),
    ):
        name = name.replace(part, saved)
    return PEFT + name
