"""The cost of publishing weights to an engine that holds weights of its own: vLLM, or servers.

Bytes follow from the model. Seconds are an estimate from a rate of each way, checksums of both sides and the
canary included. The rates of a CPU were measured with 500 MB of float32 on two cores that others used too
(docs/performance.md, docs/servers.md); those of a network and of a GPU are assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from typing import Any, Literal
from urllib.parse import urlsplit

from covey.options.schema import Config
from covey.plan.activations import FLOAT
from covey.plan.disk import size
from covey.plan.facts import Facts, ServerFacts
from covey.plan.memory import recompute_of, training_of
from covey.plan.memory_rollout import planned_layout, requests_of
from covey.plan.memory_vllm import (
    cache_bytes,
    completion_bytes,
    held_tokens,
    largest_adapter_rank,
    side_by_side,
    weight_bytes,
)
from covey.texts import counted, joined, tr

Way = Literal["process", "gpu", "files", "loopback", "network", "gloo", "nccl"]

# Bytes a second.
_RATES: dict[Way, float] = {
    "process": 1.1e9,
    "gpu": 20e9,
    "files": 0.2e9,
    "loopback": 0.2e9,
    "network": 0.2e9,
    "gloo": 0.4e9,
    "nccl": 5e9,
}
# Of a publish of next to nothing: calls and the canary.
_LEAST_S = 0.05
# What a network of 10 Gbit/s carries, for all servers behind it together.
_LINE_RATE = 1.25e9
_WORDS: dict[Way, str] = {
    "process": tr("copied within the process"),
    "gpu": tr("copied on the GPU; the time is not measured yet"),
    "files": tr("through files in the servers' --publish_directory"),
    "loopback": tr("over HTTP on this machine"),
    "network": tr("over a network of 10 Gbit/s"),
    "gloo": tr("through a process group (gloo)"),
    "nccl": tr("through a process group (NCCL), which we have not tested on GPUs yet"),
}
# From so many seconds on, a faster way is named.
_SLOW_S = 10.0
_PORT = 51216
_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPlan:
    """What brings new weights to the engine, before each rollout.

    num_bytes       of what one engine is sent before each rollout, in `dtype`
    base_bytes      of the base that it is sent once, where it applies the adapter itself; 0 elsewhere
    engines         those that are sent them: of servers their addresses
    way             how they get there
    seconds         an estimate, checks included; servers are sent to at the same time
    group_seconds   the same through a process group, where that is not asked for and would be worth it
    weight_bytes    what one engine holds of them, on each of its GPUs
    cache_bytes     its KV cache with `side_by_side` completions at their longest
    on_device       whether its memory is that of the training process, whose forecast has it
    adds_adapter    whether an adapter is added to the weights before they are sent
    """

    num_bytes: int
    base_bytes: int
    dtype: str
    engines: tuple[str, ...]
    way: Way
    seconds: float
    group_seconds: float | None
    weight_bytes: int
    cache_bytes: int
    side_by_side: int
    on_device: bool
    adds_adapter: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers."""
        return asdict(self)

    def in_words(self) -> list[str]:
        """Return the publish as lines for people."""
        added = tr(", adapter merged in") if self.adds_adapter else ""
        more = (
            tr(" and {num_engines} more", num_engines=len(self.engines) - _NAMED)
            if len(self.engines) > _NAMED
            else ""
        )
        to = (tr("each of ") if len(self.engines) > 1 else "") + joined(", ", self.engines[:_NAMED]) + more
        what = tr("the adapter") if self.base_bytes else tr("the weights")
        base = (
            tr(" (the first time also {size} of its base)", size=size(self.base_bytes))
            if self.base_bytes
            else ""
        )
        lines = [
            tr(
                "before each rollout {size} of {what} ({dtype}{added}) are sent to {to}{base}",
                size=size(self.num_bytes),
                what=what,
                dtype=self.dtype,
                added=added,
                to=to,
                base=base,
            ),
            tr(
                "about {seconds} s with its checks, an estimate: {words}",
                seconds=_in_words(self.seconds),
                words=_WORDS[self.way],
            ),
        ]
        if self.group_seconds is not None:
            quick = _in_words(self.group_seconds)
            lines.append(
                tr(
                    "about {quick} s through a process group: --vllm_server_group_port {port}",
                    quick=quick,
                    port=_PORT,
                )
            )
        return lines

    def memory_in_words(self) -> str:
        """Return the memory of one engine as a line for people."""
        who = tr("the engine's part of it") if self.on_device else tr("beside it in each server")
        return tr(
            "{who}: {size} of weights and up to {cache} of KV cache for {completions} at a time",
            who=who,
            size=size(self.weight_bytes),
            cache=size(self.cache_bytes),
            completions=counted(self.side_by_side, "completion"),
        )


