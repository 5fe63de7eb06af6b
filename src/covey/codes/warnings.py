"""Codes of what is odd about a configuration, and stops no run."""

from __future__ import annotations

WARNINGS: tuple[tuple[str, str, str], ...] = (
    ("W103", "Learning rate 0", "The gradient is computed and then multiplied by 0: no weight moves."),
    (
        "W108",
        "Option without effect",
        "The option asks for what covey does anyway, or nothing in this run uses it.",
    ),
    ("W111", "Rows left out", "Rows that cannot be used are not trained on; the other rows are."),
    (
        "W113",
        "Defaults of ms-swift",
        "The two commands have different defaults: `covey train` has covey's, and `covey rlhf` has those "
        "of ms-swift where they affect the result.",
    ),
    (
        "W114",
        "Memory may be too small",
        "The forecast is an estimate, so the run starts. If it is right, the run may end in the middle of "
        "a step.",
    ),
    (
        "W115",
        "Untested library version",
        "The tests have not been run with so old a version of the library; names and defaults change "
        "between versions.",
    ),
    (
        "W117",
        "DeepSpeed setting that the forecast ignores",
        "The setting changes what is stored in GPU or CPU memory, but the forecast does not include it.",
    ),
    (
        "W119",
        "ZeRO-2 is used instead of ZeRO-1",
        "DeepSpeed's ZeRO-1 optimizer for bfloat16 keeps its own copy of the gradients and ignores "
        "clipping. ZeRO-2 uses less memory, communicates the same amount and gives correct results.",
    ),
    (
        "W126",
        "DeepSpeed settings without effect",
        "covey itself sums, checks and clips the gradients of a step, and has its own optimizer, data "
        "order, checkpoints and logs.",
    ),
)
