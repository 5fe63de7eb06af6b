"""The options of the verbs that are none of a run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from covey.options.common import COMMON
from covey.options.declare import Options, PathKind, option


class VerbOptions(Options):
    """What a verb takes beside its words; an underscore behind a name, as in `json_`, is not typed."""

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"))


class CommonOptions(VerbOptions):
    """What every verb takes."""

    help: bool = option(False, COMMON["help"], names=("h",))
    version: bool = option(False, COMMON["version"])
    lang: Literal["en", "zh"] | None = option(None, COMMON["lang"])


class QuickstartOptions(VerbOptions):
    """Declares what `covey quickstart` takes beside the options of a run."""

    task: Literal["sums", "tools", "shapes"] = option(
        "sums",
        "sums: the model learns sums of two numbers. tools: it learns in two turns to use a calculator for "
        "products. shapes: it looks at drawings and learns to count and name what is on them.",
    )


class DoctorOptions(VerbOptions):
    """What `covey doctor` takes."""

    json_: bool = option(False, "Print the report as one JSON object; with exit code 2, the problems.")
    live: int | None = option(
        None,
        "Number (PID) of any process of a running run. Shows the current phase, step and micro-batch of "
        "the run and the stacks of all threads of each rank; the run is not disturbed.",
    )


class ExportOptions(VerbOptions):
    """What `covey export` takes."""

    merge: bool = option(False, "Merge the adapter into its base model.", names=("merge_lora",))
    output_dir: str | None = option(
        None,
        "Directory to write to; it must not exist yet. Not set: CHECKPOINT-merged, or CHECKPOINT-model.",
        path=PathKind("E403"),
    )
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "dtype of the merged model. auto: the dtype of the base model. float32 keeps the whole update of "
        "the adapter; bfloat16 rounds small parts of it away.",
        names=("dtype",),
    )
    base: str | None = option(
        None,
        "Directory of the base model, if it is no longer at the path that the adapter names.",
        names=("model",),
        path=PathKind("E415"),
    )
    checkpoint: str | None = option(
        None,
        "The checkpoint, in the place of the first argument.",
        names=("adapters", "ckpt_dir"),
        path=PathKind("E413"),
    )


class VerifyOptions(VerbOptions):
    """What `covey verify` takes."""

    json_: bool = option(
        False,
        "Print the result as a JSON list, with one object per directory; with exit code 2, one object with "
        "the problems.",
    )


class MismatchOptions(VerbOptions):
    """Declares the options of `covey mismatch`."""

    rollout: int | None = option(None, "Number of the rollout. Not set: the newest one.", ge=0)
    json_: bool = option(False, "Print the result as one JSON object; with exit code 2, the problems.")


class ReplayOptions(VerbOptions):
    """Declares the options of `covey replay`."""

    rollout: int | None = option(None, "Number of the rollout. Not set: the newest one.", ge=0)
    group: int | None = option(None, "Number of the group in the rollout. Not set: the first one.", ge=0)
    checkpoint: str | None = option(
        None,
        "Checkpoint of the run, such as checkpoint-40, or a directory, whose weights score the tokens. Not "
        "set: the one nearest to the step that sampled them.",
        path=PathKind("E408"),
    )
    sample: bool = option(False, "Draw the episodes again, by the weights of the step that sampled them.")
    json_: bool = option(False, "Print the result as one JSON object; with exit code 2, the problems.")


class RolloutOptions(VerbOptions):
    """What `covey rollout` takes."""

    model: str | None = option(
        None,
        "Directory of the model that the runs train, or quickstart. The first publish replaces its weights.",
        names=("model_id_or_path",),
        path=PathKind("E426"),
    )
    host: str = option("127.0.0.1", "Address to listen on. Addresses that other machines can reach need TLS.")
    port: int = option(8000, "Port to listen on; 0 selects a free one.")
    token_file: str | None = option(
        None,
        "File with the token that every request must contain; it is written if it does not exist. Not "
        "set: rollout-PORT.token in the working directory.",
        path=PathKind("E426"),
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "dtype in which the model computes; use that of the run. auto: bfloat16 on a GPU that supports "
        "it, else float32.",
        names=("torch_dtype",),
    )
    kernels: Literal["auto", "torch"] = option(
        "auto", "Kernels for attention, the head and decoding steps, as in `covey train`."
    )
    max_rows: int = option(256, "Number of completions that are decoded at a time.")
    engine: Literal["native", "vllm"] = option(
        "native", "Engine that samples: the built-in engine, or vLLM, which we have not tested on a GPU yet."
    )
    vllm_gpu_memory_utilization: float = option(
        0.9, "Share of each GPU's memory for vLLM's weights and cache."
    )
    vllm_max_model_len: int | None = option(
        None,
        "Largest number of tokens of a prompt and its completion in vLLM. Not set: the model's context.",
    )
    vllm_tensor_parallel_size: int = option(1, "Number of GPUs that one vLLM engine uses.")
    vllm_enforce_eager: bool = option(False, "Run vLLM without compiled graphs.")
    vllm_enable_lora: bool = option(
        False,
        "Let vLLM apply the adapters of runs: their base model is sent once, and after that only the "
        "adapters.",
    )
    vllm_max_lora_rank: int = option(16, "Highest rank of an adapter for which vLLM reserves memory.")
    vllm_engine_kwargs: dict[str, Any] | None = option(None, "More arguments for vLLM's class LLM, as JSON.")
    multi_turn_scheduler: str | None = option(
        None,
        "Scheduler of ms-swift that makes the episodes of runs, in a process of this server; a run names the "
        "same one.",
    )
    max_turns: int | None = option(None, "Largest number of turns of the scheduler.", ge=1)
    external_plugins: list[str] = option(
        [], "Python files that register schedulers and gym environments.", path=PathKind("E390")
    )
    gym_env: str | None = option(None, "Gym environment of gym_scheduler.")
    use_gym_env: bool | None = option(
        None, "Tell runs to count the total_reward of the scheduler. Not set: where gym_env is given."
    )
    tool_timeout_s: float = option(
        60.0, "Time limit for the scheduler from a turn to its next request, in seconds.", gt=0
    )
    ssl_certfile: str | None = option(
        None,
        "Certificate of the server, for https.",
        path=PathKind("E426"),
    )
    ssl_keyfile: str | None = option(
        None,
        "Private key of the certificate, if it is not in the same file.",
        path=PathKind("E426"),
    )
    i_know_this_is_open: bool = option(
        False,
        "Listen without TLS on an address that other machines can reach: anyone on the network "
        "can read the token.",
    )
    publish_directory: str | None = option(
        None,
        "Directory for weight files that the trainer can read and write too, in /dev/shm or on a shared "
        "disk.",
        path=PathKind("E426"),
    )
    end_with_run: bool = option(
        False,
        "Stop the server when the run that uses it has ended. Otherwise the server waits for the next run.",
    )


class SelftestOptions(VerbOptions):
    """What `covey selftest` takes."""

    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Device to compute on. auto: the GPU if there is one."
    )
    model: str | None = option(
        None,
        "Directory of your own model, tested in float32. Not set: a small random model.",
        path=PathKind("E301"),
    )
    ignore_memory_forecast: bool = option(
        False, "Start even if the forecast says that memory or the disk is too small."
    )


class PlanOptions(VerbOptions):
    """What `covey plan` takes beside the options of a run."""

    json_: bool = option(False, "Print the plan as one JSON object; with exit code 2, the problems.")
    plan_gpus: int | None = option(
        None,
        "Number of GPUs of the machine to plan for; deepspeed and fsdp say how the run is placed on them.",
    )
    plan_gpu_memory: str | None = option(None, "Memory of each GPU, with its unit: 96GiB, 80GB.")


PLAN_WORDS: tuple[str, ...] = tuple(name for name in PlanOptions.model_fields if not name.endswith("_"))
"""Options that `covey plan` alone takes, and on its command line only."""
