"""Codes of the rules over a run's records, and of hangs."""

from __future__ import annotations

SIGNS: tuple[tuple[str, str, str], ...] = (
    (
        "F201",
        "Entropy collapsed",
        "A model that is certain of every token samples the same completion again and again; the rewards "
        "of a group then do not differ, and there is nothing to learn from.",
    ),
    (
        "F202",
        "Entropy rose sharply",
        "The model loses abilities: its completions become noise, and rewards drop as a result.",
    ),
    (
        "F203",
        "Completions grow without benefit",
        "Longer completions need time and memory and are cut in the end; the reward shows no benefit of "
        "the length.",
    ),
    (
        "F204",
        "Completions become shorter",
        "Short completions that keep the format lose the content.",
    ),
    (
        "F205",
        "More and more completions are cut",
        "A cut completion has no answer, so it is scored as wrong, and the model learns about the length "
        "limit instead of the task.",
    ),
    (
        "F206",
        "Completions repeat themselves",
        "Repetition is a sign that the model is broken, or that the engine does not sample from the model "
        "in training.",
    ),
    (
        "F207",
        "One reward rises, another falls",
        "The total reward may rise although the run gets worse at what matters.",
    ),
    (
        "F208",
        "Held-out reward falls",
        "A gain on the training prompts alone is not the purpose of the training.",
    ),
    (
        "F209",
        "KL grows without limit",
        "The model moves away from its starting point so fast that the samples no longer match it.",
    ),
    (
        "F210",
        "Gradient far above its median",
        "Clipping limits the size of such steps, but their direction comes from a few completions, often "
        "bad ones.",
    ),
    (
        "F211",
        "No group has a signal",
        "If all completions of a prompt have the same reward, their advantages are 0 and the model learns "
        "nothing.",
    ),
    (
        "F212",
        "Few groups have a signal",
        "Only groups with different rewards teach the model something; the others cost the same.",
    ),
    ("F213", "Learning rate close to 0", "The gradient is computed, but the weights do not change."),
    (
        "F214",
        "Memory grows",
        "A run that needs more memory at every step will fail in the middle of a step.",
    ),
    (
        "F215",
        "Reward does not rise",
        "The run still takes time, but its last model is no better than an earlier one.",
    ),
    (
        "F216",
        "Rewards differ and the gradient is 0",
        "Different rewards within a group give advantages, and these give a gradient. A gradient of "
        "exactly 0 means that nothing reaches the weights, although loss and reward look normal.",
    ),
    (
        "F217",
        "KL stays exactly 0",
        "A model in training moves away from its starting point. A KL divergence of exactly 0 means that "
        "it has not changed.",
    ),
    (
        "F218",
        "NaN in the log",
        "A NaN in weights or optimizer state stays there; everything logged after it has no meaning.",
    ),
    (
        "F219",
        "No completion ends before the limit",
        "A completion that reaches the limit has no end to learn from and usually no answer to score.",
    ),
    (
        "F220",
        "Groups without signal stay in the batch",
        "The completions of these groups were sampled in vain, and the step learns from fewer prompts "
        "than planned.",
    ),
    (
        "F221",
        "The model broke down",
        "The reward is far below its earlier level, and the completions have changed completely. Weights "
        "that have changed this much rarely recover, whatever the later steps do.",
    ),
    (
        "F222",
        "Reward far below its initial value",
        "The newest model is worse than an earlier one, so continuing costs time and does not make it "
        "better.",
    ),
    (
        "F223",
        "The reward depends on the length",
        "The model learns to write more or less text instead of better text, and the reward rises "
        "nevertheless.",
    ),
    (
        "F224",
        "The same completion for every prompt",
        "The model no longer reads its prompts; it cannot learn the task from such completions.",
    ),
    (
        "F225",
        "Probabilities of engine and learner differ too much",
        "The tokens were sampled from another distribution than the one whose gradient is computed. "
        "Importance weights correct for this, but then a few tokens dominate all others; without weights "
        "the gradient is biased.",
    ),
    (
        "F226",
        "Right answers were never rewarded",
        "Until a completion earns this reward, the model cannot learn what it is for, whatever the other "
        "rewards do.",
    ),
    (
        "F227",
        "A reward is the same for every completion",
        "A reward that never differs has no effect on the advantages: the model trains as if it were not "
        "there.",
    ),
    (
        "F228",
        "Completions without a reward",
        "They are left out of their groups. The time spent on sampling them is lost, and the step learns "
        "from fewer completions than planned.",
    ),
    (
        "F229",
        "The model collapsed",
        "A model that is certain of every token samples the same completion again and again. A model "
        "that has changed this much rarely recovers in later steps.",
    ),
    (
        "F233",
        "Ids that the tokenizer does not have",
        "Such an id has a row in the embedding but no token; most often the row is padding of the "
        "vocabulary. It decodes to no text, so neither the rewards nor the users of the model see it.",
    ),
)

HANGS: tuple[tuple[str, str, str], ...] = (
    (
        "F301",
        "No progress",
        "The run would hang and keep its devices until somebody ends it. covey writes the stacks of all "
        "processes and ends the run.",
    ),
    (
        "F302",
        "Ranks that are about to do different things",
        "Each rank would wait for the others in a collective operation that never ends, or they would add "
        "up values that do not belong together.",
    ),
    (
        "F303",
        "No running process found",
        "Only a process that is training reports its state, and only to the user who owns the process.",
    ),
)
