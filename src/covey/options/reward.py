"""What scores completions."""

from __future__ import annotations

from typing import Literal

from covey.options.declare import Options, PathKind, option


class RewardOptions(Options):
    """Rewards."""

    reward_funcs: list[str] = option(
        ...,
        "One or more rewards: a built-in one such as accuracy or format (all are in docs/rewards.md), "
        "FILE.py:NAME, package.module.name, a name from a plugin, or a reward model. The score of a "
        "completion is their weighted sum.",
        trl="none",
        swift="none",
        names=("reward_functions",),
        hints=("rewards",),
        path=PathKind("E314"),
    )
    reward_model: list[str] = option(
        [],
        "Reward models: directories or ids on a hub of sequence classifiers with one label; the logit of "
        "that label is the reward.",
        trl="none, within reward_funcs",
        swift="none",
        names=("reward_model_name_or_path",),
        path=PathKind("E337"),
    )
    reward_model_revision: list[str] = option(
        [],
        "Branch, tag or commit of each reward_model on a hub. Not set: their main branches.",
        swift="none",
    )
    reward_weights: list[float] = option(
        ...,
        "One weight per reward: those of reward_funcs, then those of reward_model.",
        rule="all 1",
        trl="all 1",
        swift="all 1",
    )
    task_rewards: dict[str, list[str]] | None = option(
        None,
        'Which of reward_funcs score which task of task_column: \'{"math": ["accuracy", "format"], '
        '"chat": ["judge.py:kind"]}\'. Not set: all rewards score every row.',
    )
    external_plugins: list[str] = option(
        [],
        "Python files that register rewards in ms-swift's dictionary orms, as plugins of ms-swift do.",
        swift="none",
        path=PathKind("E314"),
    )
    reward_timeout_s: float = option(
        60.0,
        "Time limit for one call of a reward function, in seconds.",
        gt=0,
        why="With 0 seconds every call of a reward would time out.",
        resume="free",
    )
    reward_workers: int = option(
        ...,
        "Number of processes that run reward functions, per training process.",
        rule="the number of cores, at most 8",
        ge=1,
        why="Reward functions run in worker processes, so at least one is needed.",
        usual=2,
        resume="free",
    )
    reward_trial: bool = option(
        True,
        "Before weights are loaded, call each reward on two completions of a row: its gold answer and an "
        "empty one. Set it to false for judges that cost money.",
        resume="free",
    )
    max_bad_gold: float = option(
        0.05,
        "Largest share of rows with an unreadable gold answer; above it the run is refused.",
        ge=0,
        le=1,
        why="It is a share of the rows.",
        resume="free",
    )
    gold_lists: Literal["any", "all"] | None = option(
        None,
        "How a gold answer that is a list is read. any: each member is a right answer, and one is "
        "enough. all: the members are the parts of one answer, and all are needed. Not set: as any, but "
        "lists that may be parts of one answer are refused.",
    )
    unsafe_exec: bool = option(
        False,
        "Let code_reward run programs from completions even if this machine has no sandbox to isolate them.",
        resume="free",
    )
    completion_form: Literal["auto", "text", "messages"] = option(
        "auto",
        "Form in which reward functions get prompts and completions. auto: messages if the prompt column "
        "holds messages, else text.",
    )
    step_separator: str = option(
        "\n\n",
        "Text that ends a step of a completion, for rewards that give one number per step; \\n is a line "
        "break.",
        verbatim=True,
    )
    judge_base_url: str | None = option(
        None,
        "Address of the service that the reward judge uses: an OpenAI-compatible service, "
        "http://HOST:PORT/v1.",
    )
    judge_model: str | None = option(
        None,
        "Name of the model that the reward judge uses.",
    )
    judge_prompt: str | None = option(
        None,
        "Question of the reward judge, as text or a file; {prompt}, {completion} and column names in "
        "braces are replaced by their values.",
        path=PathKind("E340", or_text=True),
    )
    judge_regex: str = option(
        r"Reward:\s*([-+0-9.]+)",
        "Regular expression with one group that finds the reward in a judge's answer; the last match counts.",
    )
    judge_concurrency: int = option(
        16,
        "Number of requests to the judge at a time, per training process.",
        ge=1,
        why="The judge needs at least one request at a time.",
    )
    judge_retries: int = option(
        3,
        "How often a request is repeated after the status 429 or 5xx, a lost connection or a timeout.",
        ge=0,
        why="It is the number of retries after a failed request; 0 means no retry.",
    )
    judge_timeout_s: float = option(
        60.0,
        "Time limit for one answer of the judge, in seconds.",
        gt=0,
        why="With 0 seconds every request to the judge would time out.",
    )
    cosine_min_len_value_wrong: float = option(
        ...,
        "Reward of cosine for a wrong answer of 0 tokens.",
        rule="-0.5, or -1 with get_cosine_scaled_reward",
        trl="-1",
        swift="-0.5",
    )
    cosine_max_len_value_wrong: float = option(
        ...,
        "Reward of cosine for a wrong answer of cosine_max_len tokens.",
        rule="0, or -0.5 with get_cosine_scaled_reward",
        trl="-0.5",
        swift="0",
    )
    cosine_min_len_value_correct: float = option(
        1.0,
        "Reward of cosine for a right answer of 0 tokens.",
        trl="1",
        swift="1",
    )
    cosine_max_len_value_correct: float = option(
        0.5,
        "Reward of cosine for a right answer of cosine_max_len tokens.",
        trl="0.5",
        swift="0.5",
    )
    cosine_max_len: int = option(
        ...,
        "Number of tokens at which cosine reaches its last value; longer completions score the same.",
        rule="max_completion_length",
        ge=1,
        why="It is a number of tokens.",
        usual=1024,
        trl="required",
        swift="max_completion_length",
    )
    repetition_n_grams: int = option(
        3,
        "Number of words, or tokens, in the n-grams whose repetitions the reward repetition counts.",
        ge=1,
        why="It is the number of words or tokens in an n-gram.",
        trl="3",
        swift="3",
    )
    repetition_max_penalty: float = option(
        -1.0,
        "Reward of repetition for a completion that only repeats itself; below 0.",
        lt=0,
        why="A completion that only repeats itself gets this reward; at 0 it would not be penalized.",
        trl="-1",
        swift="-1",
    )
    soft_max_length: int = option(
        ...,
        "Number of tokens in a completion at which soft_overlong reaches -1.",
        rule="max_completion_length",
        ge=1,
        why="It is a number of tokens.",
        usual=1024,
        trl="1280",
        swift="max_completion_length",
    )
    soft_cache_length: int = option(
        ...,
        "Number of tokens before soft_max_length over which soft_overlong falls from 0 to -1.",
        rule="one fifth of soft_max_length, as in DAPO",
        ge=0,
        why="It is the number of tokens over which the penalty grows from 0 to -1; 0 makes it a step.",
        usual=256,
        trl="256",
        swift="required",
    )

    @property
    def rewards(self) -> list[str]:
        """Every reward, in the order of the weights."""
        return [*self.reward_funcs, *self.reward_model]

    @property
    def weights(self) -> list[float]:
        """Return one weight per reward."""
        return [float(w) for w in self.reward_weights or [1.0] * len(self.rewards)]
