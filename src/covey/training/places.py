"""Where the ranks of a run are: which machine, which GPU, and whether all of them see one run directory."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from covey.activity import ranks_word
from covey.comm import Comm
from covey.errors import ConfigError
from covey.plan.layout import Layout
from covey.plan.problem import problem
from covey.telemetry.owner import LOCK
from covey.texts import joined, tr
from covey.training.machines import Machines
from covey.training.process import own_device
from covey.types import Fix, Problem

# A file system that machines share may show a new file to another machine only after a while.
_SHOWN_S = 15.0


def refuse_places(layout: Layout, comm: Comm, machines: Machines | None) -> None:
    """ConfigError on every rank where two of them are on one GPU (E209), or where a model that is split over
    the ranks of a machine would be split over another one's (E370). Collective."""
    if comm.world == 1:
        return
    machine = "" if machines is None or machines.met is None else machines.met.machines[comm.rank]
    host = "" if machines is None else machines.host
    of_ranks = comm.gather_json({"gpu": _gpu(), "host": host, "machine": machine})
    if found := [*two_on_one_gpu(of_ranks), *split_over_machines(of_ranks, layout.shard_gpus)]:
        raise ConfigError(found)


def refuse_apart(output_dir: Path, comm: Comm, machines: Machines) -> None:
    """ConfigError on every rank (E414) where the machines do not see the directory of rank 0. Collective."""
    path = output_dir / LOCK
    expected = comm.gather_json(_content(path) if comm.rank == 0 else "")[0]
    until = time.monotonic() + _SHOWN_S
    while _content(path) != expected and time.monotonic() < until:
        time.sleep(0.2)
    blind = [rank for rank, content in enumerate(comm.gather_json(_content(path))) if content != expected]
    if blind:
        hosts = sorted({machines.host_of(rank) for rank in blind})
        writer = tr("rank 0 on {host_of}", host_of=machines.host_of(0))
        seen = tr(
            "{ranks_word} on {hosts} cannot see the files that {writer} writes to {output_dir}.",
            ranks_word=ranks_word(blind),
            hosts=joined(", ", hosts),
            writer=writer,
            output_dir=output_dir,
        )
        cause = tr("The directory is on a disk of one machine.")
        shared = Fix(text=tr("use a directory on a file system that all machines share: --output_dir DIR"))
        raise ConfigError([problem("E414", "output_dir", seen, cause, shared)])


def two_on_one_gpu(of_ranks: list[dict[str, str]]) -> list[Problem]:
    """Return the problem of ranks that compute on one GPU; none where each has its own, or on a CPU."""
    by_gpu: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(of_ranks):
        if place["gpu"]:
            by_gpu.setdefault((place["machine"], place["gpu"]), []).append(rank)
    shared = [(gpu, ranks) for (_, gpu), ranks in by_gpu.items() if len(ranks) > 1]
    if not shared:
        return []
    gpu, ranks = shared[0]
    host = of_ranks[ranks[0]]["host"]
    seen = tr(
        "{ranks_word} use the same GPU{words}: {gpu}.",
        ranks_word=ranks_word(ranks),
        words=tr(" of {host}", host=host) if host else "",
        gpu=gpu,
    )
    cause = tr("CUDA_VISIBLE_DEVICES, or the launcher, shows the same GPU to several processes.")
    each = Fix(
        text=tr("show each process its own GPU, or all of them to every process; with srun --gpus-per-task=1")
    )
    fewer = Fix(text=tr("start one process for each GPU: --nproc_per_node"))
    return [problem("E209", "nproc_per_node", seen, cause, each, fewer)]


def split_over_machines(of_ranks: list[dict[str, str]], num_shards: int) -> list[Problem]:
    """Return the problem where each `num_shards` successive ranks split the model and have to be on one
    machine, and some are not; `num_shards` is 0 for a model that is split over all ranks or none."""
    if not num_shards:
        return []
    for first in range(0, len(of_ranks), num_shards):
        group = of_ranks[first : first + num_shards]
        if len(group) == num_shards and len({place["machine"] for place in group}) == 1:
            continue
        hosts = joined(tr(" and "), dict.fromkeys(place["host"] for place in group))
        seen = tr(
            "--fsdp hybrid_shard shards the model over the {num_shards} processes of one machine, "
            "but ranks {first} to {last} are on {hosts}.",
            num_shards=num_shards,
            first=first,
            last=first + len(group) - 1,
            hosts=hosts,
        )
        alike = Fix(
            text=tr(
                "give each machine the same number of processes, and number them machine by "
                "machine: srun --distribution=block"
            )
        )
        all_of_them = Fix(text=tr("shard over all processes"), edits={"fsdp": "full_shard"})
        return [problem("E370", "fsdp", seen, "", alike, all_of_them)]
    return []


def _gpu() -> str:
    """The name and number of this process's GPU; empty where it has none."""
    device = own_device()
    if device.type != "cuda":
        return ""
    properties: Any = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.uuid}"


def _content(path: Path) -> str:
    """What a lock says of its owner; empty where it cannot be read."""
    try:
        # Listed first, so that a network file system looks for new files.
        os.listdir(path.parent)
        return json.dumps(json.loads(path.read_text(encoding="utf-8")), sort_keys=True)
    except (OSError, ValueError):
        return ""
