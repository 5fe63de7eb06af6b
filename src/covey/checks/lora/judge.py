"""Finds faults in an adapter that vLLM is to apply itself."""

from __future__ import annotations

from collections.abc import Collection

from covey.checks.check import Check
from covey.options.schema import Config
from covey.options.vllm import LORA_RANKS
from covey.plan.facts import Facts
from covey.plan.problem import problem, warning
from covey.plan.server_line import start_line
from covey.texts import joined, tr
from covey.types import Fix, Problem

_OPTION = "vllm_enable_lora"
_MERGED = Fix(
    text=tr("merge the adapter into the weights before they are sent to vLLM"), edits={_OPTION: False}
)


def lora_problems(config: Config, facts: Facts, typed: Collection[str]) -> list[Problem]:
    """Return what stands against it; nothing where vLLM does not sample."""
    if not config.use_vllm:
        return []
    if not config.vllm_enable_lora or config.tuner_type != "lora":
        return _idle(config, typed)
    return [*_another_kind(config), *_seeing(config, facts), *_ranks(config), *_servers(config, facts, typed)]


def _idle(config: Config, typed: Collection[str]) -> list[Problem]:
    """Options for adapters where vLLM applies none."""
    why = (
        tr("all weights are trained")
        if config.tuner_type != "lora"
        else tr("{option} is off", option=_OPTION)
    )
    named = [_OPTION] if config.vllm_enable_lora else []
    named += ["vllm_max_lora_rank"] if config.vllm_max_lora_rank is not None else []
    leave = Fix(text=tr("leave it out"))
    return [
        warning(
            "W108",
            name,
            tr("{name} is set, but {why}.", name=name, why=why),
            "",
            leave,
        )
        for name in named
        if name in typed
    ]


def _another_kind(config: Config) -> list[Problem]:
    """Adapters that are more than matrices beside linear layers."""
    problems = []
    if config.use_dora:
        seen = tr("vllm_enable_lora and use_dora are both on, but vLLM does not support DoRA.")
        plain = Fix(text=tr("use LoRA without DoRA"), edits={"use_dora": False})
        problems.append(problem("E434", _OPTION, seen, "", _MERGED, plain))
    if config.modules_to_save:
        seen = tr(
            "vllm_enable_lora is on, but modules_to_save trains {modules_to_save} whole: ",
            modules_to_save=joined(", ", config.modules_to_save),
        )
        seen += tr("vLLM applies LoRA only to linear layers; it cannot apply modules that are trained whole.")
        problems.append(problem("E434", _OPTION, seen, "", _MERGED))
    return problems


def _seeing(config: Config, facts: Facts) -> list[Problem]:
    """Adapters on what sees images."""
    if not any(part.is_trained for part in facts.model.parts if part.part != "llm"):
        return []
    seen = tr("vllm_enable_lora is on, but the adapter lies on the vision tower or the aligner, too: ")
    seen += tr("vLLM applies LoRA only to the language model.")
    text = Fix(text=tr("adapt the language model alone"), edits={"freeze_vit": True, "freeze_aligner": True})
    others = [text] if "all-linear" in config.target_modules else []
    return [problem("E434", _OPTION, seen, "", _MERGED, *others)]


def _ranks(config: Config) -> list[Problem]:
    rank, most = config.lora_rank, LORA_RANKS[-1]
    if rank > most:
        seen = tr(
            "vllm_enable_lora is on, but lora_rank is {rank}, and vLLM supports ranks up to {most}.",
            rank=rank,
            most=most,
        )
        lower = Fix(text=tr("use the highest rank that vLLM supports"), edits={"lora_rank": most})
        return [problem("E434", _OPTION, seen, "", _MERGED, lower)]
    given = config.vllm_max_lora_rank
    if config.vllm_mode == "colocate" and given is not None and given < rank:
        seen = tr("vllm_max_lora_rank is {given}, which is below lora_rank {rank}.", given=given, rank=rank)
        higher = Fix(text=tr("use the rank of the run"), edits={"vllm_max_lora_rank": rank})
        return [problem("E434", "vllm_max_lora_rank", seen, "", higher, _MERGED)]
    return []


def _servers(config: Config, facts: Facts, typed: Collection[str]) -> list[Problem]:
    """Servers without it, where it was typed; else the adapter is added to the weights for them."""
    if _OPTION not in typed:
        return []
    problems = []
    for server in facts.servers.asked or ():
        if server.fault or server.adapter_rank >= config.lora_rank:
            continue
        takes = (
            tr("supports ranks up to {adapter_rank}", adapter_rank=server.adapter_rank)
            if server.adapter_rank
            else tr("does not support adapters")
        )
        seen = tr(
            "vllm_enable_lora is on and lora_rank is {lora_rank}, but {address} {takes}.",
            lora_rank=config.lora_rank,
            address=server.address,
            takes=takes,
        )
        line = start_line(config, server.address, facts)
        again = Fix(text=tr("start the server again for an adapter of this rank: `{line}`", line=line))
        problems.append(problem("E434", _OPTION, seen, "", again, _MERGED))
    return problems


CHECK = Check(place=90, judge=lambda config, facts, typed: lora_problems(config, facts, typed or ()))
