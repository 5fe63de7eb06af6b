"""Codes of what a run finds out about itself."""

from __future__ import annotations

FINDINGS: tuple[tuple[str, str, str], ...] = (
    # -- findings of a run
    (
        "F101",
        "Loss or gradient not finite",
        "A step with a NaN or an infinity in it destroys the weights and the optimizer state for good; it "
        "is not taken.",
    ),
    (
        "F102",
        "Advantages but no gradient",
        "On fresh samples a non-zero advantage gives a non-zero gradient. An exact 0 means that the loss "
        "has lost its connection to the weights.",
    ),
    (
        "F103",
        "Gradient but no weight moved",
        "With a gradient and a learning rate every optimizer step changes weights. If none changed, the "
        "optimizer holds other tensors than the model, or updates are rounded away.",
    ),
    (
        "F105",
        "Model mixes packed rows",
        "Rows that share a forward pass must not see each other. A model that does not keep them apart "
        "trains on padded rows and samples with generate instead.",
    ),
    (
        "W170",
        "Decoding without CUDA graphs",
        "A graph launches hundreds of small kernels at once. Without graphs the host launches each of them, "
        "which takes several times as long on a GPU. The tokens are the same.",
    ),
    (
        "W176",
        "More memory than forecast",
        "The forecasts of larger batches and of other layouts are too low by as much: leave more memory free "
        "than they say.",
    ),
    (
        "W175",
        "Attention without a fused kernel",
        "torch's math kernel holds all scores of a row in float32, in each layer. Long prompts then take "
        "many times the memory and time. In bfloat16, with heads of width 64 or 128, there are fused ones.",
    ),
    (
        "F107",
        "Reward failed",
        "A completion without a reward is left out of its group; a reward that fails as a whole, or on more "
        "than 1 % of the completions of ten steps, leaves too little to compare. One that gives NaN, "
        "infinity or text computes something else than was meant, and stops the run at once.",
    ),
    (
        "F108",
        "Reward that never differs",
        "Equal rewards give advantages of 0. A reward that is the same for every completion teaches nothing.",
    ),
    (
        "F109",
        "Tracker failed",
        "A tracker only gets copies; the files of the run have everything, and the run goes on.",
    ),
    (
        "F110",
        "Trained tokens that were not sampled",
        "The gradient is that of the tokens in the loss. If they are not the ones that were sampled and "
        "scored, the model learns from text that nobody judged.",
    ),
    (
        "F111",
        "Loss tokens that do not add up",
        "Every sampled token is in the loss once unless a mask is declared for it, and a step divides by "
        "their number. A token too few or too many weighs all others wrongly.",
    ),
    (
        "F112",
        "Group that is not whole",
        "An advantage is a completion's reward against the others of its prompt. Among completions of "
        "different prompts it is noise.",
    ),
    (
        "F113",
        "Impossible advantage",
        "The advantages of a group add up to 0 and have a largest possible size. Others push the model in "
        "a direction that no reward asked for.",
    ),
    (
        "F114",
        "Samples of another policy version",
        "A sampler that is not given the new weights goes on with the old ones: rewards stay as they were "
        "while the learner drifts away.",
    ),
    (
        "F115",
        "Sampler and learner disagree",
        "With the same weights and tokens both give the same probabilities. If they do not, the model is "
        "trained on samples of another distribution.",
    ),
    (
        "F116",
        "Ratio is not 1 before an update",
        "Old and current logprobs come from the same weights and the same pass, so their ratio is exactly "
        "1. Anything else clips and weighs tokens at random.",
    ),
    (
        "F117",
        "KL before the first update",
        "The reference is the model that the run starts from, so the KL to it starts at 0. Another "
        "reference pulls the policy towards another model.",
    ),
    (
        "F118",
        "Rollout with numbers that are not finite",
        "A single NaN in a logprob or an advantage makes the whole gradient NaN.",
    ),
    (
        "F119",
        "Frozen weights changed, or a moving reference did not",
        "Weights that are not trained must be the same bits at the end as at the start; an adapter is "
        "trained for the base that it was given. A reference that follows the policy changes at its syncs "
        "and only there; elsewhere the KL is to another model than the options say.",
    ),
    (
        "F120",
        "Self test failed",
        "Two ways to compute the same thing give more than rounding apart on this machine. Training on it "
        "would not be what the configuration says, and no curve would show it.",
    ),
    (
        "F121",
        "Ranks hold different weights",
        "Every rank takes the same step. Once they differ, gradients of different models are averaged.",
    ),
    (
        "F122",
        "Rollout beside the plan",
        "The plan says how many completions a rollout has and so how many steps are taken with it; another "
        "number moves the learning rate and the data order away from what was asked for.",
    ),
    (
        "F123",
        "Micro-batch without gradient",
        "Gradients of all micro-batches add up to the step's. If some of them are lost, the step is "
        "smaller than it says and learns from a part of its data.",
    ),
    (
        "F124",
        "Trained tensor without gradient",
        "A tensor that is meant to be trained and never gets a gradient stays as it was, without a word.",
    ),
    (
        "F125",
        "Siblings that repeat each other",
        "Completions of a prompt are compared with each other. Copies have the same reward and teach "
        "nothing; half of the work is wasted, or all of it.",
    ),
    (
        "F126",
        "Resume at another place of the data",
        "A resumed run goes on with the prompts that come next. Others are repeated or skipped.",
    ),
    (
        "F127",
        "Gradient that is not its rows'",
        "The gradient of a step is the sum over its completions, however they are cut and spread. A part "
        "counted twice, lost or weighed makes another batch or another learning rate than was asked for.",
    ),
    (
        "F128",
        "Weights that are not finite",
        "A model with one NaN gives NaN for every token. It is not written: the checkpoints of before stay.",
    ),
    (
        "F129",
        "Rewards of steps that the run cannot use",
        "A list gives each token the advantage of its own step, one number gives all of them the same. One "
        "reward cannot do both, and some losses and baselines need the second.",
    ),
)
