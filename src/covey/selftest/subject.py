"""What is tested: a small random model or one of a directory, and completions that it samples."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from covey.algorithm.loss_types.registry import LOSSES
from covey.algorithm.losses import LossConfig
from covey.batching.needs import Needs
from covey.batching.shares import PackPlan
from covey.checks.model.memory import free_memory
from covey.comm import LocalComm
from covey.config.resolve import from_dict
from covey.data.model_files import model_problem
from covey.errors import ConfigError
from covey.learner.annotate import annotate_and_credit
from covey.learner.backends.single import SingleBackend
from covey.models.adapter_shapes import LoraSettings, read_shapes
from covey.models.layouts import AttentionKind
from covey.models.load import choose_stream, load_adapted, load_policy
from covey.models.policy import Policy
from covey.options.schema import Config, LearnerOptions
from covey.plan.problem import START_ANYWAY, problem
from covey.rollout.generate import GenerateEngine
from covey.rollout.native.engine import NativeEngine
from covey.texts import tr
from covey.token_streams import StreamKind
from covey.training.loss import loss
from covey.types import (
    Completion,
    Episode,
    Fix,
    GenerationRequest,
    Group,
    Origin,
    Outcome,
    Prompt,
    SamplingParams,
    Score,
    ScoredGroup,
    TokenSequence,
    TrainSample,
    TurnId,
)

LOSS = LossConfig(loss_type="dapo", epsilon=0.2, epsilon_high=0.2)
LOSS_TYPES: tuple[str, ...] = tuple(LOSSES)
"""Every value of the option, so that no loss goes without a check."""
TEMPERATURE = 0.8

# Tokens of the prompts of each rollout: the engine keeps short and long prompts in different ways. Tokens of
# the siblings: ragged, and one that its prompt alone predicts.
_PROMPTS = ((5, 12), (23, 70))
_COMPLETIONS = (16, 5, 9, 1)
NUM_GROUPS = sum(len(lengths) for lengths in _PROMPTS)
NUM_ROWS = NUM_GROUPS * len(_COMPLETIONS)

# Bytes a parameter. Disk: a checkpoint's weights and two moments. Memory: the same and the gradient, and the
# weights that the resumed run is compared with, before and after, are 24; with activations, copies on the way
# and freed memory that is kept, 40 were measured (a model of 58 M parameters, on a CPU).
_MEMORY_BYTES, _DISK_BYTES = 40, 12
_PASS_TOKENS = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model of a directory on a device, and how its rows are laid out in training.

    `family` is its `model_type`; it has `parameters` of them.
    """

    device: torch.device
    directory: Path
    is_built_in: bool
    family: str
    parameters: int
    attention: AttentionKind
    stream: StreamKind

    def policy(self, directory: Path | None = None) -> Policy:
        """A new copy of the model in float32, or of the one that a checkpoint of it holds."""
        policy = _load(directory or self.directory, self.device)
        policy.attention = self.attention
        policy.use_stream(self.stream)
        return policy

    def adapted(self) -> Policy:
        """A copy with a LoRA adapter on all linear layers; its B is not 0, so that its A has a gradient."""
        policy = load_adapted(
            self.directory,
            LoraSettings(rank=8, alpha=16),
            adapter=None,
            seed=1,
            compute_dtype=torch.float32,
            device=self.device,
            disable_dropout=True,
        )
        _unbanned(policy).attention = self.attention
        generator = torch.Generator().manual_seed(2)
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                random = torch.empty(parameter.shape).normal_(std=0.02, generator=generator)
                parameter.data.copy_(random)
        return policy

    def is_used(self, stream: StreamKind) -> bool:
        """Whether training may lay this model's rows out so; the built-in one passes every layout."""
        order: tuple[StreamKind, ...] = ("padded", "packed", "prefix")
        return self.is_built_in or order.index(stream) <= order.index(self.stream)


