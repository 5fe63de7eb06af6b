"""Faults of a publish: runs whose engine holds a copy of the weights, and gets or uses them wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from covey.checks.survey import model_dir
from covey.checksums import checksum
from covey.health.words import broken
from covey.models.load import load_policy
from covey.models.policy import Policy
from covey.options.schema import Config
from covey.rollout.engine import NamedWeights
from covey.training import backend
from covey.training.process import compute_dtype
from covey.types import Completion, GenerationRequest, Receipt
from mutants.harness import Mutant
from support.engines import CopyEngine

Patch = pytest.MonkeyPatch
_ONE = "model.layers.1.mlp.up_proj.weight"
_BF16 = {"torch_dtype": "bfloat16"}
LORA = {"tuner_type": "lora", "lora_rank": 4, "learning_rate": 1e-3}


def samples_from_a_copy(kind: Callable[..., CopyEngine] = CopyEngine) -> Callable[[Patch], None]:
    """Runs sample from engines of their own on the model that they start from; the last rank's is of this
    kind."""

    def engine_for(config: Config, facts: Any, policy: Policy, *more: Any) -> CopyEngine:
        own = load_policy(
            model_dir(config),
            device=torch.device("cpu"),
            disable_dropout=True,
            trust_remote_code=False,
            kernels=config.kernels,
        )
        own.use_layout(policy.layout)
        is_last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        return (kind if is_last else CopyEngine)(own.to(compute_dtype(config, torch.device("cpu"))))

    return lambda patch: patch.setattr(backend, "engine_for", engine_for)


class _LosesATensor(CopyEngine):
    """One tensor is never sent, as where a loader knows it under another name."""

    def take(self, name: str, weight: Tensor) -> None:
        if name != _ONE:
            super().take(name, weight)


class _NamesAnother(CopyEngine):
    """One tensor is held under another name than it was sent by."""

    def fingerprints(self) -> dict[str, int]:
        found = super().fingerprints()
        return {f"{n}_packed" if n == _ONE else n: value for n, value in found.items()}


class _KeepsItsHead(CopyEngine):
    """The head was packed when the model was loaded, and no longer is the embedding that it is tied to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        head: Any = self.policy.model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)


class _HidesItsHead(_KeepsItsHead):
    """The same, and the head is no tensor that it speaks of."""

    def fingerprints(self) -> dict[str, int]:
        return {n: value for n, value in super().fingerprints().items() if n != "lm_head.weight"}


class _DropsTheAdapter(CopyEngine):
    """The update arrives and is not applied: what is read back is what was sent."""

    def publish(self, named_weights: NamedWeights, version: int) -> Receipt:
        sent = {name: checksum(weight) for name, weight in named_weights}
        self.engine.publish(iter(()), version)
        return Receipt(version=version, fingerprints=sent)


class _KeepsItsCache(CopyEngine):
    """The first token of a prompt comes from what was computed for it the first time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompt_of: dict[int, tuple[int, ...]] = {}
        self._kept: dict[tuple[tuple[int, ...], int], float] = {}

    def submit(self, request: GenerationRequest) -> int:
        number = super().submit(request)
        self._prompt_of[number] = request.prompt_token_ids
        return number

    def results(self) -> Iterator[Completion]:
        for done in super().results():
            key = self._prompt_of[done.request_id], done.token_ids[0]
            first = self._kept.setdefault(key, done.logprobs[0])
            yield replace(done, logprobs=(first, *done.logprobs[1:]))


class _StartsAgain(CopyEngine):
    """After its second publish the process is started again, with the weights that it began with."""

    version = -1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first = {name: held.clone() for name, held in self.held().items()}

    def publish(self, named_weights: NamedWeights, version: int) -> Receipt:
        receipt = super().publish(named_weights, version)
        if self.num_publishes == 2:
            for name, weight in self._first.items():
                self.take(name, weight)
            self.engine.publish(iter(()), self._version_after(version))
        return receipt

    def _version_after(self, version: int) -> int:
        return -1


class _StartsAgainUnderItsVersion(_StartsAgain):
    """The same, and what started it told it which version it ought to serve."""

    def _version_after(self, version: int) -> int:
        return version


class _KeepsItsVersion(CopyEngine):
    """It takes the weights, and goes on with the former version."""

    def publish(self, named_weights: NamedWeights, version: int) -> Receipt:
        receipt = super().publish(named_weights, version)
        return receipt if self.num_publishes == 1 else replace(receipt, version=version - 1)


class _TakesAnotherRuns(CopyEngine):
    """Another run's publish ends in the middle of the second one of this run."""

    def publish(self, named_weights: NamedWeights, version: int) -> Receipt:
        receipt = super().publish(self._crossed(named_weights), version)
        return replace(receipt, version=self._version_at_the_end(version))

    def _crossed(self, named_weights: NamedWeights) -> NamedWeights:
        for number, (name, weight) in enumerate(named_weights):
            yield name, weight * 1.01 if self.num_publishes == 2 and number < 5 else weight

    def _version_at_the_end(self, version: int) -> int:
        return 41 if self.num_publishes == 2 else version


class _MixesTwoRuns(_TakesAnotherRuns):
    """The same, and this run's publish ends last."""

    def _version_at_the_end(self, version: int) -> int:
        return version


class _RoundsOnTheWay(CopyEngine):
    """Weights are cast to bfloat16 and back before they are copied."""

    def take(self, name: str, weight: Tensor) -> None:
        super().take(name, weight.bfloat16().float())


