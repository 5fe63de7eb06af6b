"""A model that a program holds: what stands against training it, its files, and how covey borrows it.

Its config, tokenizer and template are written to a directory, so that everything which reads those of a model
reads them there. Its weights stay in the object, which is trained itself.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from covey.config.objects import UNUSABLE, object_name
from covey.errors import CheckpointError
from covey.media.families import FAMILIES, auto_class
from covey.media.sizes import preparation_of
from covey.models.adapter_shapes import ModelShapes
from covey.models.load import load_policy
from covey.models.lora import merge_into_base
from covey.models.policy import Policy
from covey.models.quantized import is_packed
from covey.text_files import copy_processors, copy_tokenizer
from covey.texts import joined, tr

# Elements of each tensor that the checksum is of.
_SAMPLED = 1 << 12
# Attributes of modules that covey sets, beside rates of dropout, whose names have the word.
_SET = frozenset({"training", "p", "forward", "gradient_checkpointing", "_gradient_checkpointing_func"})
_SET_BY_PEFT = frozenset({"peft_config", "_hf_peft_config_loaded"})
_SHOWN = 3
_TOKENIZER = "tokenizer=AutoTokenizer.from_pretrained(DIR_OR_ID)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """A model under the name that a configuration has for it; `directory` holds its config, tokenizer and
    template, `frozen` names the tensors that need no gradient."""

    name: str
    model: Any
    directory: Path
    shapes: ModelShapes
    frozen: tuple[str, ...]

    def bytes_on(self, device: str) -> int:
        """Bytes that its weights take on a kind of device, as `cpu` or `cuda`."""
        return sum(p.nbytes for p in self.model.parameters() if p.device.type == device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What stands against an object: the argument, what was seen, and what to do."""

    option: str
    seen: str
    advice: str


def live_model(
    model: nn.Module, tokenizer: Any, directory: Path
) -> tuple[str, LiveModel | None, list[Fault]]:
    """The name of a model, the model with its files written to `directory`, and what stands against it; None
    where anything does. A path in the place of its tokenizer is that of a directory with its files; None says
    that there is none, which is the caller's to say."""
    kind = type(model).__name__
    faults = [Fault(option="model", seen=seen, advice=advice) for seen, advice in _of_model(model)]
    on_meta = any(p.is_meta for p in model.parameters())
    name = object_name(kind, UNUSABLE if on_meta else _checksum(model))
    faults += [] if faults else _write_config(model, directory)
    faults += _write_tokenizer(tokenizer, directory)
    if not faults and str(getattr(model.config, "model_type", "")) in FAMILIES:
        faults += _write_processor(model, tokenizer, directory)
    if faults:
        return name, None, faults
    live = LiveModel(
        name=name,
        model=model,
        directory=directory,
        shapes=_shapes(model),
        frozen=tuple(n for n, p in model.named_parameters() if not p.requires_grad),
    )
    return name, live, []


@contextmanager
def lent(model: Any, *, keep_weights: bool = False) -> Iterator[None]:
    """Within it covey changes how the model computes; behind it the model computes as before, with the
    weights that it has then, or with those of before where they are to be kept.

    Where an error stops a move or a cast halfway, every weight goes back to the device and dtype that it had.
    Gradients that the model holds are cleared. Modules that an adapter has put in the place of others go;
    what is left of a module trained whole is copied into the first one.
    """
    model.zero_grad(set_to_none=True)
    parts = [(m, type(m), _settings(m), dict(m._modules)) for m in model.modules()]
    weights = [(p, p.requires_grad, p.data if keep_weights else None) for p in model.parameters()]
    attention = model.config._attn_implementation
    device = next(model.parameters()).device
    places = [(p, p.device, p.dtype) for p in model.parameters()]
    try:
        yield
    except BaseException:
        _undo_half(places)
        raise
    finally:
        for part in parts:
            _put_back(*part)
        for parameter, needs_gradient, data in weights:
            parameter.requires_grad_(needs_gradient)
            if data is not None:
                parameter.data = data
        if keep_weights:
            model.to(device)
        model.zero_grad(set_to_none=True)
        model.set_attn_implementation(attention)


def _undo_half(places: Sequence[tuple[nn.Parameter, torch.device, torch.dtype]]) -> None:
    """Put weights back where they were, unless all of them lie on one device in as few dtypes as before."""
    is_whole = len({p.device for p, _, _ in places}) == 1
    if is_whole and len({p.dtype for p, _, _ in places}) <= len({dtype for _, _, dtype in places}):
        return
    for parameter, device, dtype in places:
        parameter.data = parameter.data.to(device=device, dtype=dtype)


def fold_adapter(policy: Policy) -> None:
    """Add the update of a policy's adapter to the weights of its model, for good."""
    if policy.adapter is not None:
        with torch.no_grad():
            merge_into_base(policy)


