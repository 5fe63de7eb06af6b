"""Codes of what is odd about a configuration, and stops no run."""

from __future__ import annotations

WARNINGS: tuple[tuple[str, str, str], ...] = (
    (
        "W101",
        "More processes than cores",
        "The processes take turns on the cores, so each step is slower, not faster.",
    ),
    (
        "W102",
        "bfloat16 on CPU",
        "Most CPUs emulate bfloat16: it is no faster than float32 there and less exact.",
    ),
    ("W103", "Learning rate 0", "The gradient is computed and then multiplied by 0: no weight moves."),
    (
        "W104",
        "Clipping bound within the clipping range",
        "delta below 1 + epsilon_high also bounds ratios that clipping leaves alone, which the two-sided "
        "clip is not meant to do.",
    ),
    ("W105", "Prompts left out", "Prompts longer than the limit are not trained on."),
    (
        "W106",
        "Many optimizer steps per rollout",
        "The later steps train on samples of a policy that is many updates old; clipping then discards "
        "much of them.",
    ),
    ("W107", "Warm-up longer than the run", "The learning rate never reaches the value that was asked for."),
    (
        "W108",
        "Option without effect",
        "What the option says is done anyway, or has nothing to act on here.",
    ),
    (
        "W109",
        "Prompts past the chat template",
        "The column prompt holds text, which goes to the model as it is. A model trained on chats expects "
        "its template around it.",
    ),
    (
        "W110",
        "Format that nobody asked for",
        "The reward format pays for <think> and <answer>. A model that is never told of them writes them by "
        "chance, and the reward stays 0.",
    ),
    (
        "W140",
        "Columns of bytes",
        "Columns are sent to rewards and recorded as JSON, which has no bytes.",
    ),
    (
        "W141",
        "Columns that the prompt has no place for",
        "A system message or tools reach the model through the chat template, and a prompt string has none.",
    ),
    ("W111", "Rows left out", "A row that cannot be used is not trained on; the others are."),
    (
        "W112",
        "Small learning rate for a small model",
        "Rates for models of billions of parameters move one of a few million too little to see.",
    ),
    (
        "W113",
        "Defaults of ms-swift",
        "The two commands have other defaults: `covey train` has covey's, `covey rlhf` those of ms-swift "
        "that decide the result.",
    ),
    (
        "W114",
        "Memory may be too small",
        "The forecast is an estimate, so the run starts. If it is right, the run may be ended in the middle "
        "of a step.",
    ),
    (
        "W115",
        "Library that nobody tried",
        "The tests have not run with so old a version of the library; names and defaults change between "
        "versions.",
    ),
    (
        "W117",
        "DeepSpeed setting left out of the forecast",
        "It changes what a GPU or the machine's memory holds, and the forecast counts without it.",
    ),
    (
        "W118",
        "End of a turn that is no token",
        "A completion ends at a token. A mark that is spelled out in several is never seen, so a model that "
        "learns to write it goes on behind it up to the longest length.",
    ),
    (
        "W119",
        "ZeRO-2 in the place of ZeRO-1",
        "DeepSpeed's ZeRO-1 optimizer for bfloat16 uses its own copy of the gradients and ignores the "
        "clipped ones. ZeRO-2 takes less memory, sends as much and gives the right results.",
    ),
    (
        "W122",
        "Unusual pair of options",
        "The two are from different recipes. What they do together is well defined, and what their authors "
        "did not test.",
    ),
    (
        "W126",
        "DeepSpeed settings without effect",
        "covey sums, checks and clips the gradients of a step itself, and has its own optimizer, data order, "
        "checkpoints and logs.",
    ),
    (
        "W124",
        "Reference that moves after the run",
        "The reference of the KL divergence is to follow the policy, and the run ends before it has moved: "
        "it is the run without that option.",
    ),
)
