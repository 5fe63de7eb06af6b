"""The options of what a run is made from: model, adapter, data and rewards."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


def option(group: str, default: Any, doc: str, rule: str = "") -> Any:
    """A field of the configuration: `doc` is its help text, `rule` says how it follows from others."""
    return Field(default, description=doc, json_schema_extra={"group": group, "rule": rule})


class InputOptions(BaseModel):
    """Options of the groups model, tuner, data and reward."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    # -- model
    model: str = option(
        "model",
        ...,
        "Directory with weights and tokenizer, an id on the Hugging Face hub, ms::ID on ModelScope, or the "
        "word quickstart for the built-in model.",
    )
    model_revision: str | None = option(
        "model", None, "Branch, tag or commit of a model on a hub. Not set: its main branch."
    )
    use_hf: bool = option(
        "model",
        True,
        "Where ids of models and data sets without a prefix are looked for: the Hugging Face hub, or with "
        "false ModelScope.",
    )
    trust_remote_code: bool = option(
        "model",
        False,
        "Run the Python code that comes with a model. A model of a hub then needs its --model_revision, a "
        "full commit.",
    )
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "model",
        "auto",
        "What the forward pass computes in. The weights that the optimizer updates are always float32. "
        "auto: bfloat16 on a GPU that has it, else float32.",
    )
    disable_dropout: bool = option(
        "model",
        True,
        "Turn dropout off, so that the policy gives a token the same probability each time it is asked. With "
        "it on, the guards that compare such probabilities are off.",
    )
    attn_impl: Literal["auto", "flash_attn", "sdpa", "flex", "eager"] = option(
        "model",
        "auto",
        "What computes attention in training: sdpa, torch's, row by row, or in C on a CPU; flex, one "
        "compiled kernel on a GPU; flash_attn, of that package; eager, plain products. auto: flex on a "
        "GPU that has it, else sdpa.",
    )
    kernels: Literal["auto", "torch"] = option(
        "model",
        "auto",
        "What computes attention, the head and decoding steps. auto: C on a CPU with a compiler; compiled "
        "attention, liger-kernel and CUDA graphs on a GPU. torch: the model's own modules and torch's "
        "operators alone, which is slower; to see whether another kernel is at fault.",
    )
    use_liger_kernel: Literal["auto", "true", "false"] = option(
        "model",
        "auto",
        "Norms and gated layers by the kernels of the package liger-kernel. auto: on a GPU where the package "
        "is installed and knows the model.",
    )
    gradient_checkpointing: Literal["auto", "true", "false", "selective"] = option(
        "model",
        "auto",
        "Compute activations a second time in the backward pass: true, all of a layer, a third slower; "
        "selective, all but matrix products and attention, of which what is in C on a CPU is computed again, "
        "too. auto: as memory asks for it.",
    )
    activation_offloading: bool = option(
        "model",
        False,
        "Keep activations in the machine's memory between the forward and the backward pass; for GPUs.",
    )

    # -- tuner
    tuner_type: Literal["full", "lora"] = option(
        "tuner",
        "full",
        "What is trained: full, all weights; or lora, low-rank adapters beside frozen weights.",
    )
    lora_rank: int = option("tuner", 16, "Rank of an adapter's two matrices.")
    lora_alpha: float = option(
        "tuner", 32.0, "Scale of the adapters: their output is multiplied by lora_alpha / lora_rank."
    )
    lora_dropout: float = option(
        "tuner",
        0.0,
        "Dropout in front of the adapters; without effect while disable_dropout is on, which is the default.",
    )
    target_modules: list[str] = option(
        "tuner",
        ["all-linear"],
        "Modules that get an adapter, by the end of their names; all-linear: all linear layers but the head.",
    )
    modules_to_save: list[str] = option(
        "tuner", [], "Modules that are trained whole beside the adapters, by the end of their names."
    )
    use_rslora: bool = option("tuner", False, "Scale by lora_alpha / sqrt(lora_rank) instead.")
    use_dora: bool = option(
        "tuner", False, "Train the length of each weight column beside its direction (DoRA)."
    )

    # -- data
    dataset: list[str] = option(
        "data",
        ...,
        "One or more sources: files (.jsonl, .json, .csv, .parquet, .arrow), directories, or ids on a hub as "
        "[hf::|ms::]ID[:SUBSET][@SPLIT]; #N behind any of them takes N rows. quickstart: the built-in task.",
    )
    val_dataset: list[str] = option(
        "data", [], "Sources of the prompts to evaluate on, one set each; NAME=SOURCE names a set."
    )
    split_dataset_ratio: float = option(
        "data", 0.0, "Share of the rows of dataset that is kept out of training and evaluated on."
    )
    columns: dict[str, str] | None = option(
        "data", None, 'Renames columns: \'{"question_text": "question", "final": "solution"}\'.'
    )
    system: str | None = option(
        "data",
        None,
        "System message of rows that have none: text, a file, or r1, which asks for <think> and <answer>.",
    )
    dataset_shuffle: bool = option("data", True, "Visit the prompts in a new random order in each epoch.")
    interleave_prob: list[float] = option(
        "data",
        [],
        "One probability a source: rows are drawn from the sources so, until one is used up. Not set: one "
        "source after the other.",
    )
    streaming: bool = option(
        "data", False, "Read rows as they are needed; needs max_steps, and shuffles within blocks of rows."
    )
    task_column: str | None = option(
        "data",
        None,
        "Column that names each row's task, for metrics of each and for task_rewards. A source written "
        "NAME=SOURCE gives its name to rows without that column.",
    )
    pass_rates: str | None = option(
        "data",
        None,
        "Measured pass rates of the prompts: the pass_rates.jsonl of `covey eval` or its directory, or the "
        "directory of a run, whose rollouts are counted.",
    )
    pass_rate_column: str | None = option(
        "data", None, "Column that holds each row's pass rate, 0 to 1, in place of pass_rates."
    )
    min_pass_rate: float = option("data", 0.0, "Leave out rows with a lower pass rate.")
    max_pass_rate: float = option("data", 1.0, "Leave out rows with a higher pass rate.")
    curriculum: Literal["none", "easy_to_hard", "hard_to_easy"] = option(
        "data",
        "none",
        "Order of each epoch by pass rate, in tenths; rows of one tenth come as without it.",
    )
    max_length: int | None = option(
        "data",
        None,
        "Longest prompt in tokens; longer ones are left out and counted. Not set: what the model's context "
        "leaves after max_completion_length.",
    )
    truncation_strategy: Literal["delete", "left"] = option(
        "data",
        "delete",
        "What becomes of a longer prompt: delete leaves it out, left cuts its beginning off.",
    )
    apply_chat_template: bool = option(
        "data",
        False,
        "Put a prompt that is text through the chat template as a user message, as other columns are.",
    )
    chat_template: str | None = option(
        "data", None, "Chat template in place of the tokenizer's: a Jinja file, or chatml."
    )
    enable_thinking: bool | None = option("data", None, "Given to the chat template under this name.")
    chat_template_kwargs: dict[str, Any] | None = option(
        "data", None, "Further values for the chat template, as JSON."
    )

    # -- reward
    reward_funcs: list[str] = option(
        "reward",
        ...,
        "One or more rewards: a built-in such as accuracy or format (docs/rewards.md has them all), "
        "FILE.py:NAME, package.module.name, a name of a plugin, or a reward model. A completion scores their "
        "weighted sum.",
    )
    reward_model: list[str] = option(
        "reward",
        [],
        "Reward models: directories or ids on a hub of sequence classifiers with one label, whose logit is "
        "the reward.",
    )
    reward_model_revision: list[str] = option(
        "reward", [], "Branch, tag or commit of each reward_model on a hub. Not set: their main branches."
    )
    reward_weights: list[float] = option(
        "reward", ..., "One weight per reward: those of reward_funcs, then those of reward_model.", "all 1"
    )
    task_rewards: dict[str, list[str]] | None = option(
        "reward",
        None,
        "Which of reward_funcs score which task of task_column: "
        '\'{"math": ["accuracy", "format"], "chat": ["judge.py:kind"]}\'. Not set: all score every row.',
    )
    external_plugins: list[str] = option(
        "reward", [], "Python files that put rewards into orms, as ms-swift's plugins do."
    )
    reward_timeout_s: float = option("reward", 60.0, "Seconds that one call of a reward function may take.")
    reward_workers: int = option(
        "reward", ..., "Processes that run reward functions, per training process.", "the cores, at most 8"
    )
    reward_trial: bool = option(
        "reward",
        True,
        "Call each reward on two rows before weights are loaded; false for judges that cost money.",
    )
    max_bad_gold: float = option(
        "reward", 0.05, "Share of rows whose gold answer may be unreadable before the run is refused."
    )
    unsafe_exec: bool = option(
        "reward",
        False,
        "Let code_reward run the programs of completions where nothing shuts them off from this machine.",
    )
    completion_form: Literal["auto", "text", "messages"] = option(
        "reward",
        "auto",
        "How reward functions get prompts and completions. auto: as messages where the column prompt holds "
        "messages, else as text.",
    )
    step_separator: str = option(
        "reward",
        "\n\n",
        "What ends a step of a completion, for rewards that give one number per step; \\n is a line break.",
    )
    judge_base_url: str | None = option(
        "reward", None, "Where the reward judge asks: an OpenAI-compatible service, http://HOST:PORT/v1."
    )
    judge_model: str | None = option("reward", None, "Name of the model that the reward judge asks for.")
    judge_prompt: str | None = option(
        "reward",
        None,
        "What the reward judge asks, text or a file: {prompt}, {completion} and names of columns in braces "
        "are filled in.",
    )
    judge_regex: str = option(
        "reward",
        r"Reward:\s*([-+0-9.]+)",
        "Finds the reward in the answer of a judge: what its one group has, the last time that it matches.",
    )
    judge_concurrency: int = option(
        "reward", 16, "Questions that wait for their answers at a time, per training process."
    )
    judge_retries: int = option(
        "reward", 3, "How often a question is asked again after 429, 5xx, a lost connection or a time-out."
    )
    judge_timeout_s: float = option("reward", 60.0, "Seconds that one answer of a judge may take.")
    cosine_min_len_value_wrong: float = option(
        "reward",
        ...,
        "What cosine gives a wrong answer of no token.",
        "-0.5, or -1 with get_cosine_scaled_reward",
    )
    cosine_max_len_value_wrong: float = option(
        "reward",
        ...,
        "What cosine gives a wrong answer of cosine_max_len tokens.",
        "0, or -0.5 with get_cosine_scaled_reward",
    )
    cosine_min_len_value_correct: float = option(
        "reward", 1.0, "What cosine gives a right answer of no token."
    )
    cosine_max_len_value_correct: float = option(
        "reward", 0.5, "What cosine gives a right answer of cosine_max_len tokens."
    )
    cosine_max_len: int = option(
        "reward",
        ...,
        "Tokens of a completion at which cosine ends; a longer one scores the same.",
        "max_completion_length",
    )
    repetition_n_grams: int = option(
        "reward", 3, "Words, or tokens, in a row that repetition looks for a second time."
    )
    repetition_max_penalty: float = option(
        "reward", -1.0, "What repetition gives a completion that is nothing but repeats; below 0."
    )
    soft_max_length: int = option(
        "reward", ..., "Tokens of a completion at which soft_overlong reaches -1.", "max_completion_length"
    )
    soft_cache_length: int = option(
        "reward",
        ...,
        "Tokens before soft_max_length over which soft_overlong falls from 0 to -1.",
        "a fifth of soft_max_length, as in DAPO",
    )

    @property
    def rewards(self) -> list[str]:
        """Every reward, in the order of the weights."""
        return [*self.reward_funcs, *self.reward_model]
