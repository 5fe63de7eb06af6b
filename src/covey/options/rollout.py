"""How many completions there are, and how they are drawn."""

from __future__ import annotations

from typing import Literal

from covey.options.declare import Options, only_if_set, only_with, option


class BatchOptions(Options):
    """Batch: every number counts completions, not prompts."""

    num_generations: int = option(
        8,
        "Completions sampled per prompt, the group they are compared in. At least 2.",
        trl="8",
        swift="8",
        hints=("group_size", "n"),
    )
    per_device_train_batch_size: int = option(
        8,
        "Completions in one forward pass of one process; the option that decides activation memory.",
        trl="8",
        swift="1",
        hints=("batch_size", "micro_batch_size", "train_batch_size"),
        resume="split",
    )
    max_tokens_per_micro_batch: int | None = option(
        None,
        "Tokens that one forward pass holds; a longer row passes alone. Unset: per_device_train_batch_size "
        "rows of the longest prompt and completion; on a CPU fewer where that is no slower.",
        ge=1,
        why="A forward pass has at least one token.",
    )
    gradient_accumulation_steps: int = option(
        ...,
        "Forward passes per optimizer step and process. A step uses processes x "
        "per_device_train_batch_size x this many completions.",
        rule=(
            "8 divided by the number of processes, at least 1; or 1 once another option of the batch size is "
            "typed"
        ),
        trl="1",
        swift="1",
        hints=("grad_accum",),
        resume="split",
    )
    steps_per_generation: int = option(
        ...,
        "Forward passes per process that one rollout feeds; a multiple of gradient_accumulation_steps. "
        "Equal to it, each optimizer step sees fresh samples (on-policy).",
        rule="gradient_accumulation_steps, or what generation_batch_size asks for",
        trl="gradient_accumulation_steps",
        swift="gradient_accumulation_steps",
        resume="split",
    )
    generation_batch_size: int = option(
        ...,
        "Completions per rollout over all processes; another way to say steps_per_generation.",
        rule="processes x per_device_train_batch_size x steps_per_generation",
        trl="from steps_per_generation",
        swift="from steps_per_generation",
    )
    num_iterations: int = option(
        1,
        "How often the optimizer goes over the same rollout.",
        trl="1",
        swift="1",
    )


class SamplingOptions(Options):
    """Sampling."""

    max_completion_length: int = option(
        1024,
        "Longest completion in tokens; a longer one is cut there.",
        ge=1,
        why="A completion has at least one token.",
        trl="512",
        swift="512",
        rlhf=512,
        names=("max_new_tokens", "response_length"),
        hints=("max_tokens", "max_response_length"),
    )
    temperature: float = option(
        1.0,
        "Sampling temperature, above 0; the loss divides its logits by the same number.",
        trl="1",
        swift="0.9",
        rlhf=0.9,
    )
    temperature_end: float | None = option(
        None,
        "Temperature of the last rollout, reached over the run. Not set: it stays.",
        gt=0,
        why="Sampling at 0 is greedy: all completions of a prompt are equal.",
    )
    temperature_schedule: Literal["linear", "cosine"] = option(
        "linear",
        "Schedule of temperature from its start to temperature_end.",
        read_if=only_if_set("temperature_end"),
    )
    engine: Literal["native", "generate"] = option(
        "native",
        "What samples: native, the built-in engine on the weights in training; or generate, the method of "
        "transformers, slower and for any model.",
        trl="generate of transformers",
        swift="generate of transformers",
        read_if=only_with("use_vllm", False),
    )
