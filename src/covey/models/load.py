"""Loading a policy from a model directory: safetensors only, and no code of the model unless it is asked
for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os.path import isfile
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn

from covey.config.adapters import ADAPTER_CONFIG
from covey.config.quantization import Quantization, stored_options
from covey.errors import CheckpointError, ConfigError
from covey.kernels.choose import KernelsName, choose_kernels
from covey.media.families import auto_class
from covey.models.adapter_shapes import HEAD_LEAVES, LoraSettings, adapter_settings
from covey.models.dropout import silence
from covey.models.fit import unfit_words
from covey.models.layouts import AttentionKind, automatic
from covey.models.liger import use_liger, wants_liger
from covey.models.lora import adapter_tensors, add_adapter, load_adapter, save_adapter
from covey.models.policy import Policy
from covey.models.probe import ProbeResult, widest_stream
from covey.models.quantized import cast_unpacked, compute_in, is_packed, loading_arguments
from covey.models.vision.pixels import PixelReader
from covey.plan.problem import problem
from covey.text_files import TextFiles
from covey.texts import tr
from covey.types import Fix

Attention = Literal["auto"] | AttentionKind

# What torch's own memory for a CPU begins at a multiple of.
_ALIGNED = 64


def load_policy(
    source: Path | nn.Module,
    *,
    device: torch.device,
    disable_dropout: bool,
    trust_remote_code: bool = False,
    kernels: KernelsName = "auto",
    quantization: Quantization | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Policy:
    """The model of a directory in float32, on padded rows; `choose_stream` says what else it can do. A model
    that is loaded already is taken itself.

    A backend that computes in a lower dtype casts the weights once it has their float32 masters. Packed ones,
    of a `quantization`, are for sampling alone, and multiply in `compute_dtype`.
    """
    policy = read_policy(source, trust_remote_code, quantization, device=device)
    if quantization is not None:
        compute_in(policy.model, quantization, compute_dtype)
    return _ready(policy, device, disable_dropout, kernels)


def load_adapted(
    source: Path | nn.Module,
    lora: LoraSettings,
    *,
    adapter: Path | None,
    seed: int,
    compute_dtype: torch.dtype,
    device: torch.device,
    disable_dropout: bool,
    trust_remote_code: bool = False,
    kernels: KernelsName = "auto",
    quantization: Quantization | None = None,
) -> Policy:
    """The model of a directory, or one that is loaded already, frozen in `compute_dtype`, with a new adapter
    on it, or with the saved one of the directory `adapter`.

    With a `quantization` its linear layers are packed as they are read, but for those that are trained whole:
    the same files give the same bits on every rank, and on a resume.
    """
    policy = read_policy(source, trust_remote_code, quantization, lora.modules_to_save, device)
    add_adapter(policy, lora, seed=seed, compute_dtype=compute_dtype, quantization=quantization)
    if adapter is not None:
        load_adapter(policy, adapter)
    return _ready(policy, device, disable_dropout, kernels)


def load_any(directory: Path, *, device: torch.device, base: Path | None = None) -> Policy:
    """The model of a directory, or the adapter of one on its base, in float32 and ready to sample from.

    `base` takes the place of the path that the adapter names.
    """
    if not isfile(directory / ADAPTER_CONFIG):
        policy = load_policy(directory, device=device, disable_dropout=True)
        return policy.eval()
    settings, named = adapter_settings(directory)
    return load_adapted(
        base_directory(directory, base or named),
        settings,
        adapter=directory,
        seed=0,
        compute_dtype=torch.float32,
        device=device,
        disable_dropout=True,
    ).eval()


def base_directory(adapter: Path, base: Path) -> Path:
    """`base`, if a model lies there; CheckpointError if none does."""
    if not isfile(base / "config.json"):
        raise CheckpointError(
            tr(
                "the base model of the adapter {adapter} is not at {base}; give its location",
                adapter=adapter,
                base=base,
            )
        )
    return base


def read_policy(
    source: Path | nn.Module,
    trust_remote_code: bool,
    quantization: Quantization | None = None,
    whole: Sequence[str] = (),
    device: torch.device | None = None,
) -> Policy:
    """A model in float32; of a directory ConfigError (E372) where its files do not hold all of it.

    What transformers does not find it starts from random numbers, and says so in its log alone. With a
    `quantization` it is on `device`, its linear layers packed but for those named in `whole`.
    """
    if isinstance(source, nn.Module):
        assert quantization is None, "the model of a program stays as it is"
        for parameter in source.parameters():
            parameter.data = parameter.data.float()
        return Policy(source, stream="padded")
    model, report = _from_pretrained(source, trust_remote_code, quantization, whole, device)
    name = type(model).__name__
    words = unfit_words(name, report["missing_keys"], sorted(report["mismatched_keys"]))
    if words is not None:
        raise _unfit(source, words)
    if is_packed(model.get_output_embeddings().weight):
        raise _unfit(
            source,
            tr(
                "covey does not recognize the name of its output head, so the head would be quantized as well"
            ),
        )
    _align(model)
    policy = Policy(model, stream="padded")
    if policy.vision is not None:
        policy.vision.read = PixelReader(source)
    return policy


def _from_pretrained(
    source: Path,
    trust_remote_code: bool,
    quantization: Quantization | None,
    whole: Sequence[str],
    device: torch.device | None,
) -> tuple[Any, dict[str, Any]]:
    """Return what transformers loads from a directory, and its report; ConfigError (E372) where it cannot."""
    logging = transformers.utils.logging
    logging.disable_progress_bar()
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    described = json.loads((source / "config.json").read_text("utf-8"))
    auto: Any = getattr(transformers, auto_class(described.get("model_type")))
    packing: dict[str, Any] = {}
    if quantization is not None:
        is_stored = stored_options(described) is not None
        on = device or torch.device("cpu")
        packing = loading_arguments(quantization, (*HEAD_LEAVES, *whole), on, is_stored=is_stored)
    try:
        return auto.from_pretrained(  # type: ignore[no-any-return]
            source,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **packing,
        )
    # A config.json or a file of weights that its checks let through; transformers raises errors of any kind.
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, SafetensorError) as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        raise _unfit(
            source, tr("transformers cannot load it: {name}: {error}", name=type(error).__name__, error=error)
        ) from error
    finally:
        logging.set_verbosity(before)


def _align(model: nn.Module) -> None:
    """Give memory of its own to each weight that lies in a mapped file. Where it begins there depends on the
    length of the file's header, and the last bit of a CPU's products on where it begins: a resumed run would
    not be the same to the bit."""
    for parameter in model.parameters():
        if parameter.data_ptr() % _ALIGNED:
            parameter.data = parameter.data.clone()


def _unfit(directory: Path, words: str) -> ConfigError:
    again = Fix(
        text=tr("download or save the model again; config.json and weights must come from the same save")
    )
    return ConfigError(
        [problem("E372", "model", tr("{directory}: {words}", directory=directory, words=words), "", again)]
    )


def _ready(
    policy: Policy,
    device: torch.device,
    disable_dropout: bool,
    kernels: KernelsName,
) -> Policy:
    policy.to(device)
    prepare_policy(policy, device, disable_dropout=disable_dropout, kernels=kernels)
    return policy.train()


def prepare_policy(
    policy: Policy, device: torch.device, *, disable_dropout: bool, kernels: KernelsName
) -> None:
    """Give a policy the kernels that compute it on a device; its weights are not looked at."""
    model: Any = policy.model
    policy.kernels = choose_kernels(kernels, device.type)
    policy.kernels.prepare(model)
    if disable_dropout:
        silence(model)


def choose_liger(policy: Policy, asked: str) -> None:
    """Put liger-kernel's kernels into the model where `use_liger_kernel` asks for them."""
    if asked == "auto" and policy.kernels.name == "torch":
        return
    if wants_liger(asked, policy.model, policy.device):
        policy.has_liger = use_liger(policy.model) > 0


