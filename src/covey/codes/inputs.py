"""Codes of what is wrong with the model, the data or the rewards of a run."""

from __future__ import annotations

INPUTS: tuple[tuple[str, str, str], ...] = (
    (
        "E301",
        "Model that cannot be read",
        "Without weights, a configuration and a tokenizer no model can be loaded.",
    ),
    (
        "E302",
        "Data file not found or not readable",
        "covey uses all of the data that you name, or stops: with other or less data the result would not "
        "be the one that you asked for.",
    ),
    ("E303", "Column missing", "A prompt or a reward needs a column that the data set does not have."),
    (
        "E304",
        "No prompt short enough",
        "Every prompt is longer than the limit and would be left out, so there is nothing to sample from.",
    ),
    (
        "E305",
        "Context too short",
        "Prompt and completion together must fit into the model's context; beyond it positions are "
        "undefined and the text becomes noise.",
    ),
    (
        "E306",
        "Unknown reward",
        "A reward that does not exist cannot give scores; covey reports it before the first rollout.",
    ),
    ("E307", "Number of reward weights", "Each reward has exactly one weight, in the same order."),
    (
        "E308",
        "Rewards that are always equal",
        "If every weight is 0, every total reward and every advantage is 0, and no weight of the model "
        "changes.",
    ),
    (
        "E309",
        "No usable row",
        "The data set has no row with a usable prompt, so there is nothing to sample from.",
    ),
    (
        "E310",
        "Gold answers that cannot be read",
        "A row whose gold answer cannot be read scores nothing, so the model learns nothing from it.",
    ),
    (
        "E311",
        "Not a causal language model",
        "covey trains decoder-only language models of transformers, which generate text token by token.",
    ),
    (
        "E312",
        "Images, audio or video",
        "This version trains on text only. Without the images, audio or video the model would be trained "
        "on another task.",
    ),
    (
        "E313",
        "Chat template",
        "A template turns messages into tokens; with a wrong one the model reads a format that it was not "
        "trained on.",
    ),
    (
        "E314",
        "Reward that cannot be loaded",
        "A reward that cannot be loaded cannot give scores; covey reports it before the first rollout.",
    ),
    (
        "E315",
        "Reward that cannot be called",
        "The function needs an argument that neither covey nor a column of the data provides.",
    ),
    (
        "E316",
        "Reward that failed its trial",
        "Before weights are loaded, each reward scores two completions of a row: its gold answer and an "
        "empty one. A reward that fails here would fail in every rollout, and covey never scores a failure "
        "as 0.",
    ),
    (
        "E317",
        "Adapter target that matches nothing",
        "If the target were ignored, that part of the model would not be trained, and no message would "
        "say so.",
    ),
    (
        "E318",
        "Code that comes with a model",
        "The model comes with its own Python code, which would run with all of your permissions.",
    ),
    (
        "E319",
        "Data type that the device does not support",
        "The forward pass would fail or be emulated at about a tenth of the speed, or gradients would be "
        "rounded to 0.",
    ),
    (
        "E320",
        "Weights that are not safetensors",
        "Other weight formats can execute code when they are loaded.",
    ),
    (
        "E321",
        "Files that a hub does not provide",
        "Without the files there is no model to train or no data to train on.",
    ),
    (
        "E323",
        "Prompt that starts or ends differently than in training",
        "The prompt must end with the assistant header and start with exactly one BOS token, as in the "
        "model's training. Otherwise the model continues the user's message or writes the header itself, "
        "and the run trains that.",
    ),
    (
        "E360",
        "Message that the chat template leaves out",
        "The model would be trained on prompts that lack part of the data, and nothing would show this.",
    ),
    (
        "E361",
        "Tools that the chat template leaves out",
        "The model would be asked to use tools that the prompt does not describe.",
    ),
    (
        "E362",
        "Unknown role in a message",
        "An assistant turn with an unknown role name would be kept in the prompt, which would give away "
        "the answer.",
    ),
    (
        "E363",
        "Preference pairs",
        "GRPO samples its own answers and scores them; it cannot use pairs of a better and a worse answer.",
    ),
    (
        "E364",
        "Tools that cannot be read",
        "The chat template needs the tools as a list of functions with names.",
    ),
    (
        "E365",
        "Beginning of an answer that cannot be continued",
        "A prompt that ends with a message of the assistant asks the model to continue it. The chat template "
        "has to write this message unchanged.",
    ),
    (
        "E366",
        "Gold lists that may be alternatives or parts of one answer",
        "If the members are alternatives, each is a right answer. If they are the parts of one answer, "
        "all are needed. Read the wrong way, a list rewards wrong answers or does not reward right ones.",
    ),
)
