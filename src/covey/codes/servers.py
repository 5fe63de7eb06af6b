"""Codes of rollout servers: of a run that samples on them, and of `covey rollout`."""

from __future__ import annotations

SERVERS: tuple[tuple[str, str, str], ...] = (
    (
        "E420",
        "Rollout server that does not answer",
        "The run samples on its servers. Each of them is asked before weights are loaded.",
    ),
    (
        "E421",
        "Rollout server without its token",
        "Every call of a server brings its token, which is in a file that only its owner can read.",
    ),
    (
        "E422",
        "Rollout server for another model",
        "The weights of the run are copied into the model of the server, tensor by tensor. Of another model, "
        "vocabulary or dtype they do not fit, or they compute other numbers.",
    ),
    (
        "E423",
        "Rollout server that is too short",
        "A server refuses a prompt whose completion could go past the positions of its model.",
    ),
    (
        "E424",
        "Rollout server that another run uses",
        "A server has one model. Two runs that publish to it would sample from each other's weights.",
    ),
    (
        "E425",
        "Address that others reach",
        "Whoever reads the token can sample from the model and replace its weights. Without TLS it can be "
        "read on the network.",
    ),
    (
        "E426",
        "Rollout server that cannot start",
        "It needs a whole model, an address that is free, a token that nobody else can read, and options of "
        "the engine that samples.",
    ),
    (
        "E427",
        "Addresses of rollout servers that do not fit together",
        "Each server has one address, http://HOST:PORT, and is named once.",
    ),
    (
        "E428",
        "Server that is neither covey's nor vLLM's",
        "The run speaks the protocol of `covey rollout`, and that of `vllm serve`. Servers of other tools "
        "have routes of their own.",
    ),
    (
        "E429",
        "Server of vLLM's that cannot be used as it was started",
        "It has to take the weights of every step, and to return the log-probabilities that it samples with. "
        "covey's own front around vLLM does both, with a token on every route.",
    ),
    (
        "F140",
        "No rollout server left",
        "Nobody is left to sample what is missing. The run ends; what was recorded and saved stays.",
    ),
    (
        "F141",
        "No rollout server took the weights",
        "Sampling with the weights of before would train on another policy. The run ends; what was recorded "
        "and saved stays.",
    ),
    (
        "W180",
        "Rollout server given up",
        "What it had not finished is sampled on the others, with the same result. The rollout takes longer.",
    ),
    (
        "W181",
        "Server of vLLM's with open routes",
        "Whoever reaches its port can use them: sample, stop it, replace its weights, call methods of its "
        "workers. It does not say what it holds either: log-probabilities of a few prompts alone vouch for "
        "its weights after each publish.",
    ),
    (
        "W182",
        "Weights on the network, neither encrypted nor guarded",
        "Tensors of a process group go over the network as they are, and no token is asked for. Whoever "
        "reaches that network can read the weights or break the transfer; checksums show what arrived.",
    ),
    (
        "W183",
        "No process group with a server",
        "Its weights go over HTTP or through files. That takes longer; the weights are the same.",
    ),
)
