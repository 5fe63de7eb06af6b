"""A run as processes: the ranks it is made of, and the signals that end it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from covey.activity import Activity, Stopped
from covey.checks.launch import num_ranks
from covey.comm import COLLECTIVE_LIMIT, Comm, GroupComm, LocalComm
from covey.environment import fix_segments
from covey.errors import ConfigError, OtherRankFailed
from covey.exits import interrupt_thread, is_first
from covey.options.model import ModelOptions
from covey.plan.problem import problem
from covey.texts import tr
from covey.texts.language import spoken
from covey.training.limits import Signals
from covey.training.link import Met, NotThere, meet, route_to_others, store_of_group
from covey.training.machines import MEET_S, Machines
from covey.types import Fix

SIGNAL_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""The exit code of each signal that ends a run."""


def world_size() -> int:
    """Training processes of the run."""
    return num_ranks(os.environ)


def own_device() -> torch.device:
    """The device of this process."""
    if torch.cuda.is_available():
        # A launcher may show each process a GPU of its own alone, which is the first one to it.
        number = int(os.environ.get("LOCAL_RANK", "0")) if torch.cuda.device_count() > 1 else 0
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def compute_dtype(options: ModelOptions, device: torch.device) -> torch.dtype:
    """Return what the forward pass computes in; the masters are float32 always."""
    if options.torch_dtype == "auto":
        low = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if low else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.torch_dtype]


def keep_segments() -> None:
    """Have torch keep a GPU's memory in segments of fixed size: vLLM's sleep mode gives memory back by pages,
    which segments that grow do, too. To be called before a GPU is used."""
    settings = fix_segments()
    if not torch.cuda.is_available():
        return
    # Torch may have read the environment already.
    torch._C._accelerator_setAllocatorSettings(settings)


@contextmanager
def long_lived() -> Iterator[None]:
    """Leave out of garbage collection what there is now, nearly all of it of libraries and there to the end:
    a full collection then takes a millisecond instead of a tenth of a second.

    Of a process that has left something out itself nothing more is, and what it left out stays so.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def ranks(
    world: int,
    output_dir: Path | None = None,
    activity: Activity | None = None,
    machines: Machines | None = None,
) -> Iterator[Comm]:
    """The process group of the run; metadata travels over gloo, gradients over NCCL where there are GPUs.

    What NCCL's flight recorder has to say of a collective that timed out goes to `output_dir`. `machines` are
    the other ones of a run over several, which have looked for each other since the process began.
    """
    activity = activity or Activity()
    # Under a launcher transformers' TrainingArguments make a process group, and have transformers split each
    # model that it makes for ZeRO-3. A program that trains here may have made them for its options.
    zero = sys.modules.get("transformers.integrations.deepspeed")
    if zero is not None:
        zero.unset_hf_deepspeed_config()
    if world == 1:
        had_group = dist.is_initialized()
        try:
            yield LocalComm(activity)
        finally:
            # A sharded model makes a group of one.
            if dist.is_initialized() and not had_group:
                dist.destroy_process_group()
        return
    if torch.cuda.is_available() and output_dir is not None:
        record_collectives(output_dir, os.environ)
    activity.wait("init_process_group")
    if dist.is_initialized():
        dist.destroy_process_group()
    # It lives as long as the group: rank 0 may keep the store.
    met = _make_process_group(world, machines)
    activity.leave_collective()
    try:
        yield GroupComm(activity)
    finally:
        dist.destroy_process_group()
        # A thread of gloo frees the tensors of the last collective behind it. One that still does so while
        # Python ends aborts the process: a good run would look like a failed one.
        time.sleep(_FREEING_S)
        del met


def _make_process_group(world: int, machines: Machines | None) -> Met:
    """Make the process group; ConfigError (E375) where the processes do not find each other, OtherRankFailed
    where one of another machine has ended with an error of its own."""
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    rank = os.environ["RANK"]
    words = tr(
        "covey: rank {rank} of {world} waits for the other ranks at {where}\n",
        rank=rank,
        world=world,
        where=where,
    )
    patience = threading.Timer(_PATIENCE_S, sys.stderr.write, [spoken(words)])
    patience.daemon = True
    patience.start()
    try:
        met = meet(os.environ, MEET_S) if machines is None else _met(machines)
        if machines is not None and (interface := route_to_others(os.environ)) is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store = store_of_group(met, os.environ, COLLECTIVE_LIMIT.total_seconds())
        dist.init_process_group(
            backend, store=store, rank=int(rank), world_size=world, timeout=COLLECTIVE_LIMIT
        )
        return met
    except (dist.DistError, NotThere, ValueError) as error:
        if machines is not None and machines.has_refused():
            raise OtherRankFailed(
                tr("another rank ended with an error before all ranks had connected")
            ) from error
        seen = tr(
            "Rank {rank} of {world} could not join the others at {where}: {splitlines}.",
            rank=rank,
            world=world,
            where=where,
            splitlines=str(error).splitlines()[0],
        )
        again = Fix(text=tr("start all ranks together: `torchrun --nproc_per_node N -m covey train ...`"))
        raise ConfigError([problem("E375", "MASTER_ADDR", seen, "", again)]) from error
    finally:
        patience.cancel()


def _met(machines: Machines) -> Met:
    machines.ready.wait()
    if machines.error is not None:
        raise machines.error
    assert machines.met is not None
    return machines.met


# After so long a wait for the other ranks it is said once what is waited for.
_PATIENCE_S = 60.0
# What takes microseconds, at most.
_FREEING_S = 0.1

# Each variable of torch 2.11 and later with its former name, which torch reads where this one is not set
# (torch/csrc/distributed/c10d/FlightRecorder.hpp, FlightRecorder.cpp, ProcessGroupNCCL.hpp).
_RECORDER = (
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
)


def record_collectives(output_dir: Path, environment: MutableMapping[str, str]) -> None:
    """Have NCCL remember its last 2,000 collectives and write them to `output_dir` when one times out.

    What `environment` says already stays as it is.
    """
    values = ("2000", str(output_dir.absolute() / "nccl-rank-"), "1")
    for (name, former), value in zip(_RECORDER, values, strict=True):
        if former not in environment:
            environment.setdefault(name, value)


def nccl_trace() -> bytes:
    """The last collectives as NCCL's flight recorder has them, as JSON; nothing where NCCL is not in use."""
    if not torch.cuda.is_initialized() or not dist.is_initialized():
        return b""
    try:
        from torch._C._distributed_c10d import _dump_nccl_trace_json  # type: ignore[attr-defined]
    except ImportError:
        # A build of torch without NCCL.
        return b""
    return bytes(_dump_nccl_trace_json())


