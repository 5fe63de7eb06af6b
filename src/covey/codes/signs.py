"""Codes of the rules over a run's records, and of hangs."""

from __future__ import annotations

SIGNS: tuple[tuple[str, str, str], ...] = (
    (
        "F201",
        "Entropy collapsed",
        "A model that is sure of every token samples the same completion again and again; groups then have "
        "no spread to learn from.",
    ),
    (
        "F202",
        "Entropy surged",
        "The model forgets what it could: its completions turn into noise, and rewards follow.",
    ),
    (
        "F203",
        "Completions grow without gain",
        "Longer completions cost time and memory and end up cut; the reward shows no use of them.",
    ),
    (
        "F204",
        "Completions shrink",
        "Short completions that keep the form lose the content that the form was for.",
    ),
    (
        "F205",
        "More and more completions are cut",
        "A cut completion has no answer, so it is scored as wrong, and the run learns from its limit instead "
        "of the task.",
    ),
    (
        "F206",
        "Completions repeat themselves",
        "Repetition is what a model writes that is broken, or not the one in training.",
    ),
    (
        "F207",
        "One reward rises, another falls",
        "The total may rise while the run gets worse at what is wanted.",
    ),
    (
        "F208",
        "Held-out reward falls",
        "What rises on the training prompts alone is not what the model is trained for.",
    ),
    (
        "F209",
        "KL grows without bound",
        "The model leaves the one that it started from so fast that the samples no longer fit it.",
    ),
    (
        "F210",
        "Gradient far above its median",
        "Clipping keeps such steps small, but their direction is that of a few completions, often bad ones.",
    ),
    (
        "F211",
        "No group carries signal",
        "Where all completions of a prompt have one reward, their advantages are 0 and nothing is learned.",
    ),
    (
        "F212",
        "Few groups carry signal",
        "Only groups with different rewards teach anything; the others cost as much.",
    ),
    ("F213", "Learning rate next to 0", "The gradient is computed, and the weights stay where they are."),
    (
        "F214",
        "Memory grows",
        "A run that needs more memory at every step ends in the middle of one.",
    ),
    (
        "F215",
        "Reward does not rise",
        "The run still costs time, and its last model is no better than one of before.",
    ),
    (
        "F216",
        "Rewards differ and the gradient is 0",
        "Different rewards within a group give advantages, and those a gradient. An exact 0 means that "
        "nothing reaches the weights, while loss and reward look as usual.",
    ),
    (
        "F217",
        "KL stays exactly 0",
        "A model that is trained moves away from the one that it started from. An exact 0 means that it is "
        "still the same.",
    ),
    (
        "F218",
        "Not a number in the log",
        "A NaN in weights or optimizer state stays there; what is logged after it means nothing.",
    ),
    (
        "F219",
        "No completion ends by itself",
        "A completion that runs into the limit has no end to learn, and mostly no answer to score.",
    ),
    (
        "F220",
        "Groups without signal stay in the batch",
        "Completions were sampled in vain, and the step learns from fewer prompts than planned.",
    ),
    (
        "F221",
        "The model broke down",
        "The reward is far below where it was, and the completions have become something else. Weights that "
        "have gone this far rarely come back, whatever the later steps do.",
    ),
    (
        "F222",
        "Reward far below its start",
        "The newest model is worse than an earlier one, so going on costs time and makes it no better.",
    ),
    (
        "F223",
        "The reward pays for length",
        "The model learns to write more or less instead of better, and the reward rises all the same.",
    ),
    (
        "F224",
        "One completion for every prompt",
        "The model has stopped reading its prompts; nothing about the task can be learned from such "
        "completions.",
    ),
    (
        "F225",
        "Engine and learner are far apart",
        "Tokens were drawn from another distribution than the one whose gradient is taken. Weights correct "
        "for it, and then a few tokens count for all others; without them the gradient is biased.",
    ),
)

HANGS: tuple[tuple[str, str, str], ...] = (
    (
        "F301",
        "No progress",
        "The run would stand still until somebody looks, and hold its devices until then. The stacks of all "
        "processes are written, and the run ends.",
    ),
    (
        "F302",
        "Ranks about to do different things",
        "Each would wait for the others in a collective that never ends, or they would add up what does not "
        "belong together.",
    ),
    (
        "F303",
        "No run to look at",
        "Only a process that trains says where it is, and only to the user whose process it is.",
    ),
)
