"""The verbs, and the words for those that are none."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from covey.codes import CODES
from covey.options.common import COMMON
from covey.types import Fix, Problem

VERBS: Mapping[str, str] = {
    "train": "Train a model; covey train --help has the options.",
    "rlhf": "The same for a command of ms-swift, with its defaults.",
    "plan": "Say what train would do: no weights, no network.",
    "eval": "Sample and score held-out prompts with a model or checkpoint.",
    "export": "Write a checkpoint as a model; --merge puts its adapter in.",
    "verify": "Say what is wrong with a checkpoint, by its files alone.",
    "rollout": "Sample for runs on other devices, behind HTTP.",
    "quickstart": "Train the built-in model on its task: a minute.",
    "selftest": "Measure on this machine what covey promises to be exact.",
    "doctor": "Say from its directory whether a run learns, and why not.",
    "explain": "Say what a code such as E201 means.",
}
"""Every verb with its help line."""

_SAME_FLAGS = "`covey train` takes the same flags"
_ELSEWHERE: Mapping[str, str] = {
    "grpo": _SAME_FLAGS,
    "sft": "this version trains with GRPO only: `covey train`",
    "dpo": "this version trains with GRPO only: `covey train`",
    "pt": "this version trains with GRPO only: `covey train`",
    "megatron": "`covey rlhf --rlhf_type grpo ... --fsdp full_shard`; covey has nothing of Megatron",
    "merge": "`covey export CHECKPOINT --merge`",
    "merge-lora": "`covey export CHECKPOINT --merge`",
    "infer": "`covey eval` samples and scores; a checkpoint directory is a model that transformers loads",
    "deploy": "a checkpoint directory is a model that transformers and inference servers load",
    "view": "read metrics.jsonl in the directory of the run",
}


def overview() -> str:
    """Return what `covey --help` says: what every verb takes, and the verbs."""
    lines = ["usage: covey VERB [--option value ...]", ""]
    lines += ["Reinforcement learning of language models with GRPO.", ""]
    lines += [f"  --{name:<10}{doc}" for name, doc in COMMON.items()]
    return "\n".join([*lines, "", "Commands:", *(f"  {verb:<12}{doc}" for verb, doc in VERBS.items()), ""])


def unknown_verb(word: str, behind: Sequence[str] = ()) -> Problem:
    """Return the problem of a first word that is no verb, with the words behind it."""
    plain = word.lower().replace("_", "-")
    if (foreign := _of_servers(plain, behind)) is not None:
        return foreign
    near = difflib.get_close_matches(plain, list(VERBS), n=1)
    if plain in _ELSEWHERE:
        fix, cause = Fix(text=_ELSEWHERE[plain]), "A verb of ms-swift, of TRL or of another version of covey."
    elif word.startswith("-"):
        fix, cause = Fix(text=f"put the verb first: `covey train {word} ...`"), "The verb is missing."
    elif word.lower().endswith((".yaml", ".yml")):
        fix, cause = Fix(text=f"put the verb first: `covey train {word}`"), "The verb is missing."
    elif near:
        fix, cause = Fix(text=f"`covey {near[0]}`"), f"The nearest verb is {near[0]}."
    else:
        fix, cause = Fix(text="`covey --help` lists the verbs"), "No verb has a name like it."
    return Problem(
        code="E112",
        option=word,
        seen=f"This version has no `covey {word}`; its verbs are {', '.join(VERBS)}.",
        why=CODES["E112"].why,
        cause=cause,
        fixes=(fix,),
    )


def _of_servers(word: str, behind: Sequence[str]) -> Problem | None:
    """The answer to `trl vllm-serve` and `swift rollout`, with or without the name of the tool."""
    from covey.config.argv import split
    from covey.config.foreign_server import answer
    from covey.options.verbs import RolloutOptions

    words = list(behind)
    if word in ("trl", "swift") and words:
        word = words.pop(0).lower().replace("_", "-")
        word = "swift" if word == "rollout" else word
    if word not in ("vllm-serve", "swift"):
        return None
    return answer(word, split(words, RolloutOptions))


def nameless(verb: str, seen: str, usage: str) -> Problem:
    """Return the problem of a verb that is given nothing to work on."""
    return Problem(
        code="E105",
        option=verb,
        seen=seen,
        why=f"`covey {verb}` has no default for it.",
        cause="",
        fixes=(Fix(text=usage),),
    )
