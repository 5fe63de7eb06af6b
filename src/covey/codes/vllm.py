"""Codes of sampling by vLLM."""

from __future__ import annotations

VLLM: tuple[tuple[str, str, str], ...] = (
    (
        "E431",
        "vLLM argument that covey sets itself",
        "covey needs a certain value for it or has its own option for it; two values of one setting would "
        "contradict each other.",
    ),
    (
        "E434",
        "Adapter that vLLM cannot apply",
        "vLLM can apply LoRA matrices to linear layers, up to the rank with which it was started. Other "
        "adapters are merged into the weights before these are sent.",
    ),
    (
        "W191",
        "Untested version of vLLM",
        "The interfaces of vLLM that covey uses change from release to release: an untested version may "
        "fail, or sample from weights that covey did not send.",
    ),
)
