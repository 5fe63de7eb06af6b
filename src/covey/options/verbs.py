"""The options of the verbs that are none of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from covey.options.common import COMMON
from covey.options.declare import Options, option


class VerbOptions(Options):
    """What a verb takes beside its words; an underscore behind a name, as in `json_`, is not typed."""

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"))


class CommonOptions(VerbOptions):
    """What every verb takes."""

    help: bool = option(False, COMMON["help"], names=("h",))
    version: bool = option(False, COMMON["version"])
    lang: Literal["en", "zh"] | None = option(None, COMMON["lang"])


class DoctorOptions(VerbOptions):
    """What `covey doctor` takes."""

    json_: bool = option(False, "Print the report as one JSON object.")
    live: int | None = option(
        None,
        "Number (PID) of any process of a run that goes on. Says where that run is now: phase, step, "
        "micro-batch and the stacks of all threads of each rank; nothing of it is disturbed.",
    )


class ExportOptions(VerbOptions):
    """What `covey export` takes."""

    merge: bool = option(False, "Add the adapter to its base model.", names=("merge_lora",))
    output_dir: str | None = option(
        None, "Directory to write to; must not exist yet. Not set: CHECKPOINT-merged, or CHECKPOINT-model."
    )
    base: str | None = option(
        None, "Directory of the base model, where it no longer lies at the path that the adapter names."
    )


class VerifyOptions(VerbOptions):
    """What `covey verify` takes."""

    json_: bool = option(False, "Print what was found as a JSON list, one object a directory.")


class SelftestOptions(VerbOptions):
    """What `covey selftest` takes."""

    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Where to compute. auto: the GPU where there is one."
    )
    model: str | None = option(
        None, "Directory of a model of yours, tested in float32. Not set: a small random one."
    )
    ignore_memory_forecast: bool = option(
        False, "Start although the forecast says that memory or the disk is too small."
    )


class PlanOptions(VerbOptions):
    """What `covey plan` takes beside the options of a run."""

    json_: bool = option(False, "Print the plan as one JSON object.")
    plan_gpus: int | None = option(
        None, "GPUs of a machine to plan for; the options below say what they are and how a run lies on them."
    )
    plan_gpu_memory: str | None = option(None, "Memory of each, with its unit: 96GiB, 80GB.")
    plan_zero_stage: Literal["0", "1", "2", "3"] = option("0", "Stage of DeepSpeed's ZeRO, 0 to 3; 0 is DDP.")
    plan_offload: Literal["none", "optimizer", "params"] = option(
        "none", "What lies in the machine's memory instead: none, optimizer, or params, which is both."
    )
    ladder: bool = option(
        False,
        "Show the layouts one change away, with the memory of each and the least costly that fits.",
    )


PLAN_WORDS: tuple[str, ...] = tuple(name for name in PlanOptions.model_fields if not name.endswith("_"))
"""Options that `covey plan` alone takes, and on its command line only."""
