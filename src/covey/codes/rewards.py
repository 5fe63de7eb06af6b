"""Codes of what is wrong with rewards: of length, steps, code; models and judges; those that see nothing."""

from __future__ import annotations

REWARDS: tuple[tuple[str, str, str], ...] = (
    (
        "E337",
        "Reward model that cannot give a reward",
        "The reward is the single logit of a sequence classifier. A head that was never trained gives "
        "numbers too, and the policy would learn from them.",
    ),
    (
        "E338",
        "Reward model without a chat template",
        "A reward model reads conversations in the format on which it was trained. In another format its "
        "scores have no meaning, and nothing shows this.",
    ),
    (
        "E339",
        "Revisions that do not match the reward models",
        "Each reward model needs its own revision; another commit gives another reward.",
    ),
    (
        "E340",
        "Judge that cannot be used",
        "The reward judge sends a request to a service for each completion. It needs the service's "
        "address, a model and a question.",
    ),
    (
        "E341",
        "Judge question without the completion",
        "A judge can only rate what the question shows. A name in braces that has no value would be empty "
        "in every question.",
    ),
    (
        "E342",
        "Pattern that finds no reward",
        "The reward is the number in the one group of judge_regex; without such a group every completion "
        "would fail.",
    ),
    (
        "W125",
        "Reward model with a short context",
        "A text that is longer than the reward model's context gets no score: it is counted as invalid, "
        "and more than 1 % of such texts stop the run.",
    ),
    (
        "E324",
        "Length penalty that is longer than the completion",
        "soft_overlong decreases over the last soft_cache_length of soft_max_length tokens; it cannot "
        "start before the first token.",
    ),
    (
        "E325",
        "Length penalty that no completion reaches",
        "A reward that is always 0 teaches nothing; long completions would not be penalized, although the "
        "command asks for it.",
    ),
    (
        "E328",
        "Model-written programs without a sandbox",
        "A model may write any program, and the program would run with your permissions: it could read "
        "your keys, send your data to others or end the run.",
    ),
    (
        "E329",
        "Tests that cannot be run",
        "A program is scored by the tests of its row. A row without usable tests gives no score, so the "
        "model learns nothing from it.",
    ),
    (
        "E353",
        "Step rewards with an option that needs one reward per completion",
        "Each token gets the advantage of its own step. An option that uses one advantage for the whole "
        "completion would train something that neither method describes.",
    ),
    (
        "W116",
        "Reward that does not see the gold answer",
        "A reward that scores a right answer no higher than a wrong one teaches nothing or the opposite, "
        "and its curve does not show it.",
    ),
    (
        "W120",
        "Wrong answers that score as high as right ones",
        "With cosine, the score depends on the length as well as on the answer. If the best wrong answer "
        "scores no less than the worst right one, some groups move the model towards wrong answers.",
    ),
    (
        "W121",
        "Programs that run without isolation",
        "As you allowed, programs that a model wrote run with permissions on this machine. They may read, "
        "change or send away whatever they can reach.",
    ),
)
