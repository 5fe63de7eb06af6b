"""The verbs, and the words for those that are none."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from covey.codes import CODES
from covey.options.common import COMMON
from covey.texts import joined, tr
from covey.texts.language import spoken
from covey.types import Fix, Problem

VERBS: Mapping[str, str] = {
    "train": tr("Train a model; covey train --help has the options."),
    "rlhf": tr("Run a command of ms-swift, with the defaults of ms-swift."),
    "plan": tr("Show what train would do: no weights, no network."),
    "rehearse": tr("Let scripted policies play the tools, the environment and the rewards of a run."),
    "eval": tr("Sample held-out prompts with a model or checkpoint and score them."),
    "export": tr("Write a checkpoint as a model; --merge merges its adapter."),
    "verify": tr("Check the files of a checkpoint for damage."),
    "rollout": tr("Serve samples over HTTP to runs on other devices."),
    "quickstart": tr("Train the built-in model on the built-in task in about a minute."),
    "selftest": tr("Check on this machine the results that covey promises to be exact."),
    "doctor": tr("Say from the directory of a run whether it learns and, if not, why."),
    "mismatch": tr("Say what explains the gap between the logprobs of sampler and learner."),
    "replay": tr("Play the episodes of a recorded group again: rendering, tools, environment, logprobs."),
    "explain": tr("Explain a code such as E201."),
}
"""Every verb with its help line."""

_SAME_FLAGS = tr("`covey train` takes the same options")
_ELSEWHERE: Mapping[str, str] = {
    "grpo": _SAME_FLAGS,
    "sft": tr("this version trains with GRPO only: `covey train`"),
    "dpo": tr("this version trains with GRPO only: `covey train`"),
    "pt": tr("this version trains with GRPO only: `covey train`"),
    "megatron": tr("`covey rlhf --rlhf_type grpo ... --fsdp full_shard`; covey does not use Megatron"),
    "merge": tr("`covey export CHECKPOINT --merge`"),
    "merge-lora": tr("`covey export CHECKPOINT --merge`"),
    "infer": tr("`covey eval` samples and scores; transformers can load a checkpoint directory as a model"),
    "deploy": tr("transformers and inference servers can load a checkpoint directory as a model"),
    "view": tr("read metrics.jsonl in the directory of the run"),
}


def overview() -> str:
    """Return what `covey --help` says: what every verb takes, and the verbs."""
    lines = [spoken(tr("usage: {line}", line="covey VERB [--option value ...]")), ""]
    lines += [spoken(tr("Reinforcement learning for language models with GRPO.")), ""]
    lines += [f"  --{name:<10}{spoken(tr(doc))}" for name, doc in COMMON.items()]
    verbs = (f"  {verb:<12}{spoken(doc)}" for verb, doc in VERBS.items())
    return "\n".join([*lines, "", spoken(tr("Commands:")), *verbs, ""])


def unknown_verb(word: str, behind: Sequence[str] = ()) -> Problem:
    """Return the problem of a first word that is no verb, with the words behind it."""
    plain = word.lower().replace("_", "-")
    if (foreign := _of_servers(plain, behind)) is not None:
        return foreign
    near = difflib.get_close_matches(plain, list(VERBS), n=1)
    if plain in _ELSEWHERE:
        fix, cause = (
            Fix(text=_ELSEWHERE[plain]),
            tr("This command comes from ms-swift, TRL or another version of covey."),
        )
    elif word.startswith("-"):
        fix, cause = (
            Fix(text=tr("put the command first: `covey train {word} ...`", word=word)),
            tr("The command is missing."),
        )
    elif word.lower().endswith((".yaml", ".yml")):
        fix, cause = (
            Fix(text=tr("put the command first: `covey train {word}`", word=word)),
            tr("The command is missing."),
        )
    elif near:
        fix, cause = (
            Fix(text=tr("`covey {near}`", near=near[0])),
            tr("The nearest command is {near}.", near=near[0]),
        )
    else:
        fix, cause = Fix(text=tr("`covey --help` lists the commands")), tr("No command has a similar name.")
    return Problem(
        code="E112",
        option=word,
        seen=tr(
            "This version has no command `covey {word}`; its commands are {verbs}.",
            word=word,
            verbs=joined(", ", VERBS),
        ),
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
        why=tr("`covey {verb}` needs it and has no default for it.", verb=verb),
        cause="",
        fixes=(Fix(text=usage),),
    )