def publish_plan(config: Config, facts: Facts) -> PublishPlan | None:
    """Return what publishing takes; None where the engine samples from the weights in training, nothing is
    sampled, or the model is not known. Servers that nobody has named yet count as one over a network."""
    layout, model, asked = planned_layout(facts), facts.model.sizes, requests_of(config, facts)
    is_served = layout.engine == "server"
    servers = config.rollout_servers if is_served else []
    if layout.engine == "own" or model is None or not asked:
        return None
    how = training_of(config, facts, recompute_of(config, facts))
    known = facts.servers.asked or ()
    rows = max(rows for rows, _ in asked)
    if is_served:
        # All processes share the servers.
        rows = -(-rows * max(1, facts.launch.num_processes) // max(1, len(servers)))
        rows = min([rows, *(s.rows for s in known if s.rows)]) if servers else side_by_side(config, rows)
        held, way = how.element * model.parameters, _way_to(config, known, how.cuda)
    else:
        held = weight_bytes(model, how, layout)
        way = "gpu" if how.cuda else "process"
    tokens = held_tokens(config, facts.prompts.longest or config.max_length or 1, facts.model.context)
    if is_served:
        cache = rows * completion_bytes(model, how.element, tokens)
    else:
        spans = max(1, layout.engine_parallel)
        cache = cache_bytes(config, model, how.element, tokens, rows, spans)
        rows = side_by_side(config, rows * spans)
    is_alone = _applies_adapter(config, known if is_served else None)
    num_bytes = how.element * (model.adapter_parameters if is_alone else model.parameters)
    base_bytes = how.element * model.parameters if is_alone else 0
    # What an engine holds is read at each publish.
    read_s = base_bytes / _RATES["gpu" if how.cuda else "process"]
    num_away = sum(not is_here(address) for address in servers) if servers else int(is_served)

    def seconds(way: Way) -> float:
        return _LEAST_S + read_s + max(num_bytes / _RATES[way], num_away * num_bytes / _LINE_RATE)

    may_group = is_served and way not in ("gloo", "nccl") and all(map(takes_group, known))
    quick = seconds(_group_way(known, how.cuda)) if may_group and seconds(way) >= _SLOW_S else None
    return PublishPlan(
        num_bytes=num_bytes,
        base_bytes=base_bytes,
        dtype="float32" if how.element == FLOAT else "bfloat16",
        engines=tuple(servers) or (tr("each server") if is_served else tr("vLLM in each training process"),),
        way=way,
        seconds=seconds(way),
        group_seconds=quick,
        weight_bytes=held,
        cache_bytes=cache,
        side_by_side=rows,
        on_device=not is_served,
        adds_adapter=not how.full and not is_alone,
    )


def _applies_adapter(config: Config, servers: Sequence[ServerFacts] | None) -> bool:
    """Whether vLLM, or each of these servers, applies the adapter that is trained."""
    if config.tuner_type != "lora" or not config.vllm_enable_lora:
        return False
    if servers is None:
        return largest_adapter_rank(config) >= config.lora_rank
    return bool(servers) and all(server.adapter_rank >= config.lora_rank for server in servers)


def _in_words(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"


def takes_group(server: ServerFacts) -> bool:
    """Whether a server takes weights through a process group; one that did not answer is not known to."""
    return not server.fault and server.vllm is None and bool(server.group_device)


def _group_way(known: Sequence[ServerFacts], cuda: bool) -> Way:
    return "nccl" if cuda and all(s.group_device != "cpu" for s in known) else "gloo"


def _way_to(config: Config, known: Sequence[ServerFacts], cuda: bool) -> Way:
    """The slowest of the ways to the servers."""
    if config.vllm_server_group_port is not None and all(map(takes_group, known)):
        return _group_way(known, cuda)
    if not config.rollout_servers or not all(map(is_here, config.rollout_servers)):
        return "network"
    return "files" if known and all(server.shares_files for server in known) else "loopback"


def is_here(address: str) -> bool:
    """Whether an address is one of this machine's own, which no network carries."""
    host = urlsplit(address).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