def subject(device: torch.device, directory: Path, *, is_built_in: bool) -> Subject:
    """The model with the layout that a run would train it on."""
    policy = _load(directory, device)
    choose_stream(policy, "auto")
    config: Any = policy.model.config
    return Subject(
        device=device,
        directory=directory,
        is_built_in=is_built_in,
        family=config.model_type,
        parameters=sum(p.numel() for p in policy.parameters()),
        attention=policy.attention,
        # What a fault does to the built-in model is a failure, and not a property of the model.
        stream="prefix" if is_built_in else policy.stream,
    )


def _load(directory: Path, device: torch.device) -> Policy:
    return _unbanned(load_policy(directory, device=device, disable_dropout=True))


def _unbanned(policy: Policy) -> Policy:
    """Return the policy without the ban of its generation_config.json, which plain logits do not have."""
    policy.head = replace(policy.head, banned=())
    return policy


def write_random_model(directory: Path) -> None:
    """Two layers of Qwen2 with weights large enough for attention to be far from uniform, and heads wide
    enough for every kernel."""
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = Qwen2ForCausalLM(config).float()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    disable_progress_bar()
    model.save_pretrained(directory)


def refuse(directory: Path, device: torch.device, *, ignore_forecast: bool = False) -> None:
    """ConfigError where the directory holds no model, or one that is too large for this machine by a forecast
    that is not to be ignored."""
    fault = model_problem(directory)
    if fault is not None:
        raise ConfigError(
            [
                problem(
                    "E301",
                    "model",
                    str(fault),
                    tr("The path may be misspelled, or the directory is not that of a model."),
                    Fix(text=tr("give the directory of a complete model: --model DIR")),
                    Fix(text=tr("leave out --model to test the built-in model")),
                )
            ]
        )
    parameters = sum(math.prod(shape) for shape in read_shapes(directory).tensors.values())
    free = free_memory(cuda=device.type == "cuda")
    disk = shutil.disk_usage(tempfile.gettempdir()).free
    for code, needed, have, where in (
        ("E211", _MEMORY_BYTES * parameters, free, tr("the memory of the {type}", type=device.type)),
        ("E407", _DISK_BYTES * parameters, disk, tr("the directory for temporary files")),
    ):
        if have is not None and needed > have and not ignore_forecast:
            raise ConfigError([_too_large(code, parameters, needed, have, where)])


def _too_large(code: str, parameters: int, needed: int, have: int, where: str) -> Any:
    return problem(
        code,
        "model",
        tr(
            "A model of {parameters:.2f} B parameters needs {needed:.1f} GiB for a self-test in float32, "
            "but {where} has only {have:.1f} GiB free.",
            parameters=parameters / 1e9,
            needed=needed / 2**30,
            where=where,
            have=have / 2**30,
        ),
        tr(
            "The self-test trains the model twice in float32, once from a checkpoint, and keeps its "
            "weights for comparison."
        ),
        Fix(text=tr("use a smaller model of the same family: --model DIR")),
        Fix(text=tr("leave out --model: the built-in model uses the same code")),
        START_ANYWAY,
    )


def sample(backend: SingleBackend, subject: Subject) -> list[ScoredGroup]:
    """Completions of random prompts by the engine that a run would sample with, in two rollouts."""
    with backend.rollout_view() as view:
        return [group for number in range(len(_PROMPTS)) for group in _rollout(view, subject, number)]


def _rollout(view: Policy, subject: Subject, number: int) -> list[ScoredGroup]:
    engine = GenerateEngine(view) if subject.stream == "padded" else NativeEngine(view)
    prompts = [_prompt(view, number, i, length) for i, length in enumerate(_PROMPTS[number])]
    requests = [{engine.submit(r): r for r in _requests(prompt)} for prompt in prompts]
    made = {c.request_id: c for c in engine.results()}
    return [
        _scored(p, [_episode(r, made[i]) for i, r in siblings.items()])
        for p, siblings in zip(prompts, requests, strict=True)
    ]


