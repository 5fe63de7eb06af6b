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
    (
        "E312",
        "Images, audio or video",
        "Models that take text only are trained on text, and no model on audio or video. Without the media "
        "the model would be trained on another task.",
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
        "E321",
        "Files that a hub does not provide",
        "Without the files there is no model to train or no data to train on.",
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
        "E367",
        "Image that cannot be used",
        "The model would be asked about an image that it does not see.",
    ),
    (
        "E368",
        "Token of an image in a text",
        "The model would be given the features of an image in its place, or those of another one.",
    ),
    (
        "E369",
        "Images that the chat template leaves out",
        "The model would be asked about an image that it does not see.",
    ),
    (
        "E364",
        "Tools that cannot be read",
        "The chat template needs the tools as a list of functions with names. Where the run has tools, a row "
        "can only name some of them.",
    ),
    (
        "E365",
        "Beginning of an answer that cannot be continued",
        "A prompt that ends with a message of the assistant asks the model to continue it. The chat template "
        "has to write this message unchanged.",
    ),
    (
        "E337",
        "Reward model that cannot give a reward",
        "The reward is the single logit of a sequence classifier. A head that was never trained gives "
        "numbers too, and the policy would learn from them.",
    ),
    (
        "E340",
        "Judge that cannot be used",
        "The reward judge sends a request to a service for each completion. It needs the service's "
        "address, a model and a question.",
    ),
    (
        "E348",
        "Pass rates that are not available",
        "Filtering and ordering by pass rate need measured pass rates before the run starts.",
    ),
)
