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
        "Bound of the ratio within the clipping range",
        "If delta is below 1 + epsilon_high, it also limits ratios inside the clipping range, which "
        "two-sided clipping is not meant to do.",
    ),
    ("W105", "Prompts left out", "Prompts longer than the limit are not trained on."),
    (
        "W106",
        "Many optimizer steps per rollout",
        "The later steps train on samples from a policy that is many updates old; clipping then discards "
        "many of them.",
    ),
    ("W107", "Warm-up longer than the run", "The learning rate never reaches the given value."),
    (
        "W108",
        "Option without effect",
        "The option asks for what covey does anyway, or nothing in this run uses it.",
    ),
    (
        "W109",
        "Prompts without the chat template",
        "The prompt column contains text, which is passed to the model unchanged. A model trained on "
        "chats expects its chat template.",
    ),
    (
        "W110",
        "Format that the prompt does not ask for",
        "The reward pays for tags such as <think> and <answer>. A model that is not told to use them "
        "rarely writes them, and the reward stays at 0.",
    ),
    (
        "W140",
        "Columns of bytes",
        "Columns are passed to rewards and recorded as JSON, which cannot represent bytes.",
    ),
    (
        "W141",
        "Columns that a text prompt cannot use",
        "System messages and tools reach the model through the chat template, but a text prompt does not "
        "use one.",
    ),
    ("W111", "Rows left out", "Rows that cannot be used are not trained on; the other rows are."),
    (
        "W112",
        "Small learning rate for a small model",
        "Learning rates for models of billions of parameters change a model of a few million parameters "
        "too little to see an effect.",
    ),
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
        "W118",
        "End of a turn that is not a single token",
        "A completion ends at an end token. An end mark that consists of several tokens is not "
        "recognized, so a model that writes it continues up to the maximum length.",
    ),
    (
        "W119",
        "ZeRO-2 is used instead of ZeRO-1",
        "DeepSpeed's ZeRO-1 optimizer for bfloat16 keeps its own copy of the gradients and ignores "
        "clipping. ZeRO-2 uses less memory, communicates the same amount and gives correct results.",
    ),
    (
        "W122",
        "Unusual pair of options",
        "The two options come from different methods. Their combination is well defined, but the authors "
        "did not test it.",
    ),
    (
        "W123",
        "Chat template that does not write the BOS token",
        "Many models were trained with a BOS token in front of every text, and write worse without it. "
        "covey adds no token to what a chat template writes, so the template has to write it.",
    ),
    (
        "W126",
        "DeepSpeed settings without effect",
        "covey itself sums, checks and clips the gradients of a step, and has its own optimizer, data "
        "order, checkpoints and logs.",
    ),
    (
        "W124",
        "Reference model that is not updated before the run ends",
        "The reference model of the KL divergence should follow the policy, but the run ends before its "
        "first update. The result is the same as without the option.",
    ),
)
