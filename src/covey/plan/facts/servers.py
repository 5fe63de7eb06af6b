"""Holds the facts that checks read of the rollout servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ServerFault = Literal["", "address", "silent", "token", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServeFacts:
    """What a server that `vllm serve` started says of itself.

    version          of vLLM
    open_routes      paths that answer without its key
    takes_weights    whether it has the routes by which weights are replaced, which it has in developer mode
    on_cpu           whether it samples on a CPU
    unties_head      whether its head is a tensor of its own, though the model's is its embedding
    logprobs         which log-probabilities it returns: its logprobs_mode
    quantization     how its weights are quantized; empty where they are not
    max_num_seqs     completions side by side
    directory        where files of weights lie that it and the run both see; empty where there is none
    """

    version: str
    open_routes: tuple[str, ...] = ()
    takes_weights: bool = False
    on_cpu: bool = False
    unties_head: bool = False
    logprobs: str = ""
    quantization: str = ""
    max_num_seqs: int = 1
    directory: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """A server that was asked before the run starts.

    `fault` is why nothing is known of it (its address is none, it does not answer, it refuses the token, it
    is neither covey's nor vLLM's), in words in `said`. What a server does not say is empty or 0; `max_len` is
    0 where its model has no last position, too. `engine` is native, generate or vllm. `run` names the run
    that uses it. `rows` is how many completions it decodes side by side; `shares_files` says that weights go
    to it through a directory that is here too. `vllm` is what is known of a server that `vllm serve` started.
    `adapter_rank` is the highest rank of an adapter that it applies itself, 0 where it takes whole weights.
    `group_device` is where a process group brings tensors: "cpu", or a GPU by its UUID. `images` says how its
    model's image processor prepares images; it is "" where it takes none. `scheduler` are the options of a
    run whose trajectories its scheduler makes, empty where it has none.
    """

    address: str
    fault: ServerFault = ""
    said: str = ""
    engine: str = ""
    model: str = ""
    model_type: str = ""
    num_parameters: int = 0
    vocab: int = 0
    max_len: int = 0
    dtype: str = ""
    noise_keys: bool = True
    adapter_rank: int = 0
    run: str = ""
    rows: int = 0
    shares_files: bool = False
    group_device: str = ""
    images: str = ""
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    vllm: VllmServeFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersFacts:
    """What each rollout server says (`asked`; None: nobody asked), and why the file of their token cannot be
    used."""

    asked: tuple[ServerFacts, ...] | None = None
    token_problem: str | None = None