def take_weights(model: Any, directory: Path, *, trust_remote_code: bool) -> None:
    """Give a model the weights of a checkpoint, in float32 and on the CPU."""
    saved = load_policy(
        directory,
        device=torch.device("cpu"),
        disable_dropout=False,
        trust_remote_code=trust_remote_code,
        kernels="torch",
    )
    held = dict(saved.model.named_parameters())
    own = dict(model.named_parameters())
    if {n: p.shape for n, p in held.items()} != {n: p.shape for n, p in own.items()}:
        raise CheckpointError(
            tr(
                "{directory} contains another model than the given {name}",
                directory=directory,
                name=type(model).__name__,
            )
        )
    for name, parameter in own.items():
        parameter.data = held[name].data


def _of_model(model: nn.Module) -> Iterator[tuple[str, str]]:
    """What stands against a model, and what to do; the first of its kind where the rest follows from it."""
    kind = type(model).__name__
    names = [n for n, _ in model.named_parameters()]
    if type(model).__module__.startswith("peft.") or any(".lora_" in n or ".base_layer." in n for n in names):
        yield (
            tr("model is a {kind} that contains adapters of peft.", kind=kind),
            tr(
                "to continue training the adapter, save it with `model.save_pretrained(DIR)` and "
                "pass the base with adapters=DIR; to train a new one, pass "
                "`model.merge_and_unload()` with tuner_type='lora'"
            ),
        )
        return
    if any(is_packed(p) for p in model.parameters()):
        yield (
            tr("model is a {kind} whose weights bitsandbytes has quantized.", kind=kind),
            tr(
                "give the directory or id of the model, with tuner_type='lora' and quant_bits=4 or 8: "
                "covey quantizes it while loading"
            ),
        )
        return
    if not isinstance(model, transformers.PreTrainedModel):
        yield (
            tr("model is a {kind}, but covey trains models of transformers.", kind=kind),
            tr(
                "pass a PreTrainedModel, as AutoModelForCausalLM.from_pretrained returns it, or a "
                "directory or id"
            ),
        )
        return
    places = sorted({str(p.device) for p in model.parameters()})
    if len(places) > 1 or "meta" in places:
        yield (
            tr("model is a {kind} whose weights are on {places}.", kind=kind, places=joined(", ", places)),
            tr("load it without device_map: covey moves the whole model to the device that it trains on"),
        )
        return
    auto: Any = getattr(transformers, auto_class(model.config.model_type))
    usual: Any = auto._model_mapping.get(type(model.config), None)
    if usual is not None and type(model) is not usual:
        yield (
            tr(
                "model is a {kind}, but {auto} would load its config as a {name}, so its checkpoints would "
                "load as a different model.",
                kind=kind,
                auto=auto.__name__,
                name=usual.__name__,
            ),
            f"a {usual.__name__}",
        )
        return
    yield from _against_config(model)
    yield from _rounded(model)


def _against_config(model: Any) -> Iterator[tuple[str, str]]:
    """Where the model is not the one that its config describes, and its checkpoint would not be it either."""
    tied = _is_tied(model)
    of_text = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    said = bool(getattr(model.config, "tie_word_embeddings", of_text))
    if tied != said:
        is_one = tr("one tensor") if tied else tr("two tensors")
        yield (
            tr(
                "model.config.tie_word_embeddings is {said}, but head and embedding of the model are "
                "{is_one}.",
                said=said,
                is_one=is_one,
            ),
            tr("change the config so that it matches the model, or call `model.tie_weights()`"),
        )
        return
    with torch.device("meta"):
        described = type(model)(copy.deepcopy(model.config))
    own = {n: tuple(p.shape) for n, p in model.named_parameters()}
    asked = {n: tuple(p.shape) for n, p in described.named_parameters()}
    odd = sorted(n for n in own.keys() | asked.keys() if own.get(n) != asked.get(n))
    if odd:
        shown = [
            tr(
                "{n} is {shape}, but the config says {expected}",
                n=n,
                shape=_shape(own.get(n)),
                expected=_shape(asked.get(n)),
            )
            for n in odd[:_SHOWN]
        ]
        more = tr("; and {num_odd} more", num_odd=len(odd) - _SHOWN) if len(odd) > _SHOWN else ""
        yield (
            tr(
                "{num_odd} tensors of the model do not match model.config: {shown}{more}.",
                num_odd=len(odd),
                shown=joined("; ", shown),
                more=more,
            ),
            tr(
                "change a model with methods of transformers, such as resize_token_embeddings, which also "
                "change its config"
            ),
        )


