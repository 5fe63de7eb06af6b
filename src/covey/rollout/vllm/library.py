"""What covey asks of the vllm package; no other module imports it, and this one inside its functions."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn

from covey.plan.vllm_limits import LEAST_TEMPERATURE
from covey.rollout.vllm.settings import TIES, VllmSettings, arguments_of
from covey.types import GenerationRequest, SamplingParams, TurnId

# vLLM reads them when it is asked, so they stay set. What the user has set stands.
_QUIET = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_PLUGINS": ""}
_PRIVATE = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_GREEDY = 1e-5
# Arguments from which vLLM knows its class of a model.
_OF_MODEL = {"model", "dtype", "skip_tokenizer_init", "trust_remote_code", "max_model_len"}


def start(settings: VllmSettings) -> Any:
    """Return a `vllm.LLM`, with the random numbers, threads and environment of this process as they were.

    Where the run has a process group, vLLM makes its groups beside it; all ranks start theirs together.
    """
    _set_environment(settings)
    with _undisturbed():
        from vllm import LLM

        if dist.is_initialized():
            _keep_default_group()
        if not settings.by_torchrun:
            return LLM(**arguments_of(settings))
        with _launched_as(settings):
            started = LLM(**arguments_of(settings))
        # All ranks have it open: it lasts as long as they do, and one that is killed leaves nothing behind.
        for path in Path("/dev/shm").glob(f"{settings.group_name}-*"):
            path.unlink(missing_ok=True)
        return started


def _keep_default_group() -> None:
    """Have vLLM end its own groups alone, as long as the default one is that of now. Where it is shut down or
    collected it would destroy that one as well."""
    from vllm.distributed import parallel_state

    kept, destroy = dist.group.WORLD, parallel_state.destroy_distributed_environment

    def end_own_groups() -> None:
        if dist.group.WORLD is not kept:
            destroy()
            return
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = parallel_state._NODE_COUNT = None

    parallel_state.destroy_distributed_environment = end_own_groups


@contextmanager
def _launched_as(settings: VllmSettings) -> Iterator[None]:
    """Within it vLLM's worker is told its rank and device by the run, in place of torchrun's variables.

    On a CPU it names the shared memory of its ranks after the end of the address, which is the same in every
    run by itself: a second run would be in the way.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher as Executor

    told = f"env://:{settings.group_name}", dist.get_rank(), settings.device_number
    own = Executor._distributed_args
    Executor._distributed_args = lambda self: told
    try:
        yield
    finally:
        Executor._distributed_args = own


def applies_adapters(settings: VllmSettings) -> bool:
    """Return whether vLLM's class of the model applies LoRA; one that does not would not start with it."""
    _set_environment(settings)
    with _undisturbed():
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.models import ModelRegistry, supports_lora

        arguments = {n: v for n, v in arguments_of(settings).items() if n in _OF_MODEL}
        model = EngineArgs(**arguments).create_model_config()
        return bool(supports_lora(ModelRegistry.resolve_model_cls(model.architectures, model)[0]))


def _set_environment(settings: VllmSettings) -> None:
    for name, value in (_QUIET | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}).items():
        os.environ.setdefault(name, value)
    os.environ.update(_PRIVATE, VLLM_ENABLE_V1_MULTIPROCESSING=str(int(settings.own_processes)))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """vLLM seeds every generator, and on a CPU it takes the place of `torch.set_num_threads` and writes what
    the processes started later would read."""
    environment, set_threads = dict(os.environ), torch.set_num_threads
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_gpu:
            torch.cuda.set_rng_state_all(on_gpu)
        kept = {n: v for n, v in os.environ.items() if n.startswith("VLLM_")}
        os.environ.clear()
        os.environ.update(environment | kept)


def seed_of(turn: TurnId) -> int:
    """Return a request's seed, 63 bits that are equal on every machine: a completion has its own, whatever it
    is batched with."""
    return int.from_bytes(hashlib.blake2b(turn.text.encode(), digest_size=8).digest(), "little") >> 1


def num_listed(sampling: SamplingParams, vocab: int) -> int:
    """Return how many of the most probable tokens vLLM lists with each one: with top_k all that may be kept,
    and as many again as may be just as probable as the last of them. Without filters it lists none."""
    return min(sampling.top_k + TIES, vocab) if sampling.has_filters else 0


def sampling_params(request: GenerationRequest, listed: int = 0) -> Any:
    """Return vLLM's parameters of a request: its temperature and filters, its own seed, and an end at its own
    tokens alone. Tokens come as they are sampled, each with its logprob and those of so many others."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return vllm.SamplingParams(
        temperature=0.0 if is_greedy(sampling.temperature) else sampling.temperature,
        seed=seed_of(request.turn),
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        logprobs=listed,
        logit_bias={i: float("-inf") for i in sampling.banned_token_ids} or None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def is_greedy(temperature: float) -> bool:
    """Return whether the likeliest token is taken. ValueError for a temperature that vLLM would replace."""
    if temperature <= _GREEDY:
        return True
    if temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"The temperature {temperature:g} is below {LEAST_TEMPERATURE:g}, at which vLLM samples instead."
        )
    return False


def adapter_request(name: str, number: int, directory: str) -> Any:
    """Return what a request names to be sampled with an adapter; name and number are never used again."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, directory)


def pack_again(layer: nn.Module) -> None:
    """Make the packed copy of a weight anew that vLLM multiplies with on a CPU."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(layer, False)


def version() -> str:
    """Return the version of the vllm package."""
    import vllm

    return str(vllm.__version__)
