"""Values out of range, and values that make each other pointless."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from covey.config.schema import Config, default_of
from covey.plan.problem import problem, warning
from covey.types import Fix, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """What an option may be: the test, the words for it, why, and a value that is always right."""

    accepts: Callable[[Any], bool]
    words: str
    why: str
    usual: Any


def _at_least(lowest: float, why: str, usual: Any) -> Range:
    return Range(accepts=lambda v: v >= lowest, words=f"{lowest} or more", why=why, usual=usual)


def _above(bound: float, why: str, usual: Any) -> Range:
    return Range(accepts=lambda v: v > bound, words=f"above {bound:g}", why=why, usual=usual)


def _share(why: str, usual: Any, closed: bool = False) -> Range:
    words = "from 0 to 1" if closed else "at least 0 and below 1"
    return Range(accepts=lambda v: 0 <= v < 1 or (closed and v == 1), words=words, why=why, usual=usual)


_RANGES: dict[str, Range] = {
    "lora_rank": _at_least(1, "An adapter has two matrices of this many rows and columns.", 16),
    "lora_alpha": _above(0, "At 0 the adapters change nothing.", 32.0),
    "lora_dropout": _share("It is the chance that an input is left out.", 0.0),
    "split_dataset_ratio": _share("It is the share of the rows that is not trained on.", 0.0),
    "min_pass_rate": _share("It is a share of completions.", 0.0, closed=True),
    "max_pass_rate": _share("It is a share of completions.", 1.0, closed=True),
    "reward_timeout_s": _above(0, "Every call would be too late.", 60.0),
    "reward_workers": _at_least(1, "At least one process runs the functions.", 2),
    "judge_concurrency": _at_least(1, "At least one question is asked at a time.", 16),
    "judge_retries": _at_least(0, "At 0 each question is asked once.", 3),
    "judge_timeout_s": _above(0, "Every answer would be too late.", 60.0),
    "max_bad_gold": _share("It is a share of the rows.", 0.05, closed=True),
    "cosine_max_len": _at_least(1, "It is a number of tokens.", 1024),
    "repetition_n_grams": _at_least(1, "It is a number of words or tokens in a row.", 3),
    "repetition_max_penalty": Range(
        accepts=lambda v: v < 0,
        words="below 0",
        why="At 0 repeats cost nothing, and above 0 they would be paid for.",
        usual=-1.0,
    ),
    "soft_max_length": _at_least(1, "It is a number of tokens.", 1024),
    "soft_cache_length": _at_least(0, "It is a number of tokens; 0 is a step from 0 to -1.", 256),
    "eval_steps": _at_least(1, "It is a number of steps.", 100),
    "num_generations_eval": _at_least(1, "Each prompt gets at least one completion.", 1),
    "eval_temperature": _at_least(0, "At 0 the likeliest token is taken; below there is nothing.", 1.0),
    "early_stopping_patience": _at_least(1, "It is a number of evaluations.", None),
    "max_minutes": _above(0, "The run would have no step.", None),
    "log_completions": _at_least(0, "It is a number of completions; 0 sends none.", 0),
    "max_tokens_per_micro_batch": _at_least(1, "A forward pass has at least one token.", None),
    "max_length": _at_least(1, "A prompt has at least one token.", None),
    "max_completion_length": _at_least(1, "A completion has at least one token.", 1024),
    "epsilon": _above(
        0, "Without room around 1 every change of the policy is clipped and nothing is learnt.", 0.2
    ),
    "epsilon_high": _above(0, "Without room above 1 no good completion can become more likely.", 0.28),
    "delta": _above(0, "It bounds a ratio of probabilities, which is above 0.", None),
    "tau_pos": _above(0, "It is the steepness of a gate.", 1.0),
    "tau_neg": _above(0, "It is the steepness of a gate.", 1.05),
    "vespo_k_pos": _at_least(0, "It is an exponent of a ratio.", 2.0),
    "vespo_lambda_pos": _above(0, "At 0 the weight of a likely completion has no bound.", 3.0),
    "vespo_k_neg": _at_least(0, "It is an exponent of a ratio.", 3.0),
    "vespo_lambda_neg": _above(0, "At 0 the weight of a likely completion has no bound.", 2.0),
    "real_tau": _above(0, "Scores are divided by it.", 0.5),
    "fipo_decay_rate": _above(0, "It is a number of tokens.", 32.0),
    "fipo_clip_range": _share("It is a distance from 1.", 0.2),
    "fipo_safety_threshold": _above(0, "It bounds a ratio of probabilities, which is above 0.", 4.0),
    "temperature_end": _above(0, "Sampling at 0 is greedy: all completions of a prompt are equal.", None),
    "epsilon_end": _above(0, "Without room around 1 every change of the policy is clipped.", None),
    "beta_end": _at_least(0, "Below 0 the KL term would reward drifting away.", None),
    "entropy_coef": _at_least(0, "Below 0 the bonus would punish exploration.", 0.0),
    "entropy_coef_end": _at_least(0, "Below 0 the bonus would punish exploration.", None),
    "entropy_target": _at_least(0, "An entropy is never below 0.", 0.2),
    "entropy_coef_delta": _above(0, "At 0 the weight never changes.", 0.005),
    "entropy_coef_min": _at_least(0, "Below 0 the bonus would punish exploration.", 0.0),
    "top_entropy_quantile": Range(
        accepts=lambda v: 0 < v <= 1,
        words="above 0 and at most 1",
        why="It is a share of the tokens.",
        usual=1.0,
    ),
    "max_resample_times": _at_least(1, "Without a further draw nothing is replaced.", 3),
    "replay_buffer_size": _at_least(0, "It is a number of groups; 0 keeps none.", 0),
    "off_policy_sequence_mask_delta": _above(0, "It is a mean of lost log probability.", None),
    "rollout_importance_sampling_threshold": _above(0, "It bounds a ratio of probabilities.", 2.0),
    "vllm_importance_sampling_clip_max": _above(0, "It bounds a ratio of probabilities.", 3.0),
    "vllm_importance_sampling_clip_min": _at_least(0, "It bounds a ratio of probabilities.", None),
    "beta": _at_least(0, "Below 0 the KL term would reward drifting away from the first model.", 0.0),
    "ref_model_sync_steps": _at_least(1, "It is a number of optimizer steps.", 512),
    "ref_model_mixup_alpha": Range(
        accepts=lambda v: 0 < v <= 1,
        words="above 0 and at most 1",
        why="It is the policy's part in a mean; at 0 the reference never moves.",
        usual=0.6,
    ),
    "learning_rate": _at_least(0, "Below 0 the optimizer makes good completions less likely.", 1e-6),
    "warmup_steps": _at_least(0, "It is a number of steps.", 0),
    "warmup_ratio": _share("It is a share of all steps.", 0.0, closed=True),
    "adam_beta1": _share("It is the decay of a running mean.", 0.9),
    "adam_beta2": _share("It is the decay of a running mean.", 0.999),
    "adam_epsilon": _above(0, "At 0 a gradient of 0 is divided by 0.", 1e-8),
    "weight_decay": _at_least(0, "Below 0 weights would grow with every step.", 0.0),
    "max_grad_norm": _at_least(0, "It is a length; 0 turns clipping off.", 1.0),
    "num_train_epochs": _above(0, "The run would have no step.", 1.0),
    "max_steps": Range(
        accepts=lambda v: v == -1 or v >= 1,
        words="1 or more, or -1 for not set",
        why="The run would have no step.",
        usual=-1,
    ),
    "stop_after_steps": _at_least(1, "The run would have no step.", None),
    "seed": Range(
        accepts=lambda v: 0 <= v < 2**63, words="0 or more, below 2^63", why="A seed is 63 bits.", usual=42
    ),
    "data_seed": Range(
        accepts=lambda v: 0 <= v < 2**63, words="0 or more, below 2^63", why="A seed is 63 bits.", usual=42
    ),
    "nproc_per_node": _at_least(1, "At least one process trains.", 1),
    "save_steps": _at_least(1, "It is a number of steps; the last one is always saved.", 100),
    "save_total_limit": _at_least(1, "The last checkpoint is the result of the run.", 2),
    "keep_trainer_state": _at_least(0, "It is a number of checkpoints; 0 keeps nothing to resume from.", 1),
    "logging_steps": _at_least(1, "It is a number of steps.", 1),
    "rollout_log": Range(
        accepts=lambda v: (isinstance(v, int) and v >= 1) or v in ("all", "none"),
        words="all, none, or 1 or more",
        why="It says that every N-th rollout is written.",
        usual="all",
    ),
    "rollout_log_max_gb": _above(0, "Nothing would be kept; `--rollout_log none` writes nothing.", 10.0),
}


def value_problems(config: Config) -> list[Problem]:
    """Return what is wrong with single values and with pairs of them, whatever the machine and the data
    are."""
    problems = [
        _out_of_range(name, getattr(config, name), allowed)
        for name, allowed in _RANGES.items()
        if getattr(config, name) is not None and not allowed.accepts(getattr(config, name))
    ]
    # What follows from a wrong value is no fault of its own.
    values = config.model_dump()
    problems = [
        p for p in problems if p.option not in _FOLLOWS or values[p.option] != values[_FOLLOWS[p.option]]
    ]
    return [*_temperature(config), *problems, *_warmup(config), *_warnings(config), *_sources(config)]


_FOLLOWS = {
    "eval_steps": "save_steps",
    "eval_temperature": "temperature",
    "data_seed": "seed",
    "epsilon_high": "epsilon",
    "cosine_max_len": "max_completion_length",
    "soft_max_length": "max_completion_length",
}


def _out_of_range(name: str, value: Any, allowed: Range) -> Problem:
    if allowed.usual is None:
        fix = Fix(text=f"leave out --{name}", edits={name: None})
    else:
        word = "default" if allowed.usual == default_of(name) else "usual value"
        fix = Fix(text=f"the {word}", edits={name: allowed.usual})
    return Problem(
        code="E109",
        option=name,
        seen=f"{name} is {_plain(value)}; it has to be {allowed.words}.",
        why=allowed.why,
        cause="A slip of the hand, or a value that means `not set` in another tool.",
        fixes=(fix,),
    )


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _temperature(config: Config) -> list[Problem]:
    if config.temperature > 0:
        return []
    return [
        Problem(
            code="E110",
            option="temperature",
            seen=f"temperature is {config.temperature:g}: sampling is greedy, and all completions of a "
            "prompt are equal.",
            why="Equal completions get equal rewards, every advantage is 0, and no weight moves.",
            cause="A setting for evaluation; training needs completions that differ.",
            fixes=(
                Fix(text="the model's own distribution, which is the default", edits={"temperature": 1.0}),
                Fix(text="a little sharper, the default of ms-swift", edits={"temperature": 0.9}),
            ),
        )
    ]


def _warmup(config: Config) -> list[Problem]:
    steps, ratio = config.warmup_steps > 0, config.warmup_ratio > 0
    problems = []
    if steps and ratio:
        problems.append(
            _contradiction(
                "warmup_ratio",
                f"warmup_steps is {config.warmup_steps} and warmup_ratio is {config.warmup_ratio:g}.",
                "Both set the length of the warm-up, and only one can.",
                (
                    Fix(text="keep the steps", edits={"warmup_ratio": 0.0}),
                    Fix(text="keep the share of all steps", edits={"warmup_steps": 0}),
                ),
            )
        )
    if (steps or ratio) and config.lr_scheduler_type == "constant":
        name = "warmup_steps" if steps else "warmup_ratio"
        problems.append(
            _contradiction(
                name,
                f"{name} is {getattr(config, name):g} and lr_scheduler_type is constant, which has no "
                "warm-up.",
                "The warm-up would be ignored.",
                (
                    Fix(
                        text="warm up, then stay constant",
                        edits={"lr_scheduler_type": "constant_with_warmup"},
                    ),
                    Fix(text="no warm-up", edits={"warmup_steps": 0, "warmup_ratio": 0.0}),
                ),
            )
        )
    return problems


def _contradiction(option: str, seen: str, why: str, fixes: tuple[Fix, ...]) -> Problem:
    cause = "The default schedule here is constant; in TRL it is linear, in ms-swift cosine."
    return Problem(code="E111", option=option, seen=seen, why=why, cause=cause, fixes=fixes)


def _warnings(config: Config) -> list[Problem]:
    problems = []
    if config.learning_rate == 0:
        problems.append(
            warning(
                "W103",
                "learning_rate",
                "learning_rate is 0.",
                "A dry run, or a number that was rounded to 0.",
                Fix(text="the default", edits={"learning_rate": 1e-6}),
            )
        )
    if config.delta is not None and 0 < config.delta < 1 + config.epsilon_high:
        bound = 1 + config.epsilon_high
        problems.append(
            warning(
                "W104",
                "delta",
                f"delta is {config.delta:g}, below 1 + epsilon_high = {bound:g}.",
                "delta bounds the ratio itself, not its distance from 1.",
                Fix(text="well above the clipping range", edits={"delta": max(2.0, 2 * bound)}),
            )
        )
    passes = config.num_iterations * config.steps_per_generation // max(1, config.gradient_accumulation_steps)
    if passes > _MANY_STEPS:
        problems.append(
            warning(
                "W106",
                "num_iterations",
                f"{passes} optimizer steps train on the same rollout.",
                "num_iterations, or a steps_per_generation far above gradient_accumulation_steps.",
                Fix(
                    text="one step per rollout, on-policy",
                    edits={"num_iterations": 1, "gradient_accumulation_steps": config.steps_per_generation},
                ),
            )
        )
    return problems


_MANY_STEPS = 8


def _sources(config: Config) -> list[Problem]:
    """What mixing, splitting and streaming ask of each other."""
    problems = []
    probabilities, num = config.interleave_prob, len(config.dataset)
    even = [round(1 / num, 6)] * (num - 1) if num else []
    if probabilities and (
        len(probabilities) != num or min(probabilities) < 0 or abs(sum(probabilities) - 1) > _SUM_TOLERANCE
    ):
        problems.append(
            problem(
                "E109",
                "interleave_prob",
                f"interleave_prob is {' '.join(f'{p:g}' for p in probabilities)} for {num} sources; it takes "
                "one probability each, which add up to 1.",
                "A source was added or taken away.",
                Fix(
                    text="each source alike",
                    edits={"interleave_prob": [*even, round(1 - sum(even), 6)]},
                ),
            )
        )
    if config.streaming:
        if config.max_steps < 1:
            problems.append(
                problem(
                    "E115",
                    "streaming",
                    "streaming is on and max_steps is not set: nobody knows how many rows will come.",
                    "An epoch of a stream ends where its rows do, which is known only then.",
                    Fix(text="say how many optimizer steps to take", edits={"max_steps": 1000}),
                    Fix(text="read all rows before the run", edits={"streaming": False}),
                )
            )
        for name in ("interleave_prob", "split_dataset_ratio"):
            if getattr(config, name):
                problems.append(
                    problem(
                        "E111",
                        name,
                        f"{name} is set and streaming is on.",
                        "Mixing and splitting need all rows; a stream has only the next ones.",
                        Fix(text="read all rows before the run", edits={"streaming": False}),
                    )
                )
    return problems


_SUM_TOLERANCE = 1e-6
