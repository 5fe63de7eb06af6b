"""The codes of the rollout servers that no other part uses."""

from __future__ import annotations

from covey.codes import Code

CODES = (
    Code(
        code="E436",
        title="Server and run have different schedulers",
        why="The server was started with a scheduler, which decides what the model is told after each turn. "
        "The run has to give the same scheduler options; without them it would train on single turns.",
    ),
    Code(
        code="W181",
        title="vLLM server with open routes",
        why="Anyone who reaches its port can use these routes: sample, stop the server, replace its "
        "weights, call methods of its workers. The server also does not report which weights it "
        "holds: after each publish, only the log-probabilities of a few prompts are compared.",
    ),
    Code(
        code="W182",
        title="Weights are sent over the network without encryption or access control",
        why="A process group sends tensors unencrypted and does not require a token. Anyone on that "
        "network can read the weights or disturb the transfer; checksums verify what arrived.",
    ),
)
