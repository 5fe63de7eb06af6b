"""The codes of the rewards that no other part uses."""

from __future__ import annotations

from covey.codes import Code

CODES = (
    Code(
        code="E306",
        title="Unknown reward",
        why="A reward that does not exist cannot give scores; covey reports it before the first rollout.",
    ),
    Code(
        code="E307",
        title="Number of reward weights",
        why="Each reward has exactly one weight, in the same order.",
    ),
    Code(
        code="E308",
        title="Rewards that are always equal",
        why="If every weight is 0, every total reward and every advantage is 0, and no weight of the "
        "model changes.",
    ),
    Code(
        code="E310",
        title="Gold answers that cannot be read",
        why="A row whose gold answer cannot be read scores nothing, so the model learns nothing from it.",
    ),
    Code(
        code="E315",
        title="Reward that cannot be called",
        why="The function needs an argument that neither covey nor a column of the data provides.",
    ),
    Code(
        code="E316",
        title="Reward that failed its trial",
        why="Before weights are loaded, each reward scores two completions of a row: its gold answer "
        "and an empty one. A reward that fails here would fail in every rollout, and covey never "
        "scores a failure as 0.",
    ),
    Code(
        code="E324",
        title="Length penalty that is longer than the completion",
        why="soft_overlong decreases over the last soft_cache_length of soft_max_length tokens; it "
        "cannot start before the first token.",
    ),
    Code(
        code="E325",
        title="Length penalty that no completion reaches",
        why="With these lengths the penalty is 0 for every completion: long completions are not penalized, "
        "although the command asks for it.",
    ),
    Code(
        code="E338",
        title="Reward model without a chat template",
        why="A reward model reads conversations in the format on which it was trained. In another "
        "format its scores have no meaning, and nothing shows this.",
    ),
    Code(
        code="E339",
        title="Revisions that do not match the reward models",
        why="Each reward model needs its own revision; another commit gives another reward.",
    ),
    Code(
        code="E341",
        title="Judge question without the completion",
        why="A judge can only rate what the question shows. A name in braces that has no value would "
        "be empty in every question.",
    ),
    Code(
        code="E342",
        title="Pattern that finds no reward",
        why="The reward is the number in the one group of judge_regex; without such a group every "
        "completion would fail.",
    ),
    Code(
        code="E353",
        title="Step rewards with an option that needs one reward per completion",
        why="Each token gets the advantage of its own step. An option that uses one advantage for the "
        "whole completion would train something that neither method describes.",
    ),
    Code(
        code="E366",
        title="Gold lists that may be alternatives or parts of one answer",
        why="If the members are alternatives, each is a right answer. If they are the parts of one "
        "answer, all are needed. Read the wrong way, a list rewards wrong answers or does not "
        "reward right ones.",
    ),
    Code(
        code="W110",
        title="Format that the prompt does not ask for",
        why="The reward pays for tags such as <think> and <answer>. A model that is not told to use "
        "them rarely writes them, and the reward stays at 0.",
    ),
    Code(
        code="W116",
        title="Reward that does not see the gold answer",
        why="A reward that scores a right answer no higher than a wrong one teaches nothing or the "
        "opposite, and its curve does not show it.",
    ),
    Code(
        code="W120",
        title="Wrong answers that score as high as right ones",
        why="The reward cosine changes with the length of the answer. With these values some wrong answers "
        "score as much as some right ones, so training can make wrong answers more likely.",
    ),
    Code(
        code="W125",
        title="Reward model with a short context",
        why="A text that is longer than the reward model's context gets no score: it is counted as "
        "invalid, and more than 1 % of such texts stop the run.",
    ),
    Code(
        code="W129",
        title="Some gold lists may be parts of one answer",
        why="The lists are read as alternatives. If such a list holds the parts of one answer, a "
        "completion that gives only one part is rewarded as right.",
    ),
)
