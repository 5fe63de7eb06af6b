"""Prompts: where they come from, which are used, and how they are rendered."""

from __future__ import annotations

from typing import Any, Literal

from covey.options.declare import Options, PathKind, option


class DataOptions(Options):
    """Data."""

    dataset: list[str] = option(
        ...,
        "One or more sources: files (.jsonl, .json, .csv, .parquet, .arrow), directories, or ids on a hub "
        "as [hf::|ms::]ID[:SUBSET][@SPLIT]; #N after a source takes N rows. quickstart, "
        "quickstart-tools and quickstart-shapes: the built-in tasks.",
        trl="required",
        swift="required",
        names=("dataset_name", "train_dataset"),
        hints=("data", "train_files"),
        path=PathKind("E302"),
    )
    val_dataset: list[str] = option(
        [],
        "Sources of prompts for evaluation; each source is one evaluation set. NAME=SOURCE names a set.",
        trl="a split of the data set",
        swift="none",
        resume="free",
        path=PathKind("E302"),
    )
    split_dataset_ratio: float = option(
        0.0,
        "Share of the rows of dataset that is held out: these rows are used for evaluation, not for "
        "training.",
        ge=0,
        lt=1,
        why="It is the share of rows held out for evaluation; at 1 nothing would be left to train on.",
        swift="0",
    )
    columns: dict[str, str] | None = option(
        None,
        'Rename columns: \'{"question_text": "question", "final": "solution"}\'.',
        swift="not set",
    )
    system: str | None = option(
        None,
        "System message for rows that have none: a text, a file, or r1, a message that asks for <think> "
        "and <answer>.",
        swift="the template's own",
        path=PathKind("E302", or_text=True),
    )
    dataset_shuffle: bool = option(
        True,
        "Use a new random order of the prompts in each epoch.",
        trl="true",
        swift="true",
        names=("shuffle_dataset",),
    )
    interleave_prob: list[float] = option(
        [],
        "One probability per source: each row is drawn from a source with this probability, until one "
        "source is used up. Not set: one source after the other.",
        swift="none",
    )
    streaming: bool = option(
        False,
        "Read rows only when they are needed; needs max_steps, and shuffles only within blocks of rows.",
        trl="false",
        swift="false",
        names=("dataset_streaming",),
    )
    task_column: str | None = option(
        None,
        "Column with the task of each row, for metrics per task and for task_rewards. If a source is "
        "written NAME=SOURCE, its rows without this column get the task NAME.",
    )
    pass_rates: str | None = option(
        None,
        "Measured pass rates of the prompts: pass_rates.jsonl of `covey eval` or its directory, or the "
        "directory of a run, whose rollouts are then counted.",
        path=PathKind("E348"),
    )
    pass_rate_column: str | None = option(
        None,
        "Column with the pass rate of each row, 0 to 1; replaces pass_rates.",
    )
    min_pass_rate: float = option(
        0.0,
        "Leave out rows with a pass rate below this one.",
        ge=0,
        le=1,
        why="It is a share of completions.",
    )
    max_pass_rate: float = option(
        1.0,
        "Leave out rows with a pass rate above this one.",
        ge=0,
        le=1,
        why="It is a share of completions.",
    )
    curriculum: Literal["none", "easy_to_hard", "hard_to_easy"] = option(
        "none",
        "Order rows within each epoch by pass rate, in steps of 0.1; rows in the same step keep their "
        "usual order.",
    )
    max_length: int | None = option(
        None,
        "Longest prompt in tokens; longer prompts are left out and counted. Not set: the model's context "
        "minus max_completion_length.",
        ge=1,
        why="A prompt has at least one token.",
        swift="the model's context",
        names=("max_prompt_length",),
    )
    truncation_strategy: Literal["delete", "left"] = option(
        "delete",
        "What to do with prompts longer than max_length. delete: leave them out; left: cut off their "
        "beginning.",
        swift="left",
    )
    max_pixels: int | None = option(
        None,
        "Largest number of pixels of an image; a larger image is reduced. Not set: that of the environment "
        "variable MAX_PIXELS, or of the model's preprocessor_config.json.",
        ge=1,
        why="An image has pixels.",
        swift="the model's own",
    )
    image_max_token_num: int | None = option(
        None,
        "Largest number of tokens of an image; a larger image is reduced. Not set: that of the environment "
        "variable IMAGE_MAX_TOKEN_NUM, or what max_pixels allows.",
        ge=1,
        why="An image has at least one token.",
    )
    allow_image_urls: bool = option(
        False,
        "Fetch images whose rows give a URL. false: such rows are refused.",
    )
    apply_chat_template: bool = option(
        False,
        "Use the chat template for prompts that are plain text too, as a user message.",
    )
    chat_template: str | None = option(
        None,
        "Chat template that replaces that of the tokenizer: a Jinja file, chatml, or chatml-tools, which "
        "writes tools and calls too.",
        swift="the model's own",
        path=PathKind("E313"),
    )
    enable_thinking: bool | None = option(
        None,
        "Value of enable_thinking that is passed to the chat template.",
        swift="not set",
    )
    chat_template_kwargs: dict[str, Any] | None = option(
        None,
        "More values for the chat template, as JSON.",
        trl="not set",
    )