def _prompt(view: Policy, rollout: int, number: int, length: int) -> Prompt:
    config: Any = view.model.config
    vocab = min(config.vocab_size, 1 << 15)
    generator = torch.Generator().manual_seed(length)
    return Prompt(
        id=number,
        messages=None,
        text="",
        token_ids=tuple(torch.randint(vocab, (length,), generator=generator).tolist()),
        columns={},
        origin=Origin(epoch=0, rollout=rollout),
    )


def _requests(prompt: Prompt) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt_token_ids=tuple(prompt.token_ids),
            sampling=SamplingParams(temperature=TEMPERATURE, max_new_tokens=length, stop_token_ids=()),
            turn=TurnId(
                seed=1,
                split="train",
                rollout=prompt.origin.rollout,
                attempt=0,
                prompt_id=prompt.id,
                sibling=sibling,
            ),
        )
        for sibling, length in enumerate(_COMPLETIONS)
    ]


def _episode(request: GenerationRequest, completion: Completion) -> Episode:
    return Episode(
        id=request.turn.episode,
        sequences=(TokenSequence.of_turn(request.prompt_token_ids, completion),),
        outcome=Outcome(completion.finish),
        text="",
        sampling=request.sampling,
    )


def _scored(prompt: Prompt, episodes: Sequence[Episode]) -> ScoredGroup:
    """Rewards that no two siblings share, so that every row has a gradient."""
    scores = [Score(total=sum(e.completion_ids) % 7 + 0.1 * i, parts=()) for i, e in enumerate(episodes)]
    group = Group(prompt=prompt, episodes=tuple(episodes), planned=len(episodes))
    return ScoredGroup(group=group, scores=tuple(scores))


def backend_of(
    policy: Policy, *, dtype: torch.dtype = torch.float32, reference: Policy | None = None
) -> SingleBackend:
    """The backend of one process, with AdamW as a run has it."""
    options = LearnerOptions(learning_rate=1e-6)
    return SingleBackend(policy, options, compute_dtype=dtype, reference=reference)


def loss_of(loss_type: str) -> LossConfig:
    """A loss with the options that a run has by itself, and with a KL term."""
    return loss(_config(loss_type=loss_type, beta=0.04))


def _config(**options: Any) -> Config:
    """The options of a run that asks for these."""
    return from_dict({"model": "-", "dataset": ["-"], "reward_funcs": ["format"], **options}, 1).config


def off_policy(rows: Sequence[TrainSample]) -> list[TrainSample]:
    """Rows as of another policy and another reference: ratios on both sides of their clip, KLs above 0."""
    generator = torch.Generator().manual_seed(4)
    stale = []
    for row in rows:
        old_N = row.annotated.old_logprob_N
        assert old_N is not None
        away_2N = 0.3 * torch.randn(2, *old_N.shape, generator=generator)
        old, ref = old_N + away_2N[0], old_N + away_2N[1]
        annotated = replace(row.annotated, old_logprob_N=old, ref_logprob_N=ref)
        stale.append(replace(row, annotated=annotated))
    return stale


def plan_of(
    policy: Policy,
    *,
    rows: int = NUM_ROWS,
    steps: int = 1,
    passes: int = 1,
    max_tokens: int = _PASS_TOKENS,
) -> PackPlan:
    """All rows in `steps` optimizer steps, `passes` times, on the layout that the policy has now."""
    return PackPlan(
        rank=0,
        world=1,
        completions_per_rank=rows // steps,
        num_iterations=passes,
        max_tokens=max_tokens,
        max_completion_length=max(_COMPLETIONS),
        stream=policy.stream,
        device=policy.device,
    )


def rows_of(
    groups: Sequence[ScoredGroup], backend: SingleBackend, plan: PackPlan, *, old: bool, reference: bool
) -> list[TrainSample]:
    """The completions as rows to train on, every one of them forwarded."""
    return annotate_and_credit(
        groups,
        backend,
        credit=_config(),
        needs=Needs(old=old, reference=reference, may_skip_rows=False),
        plan=plan,
        comm=LocalComm(),
    )
