"""Describes what is unusual in the prompts that the chat template makes, or that no template makes."""

from __future__ import annotations

from covey.data.template import OWN_TEMPLATES
from covey.options.schema import Config
from covey.plan.facts import PromptFacts, TemplateFacts
from covey.plan.problem import problem, warning
from covey.texts import tr
from covey.types import Fix, Problem


def template_problems(config: Config, template: TemplateFacts, prompts: PromptFacts) -> list[Problem]:
    """Return what the facts say against the rendered prompts."""
    return [
        *_plain_prompts(config, template, prompts),
        *_prompt(config, template, prompts),
        *_prefix(config, template, prompts),
        *_unstoppable(config, template, prompts),
    ]


def _plain_prompts(config: Config, template: TemplateFacts, prompts: PromptFacts) -> list[Problem]:
    if not (prompts.are_text and template.is_there) or config.apply_chat_template:
        return []
    if config.rollout_func is not None:
        # It may apply the template itself.
        return []
    return [
        warning(
            "W109",
            "apply_chat_template",
            tr("The model has a chat template, but it is not applied."),
            tr(
                "The prompts are written out in full, as in TRL, or are questions that were meant as "
                "messages."
            ),
            Fix(text=tr("apply the chat template to each prompt"), edits={"apply_chat_template": True}),
        )
    ]


def _prompt(config: Config, template: TemplateFacts, prompts: PromptFacts) -> list[Problem]:
    if template.prompt_problem is None or prompts.are_text:
        return []
    of_chatml = "<|im_start|>" in template.answer_opening
    usual = Fix(text=tr("use the common template of this form"), edits={"chat_template": "chatml"})
    return [
        problem(
            "E323",
            "chat_template",
            tr("The chat template {prompt_problem}.", prompt_problem=template.prompt_problem),
            "",
            *([usual] if of_chatml and config.chat_template not in OWN_TEMPLATES else []),
            Fix(text=tr("use the template that the model was trained with: --chat_template FILE.jinja")),
        )
    ]


def _prefix(config: Config, template: TemplateFacts, prompts: PromptFacts) -> list[Problem]:
    prefix = template.unwritten_prefix
    if not prefix or (prompts.are_text and not config.apply_chat_template):
        return []
    return [
        warning(
            "W123",
            "chat_template",
            tr(
                "The tokenizer puts {prefix} in front of every plain text, but prompts made with "
                "{chat_template} do not begin with it.",
                prefix=prefix,
                chat_template=config.chat_template,
            ),
            tr("The template may have been written for another model."),
            Fix(text=tr("write {prefix} at the beginning of the template", prefix=prefix)),
            Fix(text=tr("if the model was trained without it, there is nothing to do")),
        )
    ]


def _unstoppable(config: Config, template: TemplateFacts, prompts: PromptFacts) -> list[Problem]:
    mark = template.unstoppable_turn
    # Prompts that are text, and are not put into the template, do not ask for its turns.
    if not mark or (prompts.are_text and not config.apply_chat_template):
        return []
    if any(word in mark for word in config.stop_words):
        return []
    stop = template.stop_tokens or "none"
    return [
        warning(
            "W118",
            "chat_template",
            tr(
                "The template ends an answer with {mark}, for which the tokenizer has no token. "
                "Completions end at: {stop}.",
                mark=mark,
                stop=stop,
            ),
            tr(
                "It is the template of another model, or chatml with a tokenizer that does not have "
                "its tokens."
            ),
            Fix(text=tr("end completions at this text"), edits={"stop_words": [*config.stop_words, mark]}),
            Fix(
                text=tr(
                    "use a template that ends an answer with one of: {stop}; --chat_template FILE", stop=stop
                )
            ),
            Fix(
                text=tr(
                    "use a model whose tokenizer has the tokens of the template, such as an instruct model"
                )
            ),
        )
    ]
