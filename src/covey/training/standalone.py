"""`covey eval`: the evaluation of a run, on a model or checkpoint that nobody is training."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from os.path import isdir, isfile
from pathlib import Path

import torch
from torch import Tensor

from covey.checks.evaluation.look import survey_checked
from covey.checks.objects.look import Objects
from covey.checks.output.judge import unwritable_problem
from covey.checks.output.look import unwritable
from covey.checks.survey import Survey, fetch_model, model_dir
from covey.comm import LocalComm
from covey.config.adapters import ADAPTER_CONFIG
from covey.config.evaluation import has_own_output, is_checkpoint
from covey.config.filters import evaluated_alone
from covey.config.objects import live_kind
from covey.config.output import first_free
from covey.config.quantization import quantization_of
from covey.config.resolve import Resolved
from covey.data.pass_rates import FILE as PASS_RATES
from covey.data.pass_rates import lines_of
from covey.errors import ConfigError
from covey.learner.backends.base import Advance, Annotation
from covey.models.adapter_shapes import adapter_settings
from covey.models.live import LiveModel, lent
from covey.models.load import base_directory, choose_stream, load_adapted, load_policy
from covey.models.lora import AdapterAlone, adapter_alone, in_dtype, merged, plain_weights
from covey.models.policy import Policy
from covey.models.quantized import cast_unpacked
from covey.options.schema import Config
from covey.rollout.collector import CollectsInTurn
from covey.rollout.engine import NamedWeights
from covey.rollout.records import records_of
from covey.rollout.sampling import eval_sampling
from covey.rollout.slots import CollectPlan
from covey.telemetry.jsonl import encode, write_text
from covey.training.backend import engine_for
from covey.training.build_source import function_for, publisher_for
from covey.training.evaluate import EvalPrompts, Evaluation, Evaluator
from covey.training.process import compute_dtype, own_device
from covey.training.scoring import Scoring
from covey.training.state import Progress
from covey.types import Metric, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The metrics of an evaluation and where they were written: eval.json, beside a .jsonl of completions a
    set and the pass rate of each prompt in pass_rates.jsonl."""

    metrics: Mapping[str, Metric]
    output_dir: Path


def evaluate_checked(resolved: Resolved, directory: Path, objects: Objects) -> Evaluated:
    """The same with facts of its own; ConfigError carries what is wrong. A live model is left as it was."""
    with survey_checked(resolved, directory, objects) as found:
        live = found.live
        with lent(live.model, keep_weights=True) if live is not None else nullcontext():
            return evaluate(resolved, found, directory)


def evaluate(resolved: Resolved, found: Survey, directory: Path) -> Evaluated:
    """Sample and score every set with the model or adapter of `directory`, as a run would."""
    config, output = evaluated_alone(resolved.config), _output_dir(resolved, directory)
    if (words := unwritable(output)) != "":
        raise ConfigError([unwritable_problem(str(output), words)])
    assert found.codec is not None and found.rewards is not None
    policy = still_policy(config, directory, found.live)
    choose_stream(policy)

    comm = LocalComm()
    engine = engine_for(config, found.facts, policy, comm, found.codec.tokenizer, found.live)
    evaluator = Evaluator(
        sets=[EvalPrompts(name=name, prompts=table.entries) for name, table in found.eval_sets],
        collector=CollectsInTurn(
            publisher=publisher_for(config, found, _Still(policy), engine, comm),
            score=Scoring(found.rewards, config.weights, Progress(), None),
            codec=found.codec,
            comm=comm,
            agents=found.agents,
            function=function_for(config, found, policy),
        ),
        plan=CollectPlan(
            num_generations=config.num_generations_eval,
            sampling=eval_sampling(config, found.codec),
            seed=config.seed,
        ),
        rewards=found.rewards.tasks,
    )
    with closing(engine):
        evaluation = evaluator.run()
    if engine.given_up:
        warnings.warn(f"W170: {engine.given_up}", RuntimeWarning, stacklevel=2)
    _write(evaluation, directory, output)
    return Evaluated(metrics=evaluation.metrics, output_dir=output)


class _Still:
    """The owner of a policy that no step changes."""

    def __init__(self, policy: Policy) -> None:
        self.policy = self.sampler = policy

    def rollout_view(self) -> AbstractContextManager[Policy]:
        """The policy with its adapter merged."""
        return merged(self.policy)

    def weights(self, dtype: torch.dtype | None = None) -> NamedWeights:
        """Under transformers' names."""
        return in_dtype(plain_weights(self.policy), dtype)

    @property
    def adapter_alone(self) -> AdapterAlone | None:
        """That of the policy."""
        return adapter_alone(self.policy)

    @torch.no_grad()
    def annotate(self, micros: Sequence[MicroBatch], which: Annotation, advance: Advance) -> Tensor:
        """Logprobs of the trained tokens by the policy."""
        assert which == "old", "an evaluation has no other policy"
        return torch.cat([self.policy(micro).logprob_N for micro in micros])


def _output_dir(resolved: Resolved, directory: Path) -> Path:
    """Where the results go: as typed, beside the run's checkpoints, or under runs/."""
    if has_own_output(resolved):
        return Path(resolved.config.output_dir)
    if is_checkpoint(directory):
        return directory.parent / "evaluations" / directory.name
    return Path(first_free(str(Path("runs") / f"eval-{live_kind(directory.resolve().name)}")))


def still_policy(config: Config, directory: Path, live: LiveModel | None) -> Policy:
    """Return the model or the adapter of a directory as a run computes it, for no step to change."""
    device = own_device()
    dtype = compute_dtype(config, device)
    if isfile(directory / ADAPTER_CONFIG):
        settings, _ = adapter_settings(directory)
        policy = load_adapted(
            base_directory(directory, model_dir(config)),
            settings,
            adapter=directory,
            seed=0,
            compute_dtype=dtype,
            device=device,
            disable_dropout=True,
            trust_remote_code=config.trust_remote_code,
            kernels=config.kernels,
            quantization=quantization_of(config),
        )
    else:
        if not isdir(directory):
            fetch_model(config)
        named = directory if isdir(directory) else None
        policy = load_policy(
            live.model if live is not None else named or model_dir(config),
            device=device,
            disable_dropout=True,
            trust_remote_code=config.trust_remote_code,
            kernels=config.kernels,
            quantization=quantization_of(config),
            compute_dtype=dtype,
        )
        cast_unpacked(policy.parameters(), dtype)
    return policy.eval().requires_grad_(False)


def _write(evaluation: Evaluation, directory: Path, output: Path) -> None:
    metrics = evaluation.metrics
    body = {
        "model": str(directory),
        **{name: metric.value for name, metric in metrics.items()},
        "n": {name: metric.count for name, metric in metrics.items()},
    }
    write_text(output / "eval.json", json.dumps(body, indent=2) + "\n")
    for name, groups in evaluation.groups.items():
        write_text(output / f"{name}.jsonl", "".join(encode(r) + "\n" for r in records_of(groups)))
    rates = (line for name, groups in evaluation.groups.items() for line in lines_of(name, groups))
    write_text(output / PASS_RATES, "".join(encode(line) + "\n" for line in rates))
