"""The model card of a trainer: README.md with the base model, the data set and the tags."""

from __future__ import annotations

from importlib.metadata import version
from os.path import isdir, isfile
from pathlib import Path
from typing import TYPE_CHECKING

from covey.config.adapters import ADAPTER_CONFIG

if TYPE_CHECKING:
    from collections.abc import Iterable

    from covey.trl.trainer import GRPOTrainer


def write_card(
    trainer: GRPOTrainer,
    model_name: str | None,
    dataset_name: str | None,
    tags: str | Iterable[str] | None,
) -> None:
    """Write README.md to the output directory. A base model is named where it is the id of a hub."""
    from huggingface_hub import ModelCard, ModelCardData

    directory, base = Path(str(trainer.args.output_dir)), trainer.base_name
    is_adapter = isfile(directory / ADAPTER_CONFIG)
    facts = ModelCardData(
        base_model=None if not base or isdir(base) else base,
        datasets=dataset_name,
        library_name="peft" if is_adapter else "transformers",
        model_name=model_name or directory.resolve().name,
        tags=sorted({"covey", "grpo", *([tags] if isinstance(tags, str) else tags or ())}),
    )
    text = _text(str(facts.model_name), base, dataset_name, trainer.state.global_step)
    directory.mkdir(parents=True, exist_ok=True)
    ModelCard(f"---\n{facts.to_yaml()}\n---\n\n{text}").save(directory / "README.md")


def _text(name: str, base: str, dataset: str | None, num_steps: int) -> str:
    """The text of the card, in English whatever the language of the terminal is."""
    trained = (
        f"covey {version('covey')} trained {base or 'a model'} for {num_steps} steps with GRPO "
        "(https://arxiv.org/abs/2402.03300)."
    )
    on = f" Its prompts come from the data set {dataset}." if dataset else ""
    how = " config.yaml has the options of the run, metrics.jsonl the metrics of each step."
    return f"# {name}\n\n{trained}{on}{how}\n"
