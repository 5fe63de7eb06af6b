"""The checks: each computes one thing in two ways and says how far they are apart."""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from covey.algorithm.kl import k3
from covey.algorithm.losses import LossConfig
from covey.batching.pack import pack
from covey.batching.samples import to_samples
from covey.batching.shares import PackPlan, steps_of
from covey.checkpoint.read import read_shards, read_states
from covey.checkpoint.registry import Registry
from covey.checkpoint.write import write_checkpoint
from covey.comm import LocalComm
from covey.learner.annotate import annotate
from covey.learner.backends.single import SingleBackend
from covey.learner.update import accumulate, update
from covey.models.policy import Policy
from covey.selftest.bounds import BOUNDS
from covey.selftest.compare import by_plain_logits, by_policy, far, relative
from covey.selftest.subject import (
    LOSS,
    LOSS_TYPES,
    NUM_GROUPS,
    NUM_ROWS,
    Subject,
    backend_of,
    loss_of,
    off_policy,
    plan_of,
    rows_of,
    sample,
)
from covey.text_files import TextFiles
from covey.texts import tr
from covey.token_streams import Row, StreamKind
from covey.training.buffer import RolloutBuffer, RolloutTokens
from covey.training.state import OptimizerState, Progress, RandomState
from covey.types import ScoredGroup, TrainSample

