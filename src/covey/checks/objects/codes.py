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
        why="covey trains the object itself. It must be possible to load its checkpoints as the same "
        "model, with a tokenizer, and to read its rows.",
    ),
)
