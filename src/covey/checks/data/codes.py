"""The codes of the data that no other part uses."""

from __future__ import annotations

from covey.codes import Code

CODES = (
    Code(
        code="E303",
        title="Column missing",
        why="A prompt or a reward needs a column that the data set does not have.",
    ),
    Code(
        code="E304",
        title="No prompt short enough",
        why="Every prompt is longer than the limit and would be left out, so there is nothing to "
        "sample from.",
    ),
    Code(
        code="E305",
        title="Context too short",
        why="Prompt and completion together must fit into the model's context; beyond it positions "
        "are undefined and the text becomes noise.",
    ),
    Code(
        code="E309",
        title="No usable row",
        why="The data set has no row with a usable prompt, so there is nothing to sample from.",
    ),
    Code(
        code="E363",
        title="Preference pairs",
        why="GRPO samples its own answers and scores them; it cannot use pairs of a better and a "
        "worse answer.",
    ),
    Code(
        code="W105",
        title="Prompts left out",
        why="Prompts longer than the limit are not trained on.",
    ),
    Code(
        code="W140",
        title="Columns of bytes",
        why="Rewards get columns as JSON, which has no bytes, so no reward is given these columns.",
    ),
    Code(
        code="W141",
        title="Columns that a text prompt cannot use",
        why="System messages and tools reach the model through the chat template, but a text prompt "
        "does not use one.",
    ),
)
