"""Where rollouts are sampled, if not in the training processes."""

from __future__ import annotations

from covey.options.declare import Options, only_if_set, option

_SERVED = only_if_set("rollout_servers")


class ServerOptions(Options):
    """Rollout servers: sampling in processes of their own."""

    rollout_servers: list[str] = option(
        ...,
        "Addresses of servers that sample, http://HOST:PORT, each started by `covey rollout`, or by `vllm "
        "serve` as docs/servers.md says. None: the training processes sample.",
        rule="the vllm_server_ options where one of them is typed, else none",
        resume="free",
    )
    rollout_token_file: str | None = option(
        None,
        "File with the token that the servers ask for; `covey rollout` writes it and prints its path. Of a "
        "server of vLLM's its API key.",
        read_if=_SERVED,
        resume="free",
    )
    rollout_weights_directory: str | None = option(
        None,
        "Directory that a server started by `vllm serve` reads weights from; the run writes them there. Not "
        "set: /dev/shm where the server is on this machine.",
        read_if=_SERVED,
        resume="free",
    )
    rollout_timeout: float = option(
        120.0,
        "Seconds without a sign from a server after which it is given up and its work moves to the others.",
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
        "Port at which a server of `covey rollout` waits for a process group with the run, through which it "
        "takes the weights: NCCL between GPUs, else gloo. Servers on one host use this port and those after "
        "it, in the order of rollout_servers. Not set: weights go over HTTP or through files.",
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
        "TRL's and ms-swift's name for rollout_servers; it comes before vllm_server_host.",
        trl="not set",
        swift="not set",
        resume="free",
    )
    vllm_server_host: list[str] = option(
        [],
        "Hosts of the servers, one for each of vllm_server_port, or one for all of them.",
        trl="this machine",
        swift="not set",
        resume="free",
    )
    vllm_server_port: list[int] = option(
        [],
        "Ports of the servers, one for each of vllm_server_host, or one for all of them. None: 8000 where a "
        "host is typed.",
        trl="8000",
        swift="8000",
        resume="free",
    )
