"""The codes of programs of completions that no other part uses."""

from __future__ import annotations

from covey.codes import Code

CODES = (
    Code(
        code="E328",
        title="Model-written programs without a sandbox",
        why="A model may write any program, and the program would run with your permissions: it could "
        "read your keys, send your data to others or end the run.",
    ),
    Code(
        code="E329",
        title="Tests that cannot be run",
        why="A program is scored by the tests of its row. A row without usable tests gives no score, "
        "so the model learns nothing from it.",
    ),
    Code(
        code="W121",
        title="Programs that run without isolation",
        why="As you allowed, programs that a model wrote run with permissions on this machine. They "
        "may read, change or send away whatever they can reach.",
    ),
)
