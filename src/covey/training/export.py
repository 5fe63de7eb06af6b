"""`covey export`: a checkpoint as a model for others to load, its adapter merged where it has one.

A merged model is proven before it appears: its logits are the adapter's, and the files hold what was merged.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import exists, isfile
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn

from covey.checkpoint.examine import faults_of_model, neither
from covey.checkpoint.manifest import MANIFEST, TRAINER
from covey.config.adapters import ADAPTER_CONFIG, quantized_base
from covey.config.quantization import adapter_quantization
from covey.data.text import TemplateError, load_codec
from covey.errors import CoveyError, DamagedModelError
from covey.media.families import auto_class
from covey.models.adapter_shapes import adapter_settings
from covey.models.load import base_directory, load_any
from covey.models.lora import merge_into_base
from covey.norms import total_norm
from covey.text_files import copy_text_files, read_json, write_stops
from covey.texts import joined, tr

DType = Literal["auto", "float32", "bfloat16", "float16"]

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_PACKED = ("U8", "I8")
# Largest ‖difference‖ / ‖logits‖ against the adapter in float32: of the sum, and of weights rounded to a
# dtype, where a router may choose another expert for a token.
_MERGE_TOLERANCE = 1e-4
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
_TEXTS = ("The capital of France is Paris.", "1, 2, 3, 4, 5, 6, 7")
_RANDOM_ROWS, _ROW_LENGTH = 4, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """What was exported. A merged model was compared on `num_prompts` rows; files that were copied on none.

    `max_logit_difference` is against the adapter in float32, `dtype` that of the exported weights. `packed`
    says how the base was packed while the adapter was trained; it was merged into the base as it was before.
    """

    target: Path
    merged: bool
    num_prompts: int
    max_logit_difference: float
    dtype: str | None
    packed: str = ""


def export(
    checkpoint: Path,
    target: Path,
    *,
    merge: bool,
    base: Path | None = None,
    torch_dtype: DType = "auto",
) -> ExportResult:
    """Write the model of a checkpoint to a new directory.

    With `merge` an adapter is added to its base in float32 and saved in `torch_dtype`, or in the base's own
    dtype, which is no packed one; without, or where there is no adapter, the files are copied without the
    trainer's. `base` takes the place of the path that the adapter names. Raises DamagedModelError where files
    of the model are at fault, and CoveyError where the merged logits disagree; nothing is left behind then.
    """
    if exists(target):
        raise CoveyError(
            tr("{target} exists already; name a directory that does not exist yet", target=target)
        )
    if (why := neither(checkpoint)) is not None:
        raise CoveyError(tr("{checkpoint}: {why}", checkpoint=checkpoint, why=why))
    _require_whole(checkpoint)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        if merge and isfile(checkpoint / ADAPTER_CONFIG):
            result = _merge(checkpoint, staging, target, base, torch_dtype)
        else:
            shutil.copytree(checkpoint, staging, ignore=_left_out(checkpoint))
            result = ExportResult(
                target=target, merged=False, num_prompts=0, max_logit_difference=0.0, dtype=None
            )
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return result


def _left_out(checkpoint: Path) -> Any:
    """What copytree leaves out: the trainer's state, and the manifest that lists it."""
    return lambda folder, names: [n for n in names if Path(folder) == checkpoint and n in (TRAINER, MANIFEST)]


def _require_whole(directory: Path) -> None:
    """DamagedModelError where files of a model or an adapter are at fault."""
    if faults := faults_of_model(directory):
        raise DamagedModelError(tr("{directory}: {faults}", directory=directory, faults=joined("; ", faults)))


