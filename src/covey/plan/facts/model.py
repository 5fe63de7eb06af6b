"""Holds the facts that checks read of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from covey.types.media import Part

ModelFault = Literal[
    "missing", "kind", "media", "code", "format", "shards", "hub", "template", "weights", "quantized"
]
"""What is wrong with a model: its files, what it is, that it sees or hears, that it brings code, that its
weights are not safetensors, that they are the shards of a trainer, that a hub does not give it, its chat
template, that its weights are not those of its config.json, or that they are quantized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultDetails:
    """Holds the facts of a fault of a model, or of its template, beyond its kind and its words.

    cause    what it is, by the kinds of `data.model_files.ModelProblem` and of the errors of a hub and a
             template; "" where nothing is known
    subject  the name that the words begin with, which may be the model as it was typed or an option
    command  what mends it; for the directory of a run its newest checkpoint
    """

    cause: str = ""
    subject: str = ""
    command: str = ""


NO_DETAILS = FaultDetails()


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """Adapter targets of the command that match no module, each with the nearest names there are."""

    target: str
    nearest: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """Holds the facts of the adapter that a run starts from, and of that of its reference.

    problem            why its tensors do not fit the model, in words, or None
    other_base         the base that it names, where that is not the model by its place or name; else ""
    quantized          how its base was quantized while it was trained, where the run does it in another way
                       or not at all; "" where nothing says so
    quantization       the options that quantize a base so; none where bitsandbytes does not
    is_on_all_linear   whether it lies on every layer that `all-linear` means
    reference_problem  (code, words) why that of ref_adapters cannot be the reference, or None
    digest             SHA-256 of the weights of the adapter that the reference has; None where no KL term
                       reads them, or the reference is the base
    """

    problem: str | None = None
    other_base: str = ""
    quantized: str = ""
    quantization: Mapping[str, Any] = field(default_factory=dict)
    is_on_all_linear: bool = False
    reference_problem: tuple[str, str] | None = None
    digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSizes:
    """Sizes of a vision tower by config.json.

    depth          layers
    hidden         width of its residual stream
    heads          heads of a layer
    intermediate   width of the MLP
    patch_numbers  numbers of a patch
    features       numbers that it gives for a patch: those of a token by the patches that are one
    is_gated       whether its MLP is gated and its norms are RMS norms, as those of Qwen2.5-VL are
    is_siglip      whether it turns no queries and keys by their positions, as SigLIP
    """

    depth: int
    hidden: int
    heads: int
    intermediate: int
    patch_numbers: int
    features: int
    is_gated: bool
    is_siglip: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model by its config.json and the headers of its weight files, for the memory forecast.

    family        model_type
    layers        decoder layers
    hidden        width of the residual stream
    heads         query heads of a layer
    kv_heads      key heads of a layer
    head_width    width of a head
    intermediate  width of the MLP; of a mixture of experts that of all experts of a token together
    vocabulary    rows of the head
    tied          whether head and embedding are one tensor
    parameters    weights
    adapted       last words of the names of the layers that the adapters of the configuration lie on, whether
                  or not it trains adapters
    adapted_parameters  weights of those layers
    adapter_parameters  weights of the adapters
    saved_parameters    weights that are trained whole beside the adapters
    packable_parameters weights that may be quantized: of linear layers that are not trained whole
    seeing_parameters   weights of what sees images: the vision tower and the aligner
    frozen_parameters   weights that training without adapters leaves as they are
    frozen_text         whether those of the language model are among them
    vision              the sizes of its vision tower; None without one
    is_joined           whether its files hold experts one by one, which transformers joins as it loads them
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    intermediate: int
    vocabulary: int
    tied: bool
    parameters: int
    adapted: tuple[str, ...] = ()
    adapted_parameters: int = 0
    adapter_parameters: int = 0
    saved_parameters: int = 0
    packable_parameters: int = 0
    seeing_parameters: int = 0
    frozen_parameters: int = 0
    frozen_text: bool = False
    is_joined: bool = False
    vision: VisionSizes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFacts:
    """Holds the number of weights of a part of a model that sees images, and whether any of them, or an
    adapter on it, is trained."""

    part: Part
    num_parameters: int
    is_trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Holds the facts of the model.

    problem              why it cannot be read; None where it can be, or where nobody looked
    fault                what kind of fault that is, and `details` what is known beyond it
    stored_quantization  the options that its weights stand for, where bitsandbytes has quantized them
    unused_tensors       tensors of its files that it has no use for
    tokens_beyond        (token, id) of the tokenizer's tokens that the embedding has no row for
    embedding_rows       rows of the embedding, by config.json
    directory            where its files lie
    type                 its family, as config.json names it
    context              positions
    num_parameters       weights
    num_trained          weights that are trained: all of them, those of some parts, or those of the adapters
    parts                the parts of a model that sees images
    sizes                widths and counts that its memory follows from
    unused_sampling      settings of its generation_config.json that sampling does not follow
    image_processor      how it prepares images, by the files of its image processor; "" where there are none
    """

    problem: str | None = None
    fault: ModelFault | None = None
    details: FaultDetails = NO_DETAILS
    stored_quantization: Mapping[str, Any] | None = None
    unused_tensors: tuple[str, ...] = ()
    tokens_beyond: tuple[tuple[str, int], ...] = ()
    embedding_rows: int | None = None
    directory: str | None = None
    type: str | None = None
    context: int | None = None
    num_parameters: int | None = None
    num_trained: int | None = None
    parts: tuple[PartFacts, ...] = ()
    sizes: ModelSizes | None = None
    unused_sampling: tuple[tuple[str, float], ...] = ()
    image_processor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """Holds the facts of the chat template and of the ends of answers.

    problem            why it cannot be used, beside what is wrong with the model, and `details` what is
                       known beyond that
    is_there           whether the model, or the command, brings one
    prompt_problem     what it does to a prompt that it does to no conversation
    answer_opening     what it puts in front of an answer there, and not behind a prompt; else ""
    unwritten_prefix   what the tokenizer puts before a plain text, and a typed template does not; else ""
    banned_tokens      the tokens that are never sampled, in words; else ""
    unstoppable_turn   what it ends an assistant's turn with, if that is no token; else ""
    stop_tokens        the end tokens and where each comes from, in words
    hidden_stop_words  (word, special token) of stop words that no text contains
    """

    problem: str | None = None
    details: FaultDetails = NO_DETAILS
    is_there: bool | None = None
    prompt_problem: str | None = None
    answer_opening: str = ""
    unwritten_prefix: str = ""
    banned_tokens: str = ""
    unstoppable_turn: str = ""
    stop_tokens: str | None = None
    hidden_stop_words: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFacts:
    """Holds the facts of the adapters that are trained.

    start                the adapter that the run starts from, where it starts from one
    unmatched_targets    adapter targets that match no module
    untrainable_targets  (name, reason) of adapter targets that an adapter would not reach
    """

    start: AdapterFacts | None = None
    unmatched_targets: tuple[TargetFacts, ...] = ()
    untrainable_targets: tuple[tuple[str, str], ...] = ()