# Tokens of a block of the head, and in how many blocks it takes the vocabulary.
_BLOCK_TOKENS, _VOCABULARY_BLOCKS = 24, 4
_LEARNING_RATE = 1e-4
# What many checks look at: the groups of the first rollout, in forward passes of about two rows.
_FEW_GROUPS, _PASS_TOKENS = 2, 64
_OF_ITS_OWN = tr("this model is trained on padded rows, without sharing (F105)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Holds a check with what it measured and the most that it may. `unused` says why nothing depends on
    it."""

    name: str
    value: float
    limit: float
    unused: str = ""

    @property
    def failed(self) -> bool:
        """Whether something is wrong; what is not a number is."""
        return not self.unused and not self.value <= self.limit


def checks(subject: Subject) -> Iterator[Measured]:
    """Yield every check, in the order of `BOUNDS`."""
    for name, value, unused in _all(subject):
        limit = BOUNDS[name].limit(is_cpu=subject.device.type == "cpu", is_built_in=subject.is_built_in)
        yield Measured(name=name, value=value, limit=limit, unused=unused)


Values = Iterator[tuple[str, float, str]]


def _all(subject: Subject) -> Values:
    policy = subject.policy()
    backend = backend_of(policy)
    groups = sample(backend, subject)
    yield from _layouts(subject, backend, groups)
    yield from _losses(backend, groups)
    yield from _head(policy, groups)
    yield from _sampler("float32", backend, groups)
    yield from _on_policy(subject, policy, groups)
    yield from _determinism(subject, backend, groups)
    del backend
    yield from _in_bfloat16(subject, policy)
    del policy
    _release(subject)
    yield from _adapter(subject, groups)
    _release(subject)
    yield tr("resume: weights"), _resume(subject, groups), ""


def _release(subject: Subject) -> None:
    """Make room for the next copy of a model: modules refer to each other in circles."""
    if not subject.is_built_in:
        gc.collect()


# -- the gradient of one optimizer step


def gradient(
    backend: SingleBackend, rows: Sequence[TrainSample], plan: PackPlan, loss: LossConfig = LOSS
) -> dict[str, Tensor]:
    """Return the gradient of all rows as one optimizer step, which the backend keeps no longer."""
    (batch,) = pack(rows, plan, rollout=0)
    backend.policy.train()
    accumulate(batch, backend, loss, LocalComm())
    found = backend.masters.gradients()
    for master in backend.masters.masters:
        master.grad = None
    return found


def _layouts(subject: Subject, backend: SingleBackend, groups: Sequence[ScoredGroup]) -> Values:
    """Compare a row a pass, packed rows, and rows that share their prompt with padded rows in one forward
    pass."""
    policy = backend.policy
    policy.use_stream("padded")
    rows = rows_of(groups, backend, plan_of(policy), old=False, reference=False)
    whole = gradient(backend, rows, plan_of(policy))
    yield (
        tr("micro-batches: gradient"),
        far(gradient(backend, rows, plan_of(policy, max_tokens=1)), whole),
        "",
    )
    streams: tuple[tuple[str, StreamKind], ...] = (
        (tr("packing"), "packed"),
        (tr("prompt sharing"), "prefix"),
    )
    for name, stream in streams:
        policy.use_stream(stream)
        unused = "" if subject.is_used(stream) else _OF_ITS_OWN
        yield tr("{name}: gradient", name=name), far(gradient(backend, rows, plan_of(policy)), whole), unused


def _losses(backend: SingleBackend, groups: Sequence[ScoredGroup]) -> Values:
    """Compare all rows in one forward pass and in several, for every loss off its policy, with a KL term."""
    policy = backend.policy
    policy.use_stream("padded")
    some = groups[:_FEW_GROUPS]
    plan, cut = _few(policy), _few(policy, max_tokens=_PASS_TOKENS)
    rows = off_policy(rows_of(some, backend, plan, old=True, reference=False))
    for loss_type in LOSS_TYPES:
        loss = loss_of(loss_type)
        whole = gradient(backend, rows, plan, loss)
        yield (
            tr("loss {loss_type}: gradient", loss_type=loss_type),
            far(gradient(backend, rows, cut, loss), whole),
            "",
        )


def _adapter(subject: Subject, groups: Sequence[ScoredGroup]) -> Values:
    """Compare the gradient of an adapter from padded rows in one forward pass with that of several passes,
    and of rows that share their prompt."""
    backend = backend_of(subject.adapted())
    policy = backend.policy
    rows = rows_of(groups[:_FEW_GROUPS], backend, _few(policy), old=False, reference=False)
    whole = gradient(backend, rows, _few(policy))
    cut = gradient(backend, rows, _few(policy, max_tokens=_PASS_TOKENS))
    yield tr("LoRA, micro-batches: gradient"), far(cut, whole), ""
    policy.use_stream("prefix")
    shared = gradient(backend, rows, _few(policy))
    unused = "" if subject.is_used("prefix") else _OF_ITS_OWN
    yield tr("LoRA, prompt sharing: gradient"), far(shared, whole), unused


def _few(policy: Policy, **limits: int) -> PackPlan:
    """Return the rows of the first groups as one optimizer step."""
    return plan_of(policy, rows=NUM_ROWS * _FEW_GROUPS // NUM_GROUPS, **limits)


def _head(policy: Policy, groups: Sequence[ScoredGroup]) -> Values:
    """Compare the head over blocks of tokens and of the vocabulary with the model's own logits."""
    policy.use_stream("padded")
    rows = [
        Row(token_ids=s.token_ids, is_trained=s.is_trained, prompt_length=s.prompt_length, prompt_key=s.group)
        for s in to_samples(groups)
    ]
    vocabulary: int = policy.model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
    cells = _BLOCK_TOKENS * -(-vocabulary // _VOCABULARY_BLOCKS)
    plain, own = by_plain_logits(policy.model, rows), policy.head
    policy.head = replace(own, block=(_BLOCK_TOKENS, cells))
    chunked = by_policy(policy, rows)
    policy.head = own
    yield tr("head in blocks: logprobs"), relative(chunked[0], plain[0]), ""
    yield tr("head in blocks: gradient"), relative(chunked[1], plain[1]), ""


# -- what was sampled


@torch.no_grad()
def _logprobs(backend: SingleBackend, groups: Sequence[ScoredGroup]) -> Tensor:
    """Return the learner's logprobs of the sampled tokens, on padded rows."""
    backend.policy.use_stream("padded")
    plan = plan_of(backend.policy)
    samples, everything = to_samples(groups), [True] * NUM_ROWS
    steps = steps_of(samples, everything, plan)
    logprobs = annotate(samples, everything, steps, backend, "old", plan, LocalComm())
    return torch.cat([values for values in logprobs if values is not None])


def _sampler(dtype: str, backend: SingleBackend, groups: Sequence[ScoredGroup]) -> Values:
    sampled = torch.cat([torch.tensor(s.sampler_logprobs) for s in to_samples(groups)])
    gap = (sampled - _logprobs(backend, groups)).abs()
    yield tr("sampler, {dtype}: largest difference", dtype=dtype), float(gap.max()), ""
    yield tr("sampler, {dtype}: mean difference", dtype=dtype), float(gap.mean()), ""


def _in_bfloat16(subject: Subject, policy: Policy) -> Values:
    """Compare logprobs of engine and learner in bfloat16, which `policy` is cast to."""
    if not has_bfloat16(subject.device):
        for which in ("largest", "mean"):
            yield (
                tr("sampler, bfloat16: {which} difference", which=which),
                math.nan,
                tr("this GPU does not support bfloat16"),
            )
        return
    policy.use_stream(subject.stream)
    backend = backend_of(policy, dtype=torch.bfloat16)
    groups = sample(backend, subject)
    yield from _sampler("bfloat16", backend, groups)


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16; a CPU does, if slowly."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def _on_policy(subject: Subject, policy: Policy, groups: Sequence[ScoredGroup]) -> Values:
    """Measure the importance ratio before an update, and the KL to a reference that is the same model."""
    policy.use_stream(subject.stream)
    reference = subject.policy().requires_grad_(False).eval()
    backend = backend_of(policy, reference=reference)
    rows = rows_of(groups, backend, plan_of(policy), old=True, reference=True)
    (batch,) = pack(rows, plan_of(policy), rollout=0)
    ratio = kl = 0.0
    for micro in batch.micro_batches:
        logprob_N = policy(micro).logprob_N.detach()
        assert micro.old_logprob_N is not None and micro.ref_logprob_N is not None
        ratio = max(ratio, float((torch.exp(logprob_N - micro.old_logprob_N) - 1.0).abs().max()))
        kl = max(kl, float(k3(logprob_N, micro.ref_logprob_N).abs().max()))
    yield tr("on-policy: ratio - 1"), ratio, ""
    yield tr("unchanged reference: KL"), kl, ""


def _determinism(subject: Subject, backend: SingleBackend, groups: Sequence[ScoredGroup]) -> Values:
    """Compare a rollout with that of a new engine, and a step with the same step again."""
    backend.policy.use_stream(subject.stream)
    again = sample(backend, subject)
    pairs = zip(to_samples(groups), to_samples(again), strict=True)
    differing = sum(a != b for x, y in pairs for a, b in zip(x.token_ids, y.token_ids, strict=True))
    yield tr("determinism: tokens that differ"), float(differing), ""
    plan = plan_of(backend.policy)
    rows = rows_of(groups, backend, plan, old=False, reference=False)
    first = gradient(backend, rows, plan)
    yield tr("determinism: gradient"), far(gradient(backend, rows, plan), first), ""


# -- resume


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Holds the learner's part of a run, with every state that a checkpoint of it holds."""

    backend: SingleBackend
    progress: Progress
    buffer: RolloutBuffer
    registry: Registry

    def go_on(self, until: int) -> None:
        """Take optimizer steps until so many are taken, of the four that the rollout gives."""
        self.backend.policy.train()
        for batch in pack(self.buffer.rows, self.plan, rollout=0)[self.buffer.done : until]:
            update(batch, self.backend, LOSS, _LEARNING_RATE, LocalComm())
            self.buffer.done += 1
            self.progress.step += 1

    @property
    def plan(self) -> PackPlan:
        return plan_of(self.backend.policy, steps=2, passes=2)

    def weights(self) -> dict[str, Tensor]:
        masters = self.backend.masters
        return {n: m.detach().clone() for n, m in zip(masters.names, masters.masters, strict=True)}


def _run(policy: Policy) -> _Run:
    backend, progress = backend_of(policy), Progress()
    buffer = RolloutBuffer(plan_of(policy, steps=2, passes=2))
    registry = Registry()
    for component in (progress, buffer, RandomState(LocalComm())):
        registry.register(component)
    registry.register_sharded(OptimizerState(backend))
    registry.register_sharded(RolloutTokens(buffer))
    return _Run(backend=backend, progress=progress, buffer=buffer, registry=registry)


def _resume(subject: Subject, groups: Sequence[ScoredGroup]) -> float:
    """Compare two steps after a checkpoint with those of a new run that starts from it.

    The difference is a share of what the last two steps changed.
    """
    run = _run(subject.policy())
    run.buffer.fill(rows_of(groups, run.backend, run.plan, old=True, reference=False), {}, {})
    run.go_on(2)
    with tempfile.TemporaryDirectory(prefix="covey-selftest-") as work:
        checkpoint = _save(run, subject, Path(work))
        run.go_on(4)
        expected = run.weights()
        del run
        _release(subject)
        again = _run(subject.policy(checkpoint))
        again.registry.load(read_states(checkpoint), read_shards(checkpoint))
    start = again.weights()
    again.go_on(4)
    differences = again.weights()
    for name, tensor in start.items():
        differences[name] -= tensor
        expected[name] -= tensor
    return far(differences, expected)


def _save(run: _Run, subject: Subject, directory: Path) -> Path:
    return write_checkpoint(
        directory,
        step=run.progress.step,
        write_model=run.backend.model_writer(TextFiles(origin=subject.directory), None),
        states=run.registry.states(),
        shards=run.registry.shards(),
        meta={},
    )
