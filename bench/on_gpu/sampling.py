"""Rollouts of the native engine for the parts: with recordings, without them, and what recording costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch

from covey.kernels.gpu.kernels import GpuKernels
from covey.kernels.gpu.recordings import Recordings
from covey.models.policy import Policy
from covey.rollout.engine import Engine
from covey.rollout.native.engine import NativeEngine
from covey.types import Completion, GenerationRequest, SamplingParams, TurnId
from on_gpu.machine import device, wait

# Tokens of a stride where a CPU stands in for a GPU.
_SMALL_STRIDE = 4


def recordings() -> Recordings:
    """CUDA graphs; on a CPU the same bookkeeping around plain calls."""
    return Recordings() if device().type == "cuda" else Recordings(record=lambda work: work)


def recorded_engine(policy: Policy, held: Recordings, max_rows: int = 256) -> NativeEngine:
    """An engine whose strides are played from `held`."""
    stride = None if device().type == "cuda" else _SMALL_STRIDE
    return NativeEngine(policy, max_rows=max_rows, stride=stride, kernels=GpuKernels(held))


def plain_engine(policy: Policy, max_rows: int = 256) -> NativeEngine:
    """An engine that launches every kernel by itself."""
    if device().type != "cuda":
        return NativeEngine(policy, max_rows=max_rows)
    none = Recordings()
    none.failure = "this engine computes every stride plainly"
    return NativeEngine(policy, max_rows=max_rows, kernels=GpuKernels(none))


def requests(
    prompts: Sequence[int], lengths: Sequence[int], vocabulary: int, seed: int = 0
) -> list[GenerationRequest]:
    """For each prompt of so many random tokens a completion of each length; no token ends one."""
    generator = torch.Generator().manual_seed(seed)
    asked = []
    for number, length in enumerate(prompts):
        tokens = tuple(torch.randint(vocabulary, (length,), generator=generator).tolist())
        asked += [
            GenerationRequest(
                prompt_token_ids=tokens,
                sampling=SamplingParams(temperature=1.0, max_new_tokens=longest, stop_token_ids=()),
                turn=TurnId(
                    seed=seed, split="train", rollout=0, attempt=0, prompt_id=number, sibling=sibling
                ),
            )
            for sibling, longest in enumerate(lengths)
        ]
    return asked


def sample(engine: Engine, asked: Sequence[GenerationRequest]) -> tuple[list[Completion], float]:
    """The completions in the order of the requests, and the seconds that they took."""
    numbers = [engine.submit(request) for request in asked]
    wait()
    began = time.perf_counter()
    made = {c.request_id: c for c in engine.results()}
    wait()
    return [made[number] for number in numbers], time.perf_counter() - began


class Graphs:
    """Counts the CUDA graphs that are captured inside `with`, and the seconds of capture.

    It watches torch's own class, and so sees whatever captures.
    """

    def __enter__(self) -> Self:
        self.count, self.seconds = 0, 0.0
        kind: Any = torch.cuda.CUDAGraph
        self._kept = kind.capture_begin, kind.capture_end
        begin, end = self._kept
        began = 0.0

        def watched_begin(graph: Any, *arguments: Any, **named: Any) -> Any:
            nonlocal began
            began = time.perf_counter()
            return begin(graph, *arguments, **named)

        def watched_end(graph: Any) -> Any:
            found = end(graph)
            self.count += 1
            self.seconds += time.perf_counter() - began
            return found

        kind.capture_begin, kind.capture_end = watched_begin, watched_end
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        graph: Any = torch.cuda.CUDAGraph
        graph.capture_begin, graph.capture_end = self._kept


def used_bytes() -> int:
    """Bytes of the GPU that are taken, those of CUDA itself included; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free
