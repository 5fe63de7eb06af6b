"""Codes of what is wrong with rewards that are models, or a judge behind a service."""

from __future__ import annotations

REWARDS: tuple[tuple[str, str, str], ...] = (
    (
        "E337",
        "Reward model that gives no reward",
        "The reward is the one logit of a sequence classifier. A head that was never trained gives numbers "
        "too, and the policy would learn them.",
    ),
    (
        "E338",
        "Reward model without a chat template",
        "A reward model reads a conversation in the form it was trained on. In another form its scores mean "
        "nothing, and nothing shows it.",
    ),
    (
        "E339",
        "Revisions that do not fit the reward models",
        "Each reward model has a revision of its own; another commit is another reward.",
    ),
    (
        "E340",
        "Judge that cannot be asked",
        "The reward judge asks a service for each completion. Without its address, its model and its "
        "question there is no reward.",
    ),
    (
        "E341",
        "Question to a judge that leaves out the answer",
        "A judge rates what it is shown. A name that nothing has a value for would be empty in every "
        "question.",
    ),
    (
        "E342",
        "Pattern that finds no reward",
        "The reward is the number in the one group of judge_regex; without it every completion would fail.",
    ),
    (
        "W125",
        "Reward model with a short context",
        "A text that is longer than the reward model's context gets no score: it is invalid and counted, and "
        "more than 1 % of them stop the run.",
    ),
)