def _merge(
    checkpoint: Path, staging: Path, target: Path, base: Path | None, torch_dtype: DType
) -> ExportResult:
    _, named = adapter_settings(checkpoint)
    origin = base_directory(checkpoint, base or named)
    _require_whole(origin)
    own = _own_dtype(origin)
    dtype = own if torch_dtype == "auto" else getattr(torch, torch_dtype)
    policy = load_any(checkpoint, device=torch.device("cpu"), base=origin)
    rows = _rows(origin, policy.model)
    expected = _logits(policy.model, rows)
    model: Any = merge_into_base(policy)
    _agree(_logits(model, rows), expected, _MERGE_TOLERANCE, tr("merging the adapter"))
    model.to(dtype).save_pretrained(staging)
    for source in (origin, checkpoint):
        copy_text_files(source, staging)
    _write_stops(staging)
    auto: Any = getattr(transformers, auto_class(model.config.model_type))
    written: Any = auto.from_pretrained(
        staging, dtype=torch.float32, use_safetensors=True, local_files_only=True
    ).eval()
    held = written.state_dict()
    for name, tensor in model.state_dict().items():
        if not torch.equal(tensor.float(), held[name].float()):
            raise CoveyError(
                tr("{name} loaded from the exported files differs from what was saved", name=name)
            )
    difference = _agree(_logits(written, rows), expected, _TOLERANCE[dtype], tr("the exported model"))
    return ExportResult(
        target=target,
        merged=True,
        num_prompts=len(rows),
        max_logit_difference=difference,
        dtype=str(dtype).removeprefix("torch."),
        packed=_packed(checkpoint),
    )


def _write_stops(directory: Path) -> None:
    """Have generation_config.json list what ends a completion in a run of the model."""
    try:
        stops = load_codec(directory).stop_token_ids
    except (TemplateError, FileNotFoundError):
        return  # a model may come without a tokenizer
    if stops:
        write_stops(directory, stops, read_json(directory / "config.json"))


def _packed(checkpoint: Path) -> str:
    """How the base was packed while an adapter was trained, in words; "" where nothing says that it was."""
    bits = adapter_quantization(checkpoint).get("quant_bits") or (quantized_base(checkpoint) or ("", ""))[1]
    return tr("{bits} bits", bits=bits) if bits else ""


def _own_dtype(directory: Path) -> torch.dtype:
    """The dtype that most parameters of a model directory are stored in."""
    sizes: Counter[str] = Counter()
    for path in directory.glob("*.safetensors"):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                part = file.get_slice(name)
                sizes[part.get_dtype()] += torch.Size(part.get_shape()).numel()
    name = sizes.most_common(1)[0][0] if sizes else ""
    if name not in _DTYPES:
        words = tr(
            "the base model at {directory} is stored as {name}; it cannot be merged",
            directory=directory,
            name=name or tr("nothing"),
        )
        if name in _PACKED:
            words = tr(
                "the base model at {directory} is stored quantized, and an adapter cannot be "
                "merged into it; name the model before it was quantized: --base DIR",
                directory=directory,
            )
        raise CoveyError(words)
    return _DTYPES[name]


def _rows(base: Path, model: nn.Module) -> list[list[int]]:
    """Random tokens, and short text where the base has a tokenizer."""
    config: Any = model.config
    vocab_size = config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(20)
    rows = torch.randint(vocab_size, (_RANDOM_ROWS, _ROW_LENGTH), generator=generator).tolist()
    try:
        rows += [list(row) for row in load_codec(base).encode(_TEXTS) if row]
    except (TemplateError, FileNotFoundError):
        # A model may come without a tokenizer; the random rows are what proves the merge.
        return rows
    return rows


@torch.no_grad()
def _logits(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.cat([model(input_ids=torch.tensor([list(r)])).logits[0].float() for r in rows])


def _agree(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> float:
    """The largest difference; CoveyError where the relative one is above `tolerance`."""
    gap = float(total_norm([actual - expected]) / total_norm([expected]))
    largest = float((actual - expected).abs().max())
    if not gap <= tolerance:
        raise CoveyError(
            tr(
                "{what} changed its logits: they differ by {gap:.2e} of their norm (allowed "
                "{tolerance:g}), at most {largest:.3g}, so nothing was exported",
                what=what,
                gap=gap,
                tolerance=tolerance,
                largest=largest,
            )
        )
    return largest
