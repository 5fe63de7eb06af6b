"""What the checks need to know of the rollout servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ServerFault = Literal["", "address", "silent", "token"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """A server that was asked before the run starts.

    `fault` is why nothing is known of it (its address is none, it does not answer, it refuses the token), in
    words in `said`. `max_len` is 0 where its model has no last position; `run` names the run that uses it.
    `rows` is how many completions it decodes side by side (0: not known); `shares_files` says that weights go
    to it through a directory that is here too.
    """

    address: str
    fault: ServerFault = ""
    said: str = ""
    model: str = ""
    model_type: str = ""
    num_parameters: int = 0
    vocab: int = 0
    max_len: int = 0
    dtype: str = ""
    noise_keys: bool = True
    run: str = ""
    rows: int = 0
    shares_files: bool = False
