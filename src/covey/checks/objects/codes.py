"""The codes of the live objects of a program that no other part uses."""

from __future__ import annotations

from covey.codes import Code

CODES = (
    Code(
        code="E376",
        title="The run used a Python object that the command does not have",
        why="The model or the rows were an object of a Python program. config.yaml contains only its "
        "name and checksum, so only a program can provide it.",
    ),
    Code(
        code="E377",
        title="Object that cannot be used",
        why="covey trains the model that the program gives. Its checkpoints must load again as the same "
        "model with its tokenizer, and covey must be able to read the rows of the data.",
    ),
)
