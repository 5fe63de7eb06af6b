"""Codes of rollout servers: of a run that samples on them, and of `covey rollout`."""

from __future__ import annotations

SERVERS: tuple[tuple[str, str, str], ...] = (
    (
        "E420",
        "Rollout server that does not answer",
        "The run samples on its servers and contacts each of them before weights are loaded.",
    ),
    (
        "E421",
        "Rollout server without its token",
        "Every request to a server must contain its token, which is in a file that only its owner can read.",
    ),
    (
        "E422",
        "Rollout server for another model",
        "The weights of the run are copied into the model of the server, tensor by tensor. If model, "
        "vocabulary or dtype differ, they do not fit or give other results.",
    ),
    (
        "E423",
        "Rollout server with too short a context",
        "A server refuses a prompt if its completion could exceed the context of the server's model.",
    ),
    (
        "E424",
        "Rollout server that another run uses",
        "A server holds one model. If two runs publish to it, each samples from the other's weights.",
    ),
    (
        "E425",
        "Address that other machines can reach",
        "Anyone who reads the token can sample from the model and replace its weights. Without TLS the "
        "token can be read on the network.",
    ),
    (
        "E426",
        "Rollout server that cannot start",
        "The server needs a complete model, a free address, a token file that nobody else can read, for TLS "
        "a certificate with its key, and only options of the engine that samples.",
    ),
    (
        "E427",
        "Addresses of rollout servers that do not match",
        "Each server has one address, http://HOST:PORT, and must be named only once.",
    ),
    (
        "E428",
        "Server that is neither covey's nor vLLM's",
        "The run supports the protocols of `covey rollout` and of `vllm serve`. Servers of other tools "
        "use other routes.",
    ),
    (
        "E429",
        "vLLM server that was started with unsuitable options",
        "The server must accept new weights at every step and return the log-probabilities with which it "
        "samples. `covey rollout --engine vllm` does both and requires a token on every route but /health.",
    ),
    (
        "F140",
        "No rollout server left",
        "Without a server nothing can be sampled. The run ends; everything recorded and saved so far "
        "remains.",
    ),
    (
        "F141",
        "No rollout server accepted the weights",
        "Sampling with the previous weights would mean training on samples from another policy. The run "
        "ends; everything recorded and saved so far remains.",
    ),
    (
        "W180",
        "Rollout server no longer used",
        "The other servers sample what it had not finished, with the same result; the rollout takes longer. "
        "If none is left, these completions are lost.",
    ),
    (
        "W183",
        "No process group with a server",
        "The weights of this server are sent over HTTP or through files. That takes longer; the weights "
        "are the same.",
    ),
)
