"""What covey asks of the vllm package; no other module imports it, and this one inside its functions."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from covey.plan.vllm_limits import LEAST_TEMPERATURE
from covey.rollout.vllm.settings import TIES, VllmSettings, arguments_of
from covey.texts import tr
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
            started = LLM(**arguments_of(settings))
        else:
            with _launched_as(settings):
                started = LLM(**arguments_of(settings))
            # All ranks have it open: it lasts as long as they do, and one that is killed leaves nothing.
            for path in Path("/dev/shm").glob(f"{settings.group_name}-*"):
                path.unlink(missing_ok=True)
    if settings.media_limits and any(started.collective_rpc("covey_normalizes")):
        raise RuntimeError(tr("vLLM would normalize the pixels of images a second time."))
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


def image_item(llm: Any, patches_PC: Tensor, grid_13: Tensor) -> Any:
    """Return an image in the form in which vLLM's processor of the model would give it on."""
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalKwargsItems

    fields = BatchFeature({"pixel_values": patches_PC, "image_grid_thw": grid_13})
    config = llm.llm_engine.renderer.get_mm_processor()._get_mm_fields_config(fields, {})
    (item,) = MultiModalKwargsItems.from_hf_inputs(fields, config)["image"]
    return item


def image_prompt(
    token_ids: list[int], items: Sequence[Any], keys: Sequence[str], places: Sequence[tuple[int, int]]
) -> Any:
    """Return a prompt as it is behind vLLM's processor, which takes it as it is: its tokens hold all
    placeholders of each image, which begin at a place and are so many. vLLM takes equal keys for equal
    images."""
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    ranges = [PlaceholderRange(offset=begin, length=number) for begin, number in places]
    of_images = MultiModalKwargsItems({"image": list(items)})
    return mm_input(token_ids, of_images, {"image": list(keys)}, {"image": ranges})


def adapter_request(name: str, number: int, directory: str) -> Any:
    """Return what a request names to be sampled with an adapter; name and number are never used again."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, directory)


def normalizes_pixels(model: nn.Module) -> bool:
    """Return whether vLLM's class of the model normalizes the pixels that it is given."""
    from vllm.model_executor.layers.fusion.mm_input_norm import FusedMMInputNorm

    return any(isinstance(module, FusedMMInputNorm) for module in model.modules())


def fused_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the names that each fused module of vLLM's class of a model stands for."""
    from vllm.model_executor.utils import get_packed_modules_mapping

    return get_packed_modules_mapping(model)


def held_names(model: nn.Module, sent: Iterable[str]) -> dict[str, str]:
    """Return the names of tensors that were sent, by those under which vLLM's class of the model has them,
    where these differ, as those of models that see images do."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return {}
    rename = mapper.get_rename_mapper()
    return {held: name for name in sent if (held := rename.map_name(name)) not in (None, name)}


def pack_again(layer: nn.Module) -> None:
    """Make the packed copy of a weight anew that vLLM multiplies with on a CPU."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(layer, False)


def version() -> str:
    """Return the version of the vllm package."""
    import vllm

    return str(vllm.__version__)
