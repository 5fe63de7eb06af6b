"""The recorded tokens of a run, scored again by its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os.path import isfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from covey.batching.pack import build_micros, episode_tokens
from covey.batching.shares import PackPlan
from covey.checks.survey import model_dir
from covey.config.adapters import ADAPTER_CONFIG
from covey.config.checkpoints import checkpoint_step, list_checkpoints
from covey.config.file import read_file
from covey.config.resolve import resolve
from covey.errors import CoveyError
from covey.models.load import choose_stream
from covey.models.policy import Policy
from covey.options.schema import Config
from covey.texts import tr
from covey.training.standalone import still_policy
from covey.types import AnnotatedSample, Sample, TokenSequence, TrainSample
from covey.types.arrays import constant_bools

# Tokens of a forward pass, where a row has no more.
_MOST_TOKENS = 8192


def config_of(run: Path) -> Config:
    """Return the options of a run."""
    return resolve(read_file(str(run / "config.yaml")).typed, 1).config


def scorable(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples that have trained tokens."""
    return [s for s in samples if isinstance(s.tokens, TokenSequence) and s.num_trained]


class RunWeights:
    """Finds the weights of a run: `by_step` its checkpoints, and as step 0 the model that it began with,
    whose directory is `base`."""

    def __init__(self, run: Path, config: Config) -> None:
        self._config = config
        self.by_step = {checkpoint_step(path.name) or 0: path for path in list_checkpoints(run)}
        try:
            self.base = model_dir(config)
        except (CoveyError, OSError):
            # It is not on this machine any more; checkpoints may be.
            self.base = Path(config.model)
        if isfile(self.base / "config.json") and config.adapters is None:
            self.by_step.setdefault(0, self.base)

    def nearest(self, version: int) -> int:
        """Return the step nearest to a version, the earlier one of two; CoveyError where there is none."""
        if not self.by_step:
            raise CoveyError(tr("the run has no checkpoint, and its model is not where it was"))
        return min(self.by_step, key=lambda step: (abs(step - version), step))

    def load(self, directory: Path, config: Config | None = None) -> Policy:
        """Return the weights of a directory; `config` says otherwise than the run how they compute."""
        config = config or self._config
        if not isfile(directory / ADAPTER_CONFIG):
            config = config.model_copy(update={"model": str(directory)})
        policy = still_policy(config, directory, None)
        choose_stream(policy)
        return policy


@torch.no_grad()
def gaps(policy: Policy, samples: Sequence[Sample]) -> Tensor:
    """Return the sampler's logprobs less the policy's of all trained tokens (N,), float32 on the CPU."""
    return torch.cat([_gaps(policy, part) for part in _passes(samples)])


def _passes(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Return neighbours that fit into a pass."""
    part: list[Sample] = []
    for sample in samples:
        if part and sum(s.length for s in part) + sample.length > _MOST_TOKENS:
            yield part
            part = []
        part.append(sample)
    if part:
        yield part


def _gaps(policy: Policy, samples: Sequence[Sample]) -> Tensor:
    """Return the sampler's logprobs less the policy's (N,), float32 on the CPU."""
    rows = [
        TrainSample(
            annotated=AnnotatedSample(sample=s), advantage=0.0, loss_mask=constant_bools(True, s.num_trained)
        )
        for s in samples
    ]
    plan = PackPlan(
        rank=0,
        world=1,
        completions_per_rank=len(rows),
        num_iterations=1,
        max_tokens=sum(s.length for s in samples),
        max_completion_length=max(s.num_trained for s in samples),
        stream=policy.stream,
        device=policy.device,
    )
    micros = build_micros([rows], plan, episode_tokens(rows))
    own_N = torch.cat([policy(micro).logprob_N for micro in micros]).float().cpu()
    return torch.from_numpy(np.concatenate([s.sampler_logprobs for s in samples])) - own_N
