"""Options that were typed and that nothing would read, because of another setting or of the data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from covey.checks.check import Check
from covey.config.derive import is_usual
from covey.options.declare import ReadIf
from covey.options.schema import FACTS, Config
from covey.plan.facts import PromptFacts, RewardFacts
from covey.plan.problem import problem, warning
from covey.plan.words import flags
from covey.texts import counted, joined, plural, tr
from covey.types import Fix, Problem

# Conditions of which E115 or W108 is said below.
_OF_THEIR_OWN = ("tuner_type", "eval_strategy")
_OF_MESSAGES = ("system", "chat_template", "chat_template_kwargs")


def effect_problems(
    config: Config, prompts: PromptFacts, rewards: RewardFacts, typed: Collection[str]
) -> list[Problem]:
    """Return what is said about options that were typed and have no effect in this run."""
    return [
        *_adapters(config, typed),
        *_dropout(config, typed),
        *_evaluation(config, _changed(config, _read_with("eval_strategy"), typed)),
        *_messages(config, prompts),
        *_tables(config, typed),
        *_rewards(config, rewards, typed),
        *_gold_lists(config, rewards),
    ]


def unread(config: Config, typed: Collection[str]) -> dict[str, ReadIf]:
    """Options that were typed with another value than they have untyped, and the condition under which they
    would be read; adapters and evaluations have words of their own."""
    values = config.model_dump()
    found = {}
    for name in typed:
        unmet = _unmet(name, values)
        if unmet is not None and unmet.option not in _OF_THEIR_OWN and not is_usual(name, values):
            found[name] = unmet
    return found


def _unmet(name: str, values: Mapping[str, Any]) -> ReadIf | None:
    """The first condition that does not hold, of those under which an option is read, and the option that it
    speaks of in turn; None where it is read."""
    read_if = FACTS[name].read_if
    if read_if is None:
        return None
    above = _unmet(read_if.option, values)
    return above if above is not None or read_if.holds(values[read_if.option]) else read_if


def _read_with(option: str) -> list[str]:
    """The options that are read only under some value of another."""
    return [n for n, facts in FACTS.items() if facts.read_if is not None and facts.read_if.option == option]


def _changed(config: Config, names: Sequence[str], typed: Collection[str]) -> list[str]:
    """The options that were typed with another value than they have untyped, as in a whole config.yaml."""
    values = config.model_dump()
    return [n for n in names if n in typed and not is_usual(n, values)]


def _adapters(config: Config, typed: Collection[str]) -> list[Problem]:
    is_full_typed = "tuner_type" in typed
    names = [n for n in _read_with("tuner_type") if n in typed]
    if is_full_typed:
        names = _changed(config, names, typed)
    if not names or config.tuner_type != "full":
        return []
    seen = tr("{set}, but all weights are trained, so there is no adapter.", set=_set(config, names))
    adapters = Fix(text=tr("train adapters"), edits={"tuner_type": "lora"})
    if is_full_typed:
        cause = tr("In this command for LoRA only the tuner was changed.")
        return [warning("W108", names[0], seen, cause, _leave_out(names), adapters)]
    cause = tr("--tuner_type lora may be missing; it is the default of `covey rlhf` only.")
    return [problem("E115", names[0], seen, cause, adapters, _leave_out(names))]


def _dropout(config: Config, typed: Collection[str]) -> list[Problem]:
    if "lora_dropout" not in typed or not (config.lora_dropout and config.disable_dropout):
        return []
    if config.tuner_type == "full":
        return []
    return [
        warning(
            "W108",
            "lora_dropout",
            tr(
                "lora_dropout is {lora_dropout:g}, but disable_dropout is on, so nothing is dropped.",
                lora_dropout=config.lora_dropout,
            ),
            tr(
                "It is the default of other trainers. Dropout changes the network in each forward "
                "pass, so the ratio of new to old probabilities is not 1 before the first update."
            ),
            Fix(text=tr("train without dropout, as now"), edits={"lora_dropout": 0.0}),
            Fix(text=tr("train with dropout anyway"), edits={"disable_dropout": False}),
        )
    ]


def _evaluation(config: Config, names: Sequence[str]) -> list[Problem]:
    if not names or config.eval_strategy != "no":
        return []
    if config.val_dataset or config.split_dataset_ratio:
        way = Fix(text="evaluate", edits={"eval_strategy": "steps"})
    else:
        way = Fix(text=tr("name an evaluation dataset: --val_dataset FILE, or --split_dataset_ratio 0.05"))
    seen = tr("{set}, but nothing is evaluated.", set=_set(config, names))
    return [warning("W108", names[0], seen, tr("No evaluation dataset is given."), way, _leave_out(names))]


def _messages(config: Config, prompts: PromptFacts) -> list[Problem]:
    """A system message or a template, which prompts that are text never meet."""
    names = [n for n in _OF_MESSAGES if getattr(config, n) is not None]
    if not names or not prompts.are_text or config.apply_chat_template:
        return []
    return [
        problem(
            "E115",
            names[0],
            tr(
                "{set}, but the column prompt holds text, which is given to the model unchanged.",
                set=_set(config, names),
            ),
            tr(
                "The column prompt holds questions. As in TRL, text in it is taken as the full prompt, "
                "without a chat template."
            ),
            Fix(text=tr("apply the chat template to each prompt"), edits={"apply_chat_template": True}),
            _leave_out(names),
        )
    ]


def _tables(config: Config, typed: Collection[str]) -> list[Problem]:
    if "log_completions" not in typed or not config.log_completions or config.report_to != ["none"]:
        return []
    seen = tr(
        "log_completions asks for a table of {completions} in a tracker, but report_to is none.",
        completions=counted(config.log_completions, "completion"),
    )
    cause = tr(
        "In TRL the option also prints a table on the terminal. covey prints no completions; it writes them "
        "to {output_dir}/rollouts/*.jsonl, one line for each with its text, rewards and advantage.",
        output_dir=config.output_dir,
    )
    if config.rollout_log == "none":
        cause = tr(
            "In TRL the option also prints a table on the terminal. covey prints no completions, and with "
            "--rollout_log none it writes none."
        )
    return [
        warning(
            "W108",
            "log_completions",
            seen,
            cause,
            _leave_out(["log_completions"]),
            Fix(text=tr("use a tracker"), edits={"report_to": ["tensorboard"]}),
        )
    ]


def _rewards(config: Config, rewards: RewardFacts, typed: Collection[str]) -> list[Problem]:
    """Options of built-in rewards that are not asked for; a function of the user's may read any of them."""
    readers = rewards.options
    asked = [name.removeprefix("trl.rewards.") for name in config.reward_funcs]
    if any(name not in readers for name in asked):
        return []
    read = {option for name in asked for option in readers[name]}
    unread = dict.fromkeys(o for options in readers.values() for o in options if o not in read)
    names = _changed(config, list(unread), typed)
    if not names:
        return []
    reward = min((name for name, options in readers.items() if names[0] in options), key=len)
    num = len(config.reward_funcs)
    more = [*config.reward_weights[:num], 1.0, *config.reward_weights[num:]]
    weights = {"reward_weights": more} if "reward_weights" in typed else {}
    add = Fix(
        text=tr("add {reward}", reward=reward),
        edits={"reward_funcs": [*config.reward_funcs, reward], **weights},
    )
    seen = tr(
        "{set}, but no reward of this run reads it: {rewards}.",
        set=_set(config, names),
        rewards=joined(", ", config.rewards),
    )
    cause = tr("The reward that reads it may be missing from --reward_funcs.")
    return [warning("W108", names[0], seen, cause, add, _leave_out(names))]


def _gold_lists(config: Config, rewards: RewardFacts) -> list[Problem]:
    """W108: `gold_lists` is set, but no gold is a list of several members."""
    golds = rewards.golds
    if config.gold_lists is None or config.streaming or golds is None:
        return []
    if golds.num_lists or not golds.num_checked:
        return []
    seen = tr("{set}, but no gold answer is a list of several members.", set=_set(config, ["gold_lists"]))
    cause = tr("A list that is written as text, such as {example}, is read as one answer.", example='"A, C"')
    return [warning("W108", "gold_lists", seen, cause, _leave_out(["gold_lists"]))]


def _set(config: Config, names: Sequence[str]) -> str:
    typed = flags({n: getattr(config, n) for n in names})
    return plural(len(names), "{typed} is set", "{typed} are set", typed=typed)


def _leave_out(names: Sequence[str]) -> Fix:
    return Fix(text=tr("leave out {names}", names=" ".join(f"--{n}" for n in names)))


CHECK = Check(
    place=250,
    judge=lambda config, facts, typed: effect_problems(config, facts.prompts, facts.rewards, typed or ()),
)
