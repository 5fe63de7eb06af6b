"""Codes of sampling by vLLM."""

from __future__ import annotations

VLLM: tuple[tuple[str, str, str], ...] = (
    (
        "E430",
        "Setup in which vLLM cannot run",
        "In this setup vLLM cannot be reached, does not start, hangs, or samples with other weights than "
        "those in training.",
    ),
    (
        "E431",
        "vLLM argument that covey sets itself",
        "covey needs a certain value for it or has its own option for it; two values of one setting would "
        "contradict each other.",
    ),
    (
        "E432",
        "Temperature outside vLLM's range",
        "vLLM refuses a temperature above its maximum, and replaces one below its minimum without a message: "
        "the loss would divide the logits by another temperature than the one used for sampling.",
    ),
    (
        "E433",
        "Completions longer than vLLM's maximum length",
        "vLLM refuses a prompt that is too long, and cuts off a completion at its maximum length.",
    ),
    (
        "E434",
        "Adapter that vLLM cannot apply",
        "vLLM can apply LoRA matrices to linear layers, up to the rank with which it was started. Other "
        "adapters are merged into the weights before these are sent.",
    ),
    (
        "W190",
        "vLLM on a GPU: we have not tested this yet",
        "covey's tests use vLLM's build for CPUs. The features that only GPUs have (sleep mode, several "
        "GPUs, GPU memory) follow vLLM's documentation.",
    ),
    (
        "W191",
        "Untested version of vLLM",
        "The interfaces of vLLM that covey uses change from release to release: an untested version may "
        "fail, or sample from weights that covey did not send.",
    ),
)
