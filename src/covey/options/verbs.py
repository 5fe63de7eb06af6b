"""The options of the verbs that are none of a run."""

from __future__ import annotations

from typing import Any, Literal

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


class RolloutOptions(VerbOptions):
    """What `covey rollout` takes."""

    model: str | None = option(
        None,
        "Directory of the model that the runs train, or quickstart. Its weights are replaced by those of the "
        "first publish.",
        names=("model_id_or_path",),
    )
    host: str = option("127.0.0.1", "Address to listen on. Others than this machine's own need TLS.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.")
    token_file: str | None = option(
        None,
        "File with the token that every call has to bring; written where it does not exist. Not set: "
        "rollout-PORT.token in the working directory.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "What the model computes in; that of the run. auto: bfloat16 on a GPU that has it, else float32.",
        names=("torch_dtype",),
    )
    kernels: Literal["auto", "torch"] = option("auto", "What computes the heavy parts, as in `covey train`.")
    max_rows: int = option(256, "Completions that are decoded side by side.")
    engine: Literal["native", "vllm"] = option(
        "native", "What samples: the built-in engine, or vLLM, which we have not run on a GPU yet."
    )
    vllm_gpu_memory_utilization: float = option(
        0.9, "Share of each GPU's memory that vLLM takes, weights and cache."
    )
    vllm_max_model_len: int | None = option(
        None,
        "Tokens of the longest prompt with its completion that vLLM holds. Not set: the model's context.",
    )
    vllm_tensor_parallel_size: int = option(1, "GPUs that one vLLM spans.")
    vllm_enforce_eager: bool = option(False, "Whether vLLM runs without compiled graphs.")
    vllm_enable_lora: bool = option(
        False,
        "Whether vLLM applies the adapters of runs itself: their base is sent once, then adapters alone.",
    )
    vllm_max_lora_rank: int = option(16, "Highest rank of an adapter that vLLM makes room for.")
    vllm_engine_kwargs: dict[str, Any] | None = option(
        None, "Further arguments of vLLM's class LLM, as JSON."
    )
    ssl_certfile: str | None = option(None, "Certificate of the server, for https.")
    ssl_keyfile: str | None = option(None, "Its private key, where it is not in the same file.")
    i_know_this_is_open: bool = option(
        False, "Listen on an address that others reach without TLS: they can read the token."
    )
    publish_directory: str | None = option(
        None,
        "Directory that the trainer sees too, as in /dev/shm or on a shared disk, for files of weights.",
    )
    end_with_run: bool = option(
        False, "End once the run that uses the server has ended. Otherwise it waits for the next one."
    )


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
    ladder: bool = option(
        False,
        "Show the layouts one change away, with the memory of each and the least costly that fits.",
    )


PLAN_WORDS: tuple[str, ...] = tuple(name for name in PlanOptions.model_fields if not name.endswith("_"))
"""Options that `covey plan` alone takes, and on its command line only."""
