"""Where rollouts are sampled, if not in the training processes."""

from __future__ import annotations

from covey.options.declare import Options, PathKind, only_if_set, option

_SERVED = only_if_set("rollout_servers")


class ServerOptions(Options):
    """Rollout servers: sample in separate processes."""

    rollout_servers: list[str] = option(
        ...,
        "Addresses of servers that sample, http://HOST:PORT, each started by `covey rollout`, or by `vllm "
        "serve` as described in docs/servers.md. Not set: the training processes sample.",
        rule="the addresses given by the vllm_server_ options, else none",
        resume="free",
    )
    max_staleness: int = option(
        ...,
        "How many rollouts the servers may begin ahead of the one that is trained on; what runs continues "
        "with each new version of the weights. 0: sample a rollout, then train on it. docs/ahead.md says "
        "what to choose.",
        rule="1 with async_generate, else 0",
        ge=0,
        why="It is a number of rollouts; 0 starts none early.",
        trl="4 in AsyncGRPOConfig",
        resume="free",
    )
    async_generate: bool = option(
        False,
        "Sample the next rollout while the model trains: max_staleness 1, unless that is given.",
        swift="false",
        resume="free",
    )
    rollout_token_file: str | None = option(
        None,
        "File with the token that the servers require; `covey rollout` writes it and prints its path. For "
        "servers started by `vllm serve`, the file holds the API key.",
        read_if=_SERVED,
        resume="free",
        path=PathKind("E421"),
    )
    rollout_weights_directory: str | None = option(
        None,
        "Directory from which a server started by `vllm serve` reads weights; the run writes them there. "
        "Not set: /dev/shm if the server is on this machine.",
        read_if=_SERVED,
        resume="free",
        path=PathKind("E429"),
    )
    rollout_timeout: float = option(
        120.0,
        "A server that does not respond for this many seconds is given up, and its work moves to the others.",
        gt=0,
        why="A server needs some time to answer.",
        trl="240 for the start of the server",
        swift="240 for the start of the server",
        names=("vllm_server_timeout",),
        read_if=_SERVED,
        resume="free",
    )
    vllm_server_group_port: int | None = option(
        None,
        "Port at which a server of `covey rollout` waits for the run to form a process group, over which "
        "it receives the weights: NCCL between GPUs, else gloo. Servers on one host use this port and the "
        "next ones, in the order of rollout_servers. Not set: weights are sent over HTTP or through files.",
        ge=1024,
        le=65535,
        why="Ports below 1024 are reserved for the system.",
        trl="51216",
        swift="51216",
        names=("vllm_group_port",),
        read_if=_SERVED,
        resume="free",
    )
    vllm_server_base_url: list[str] = option(
        [],
        "Name of rollout_servers in TRL and ms-swift; it takes precedence over vllm_server_host.",
        trl="not set",
        swift="not set",
        resume="free",
    )
    vllm_server_host: list[str] = option(
        [],
        "Hosts of the servers: one for each vllm_server_port, or one for all of them.",
        trl="this machine",
        swift="not set",
        resume="free",
    )
    vllm_server_port: list[int] = option(
        [],
        "Ports of the servers: one for each vllm_server_host, or one for all of them. Not set: 8000 if a "
        "host is given.",
        trl="8000",
        swift="8000",
        resume="free",
    )

    @property
    def is_ahead(self) -> bool:
        """Whether servers sample while the model trains."""
        return self.async_generate or self.max_staleness > 0
