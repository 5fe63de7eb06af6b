"""Codes of what a run finds out about itself."""

from __future__ import annotations

FINDINGS: tuple[tuple[str, str, str], ...] = (
    # -- findings of a run
    (
        "F101",
        "Loss or gradient not finite",
        "A step with NaN or infinity destroys the weights and the optimizer state permanently, so it is "
        "not taken.",
    ),
    (
        "F102",
        "Advantages but no gradient",
        "On fresh samples, a non-zero advantage gives a non-zero gradient. A gradient of exactly 0 means "
        "that the loss is no longer connected to the weights.",
    ),
    (
        "F103",
        "Gradient but no weight changed",
        "With a gradient and a learning rate, every optimizer step changes weights. If none changed, the "
        "optimizer holds other tensors than the model, or rounding removes the updates.",
    ),
    (
        "F105",
        "Model mixes packed rows",
        "Rows that share a forward pass must not influence each other. A model that does not keep them "
        "apart, or whose tokens of an image see each other (Gemma 3), is trained on padded rows and samples "
        "with generate instead.",
    ),
    (
        "W170",
        "Decoding without CUDA graphs",
        "A CUDA graph launches hundreds of small kernels at once. Without graphs the CPU launches each of "
        "them, which takes several times as long on a GPU. The sampled tokens are the same.",
    ),
    (
        "W176",
        "More memory used than forecast",
        "The forecasts for larger batches and other layouts are too low by a similar amount: leave more "
        "memory free than they suggest.",
    ),
    (
        "W175",
        "Attention without a fused kernel",
        "torch's math kernel stores all attention scores of a row in float32, in each layer. Long prompts "
        "then need many times the memory and time. Fused kernels exist for bfloat16 with a head width of "
        "64 or 128.",
    ),
    (
        "F107",
        "Reward failed",
        "A completion without a reward is left out of its group. A reward that fails completely, or on "
        "more than 1 % of the completions of ten steps, leaves too little to compare. A reward that "
        "returns NaN, infinity or text does not compute what was intended and stops the run at once.",
    ),
    (
        "F108",
        "Reward that is always the same",
        "Equal rewards give advantages of 0. A reward that is the same for every completion teaches nothing.",
    ),
    (
        "F109",
        "Tracker failed",
        "A tracker gets only copies; the files of the run contain everything, and the run continues.",
    ),
    (
        "F110",
        "Trained tokens that were not sampled",
        "The gradient comes from the tokens in the loss. If they are not the tokens that were sampled and "
        "scored, the model learns from text that no reward has judged.",
    ),
    (
        "F111",
        "Wrong number of tokens in the loss",
        "Every sampled token is in the loss once, unless a mask excludes it, and a step divides by the "
        "number of tokens. One token too few or too many changes the weight of all others.",
    ),
    (
        "F112",
        "Incomplete group",
        "An advantage compares the reward of a completion with those of the other completions of the same "
        "prompt. Among completions of different prompts it is only noise.",
    ),
    (
        "F113",
        "Impossible advantage",
        "The advantages of a group sum to 0, and their size has an upper bound. Other advantages change "
        "the model in a direction that no reward asks for.",
    ),
    (
        "F114",
        "Samples of another policy version",
        "A sampler that does not receive new weights keeps using the old ones: rewards stay the same "
        "while the learner moves away.",
    ),
    (
        "F115",
        "Sampler and learner disagree",
        "With the same weights and tokens, both compute the same probabilities. If they differ, the model "
        "is trained on samples from another distribution.",
    ),
    (
        "F116",
        "Ratio is not 1 before an update",
        "Old and current log-probabilities come from the same weights and the same forward pass, so their "
        "ratio is exactly 1. Otherwise tokens are clipped and weighted at random.",
    ),
    (
        "F117",
        "KL is not 0 before the first update",
        "The reference is the model from which the run starts, so the KL divergence starts at 0. Another "
        "reference pulls the policy towards another model.",
    ),
    (
        "F118",
        "Rollout with NaN or infinity",
        "A single NaN in a log-probability or an advantage makes the whole gradient NaN.",
    ),
    (
        "F119",
        "Frozen weights changed, or a moving reference model did not",
        "Weights that are not trained must have the same bits at the end as at the start; an adapter is "
        "trained for the base model that it was given. A reference model that follows the policy changes "
        "only when it is updated. Otherwise the KL term uses another model than the options say.",
    ),
    (
        "F120",
        "Self-test failed",
        "On this machine, two ways to compute the same result differ by more than rounding. Training here "
        "would differ from the configuration, and no metric would show it.",
    ),
    (
        "F121",
        "Ranks hold different weights",
        "Every rank takes the same step. If their weights differ, gradients of different models are "
        "averaged.",
    ),
    (
        "F122",
        "Rollout size differs from the plan",
        "The plan sets how many completions a rollout has, and therefore how many steps are taken with "
        "it. Another number changes the learning rate and the data order.",
    ),
    (
        "F123",
        "Micro-batch without gradient",
        "The gradients of all micro-batches sum to the gradient of the step. If some are lost, the step "
        "is smaller than intended and learns from only part of its data.",
    ),
    (
        "F124",
        "Trained tensor without gradient",
        "A tensor that should be trained but never gets a gradient does not change, and no message would "
        "say so.",
    ),
    (
        "F125",
        "Completions of a prompt that repeat each other",
        "The completions of a prompt are compared with each other. Copies have the same reward and teach "
        "nothing; half of the work, or all of it, is wasted.",
    ),
    (
        "F126",
        "Resume at the wrong position in the data",
        "A resumed run must continue with the next prompts. Otherwise prompts are repeated or skipped.",
    ),
    (
        "F127",
        "Gradient that does not match its rows",
        "The gradient of a step is the sum over its completions, however they are divided into "
        "micro-batches and ranks. If a part is counted twice, lost or weighted, the step uses another "
        "batch or another learning rate than intended.",
    ),
    (
        "F128",
        "Weights with NaN or infinity",
        "A model with one NaN gives NaN for every token. It is not saved: the earlier checkpoints remain.",
    ),
    (
        "F137",
        "Completions of several rows with loss_type real",
        "This loss gives each completion one score, the mean over its tokens in one row. A completion of "
        "several rows would have several scores and count more often than others in its group.",
    ),
    (
        "F145",
        "Rollout function returned what cannot be trained",
        "Each row that rollout_func returns is trained as it is: the tokens of its prompt, those behind it, "
        "and the log-probabilities that the model's own were sampled with.",
    ),
    (
        "F215",
        "Reward does not rise",
        "The run still takes time, but its last model is no better than an earlier one.",
    ),
)
