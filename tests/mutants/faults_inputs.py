"""Faults of what a run is given: chat templates, rewards, and the checkpoint that it goes on from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.checkpoint.registry import State
from covey.checks.model import look as model
from covey.data.order import Order
from covey.data.template import CHATML, compiled
from covey.data.text import TextCodec
from covey.training import state
from mutants.faults import Patch, Plant, before, changed
from mutants.harness import START, Mutant, nothing

# -- templates

_UNOPENED = CHATML.partition("{% if add_generation_prompt %}")[0]
_INSTRUCTIONS = (
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %}{{ m['content'] }}{% endif %}"
    "{% endfor %}"
)


def _template(text: str) -> Plant:
    return changed(
        model, "load_codec", lambda codec, *args: replace(codec, chat_template=compiled(text, "the template"))
    )


def _two_starts(codec: TextCodec, *args: Any) -> TextCodec:
    """The template writes a start token, and so does what it puts before the first message."""
    text = "{{ bos_token }}{{ bos_token }}" + CHATML
    start = {"bos_token": "<|endoftext|>"}
    return replace(codec, chat_template=compiled(text, "the template"), special_tokens=start)


# -- rewards

_FILE = Path(__file__).parent / "rewards.py"


def reward(name: str, **options: Any) -> dict[str, Any]:
    """Options of a run with one of the functions of rewards.py beside the built-in reward."""
    return {"reward_funcs": ["accuracy", f"{_FILE}:{name}"], **options}


# -- a resume


def _restored(component: type, **change: Any) -> Plant:
    def other(self: Any, found: State) -> tuple[Any, State]:
        assert change.keys() <= found.json.keys()
        return self, replace(found, json={**found.json, **change})

    return before(component, "load_state", other)


def _empty_buffer(patch: Patch) -> None:
    patch.setattr(state.RolloutBuffer, "load_state", lambda self, found: None)


def another_order(owner: Order, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return (replace(owner, seed=owner.seed + 1), *args)


def _resumed(name: str, plant: Callable[[Patch], None], says: str, **options: Any) -> Mutant:
    return Mutant(f"resume {name}", "F126", 2, plant, options, says=says, is_resumed=True)


LONG = {"steps_per_generation": 8, "max_steps": 6}

MUTANTS = (
    Mutant(
        "template that opens no answer",
        "E323",
        START,
        _template(_UNOPENED),
        says="'<|im_start|>assistant'",
        is_read=True,
    ),
    Mutant(
        "template with two start tokens",
        "E323",
        START,
        changed(model, "load_codec", _two_starts),
        says="<|endoftext|> twice",
        is_read=True,
    ),
    Mutant("template of another model", "F108", 0, _template(_INSTRUCTIONS), is_read=True),
    Mutant("reward that raises", "F107", 0, nothing, reward("raises"), says="does not answer"),
    Mutant(
        "reward that sleeps past its limit",
        "F107",
        0,
        nothing,
        reward("sleeps", reward_timeout_s=1),
        says="returned nothing within 1 s",
    ),
    Mutant(
        "reward whose exception is swallowed", "F108", 0, nothing, reward("swallows"), says="swallows is 0"
    ),
    Mutant("reward that gives NaN", "F107", 0, nothing, reward("gives_nan"), says="nan"),
    _resumed("at the first rollout", _restored(state.Progress, rollout=0), "the next prompts are"),
    _resumed("a rollout too late", _restored(state.Progress, rollout=3), "the next prompts are"),
    _resumed("in another order", before(Order, "take", another_order), "the next prompts are"),
    _resumed(
        "at its rollout's first step", _restored(state.RolloutBuffer, done=0), "after 0 of them", **LONG
    ),
    _resumed("a step too late", _restored(state.RolloutBuffer, done=3), "after 3 of them", **LONG),
    _resumed("without its rollout", _empty_buffer, "after 0 of them", **LONG),
)
