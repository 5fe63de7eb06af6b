"""Templates that run without end, or take all memory, or fail: what is said, and how soon."""

from __future__ import annotations

import subprocess
import time

import pytest

from covey.data import template_trial
from covey.data.errors import TemplateError
from covey.data.template_trial import TemplateTrial
from covey.data.text import load_codec

LOOPS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def _less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_trial, "_CPU_S", 1)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (LOOPS, "does not finish within 1 s"),
        ("{{ 9 ** (9 ** 9) }}", "does not finish within 1 s"),
        ("{{ 'a' * 3000000000 }}", "more than 1 GiB"),
        ("{{ messages[0].content * 3000000000 }}", "more than 1 GiB"),
        ("{{ messages[0].content.center(10 ** 10) }}", "more than 1 GiB"),
        ("{{ 'a' * 20000000 }}", "more than 1,000,000 characters"),
        # Nothing of this is done for a first short question.
        ("{% if messages[0].role == 'system' %}{{ 'a' * 3000000000 }}{% endif %}", "more than 1 GiB"),
        ("{% if messages | length > 9 %}" + LOOPS + "{% endif %}", "does not finish within 1 s"),
        ("{% for m in messages %}" * 30 + "{% endfor %}" * 30, "SyntaxError: too many statically nested"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
    ],
)
def test_a_template_that_does_not_end_is_refused_soon(template, words, model_dir):
    started = time.process_time()
    with pytest.raises(TemplateError, match=f"the model's chat template cannot be used: .*{words}") as error:
        load_codec(model_dir(template=template))
    assert error.value.kind == "broken_template"
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1 // (messages | length - messages | length) }}", "ZeroDivisionError"),
        ("{% for a in range(10 ** 8) %}{% endfor %}", "OverflowError: Range too big"),
        ("{% macro again(x) %}{{ again(x) }}{% endmacro %}{{ again(1) }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_is_an_error_of_the_template(template, words, model_dir):
    codec = load_codec(model_dir(template=template))
    with pytest.raises(TemplateError, match=f"the chat template fails: {words}") as error:
        codec.render(ASK)
    assert error.value.kind == "broken_template"


def test_each_kind_of_conversation_is_tried_before_it_is_rendered_here(model_dir):
    asks = "{% if KIND %}{{ 'a' * 3000000000 }}{% endif %}{{ messages[-1].content }}"
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    long = [{"role": "user", "content": "word " * 200_000}]
    kinds = {
        "messages[0].role == 'tool'": {"messages": [{"role": "tool", "content": "4"}]},
        "tools": {"messages": ASK, "tools": [tool]},
        "reasoning": {"messages": ASK, "kwargs": {"reasoning": "low"}},
        "messages[0].content | length > 900000": {"messages": long},
    }
    for kind, conversation in kinds.items():
        codec = load_codec(model_dir(template=asks.replace("KIND", kind)))
        assert codec.render(ASK) == "hi"
        with pytest.raises(TemplateError, match="more than 1 GiB"):
            codec.render(**conversation)


def test_what_was_tried_is_not_tried_again(model_dir, monkeypatch):
    """Nor is a template that is known to end."""
    runs = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **given: runs.append(1) or run(*args, **given))
    plain = load_codec(model_dir(template="{{ messages[-1].content }}"))
    assert [plain.render([{"role": "user", "content": "word " * n}]) for n in range(1, 90)]
    assert len(runs) == 1
    for chat_template in (None, "chatml", "chatml-tools"):
        assert load_codec(model_dir(), chat_template=chat_template).render(ASK)
    assert len(runs) == 1


def test_a_process_that_cannot_be_started_says_nothing_against_a_template(monkeypatch):
    monkeypatch.setattr(template_trial.sys, "executable", "/bin/false")
    TemplateTrial("{{ 1 }}", "the template", {}).start()
