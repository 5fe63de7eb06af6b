"""Codes of weights that are given to an engine which holds a copy of them."""

from __future__ import annotations

PUBLISHING: tuple[tuple[str, str, str], ...] = (
    (
        "F150",
        "Published weights are not used by the engine",
        "An engine that keeps its previous weights samples from an old policy. The curves look the same "
        "as before, but the gradient is wrong.",
    ),
    (
        "F151",
        "Engine holds other tensors than those sent",
        "One tensor that is missing, old or rounded gives the engine another model. It still samples well "
        "enough that nobody notices.",
    ),
    (
        "F152",
        "Log-probabilities of engine and learner differ after a publish",
        "With the same weights and tokens, both compute the same probabilities, except for rounding. If "
        "they differ, the engine computes with other weights than it holds.",
    ),
    (
        "F153",
        "Engine draws other tokens than its random key gives",
        "A completion is determined by its random key. An engine that draws other tokens gives another "
        "rollout after a resume or on another server, or samples from another distribution than it "
        "reports.",
    ),
    (
        "F154",
        "Engine restarted with old weights",
        "A process that is restarted has the weights with which it was first started, and continues to "
        "answer as before.",
    ),
    (
        "F155",
        "Two runs published to the same engine",
        "Two runs that publish to one engine overwrite each other's weights; each run then trains on "
        "samples from the other one's model.",
    ),
)
