"""Declares the arguments of TRL's scripts beside GRPOConfig, and loads the data sets that they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from covey.data.tables import library
from covey.texts import tr

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


@dataclass
class ScriptArguments:
    """The data set of a script, by the names of TRL."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False
    ignore_bias_buffers: bool = False


@dataclass
class DatasetConfig:
    """Names one data set of a mixture for `datasets.load_dataset`; `fraction` is its share of the rows."""

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclass
class DatasetMixtureConfig:
    """Several data sets that are trained on together; dicts among them become `DatasetConfig`."""

    datasets: list[DatasetConfig] = field(default_factory=list)
    streaming: bool = False
    test_split_size: float | None = None

    def __post_init__(self) -> None:
        self.datasets = [DatasetConfig(**one) if isinstance(one, dict) else one for one in self.datasets]


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict:
    """Return the data sets one after the other as the split `train`, with a split `test` where one is asked.

    Where they have fractions, each has so many of its first rows that the shares hold and no row comes twice.
    ValueError where there is no data set, or where fractions are missing or cannot be kept.
    """
    parts = mixture_config.datasets
    if not parts:
        raise ValueError(tr("The mixture has no data set; name one or more in datasets."))
    fractions = [part.fraction for part in parts if part.fraction is not None]
    if fractions and (len(fractions) < len(parts) or mixture_config.streaming):
        raise ValueError(
            tr("Either all data sets of a mixture have a fraction or none; streamed ones have none.")
        )
    tables = [_load(part, streaming=mixture_config.streaming) for part in parts]
    if fractions:
        tables = _shares(tables, fractions)
    whole = library().concatenate_datasets(tables)
    if mixture_config.test_split_size is not None:
        return whole.train_test_split(test_size=mixture_config.test_split_size)
    return library().DatasetDict({"train": whole})


def _load(part: DatasetConfig, *, streaming: bool) -> Any:
    table = library().load_dataset(
        path=part.path,
        name=part.name,
        data_dir=part.data_dir,
        data_files=part.data_files,
        split=part.split,
        streaming=streaming,
    )
    return table if part.columns is None else table.select_columns(part.columns)


def _shares(tables: list[Dataset], fractions: list[float]) -> list[Dataset]:
    shares = [fraction / sum(fractions) for fraction in fractions]
    pairs = list(zip(tables, shares, strict=True))
    num_rows = min(len(table) / share for table, share in pairs if share > 0)
    return [table.select(range(round(share * num_rows))) for table, share in pairs]


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Whether a row has messages with roles in the place of text."""
    for name in ("prompt", "chosen", "rejected", "completion", "messages"):
        if name in example:
            first = example[name][0] if isinstance(example[name], list) and example[name] else None
            return isinstance(first, dict) and "role" in first
    return False


class RichProgressCallback:
    """Does nothing: covey itself shows how far a run is."""
