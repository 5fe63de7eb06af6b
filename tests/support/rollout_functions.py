"""Rollout functions as people write them for TRL, in a file of their own: `FILE.py:NAME`."""

from __future__ import annotations

from pathlib import Path

_TEXT = '''"""Rollout functions, and a reward of what they give."""

NAMES = ("prompt_ids", "completion_ids", "logprobs")


def once(prompts, trainer):
    found = trainer.generate(prompts)
    return {name: [row[name] for row in found] for name in NAMES}


def numbered(prompts, trainer):
    return {**once(prompts, trainer), "place": list(range(len(prompts))), "of": "a rollout"}


def by_place(completions, place, of, **others):
    assert set(of) == {"a rollout"} and "solution" in others
    return [float(number % 3 == 0) for number in place]


def alternating(completions, **others):
    return [float(number % 2) for number in range(len(completions))]


def shifted(prompts, trainer):
    found = once(prompts, trainer)
    return {**found, "logprobs": [[*row[1:], row[0]] for row in found["logprobs"]]}


def cut_and_shifted(prompts, trainer):
    """No whole completions, so that only the model can say what is right."""
    found = {name: [row[:-1] for row in rows] for name, rows in once(prompts, trainer).items()}
    return {**found, "logprobs": [[*row[1:], row[0]] for row in found["logprobs"]]}


def of_zeros(prompts, trainer):
    found = once(prompts, trainer)
    return {**found, "logprobs": [[0.0] * len(row) for row in found["logprobs"]]}


def negated(prompts, trainer):
    found = once(prompts, trainer)
    return {**found, "logprobs": [[-value for value in row] for row in found["logprobs"]]}


def turns(prompts, trainer):
    """Two turns, and what follows the first from a tokenizer of transformers."""
    said = trainer.processing_class.encode(" Again: ", add_special_tokens=False)
    first = trainer.generate(prompts, max_tokens=10)
    second = trainer.generate([[*row["prompt_ids"], *row["completion_ids"], *said] for row in first])
    found = {name: [] for name in (*NAMES, "env_mask")}
    for a, b in zip(first, second):
        found["prompt_ids"].append(a["prompt_ids"])
        found["completion_ids"].append([*a["completion_ids"], *said, *b["completion_ids"]])
        found["logprobs"].append([*a["logprobs"], *[0.0] * len(said), *b["logprobs"]])
        own = [1] * len(a["completion_ids"]), [1] * len(b["completion_ids"])
        found["env_mask"].append([*own[0], *[0] * len(said), *own[1]])
    return found


def inverted(prompts, trainer):
    found = turns(prompts, trainer)
    return {**found, "env_mask": [[1 - own for own in row] for row in found["env_mask"]]}


def unmasked(prompts, trainer):
    found = turns(prompts, trainer)
    return {name: found[name] for name in NAMES}


def encoded_again(prompts, trainer):
    """Prompts of both turns in front, as if the model had seen them at once."""
    first = once(prompts, trainer)
    second = once([[*p, *c] for p, c in zip(first["prompt_ids"], first["completion_ids"])], trainer)
    return {name: [[*a, *b] for a, b in zip(first[name], second[name])] for name in NAMES}


def own_starts(prompts, trainer):
    """A prompt of its own for each completion."""
    found = trainer.generate([f"{number}: what is 1+{number}? " for number in range(len(prompts))])
    return {name: [row[name] for row in found] for name in NAMES}


def raises(prompts, trainer):
    raise ConnectionError("no sandbox is free")


async def in_a_loop(prompts, trainer):
    return once(prompts, trainer)


def of_three(prompts, args, processing_class):
    return once(prompts, args)


number = 5
'''


def functions_file(folder: Path) -> Path:
    """Write the file, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "functions.py"
    file.write_text(_TEXT, encoding="utf-8")
    return file
