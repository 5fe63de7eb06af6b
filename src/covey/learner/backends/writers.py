"""Writers of each rank's part of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from covey.checkpoint.manifest import FileEntry
from covey.checkpoint.model_files import ModelFiles
from covey.learner.backends.base import ModelWriter
from covey.models.lora import Adapter, save_adapter
from covey.text_files import TextFiles


def model_writer(files: ModelFiles, text: TextFiles, rank: int) -> ModelWriter:
    """Return what writes the rank's tensors, and on the first rank config and text files."""

    def write(directory: Path) -> dict[str, FileEntry]:
        entries = files.write(directory)
        if rank == 0:
            text.write(directory)
        return entries

    return write


def adapter_writer(
    adapter: Adapter, tensors: Mapping[str, Tensor], text: TextFiles, base: str | None, rank: int
) -> ModelWriter:
    """Return what writes an adapter on the first rank; it names `base` as its model, or else the origin of
    its texts."""

    def write(directory: Path) -> dict[str, FileEntry]:
        if rank == 0:
            save_adapter(adapter, tensors, directory, base=base or str(text.origin.absolute()))
            text.write(directory)
        return {}

    return write
