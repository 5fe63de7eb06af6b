"""Everything that is wrong with a run, all at once, before anything is started."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from covey.checks.algorithm import algorithm_problems
from covey.checks.batch import batch_problems
from covey.checks.code.judge import code_problems
from covey.checks.data.judge import data_problems
from covey.checks.deepspeed import deepspeed_problems
from covey.checks.effect import effect_problems
from covey.checks.evaluation.judge import eval_problems
from covey.checks.levers import lever_problems
from covey.checks.lora.judge import lora_problems
from covey.checks.model.judge import model_problems
from covey.checks.model.quantization import quantization_problems
from covey.checks.objects.judge import object_problems
from covey.checks.pass_rates.judge import pass_rate_problems
from covey.checks.ray.judge import ray_problems
from covey.checks.rewards.judge import reward_problems
from covey.checks.rewards.steps import step_problems
from covey.checks.run.judge import run_problems
from covey.checks.servers.judge import server_problems
from covey.checks.start import is_settled, start_problems
from covey.checks.tasks.judge import task_problems
from covey.checks.values import value_problems
from covey.checks.vllm import vllm_problems
from covey.config.resolve import Resolved, faulty_options
from covey.errors import ConfigError
from covey.options.schema import Config
from covey.plan.check_filters import filter_problems
from covey.plan.check_layout import layout_problems
from covey.plan.check_memory import memory_problems
from covey.plan.facts import Facts
from covey.plan.kernels import kernel_problems
from covey.plan.shape import COUNTS
from covey.plan.versions import version_problems
from covey.plan.words import sentence
from covey.texts import joined, tr
from covey.types import Problem, Severity


def checks(config: Config, facts: Facts, typed: Collection[str] | None = None) -> list[Problem]:
    """Return every problem and warning of a configuration under these facts, errors first.

    `typed` are the names of the options that the user gave (`Resolved.typed_names`): a fix of the batch names
    only what has to be typed, and of those that have no effect each is named.
    """
    layout = [*facts.launch.layout_problems, *layout_problems(config, facts)]
    layout += deepspeed_problems(config, facts, typed)
    problems = [
        *object_problems(config, facts.launch),
        *model_problems(config, facts),
        *start_problems(config, facts.lora, facts.output, typed or ()),
        *quantization_problems(config, facts),
        *kernel_problems(config, facts.model, facts.machine),
        *lever_problems(config, facts, typed or ()),
        *version_problems(config, facts),
        *vllm_problems(config, facts),
        *lora_problems(config, facts, typed or ()),
        *ray_problems(config, facts.launch),
        *server_problems(config, facts),
        *data_problems(config, facts),
        *reward_problems(config, facts.data, facts.prompts, facts.rewards),
        *step_problems(config, facts.rewards, typed or ()),
        *code_problems(config, facts.rewards),
        *task_problems(config, facts),
        *pass_rate_problems(config, facts.data, facts.output),
        *batch_problems(config, facts.launch.num_processes, facts.prompts.num_used, typed),
        *layout,
        # A layout whose parts cannot be together has no forecast.
        *([] if any(p.severity is Severity.ERROR for p in layout) else memory_problems(config, facts, typed)),
        *value_problems(config),
        *filter_problems(config, facts),
        *algorithm_problems(config, facts.launch.num_processes, typed or ()),
        *eval_problems(config, facts),
        *run_problems(config, facts),
        *effect_problems(config, facts.prompts, facts.rewards, typed or ()),
    ]
    return sorted(problems, key=lambda problem: problem.severity is not Severity.ERROR)


def refuse_faults(resolved: Resolved, facts: Facts) -> list[Problem]:
    """Return the warnings of a run; ConfigError carries everything that is wrong, warnings included.

    What only follows from a value that nobody could read is left out.
    """
    said = [problem for problem in resolved.problems if not is_settled(problem, facts.lora)]
    faulty = faulty_options(said, resolved.typed_names)
    no_gpus = not facts.layout.num_gpus
    no_batch = no_gpus or bool(faulty & {*COUNTS, "nproc_per_node"})
    # Where a launcher's variables are wrong (E370), the number of processes is not known.
    no_batch = no_batch or any(problem.code == "E370" for problem in said)
    checked = [
        _as_typed(problem, resolved)
        for problem in checks(resolved.config, facts, resolved.typed_names)
        if problem.option not in faulty and not (no_batch and problem.code.startswith("E2"))
    ]
    problems = [*said, *checked]
    if any(problem.severity is Severity.ERROR for problem in problems):
        raise ConfigError(problems)
    return problems


def _as_typed(problem: Problem, resolved: Resolved) -> Problem:
    """Return a problem with the name under which its option was typed, where it is called otherwise here."""
    name = resolved.other_names.get(problem.option)
    if name is None:
        return problem
    also = tr("{option} was given as {name}.", option=problem.option, name=name)
    return replace(problem, seen=joined(" ", [sentence(problem.seen), also]))
