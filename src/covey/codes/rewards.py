"""Codes of what is wrong with rewards: of length, steps, code; models and judges; those that see nothing."""

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
    (
        "E324",
        "Penalty for length that is longer than the length",
        "soft_overlong falls over the last soft_cache_length of soft_max_length tokens; it cannot begin "
        "before the first.",
    ),
    (
        "E325",
        "Penalty for length that no completion reaches",
        "A reward that is 0 whatever the model writes teaches nothing; long completions would cost nothing "
        "although somebody asked for it.",
    ),
    (
        "E328",
        "Programs that nothing shuts off",
        "A model may write anything, and its program would run with your rights: it could read your keys, "
        "send your data away or end the run.",
    ),
    (
        "E329",
        "Tests that cannot be run",
        "A program is scored by the tests of its row. A row without tests that can be run scores nothing, so "
        "the model learns nothing from it.",
    ),
    (
        "E353",
        "Rewards of steps beside a part that needs one per completion",
        "Each token gets the advantage of its own step. What takes the advantage of a completion as a whole "
        "would learn something that neither recipe says.",
    ),
    (
        "W116",
        "Reward that does not see the gold answer",
        "A reward that scores a right answer no higher than a wrong one teaches nothing, or the opposite, "
        "and its curve does not say so.",
    ),
    (
        "W120",
        "Wrong answers that score as much as right ones",
        "With cosine the length decides beside the answer. Where the best wrong answer scores no less than "
        "the worst right one, some groups push the model towards wrong answers.",
    ),
    (
        "W121",
        "Programs that run unprotected",
        "Programs that a model wrote run with rights on this machine, by your word. Whatever they can reach "
        "may be read, changed or sent away.",
    ),
)