class _RoundsTwice(CopyEngine):
    """It asks for float16, and casts that to bfloat16: some numbers are rounded twice, to another one."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, dtype=torch.bfloat16)
        self.capabilities = replace(self.capabilities, dtype=torch.float16)


class _DrawsByAnotherSeed(CopyEngine):
    """Its logprobs are right and its noise is its own."""

    def submit(self, request: GenerationRequest) -> int:
        return super().submit(replace(request, turn=replace(request.turn, seed=77)))


def _one(
    name: str, code: str, step: int, kind: type[CopyEngine], says: str, options: Mapping[str, Any] = {}
) -> Mutant:
    return Mutant(name, code, step, samples_from_a_copy(kind), options, says=says)


MUTANTS: Sequence[Mutant] = (
    _one("a tensor is not sent", "F151", 1, _LosesATensor, f"held with different values: {_ONE}"),
    _one(
        "a tensor under another name",
        "F151",
        0,
        _NamesAnother,
        f"missing: {_ONE}; held although not sent: {_ONE}_packed",
    ),
    _one("a tied head kept old", "F151", 1, _KeepsItsHead, "lm_head.weight (tied to model.embed_tokens"),
    _one("a tied head kept old, and not named", "F152", 1, _HidesItsHead, "from the learner's"),
    _one("an adapter is not applied", "F152", 1, _DropsTheAdapter, "from the learner's", LORA),
    _one("a prefix cache is not reset", "F152", 1, _KeepsItsCache, "from the learner's"),
    _one("an engine that started again", "F154", 1, _StartsAgain, "sampled with no version"),
    _one("one that hides it", "F152", 1, _StartsAgainUnderItsVersion, "from the learner's"),
    _one("a version that is not served", "F150", 1, _KeepsItsVersion, "it serves version 0"),
    _one("two publishes cross", "F155", 1, _TakesAnotherRuns, "it serves version 41"),
    _one(
        "two publishes mix",
        "F151",
        1,
        _MixesTwoRuns,
        "held with different values: lm_head.weight (tied to model.embed_tokens.weight), model.emb",
    ),
    _one("a cast to bfloat16 on the way", "F151", 0, _RoundsOnTheWay, "held with different values"),
    _one("a bfloat16 cast done twice", "F151", 0, _RoundsTwice, "held with different values"),
    _one("tokens of another noise", "F153", 0, _DrawsByAnotherSeed, "with the same noise, draws"),
)

HEALTHY: Sequence[Mutant] = (
    Mutant("float32", "", 0, samples_from_a_copy()),
    Mutant("bfloat16", "", 0, samples_from_a_copy(), _BF16),
    Mutant("LoRA", "", 0, samples_from_a_copy(), LORA),
    Mutant("LoRA in bfloat16", "", 0, samples_from_a_copy(), {**LORA, **_BF16}),
    Mutant("dropout", "", 0, samples_from_a_copy(), {"disable_dropout": False}),
    Mutant("two updates a rollout", "", 0, samples_from_a_copy(), {"steps_per_generation": 4}),
)


class _Fails(CopyEngine):
    """Its second publish breaks off after one tensor, as a connection does."""

    def publish(self, named_weights: NamedWeights, version: int) -> Receipt:
        if self.num_publishes:
            next(named_weights)
            raise broken("F114", version, "a publish that breaks off", "")
        return super().publish(named_weights, version)


def _of_ranks(
    name: str, code: str, step: int, kind: type[CopyEngine], says: str = "", **options: Any
) -> Mutant:
    given = {"per_device_train_batch_size": 8, **options}
    return Mutant(name, code, step, samples_from_a_copy(kind), given, says=says, is_everywhere=True)


_FSDP = {"fsdp": "full_shard"}
RANKS: Sequence[Mutant] = (
    _of_ranks("its engine loses a tensor", "F151", 1, _LosesATensor, "the engine of rank 1: 50 tensors"),
    _of_ranks("its engine loses a tensor, sharded", "F151", 1, _LosesATensor, _ONE, **_FSDP),
    _of_ranks("its engine hides its head", "F152", 1, _HidesItsHead, "from the learner's"),
    _of_ranks("its engine hides its head, sharded", "F152", 1, _HidesItsHead, "from the learner's", **_FSDP),
    _of_ranks("its engine hides its head, ZeRO-3", "F152", 1, _HidesItsHead, deepspeed="zero3"),
    _of_ranks("its engine drops the adapter, sharded", "F152", 1, _DropsTheAdapter, **{**LORA, **_FSDP}),
    _of_ranks("its publish breaks off, sharded", "F114", 1, _Fails, "breaks off", **_FSDP),
)

HEALTHY_RANKS: Sequence[Mutant] = (
    _of_ranks("engines of their own", "", 0, CopyEngine),
    _of_ranks("engines of their own, sharded", "", 0, CopyEngine, **_FSDP),
    _of_ranks("engines of their own, sharded, LoRA", "", 0, CopyEngine, **{**LORA, **_FSDP}),
    _of_ranks("engines of their own, ZeRO-2", "", 0, CopyEngine, deepspeed="zero2"),
    _of_ranks("engines of their own, ZeRO-3", "", 0, CopyEngine, deepspeed="zero3"),
    _of_ranks("engines of their own, sharded, bfloat16", "", 0, CopyEngine, **{**_BF16, **_FSDP}),
)
