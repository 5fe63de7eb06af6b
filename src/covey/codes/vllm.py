"""Codes of sampling by vLLM."""

from __future__ import annotations

VLLM: tuple[tuple[str, str, str], ...] = (
    (
        "E430",
        "vLLM where it cannot run",
        "vLLM does not start that way, or it would hang, or sample another policy than the one that trains.",
    ),
    (
        "E431",
        "Argument of vLLM that is covey's",
        "covey needs it as it is, or has an option for it; two values of one setting would contradict each "
        "other.",
    ),
    (
        "E432",
        "Temperature below vLLM's lowest",
        "vLLM replaces it without a word, and the loss would divide logits by a number that nothing was "
        "sampled at.",
    ),
    (
        "E433",
        "Completions longer than vLLM holds",
        "vLLM refuses a prompt that is too long, and cuts a completion where its length ends.",
    ),
    (
        "E434",
        "Adapter that vLLM cannot apply",
        "vLLM applies LoRA matrices beside linear layers, up to the rank that it was started for. Another "
        "adapter is added to the weights before they are sent.",
    ),
    (
        "W190",
        "vLLM on a GPU, not yet tried by us",
        "covey's tests run vLLM's build for CPUs. What GPUs alone have (sleeping, several GPUs, its memory) "
        "is written after vLLM's documentation.",
    ),
    (
        "W191",
        "Version of vLLM that nobody tried",
        "What covey asks of vLLM changes from release to release: an untested one may fail, or sample from "
        "weights that it was not sent.",
    ),
)
