"""Codes of what is wrong with the model, the data or the rewards of a run."""

from __future__ import annotations

INPUTS: tuple[tuple[str, str, str], ...] = (
    (
        "E301",
        "Model that cannot be read",
        "Without weights, a configuration and a tokenizer there is nothing to train.",
    ),
    ("E302", "Data file not found or not readable", "A run on part of its data is another run."),
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
        "undefined and the text turns to noise.",
    ),
    (
        "E306",
        "Unknown reward",
        "A reward that does not exist cannot score; better now than after the first rollout.",
    ),
    ("E307", "Number of reward weights", "Each reward has exactly one weight, in the same order."),
    (
        "E308",
        "Rewards that cannot differ",
        "If every weight is 0 every total is 0, every advantage is 0 and no weight of the model moves.",
    ),
    ("E309", "No usable row", "The data set has no row with a prompt, so there is nothing to sample from."),
    (
        "E310",
        "Gold answers that cannot be read",
        "A row whose gold answer cannot be read scores nothing, so the model learns nothing from it.",
    ),
    (
        "E311",
        "Model that is no causal language model",
        "GRPO samples text token by token and trains on it; other kinds of model have no such head.",
    ),
    (
        "E312",
        "Images, audio or video",
        "This version trains on text. Leaving the other half of the input out would train another task.",
    ),
    (
        "E313",
        "Chat template",
        "Messages become tokens through a template; without the right one the model reads another language.",
    ),
    (
        "E314",
        "Reward that cannot be loaded",
        "A reward that is not there cannot score; better now than after the first rollout.",
    ),
    (
        "E315",
        "Reward that cannot be called",
        "The function asks for an argument that neither covey nor a column of the data gives.",
    ),
    (
        "E316",
        "Reward that failed its trial",
        "Before weights are loaded each reward scores two rows, one with the gold answer and one empty. "
        "What fails there fails in every rollout, and nothing is ever scored 0 for it.",
    ),
    (
        "E317",
        "Adapter target that matches nothing",
        "A target that is ignored leaves that part of the model untrained without a word.",
    ),
    (
        "E318",
        "Code that comes with a model",
        "The model brings Python code of its own, which would run with all of your rights.",
    ),
    (
        "E319",
        "Data type that the device lacks",
        "The forward pass would fail, or be emulated at a tenth of the speed.",
    ),
    (
        "E320",
        "Weights that are not safetensors",
        "Other formats of weights can run code when they are read.",
    ),
    (
        "E321",
        "Hub that does not give the files",
        "Without its files there is nothing to train, or nothing to train on.",
    ),
    (
        "E323",
        "Chat template that begins prompts otherwise",
        "The model answers where it was taught to: after the words that open its turn, in a text with one "
        "token at its start. After another beginning it writes on for the user, or opens the turn itself, "
        "and the run trains that.",
    ),
    (
        "E360",
        "Message that the chat template leaves out",
        "The model would be trained on prompts that lack a part of the data, and nothing would show it.",
    ),
    (
        "E361",
        "Tools that the chat template leaves out",
        "The model would be asked to use tools that it is never told of.",
    ),
    (
        "E362",
        "Unknown role of a message",
        "A turn of the assistant under another name would stand in the prompt, and with it the answer.",
    ),
    (
        "E363",
        "Preference pairs",
        "GRPO samples its own answers and scores them; a better and a worse answer give it no score.",
    ),
    (
        "E364",
        "Tools that cannot be read",
        "The chat template is given tools as a list of functions with names.",
    ),
)
