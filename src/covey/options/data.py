"""Prompts: where they come from, which are used, and how they are rendered."""

from __future__ import annotations

from typing import Any, Literal

from covey.options.declare import Options, option


class DataOptions(Options):
    """Data."""

    dataset: list[str] = option(
        ...,
        "One or more sources: files (.jsonl, .json, .csv, .parquet, .arrow), directories, or ids on a hub as "
        "[hf::|ms::]ID[:SUBSET][@SPLIT]; #N behind any of them takes N rows. quickstart: the built-in task.",
        trl="required",
        swift="required",
        names=("dataset_name",),
        hints=("data", "train_files"),
    )
    val_dataset: list[str] = option(
        [],
        "Sources of the prompts to evaluate on, one set each; NAME=SOURCE names a set.",
        trl="a split of the data set",
        swift="none",
        resume="free",
    )
    split_dataset_ratio: float = option(
        0.0,
        "Share of the rows of dataset that is kept out of training and evaluated on.",
        ge=0,
        lt=1,
        why="It is the share of rows held out for evaluation; at 1 nothing would be left to train on.",
        swift="0",
    )
    columns: dict[str, str] | None = option(
        None,
        'Renames columns: \'{"question_text": "question", "final": "solution"}\'.',
        swift="not set",
    )
    system: str | None = option(
        None,
        "System message of rows that have none: text, a file, or r1, which asks for <think> and <answer>.",
        swift="the template's own",
    )
    dataset_shuffle: bool = option(
        True,
        "Visit the prompts in a new random order in each epoch.",
        trl="true",
        swift="true",
        names=("shuffle_dataset",),
    )
    interleave_prob: list[float] = option(
        [],
        "One probability a source: rows are drawn from the sources so, until one is used up. Not set: one "
        "source after the other.",
        swift="none",
    )
    streaming: bool = option(
        False,
        "Read rows as they are needed; needs max_steps, and shuffles within blocks of rows.",
        trl="false",
        swift="false",
    )
    task_column: str | None = option(
        None,
        "Column that names each row's task, for metrics of each and for task_rewards. A source written "
        "NAME=SOURCE gives its name to rows without that column.",
    )
    pass_rates: str | None = option(
        None,
        "Measured pass rates of the prompts: the pass_rates.jsonl of `covey eval` or its directory, or the "
        "directory of a run, whose rollouts are counted.",
    )
    pass_rate_column: str | None = option(
        None,
        "Column that holds each row's pass rate, 0 to 1, in place of pass_rates.",
    )
    min_pass_rate: float = option(
        0.0,
        "Leave out rows with a lower pass rate.",
        ge=0,
        le=1,
        why="It is a share of completions.",
    )
    max_pass_rate: float = option(
        1.0,
        "Leave out rows with a higher pass rate.",
        ge=0,
        le=1,
        why="It is a share of completions.",
    )
    curriculum: Literal["none", "easy_to_hard", "hard_to_easy"] = option(
        "none",
        "Order of each epoch by pass rate, in tenths; rows of one tenth come as without it.",
    )
    max_length: int | None = option(
        None,
        "Longest prompt in tokens; longer ones are left out and counted. Not set: what the model's context "
        "leaves after max_completion_length.",
        ge=1,
        why="A prompt has at least one token.",
        swift="the model's context",
        names=("max_prompt_length",),
    )
    truncation_strategy: Literal["delete", "left"] = option(
        "delete",
        "What becomes of a longer prompt: delete leaves it out, left cuts its beginning off.",
        swift="left",
    )
    apply_chat_template: bool = option(
        False,
        "Put a prompt that is text through the chat template as a user message, as other columns are.",
    )
    chat_template: str | None = option(
        None,
        "Chat template in place of the tokenizer's: a Jinja file, or chatml.",
        swift="the model's own",
    )
    enable_thinking: bool | None = option(
        None,
        "Given to the chat template under this name.",
        swift="not set",
    )
    chat_template_kwargs: dict[str, Any] | None = option(
        None,
        "Further values for the chat template, as JSON.",
        trl="not set",
    )
