"""How many completions there are, and how they are drawn."""

from __future__ import annotations

from typing import Literal

from covey.options.declare import Options, only_if_set, only_with, option


class BatchOptions(Options):
    """Batch: all numbers count completions, not prompts."""

    num_generations: int = option(
        8,
        "Number of completions per prompt; they form a group and are compared with each other. At "
        "least 2, or 1 with advantage_estimator reinforce_plus_plus.",
        trl="8",
        swift="8",
        hints=("group_size", "n"),
    )
    per_device_train_batch_size: int = option(
        8,
        "Number of completions in one forward pass of one process; this option decides how much memory "
        "activations need.",
        trl="8",
        swift="1",
        hints=("batch_size", "micro_batch_size", "train_batch_size"),
        resume="split",
    )
    max_tokens_per_micro_batch: int | None = option(
        None,
        "Largest number of tokens in one forward pass; a longer row is processed alone. Not set: "
        "per_device_train_batch_size rows of the longest prompt and completion; on a CPU fewer where that "
        "is no slower.",
        ge=1,
        why="A forward pass has at least one token.",
    )
    gradient_accumulation_steps: int = option(
        ...,
        "Number of forward passes per optimizer step in each process. A step uses processes x "
        "per_device_train_batch_size x this many completions.",
        rule=(
            "8 divided by the number of processes, at least 1; or 1 if another option of the batch size "
            "is given"
        ),
        trl="1",
        swift="1",
        hints=("grad_accum",),
        resume="split",
    )
    steps_per_generation: int = option(
        ...,
        "Number of forward passes in each process for which one rollout is used; a multiple of "
        "gradient_accumulation_steps. If the two are equal, each optimizer step uses fresh samples "
        "(on-policy).",
        rule="gradient_accumulation_steps, or the value that follows from generation_batch_size",
        trl="gradient_accumulation_steps",
        swift="gradient_accumulation_steps",
        resume="split",
    )
    generation_batch_size: int = option(
        ...,
        "Number of completions in a rollout over all processes; another way to set steps_per_generation.",
        rule="processes x per_device_train_batch_size x steps_per_generation",
        trl="from steps_per_generation",
        swift="from steps_per_generation",
    )
    num_iterations: int = option(
        1,
        "Number of passes of the optimizer over the same rollout.",
        trl="1",
        swift="1",
    )


class SamplingOptions(Options):
    """Sampling."""

    max_completion_length: int = option(
        1024,
        "Largest number of tokens in a completion; longer completions are cut there.",
        ge=1,
        why="A completion has at least one token.",
        trl="512",
        swift="512",
        rlhf=512,
        names=("max_new_tokens", "response_length"),
        hints=("max_tokens", "max_response_length"),
    )
    stop_words: list[str] = option(
        [],
        "Texts that end a completion, such as '</answer>' 'Question:'; \\n is a line break. The completion "
        "ends with the token that completes one of them; the text stays in it and is trained. A model "
        "without chat training may need them. Not set: only the model's end tokens end a completion.",
        swift="none",
        hints=("stop", "stop_strings", "stop_sequences"),
        verbatim=True,
    )
    temperature: float = option(
        1.0,
        "Sampling temperature, above 0; the loss divides the logits by the same number.",
        trl="1",
        swift="0.9",
        rlhf=0.9,
    )
    temperature_end: float | None = option(
        None,
        "Temperature of the last rollout; the temperature changes gradually over the run. Not set: it "
        "stays constant.",
        gt=0,
        why="Sampling at 0 is greedy: all completions of a prompt are equal.",
    )
    temperature_schedule: Literal["linear", "cosine"] = option(
        "linear",
        "Schedule of the temperature from temperature to temperature_end.",
        read_if=only_if_set("temperature_end"),
    )
    top_p: float = option(
        1.0,
        "Sample from the fewest tokens that together have this probability; 1 keeps all. The loss uses the "
        "probabilities among the tokens that were kept.",
        gt=0,
        le=1,
        why="top_p 0.9 samples from the most probable tokens that together have a probability of 0.9; 1 "
        "turns it off.",
        trl="1",
        swift="1",
    )
    top_k: int = option(
        0,
        "Sample from this many of the most probable tokens and those as probable as the last of them; 0 or "
        "-1 keeps all.",
        ge=0,
        also=(-1,),
        why="top_k 50 samples from the 50 most probable tokens; 0 or -1 turns it off.",
        trl="0",
        swift="-1",
        words={"-1": 0},
    )
    min_p: float = option(
        0.0,
        "Leave out tokens that have less than this share of the largest probability; 0 keeps all. min_p "
        "comes first, then top_k, then top_p, all after the temperature.",
        ge=0,
        le=1,
        why="min_p 0.1 leaves out tokens less than a tenth as probable as the most probable one; 0 turns it "
        "off.",
        trl="not set",
        swift="0",
        words={"none": 0.0},
    )
    engine: Literal["native", "generate"] = option(
        "native",
        "Engine that samples. native: the built-in engine, which uses the weights in training; generate: "
        "the method of transformers, which is slower but supports any model.",
        trl="generate of transformers",
        swift="generate of transformers",
        read_if=only_with("use_vllm", False),
    )