def choose_stream(policy: Policy, attention: Attention = "sdpa", share: float = 1.0) -> list[ProbeResult]:
    """Put the policy on the best layout that it passes the probe with; returns what the probe measured.

    `auto` is flex attention where the kernels are not torch's alone, the device has it and this model
    compiles with it; else masked rows.
    """
    best = "sdpa" if policy.kernels.name == "torch" else automatic(policy.device)
    policy.attention = best if attention == "auto" else attention
    try:
        return _choose_stream(policy, share)
    except RuntimeError as error:
        # What the compiler cannot do shows in its first call: errors of it and of its kernels are of this
        # kind. A kernel that was asked for by name is not exchanged, and memory is no matter of kernels.
        is_memory = isinstance(error, torch.OutOfMemoryError)
        if is_memory or attention != "auto" or policy.attention == "sdpa":
            raise
        policy.no_flex = (str(error).strip().splitlines() or [type(error).__name__])[0]
        policy.attention = "sdpa"
        return _choose_stream(policy, share)


def _choose_stream(policy: Policy, share: float) -> list[ProbeResult]:
    stream, policy.shares_prompts, results = widest_stream(policy, share)
    policy.use_stream(stream)
    return results


def save_policy(policy: Policy, source: Path, target: Path) -> None:
    """Save the model so that `from_pretrained` loads it, with the text files of `source` beside it.

    Weights are saved in the dtype that they are held in for computing. Of a policy with an adapter the
    adapter alone is saved, for peft to load; it names `source` as its base.
    """
    if policy.adapter is None:
        policy.model.save_pretrained(target)  # type: ignore[operator]
    else:
        tensors = adapter_tensors(policy.adapter)
        save_adapter(policy.adapter, tensors, target, base=str(source.absolute()))
    TextFiles(origin=source).write(target)


def load_still(
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kernels: KernelsName = "auto",
    trust_remote_code: bool = False,
) -> Policy:
    """The model of a directory in `dtype`, ready to sample from, on the best layout that it passes the probe
    with."""
    policy = load_policy(
        directory,
        device=device,
        disable_dropout=True,
        trust_remote_code=trust_remote_code,
        kernels=kernels,
        compute_dtype=dtype,
    )
    cast_unpacked(policy.parameters(), dtype)
    policy.eval().requires_grad_(False)
    choose_stream(policy, "auto")
    return policy


def tensors_by_name(policy: Policy) -> dict[str, Tensor]:
    """Every parameter where it lies, under each of its names in transformers: a tied one has two."""
    named = policy.model.named_parameters(remove_duplicate=False)
    return {name: parameter.detach() for name, parameter in named}


def largest_bytes(policy: Policy) -> int:
    """The size of the largest tensor."""
    return max(tensor.numel() * tensor.element_size() for tensor in tensors_by_name(policy).values())
