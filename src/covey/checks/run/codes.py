"""The codes of the run and its machine that no other part uses."""

from __future__ import annotations

from covey.codes import Code

CODES = (
    Code(
        code="E210",
        title="No optimizer step",
        why="The run would end before its first optimizer step.",
    ),
    Code(
        code="W101",
        title="More processes than cores",
        why="The processes take turns on the cores, so each step is slower, not faster.",
    ),
    Code(
        code="W107",
        title="Warm-up longer than the run",
        why="The run ends during the warm-up, so the learning rate never reaches --learning_rate.",
    ),
    Code(
        code="W124",
        title="Reference model that is not updated before the run ends",
        why="The reference model of the KL divergence should follow the policy, but the run ends "
        "before its first update. The result is the same as without the option.",
    ),
    Code(
        code="W161",
        title="Options of the stopped run unknown",
        why="A resumed run compares its options with those of the stopped run, so that samples, "
        "gradients and learning rates continue unchanged. Here nothing was compared.",
    ),
)
