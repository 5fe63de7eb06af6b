"""Codes of weights that are given to an engine which holds a copy of them."""

from __future__ import annotations

PUBLISHING: tuple[tuple[str, str, str], ...] = (
    (
        "F150",
        "Published version not served",
        "An engine that keeps its former weights samples from a policy that is no longer trained. The curves "
        "look as they did before, and the gradient is wrong.",
    ),
    (
        "F151",
        "Engine holds other tensors than were sent",
        "One tensor that is missing, old or rounded makes another model of the engine's. It samples well "
        "enough for nobody to see it.",
    ),
    (
        "F152",
        "Engine's logprobs are not the learner's after a publish",
        "With the same weights and tokens both give the same probabilities, but for rounding. If they do "
        "not, the engine computes with something else than it holds.",
    ),
    (
        "F153",
        "Engine draws other tokens than its noise gives",
        "A completion is determined by its noise key. An engine that draws otherwise gives another rollout "
        "after a resume or on another server, or samples from another distribution than it says.",
    ),
    (
        "F154",
        "Engine started again with old weights",
        "A process that is started again has the weights that it began with, and answers as if nothing had "
        "happened.",
    ),
    (
        "F155",
        "Two publishes crossed",
        "Two runs that publish to one engine overwrite each other's weights; each then trains on what the "
        "other one's model has sampled.",
    ),
)
