"""Where the rollouts of a configuration come from, and the evaluator that samples beside them."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from covey.checks.survey import Survey, model_dir
from covey.comm import Comm
from covey.data.images import PlacedImage
from covey.data.order import Order
from covey.data.pass_rates import levels
from covey.data.prompts import fields_of
from covey.data.text import TextCodec
from covey.learner.canary import Learner, learners_view
from covey.media.source import sources_of
from covey.models.lora import tied_names
from covey.models.policy import Policy
from covey.options.schema import Config
from covey.plan.batch import BatchPlan
from covey.rewards.registry import metric_names
from covey.rollout.ahead import CollectsAhead, Sampler
from covey.rollout.canary import Bound, Canary, canary_requests
from covey.rollout.collector import Collector, CollectsInTurn
from covey.rollout.engine import Engine
from covey.rollout.function_context import RolloutFunction
from covey.rollout.publisher import Owner, Publisher
from covey.rollout.sampling import eval_sampling, sampling
from covey.rollout.server.client import ServerEngine
from covey.rollout.slots import CollectPlan
from covey.training.ahead import AheadSource
from covey.training.evaluate import EvalPrompts, Evaluator
from covey.training.objective import Objective
from covey.training.process import compute_dtype
from covey.training.scoring import Scoring
from covey.training.select import FURTHER, Further, OneByOne, Replay, SelectingSource
from covey.training.source import (
    LiveSource,
    PromptSupply,
    ReplaySource,
    Source,
    StreamSupply,
    TableSupply,
)
from covey.types import Medium


def prompt_supply(config: Config, found: Survey, plan: BatchPlan) -> TableSupply | StreamSupply | None:
    """Where prompts come from; None where rollouts are replayed."""
    if config.replay_rollouts is not None:
        return None
    if found.stream is not None:
        return StreamSupply(stream=found.stream, per_rollout=plan.prompts_per_rollout)
    assert found.prompts is not None
    order = Order(
        num_prompts=len(found.prompts.entries),
        per_rollout=plan.prompts_per_rollout,
        seed=config.data_seed,
        shuffle=config.dataset_shuffle,
        levels=levels(config.curriculum, fields_of(found.prompts.entries, "pass_rate")),
    )
    return TableSupply(prompts=found.prompts, order=order)


class _Owner(Owner, Learner, Protocol):
    """What owns weights and computes with them: a backend, or the policy of an evaluation."""


def publisher_for(config: Config, found: Survey, owner: _Owner, engine: Engine, comm: Comm) -> Publisher:
    """What gives an engine the weights, with a canary where the engine holds a copy of them."""
    if not engine.capabilities.holds_weights:
        return Publisher(owner, engine, comm)
    assert found.codec is not None
    vocab = min(owner.sampler.vocab, found.codec.tokenizer.get_vocab_size())
    own = compute_dtype(config, owner.policy.device)
    canary = Canary(
        requests=canary_requests(vocab, owner.sampler.head.banned, _canary_images(found.codec)),
        view=learners_view(owner, comm.activity.advance),
        bound=Bound(own, engine.capabilities.dtype or own),
    )
    return Publisher(owner, engine, comm, canary=canary, tied=tied_names(owner.sampler))


def _canary_images(codec: TextCodec) -> list[Medium]:
    """Two images of noise, the same in every run, for a model that sees."""
    if codec.vision is None:
        return []
    limits = codec.vision.limits
    side = limits.tile or 2 * limits.token_side
    noise = np.random.default_rng(0).integers(256, size=(2, side, side, 3), dtype=np.uint8)
    return [codec.vision.medium(PlacedImage(source)) for pixels in noise for source in sources_of(pixels)]


def function_for(config: Config, found: Survey, policy: Policy) -> RolloutFunction | None:
    """Return the function that makes the episodes with this policy; None where an engine alone does."""
    if found.rollout_func is None:
        return None
    assert found.codec is not None
    origin = model_dir(config) if found.live is None else found.live.directory
    return RolloutFunction(
        call=found.rollout_func,
        args=config,
        policy=policy,
        load_tokenizer=partial(
            _tokenizer, origin, found.codec.template_text, trust_remote_code=config.trust_remote_code
        ),
        model_context=found.facts.model.context,
    )


def _tokenizer(origin: Path, template: str | None, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model as transformers has it, with the chat template of the run."""
    tokenizer = AutoTokenizer.from_pretrained(origin, trust_remote_code=trust_remote_code)
    tokenizer.chat_template = template
    return tokenizer


