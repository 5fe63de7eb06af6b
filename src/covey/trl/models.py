"""The model of a trainer: one that a program gave, and the one that a run has left."""

from __future__ import annotations

import copy
import shutil
import time
from itertools import count
from os.path import exists, getmtime, isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.checkpoint.manifest import MANIFEST, TRAINER
from covey.config.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from covey.media.families import FAMILIES, auto_class
from covey.quickstart.built_in import BUILT_IN
from covey.texts import tr
from covey.texts.language import spoken

if TYPE_CHECKING:
    from covey.training.job import Job

_START = "start-adapter-"
# Processes of one run begin within so many seconds, by clocks that differ by less.
_BEGUN, _SKEW_S, _PATIENCE_S = time.time(), 60.0, 600.0


def is_peft_model(model: Any) -> bool:
    """Whether an object is a model of transformers within one of peft."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def without_adapter(model: Any) -> Any:
    """Return the base of a model of peft as a model of its own, on the same weights."""
    import torch

    base = model.get_base_model()
    with torch.device("meta"):
        bare = type(base)(copy.deepcopy(base.config))
    held = {_plain(name): tensor for name, tensor in (*base.named_parameters(), *base.named_buffers())}
    for module_name, module in bare.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name in module._parameters:
            tensor = held.get(prefix + name)
            if tensor is not None:
                module._parameters[name] = torch.nn.Parameter(tensor.data, requires_grad=True)
        for name in module._buffers:
            module._buffers[name] = held.get(prefix + name, module._buffers[name])
    bare.tie_weights()
    bare.generation_config = base.generation_config
    bare.name_or_path = getattr(base, "name_or_path", "")
    return bare


def merged_copy(model: Any) -> Any:
    """Return a copy of the base of a model of peft with its adapter added."""
    return copy.deepcopy(model).merge_and_unload()


def _plain(name: str) -> str:
    """The name that a tensor of an adapted module has in the base."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def save_start(model: Any, output_dir: Path, *, rank: int, resumes: bool) -> Path:
    """Return the directory in `output_dir` with the adapter that a run begins with: that of the first rank,
    which writes it, as the others may have drawn other numbers. A resumed run has it already.

    Raises TimeoutError where the first rank writes none.
    """
    if resumes and (found := _starts(output_dir)):
        return found[-1]
    if rank == 0:
        target = next(p for n in count(1) if not exists(p := output_dir / f"{_START}{n}"))
        model.save_pretrained(target.with_name(f".{target.name}"))
        return target.with_name(f".{target.name}").rename(target)
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        new = [p for p in _starts(output_dir) if getmtime(p) > _BEGUN - _SKEW_S]
        if new:
            return new[-1]
        time.sleep(0.1)
    raise TimeoutError(spoken(tr("Rank 0 has not written the adapter to {path}.", path=output_dir)))


def _starts(output_dir: Path) -> list[Path]:
    """The directories of adapters to begin with, in their order."""
    return sorted(output_dir.glob(f"{_START}*"), key=lambda path: int(path.name.removeprefix(_START)))


def take_adapter(model: Any, checkpoint: Path) -> None:
    """Give a model of peft the adapter of a checkpoint."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    set_peft_model_state_dict(model, load_file(checkpoint / ADAPTER_WEIGHTS))


def trained_model(checkpoint: Path, base: Any) -> Any:
    """Return the model of a checkpoint; an adapter is put on `base`, a model or the name of one."""
    if not isfile(checkpoint / ADAPTER_CONFIG):
        return named_model(str(checkpoint))
    from peft import PeftModel

    return PeftModel.from_pretrained(named_model(base) if isinstance(base, str) else base, str(checkpoint))


def named_model(name: str, revision: str | None = None) -> Any:
    """Return the model of a directory or of a hub, in the dtype of its files."""
    import transformers

    place = _place(name)
    config = transformers.AutoConfig.from_pretrained(place, revision=revision)
    auto: Any = getattr(transformers, auto_class(config.model_type))
    return auto.from_pretrained(place, revision=revision, dtype="auto")


def named_tokenizer(name: str, revision: str | None = None) -> Any:
    """Return the tokenizer of a model of text, and the processor of one that sees."""
    import transformers

    place = _place(name)
    config = transformers.AutoConfig.from_pretrained(place, revision=revision)
    kind = "AutoProcessor" if config.model_type in FAMILIES else "AutoTokenizer"
    auto: Any = getattr(transformers, kind)
    return auto.from_pretrained(place, revision=revision)


def _place(name: str) -> str:
    """Where the files of a model lie, of the built-in ones too; the id of a hub as it is."""
    return str(BUILT_IN[name].model_dir if name in BUILT_IN else name)


def copy_model(checkpoint: Path, target: Path) -> None:
    """Copy the files of a checkpoint's model, without those of the run."""
    target.mkdir(parents=True, exist_ok=True)
    for path in checkpoint.iterdir():
        if path.name not in (TRAINER, MANIFEST) and isfile(path):
            shutil.copy2(path, target / path.name)


def write_model(job: Job, target: Path) -> None:
    """Write the model as it is now. Collective."""
    write = job.saver.model_writer()
    target.mkdir(parents=True, exist_ok=True)
    job.comm.max([0.0])
    write(target)
    job.comm.max([0.0])