def gpu_memory() -> dict[str, float]:
    """Gibibytes of this process's GPU by torch's own count, without a word to the driver; none where CUDA is
    not in use."""
    if not torch.cuda.is_initialized():
        return {}
    values = {
        "allocated_gib": torch.cuda.memory_allocated(),
        "reserved_gib": torch.cuda.memory_reserved(),
        "peak_gib": torch.cuda.max_memory_allocated(),
    }
    return {name: round(value / 2**30, 3) for name, value in values.items()}


def interrupt(activity: Activity) -> None:
    """Raise KeyboardInterrupt in the thread that trains, as Ctrl-C does.

    In the main thread it ends a call that waits for the system; in another one, and inside native code, it is
    raised when the call comes back to Python.
    """
    activity.is_interruptible = True
    is_main = activity.thread == threading.main_thread().ident
    if is_main and callable(signal.getsignal(signal.SIGINT)):
        signal.pthread_kill(activity.thread, signal.SIGINT)
    else:
        interrupt_thread(activity.thread)


def _acknowledged(number: int, *, drops: bool) -> str:
    """What a signal makes a run do; whoever pressed Ctrl-C sits at the terminal and may do so again."""
    does = tr("dropping this rollout, then saving") if drops else tr("ending after this step, then saving")
    if number == signal.SIGINT:
        return tr("covey: {does}; press Ctrl-C again to end at once\n", does=does)
    return tr("covey: {does}\n", does=does)


@contextmanager
def handlers(signals: Signals, activity: Activity, *, owns_process: bool = False) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks the loop to save and end, at once where what it does can be thrown
    away (Stopped); a second Ctrl-C ends without a save, and so does the first of `interrupt`.

    A command (`owns_process`) whose run has ended without an error ignores SIGTERM from then on: what it
    exits with is decided.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if activity.is_interruptible or (signals.received and number == signal.SIGINT):
            raise KeyboardInterrupt
        is_repeated, signals.received = bool(signals.received), number
        activity.is_asked_to_stop = True
        raises = activity.may_stop
        drops = raises or activity.may_stop_between
        activity.may_stop = False
        if is_first() and not is_repeated:
            sys.stderr.write(spoken(_acknowledged(number, drops=drops)))
        if raises:
            raise Stopped

    before = {number: signal.signal(number, ask) for number in SIGNAL_CODES}
    after: dict[signal.Signals, Any] = {**before}
    try:
        yield
        if owns_process:
            after[signal.SIGTERM] = signal.SIG_IGN
    finally:
        for number, handler in after.items():
            signal.signal(number, handler)