def collector_for(
    config: Config, found: Survey, publisher: Publisher, scoring: Scoring, comm: Comm, policy: Policy
) -> Collector:
    """Return the collector of a run: it samples while the model trains, or in turn with it, with this
    policy."""
    assert found.codec is not None
    if config.is_ahead:
        engine = cast(ServerEngine, publisher.engine)
        return CollectsAhead(
            publisher=publisher,
            sampler=Sampler(engine, found.codec, found.agents, engine.activity),
            score=scoring,
            codec=found.codec,
            comm=comm,
            agents=found.agents,
        )
    return CollectsInTurn(
        publisher=publisher,
        score=scoring,
        codec=found.codec,
        comm=comm,
        agents=found.agents,
        function=function_for(config, found, policy),
    )


def source_for(
    config: Config,
    found: Survey,
    supply: TableSupply | StreamSupply | None,
    collector: Collector,
    scoring: Scoring,
    plan: BatchPlan,
) -> Source:
    """What gives a rollout by its number: sampled now, or read from the files of another run."""
    if config.replay_rollouts is not None:
        return ReplaySource(
            Path(config.replay_rollouts),
            dict(zip(metric_names(config.rewards), config.weights, strict=True)),
            found.images,
        )
    assert found.codec is not None
    assert supply is not None
    live = LiveSource(
        supply=supply,
        collector=collector,
        plan=CollectPlan(
            num_generations=config.num_generations,
            sampling=sampling(config, found.codec),
            seed=config.seed,
            weights=scoring.weights,
        ),
        tasks={task: scoring.rewards.tasks.get(task, ()) for task in found.facts.tasks.num_rows},
    )
    if not config.is_ahead:
        return live
    assert plan.total_steps is not None
    return AheadSource(
        **{own.name: getattr(live, own.name) for own in fields(live)},
        most=config.max_staleness,
        end=-(-plan.total_steps // plan.steps_per_rollout),
        steps_per_rollout=plan.steps_per_rollout,
        images=found.images,
    )


def at_scheduled_temperature(source: Source, objective: Objective, plan: BatchPlan) -> Source:
    """The source at the temperature that each rollout has."""
    if not isinstance(source, LiveSource) or "temperature" not in objective.schedules:
        return source
    return replace(source, temperature=lambda n: objective.temperature_at(n * plan.steps_per_rollout))


def selecting_groups(source: Source, config: Config, found: Survey) -> Source:
    """The source with groups without signal replaced, where that is asked for."""
    if not isinstance(source, LiveSource) or not (config.dynamic_sample or config.replay_buffer_size):
        return source
    seed = config.data_seed + FURTHER
    further: PromptSupply
    if found.stream is not None:
        further = StreamSupply(stream=found.stream.reordered(seed), per_rollout=1)
    else:
        assert found.prompts is not None
        further = OneByOne(found.prompts, seed)
    return SelectingSource(
        source,
        config,
        Further(further),
        Replay(config.replay_buffer_size, config.seed),
        attempts=config.max_resample_times if config.dynamic_sample else 0,
        images=found.images,
    )


def evaluator_for(config: Config, found: Survey, collector: Collector, scoring: Scoring) -> Evaluator | None:
    """What evaluates on held-out prompts; None where the run does not."""
    if config.eval_strategy == "no" or not found.eval_sets:
        return None
    assert found.codec is not None
    return Evaluator(
        sets=[EvalPrompts(name=name, prompts=table.entries) for name, table in found.eval_sets],
        collector=collector,
        plan=CollectPlan(
            num_generations=config.num_generations_eval,
            sampling=eval_sampling(config, found.codec),
            seed=config.seed,
            weights=scoring.weights,
        ),
        rewards=scoring.rewards.tasks,
    )


def longest_prompt_of(found: Survey, source: Source) -> int:
    """Tokens of the longest prompt that is trained on."""
    if isinstance(source, ReplaySource):
        return source.longest_prompt
    return found.facts.prompts.longest or 0


def total_steps_of(plan: BatchPlan, source: Source) -> int:
    """Optimizer steps of the whole run; a replay has no more than its files hold."""
    if not isinstance(source, ReplaySource):
        assert plan.total_steps is not None
        return plan.total_steps
    held = source.num_rollouts * plan.steps_per_rollout
    return held if plan.total_steps is None else min(held, plan.total_steps)