def _rounded(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Where numbers that no checkpoint holds have been rounded, as the frequencies of positions."""
    for path, module in model.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            buffer = getattr(module, name, None)
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != torch.float32:
                dtype = str(buffer.dtype).removeprefix("torch.")
                yield (
                    tr(
                        "the buffer {path}.{name} of the model is {dtype}, but a model that is loaded "
                        "from a checkpoint has it in float32.",
                        path=path,
                        name=name,
                        dtype=dtype,
                    ),
                    tr(
                        "load the model with dtype=torch.float32 and do not call model.half() or "
                        "model.bfloat16(); the option torch_dtype sets the dtype for computation"
                    ),
                )
                return


def _write_config(model: Any, directory: Path) -> list[Fault]:
    described = copy.deepcopy(model.config)
    described.architectures = [type(model).__name__]

    def write() -> None:
        described.save_pretrained(directory)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(directory)

    seen = _refusal(write)
    advice = tr("correct model.config or model.generation_config until `model.save_pretrained(DIR)` works")
    words = tr("transformers cannot save the configuration of the model: {seen}", seen=seen)
    return [] if seen is None else [Fault(option="model", seen=words, advice=advice)]


def _write_tokenizer(tokenizer: Any, directory: Path) -> list[Fault]:
    if tokenizer is None:
        return []
    if isinstance(tokenizer, Path):
        copy_tokenizer(tokenizer, directory)
        return []
    if isinstance(tokenizer, transformers.ProcessorMixin):
        # The template of a processor is beside its tokenizer's.
        own, template = tokenizer.tokenizer, getattr(tokenizer, "chat_template", None)
        own.chat_template = template or own.chat_template
        tokenizer = own
    kind = type(tokenizer).__name__
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase) or not tokenizer.is_fast:
        seen = tr(
            "tokenizer is of type {kind}, but covey needs a tokenizer of transformers that has a "
            "tokenizer.json.",
            kind=kind,
        )
        return [Fault(option="tokenizer", seen=seen, advice=_TOKENIZER)]
    refusal = _refusal(lambda: tokenizer.save_pretrained(directory))
    words = tr("transformers cannot save the tokenizer: {refusal}", refusal=refusal)
    advice = tr("correct it until `tokenizer.save_pretrained(DIR)` works")
    return [] if refusal is None else [Fault(option="tokenizer", seen=words, advice=advice)]


def _write_processor(model: Any, processor: Any, directory: Path) -> list[Fault]:
    """Write how images are prepared, by the processor that was given or by the files of the model."""
    if isinstance(processor, transformers.ProcessorMixin):
        processor.image_processor.save_pretrained(directory)
    else:
        named = processor if isinstance(processor, Path) else getattr(model, "name_or_path", "")
        copy_processors(Path(str(named)), directory)
    if processor is None or preparation_of(directory):
        return []
    seen = tr("The model sees images, but a tokenizer does not say how they are prepared.")
    return [Fault(option="tokenizer", seen=seen, advice="tokenizer=AutoProcessor.from_pretrained(DIR_OR_ID)")]


def _refusal(write: Callable[[], object]) -> str | None:
    try:
        write()
    # What a config or tokenizer that was changed by hand raises depends on what is wrong with it.
    except Exception as error:  # noqa: BLE001
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


def _shapes(model: Any) -> ModelShapes:
    tensors = {n: tuple(p.shape) for n, p in model.named_parameters()}
    vocab_size, family = model.config.get_text_config().vocab_size, model.config.model_type
    return ModelShapes(tensors=tensors, vocab_size=vocab_size, tied=_is_tied(model), family=family)


def _is_tied(model: Any) -> bool:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embedding.weight


def _checksum(model: nn.Module) -> str:
    """Of a part of every tensor as float32, so that the dtype in which a model was loaded is no matter."""
    digest = hashlib.blake2b(digest_size=4)
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        part = flat[:: max(1, flat.numel() // _SAMPLED)].float().cpu().contiguous()
        digest.update(f"{name} {tuple(parameter.shape)} ".encode())
        digest.update(part.numpy().tobytes())
    return digest.hexdigest()


def _settings(module: nn.Module) -> dict[str, Any]:
    return {n: v for n, v in vars(module).items() if _is_set(n)}


def _is_set(name: str) -> bool:
    return name in _SET or name in _SET_BY_PEFT or "dropout" in name


def _put_back(
    module: nn.Module, kind: type[nn.Module], settings: dict[str, Any], children: dict[str, Any]
) -> None:
    for name, child in children.items():
        now = module._modules.get(name)
        if now is not child and isinstance(child, nn.Module) and isinstance(now, type(child)):
            child.load_state_dict(now.state_dict())
        module._modules[name] = child
    module.__class__ = kind
    own = vars(module)
    for name in [n for n in own if _is_set(n) and n not in settings]:
        del own[name]
    own.update(settings)


def _shape(shape: tuple[int, ...] | None) -> str:
    return tr("missing") if shape is None else "x".join(map(str, shape))
