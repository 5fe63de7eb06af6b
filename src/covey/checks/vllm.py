"""Finds faults in sampling by vLLM: options that cannot be together, and what it has no place for."""

from __future__ import annotations

from typing import Any

from covey.checks.check import Check
from covey.codes import Code
from covey.config.quantization import quantization_of
from covey.media.families import FAMILIES, VLLM_FAMILIES
from covey.options.schema import Config
from covey.plan.facts import DataFacts, Facts, LaunchFacts, MachineFacts, ModelFacts, PromptFacts
from covey.plan.layout import Layout
from covey.plan.problem import problem, warning
from covey.plan.server_line import start_line
from covey.plan.vllm_limits import LEAST_TEMPERATURE, OWNED, UNTRIED
from covey.texts import counted, joined, plural, tr
from covey.types import Fix, Problem

_HIGHEST_TEMPERATURE = 2.0

_OWN_ENGINE = Fix(text=tr("use covey's own engine"), edits={"use_vllm": False})


def vllm_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what stands against sampling by vLLM; nothing where it does not sample."""
    if not config.use_vllm:
        return []
    problems = [
        *_arguments(config),
        *_temperature(config),
        *_length(config, facts.model, facts.prompts),
        *_packed(config),
        *_media(config, facts.data),
    ]
    if config.vllm_mode == "colocate":
        problems += _family(facts.model)
        problems += _colocated(config, facts.launch, facts.machine, facts.layout)
    problems += _servers(config, facts)
    if facts.machine.cuda and config.vllm_mode == "colocate":
        seen = tr(
            "{untried}; the weights that are sent to it are verified against the model in training.",
            untried=UNTRIED,
        )
        problems.append(warning("W190", "use_vllm", seen, "", _OWN_ENGINE))
    return problems


def _servers(config: Config, facts: Facts) -> list[Problem]:
    """Servers without the mode for them, and the mode without servers."""
    has_servers, is_mode = bool(config.rollout_servers), config.vllm_mode == "server"
    colocate = Fix(
        text=tr("run vLLM in the training process"), edits={"vllm_mode": "colocate", "rollout_servers": []}
    )
    if is_mode and not has_servers and facts.layout.is_here:
        seen = tr("vllm_mode is server, but rollout_servers is not set.")
        line = start_line(config, "http://127.0.0.1:8000", facts)
        named = Fix(
            text=tr(
                "start a server with `{line}`, and add to this command: --rollout_servers "
                "http://127.0.0.1:8000 --rollout_token_file rollout-8000.token",
                line=line,
            )
        )
        return [problem("E430", "vllm_mode", seen, "", named, _OWN_ENGINE)]
    if has_servers and not is_mode:
        seen = tr("vllm_mode is colocate, but rollout_servers is set.")
        served = Fix(text=tr("sample on the servers"), edits={"vllm_mode": "server"})
        return [problem("E430", "vllm_mode", seen, "", served, colocate)]
    return []


def _colocated(config: Config, launch: LaunchFacts, machine: MachineFacts, layout: Layout) -> list[Problem]:
    """Return the problems of a vLLM that runs in the training processes."""
    problems = []
    number, spans = config.vllm_data_parallel_size, max(1, config.vllm_tensor_parallel_size)
    engines = max(1, launch.num_processes // spans)
    if number not in (1, engines):
        seen = plural(
            engines,
            "vllm_data_parallel_size is {number}, but {processes} with vllm_tensor_parallel_size {spans} are "
            "{engines} vLLM engine.",
            "vllm_data_parallel_size is {number}, but {processes} with vllm_tensor_parallel_size {spans} are "
            "{engines} vLLM engines.",
            number=number,
            processes=counted(launch.num_processes, "training process"),
            spans=spans,
            engines=engines,
        )
        alone = Fix(
            text=tr("as many engines as there are: leave out --vllm_data_parallel_size"),
            edits={"vllm_data_parallel_size": 1},
        )
        problems.append(problem("E430", "vllm_data_parallel_size", seen, "", alone))
    return [*problems, *([] if machine.cuda or not layout.is_here else _on_cpu(config))]


def _on_cpu(config: Config) -> list[Problem]:
    """Options that vLLM reads on GPUs alone."""
    problems = []
    if config.vllm_gpu_memory_utilization is not None:
        seen = tr(
            "vllm_gpu_memory_utilization is {share:g}, but vLLM runs on a CPU here, where the size of its "
            "cache follows from the number of completions sampled at a time.",
            share=config.vllm_gpu_memory_utilization,
        )
        problems.append(_idle("vllm_gpu_memory_utilization", seen))
    if config.vllm_enable_sleep_mode:
        name = "sleep_level" if config.sleep_level else "vllm_enable_sleep_mode"
        seen = tr("{name} is set, but vLLM runs on a CPU here, where it has no sleep mode.", name=name)
        problems.append(_idle(name, seen))
    return problems


def _idle(name: str, seen: str) -> Problem:
    return warning("W108", name, seen, "", Fix(text=tr("leave out --{name}", name=name)))


def _arguments(config: Config) -> list[Problem]:
    taken = sorted(OWNED & (config.vllm_engine_kwargs or {}).keys())
    if not taken:
        return []
    seen = tr("vllm_engine_kwargs sets {taken}, which covey sets itself.", taken=joined(", ", taken))
    fix = Fix(
        text=tr(
            "remove these names from the JSON; where covey has an option for one, use that, such as "
            "--vllm_max_model_len N"
        )
    )
    return [problem("E431", "vllm_engine_kwargs", seen, "", fix)]


def _temperature(config: Config) -> list[Problem]:
    named = {n: getattr(config, n) for n in ("temperature", "temperature_end", "eval_temperature")}
    if config.eval_temperature == config.temperature:
        # It follows from the other.
        del named["eval_temperature"]
    outside = {n: v for n, v in named.items() if v is not None and not _samples_at(v)}
    return [_outside(name, value) for name, value in outside.items()]


def _samples_at(temperature: float) -> bool:
    """Whether vLLM samples at this temperature."""
    return not temperature or LEAST_TEMPERATURE <= temperature <= _HIGHEST_TEMPERATURE


def _outside(name: str, value: float) -> Problem:
    if value > _HIGHEST_TEMPERATURE:
        most = _HIGHEST_TEMPERATURE
        seen = tr("{name} is {value:g}, but vLLM takes at most {most:g}.", name=name, value=value, most=most)
        fix = Fix(text=tr("use the highest temperature of vLLM"), edits={name: most})
        return problem("E432", name, seen, "", fix, _OWN_ENGINE)
    seen = tr(
        "{name} is {value:g}, but vLLM raises temperatures below {least_temperature:g} to "
        "{least_temperature:g}.",
        name=name,
        value=value,
        least_temperature=LEAST_TEMPERATURE,
    )
    fix = Fix(text=tr("use the lowest temperature of vLLM"), edits={name: LEAST_TEMPERATURE})
    return problem("E432", name, seen, "", fix, _OWN_ENGINE)


def _length(config: Config, model: ModelFacts, prompts: PromptFacts) -> list[Problem]:
    prompt, context = prompts.longest, model.context
    if prompt is None:
        return []
    needed = prompt + config.max_completion_length
    held = config.vllm_max_model_len or needed
    if held < needed:
        seen = tr(
            "vllm_max_model_len is {held}; the longest prompt has {tokens} and max_completion_length is "
            "{max_completion_length}, {needed} in total.",
            held=held,
            tokens=counted(prompt, "token"),
            max_completion_length=config.max_completion_length,
            needed=needed,
        )
        fix = Fix(text=tr("use the length that the run needs"), edits={"vllm_max_model_len": needed})
        return [problem("E433", "vllm_max_model_len", seen, "", fix)]
    if context is not None and held > context:
        seen = tr(
            "vllm_max_model_len is {held}, but the context of the model is {context}, so vLLM uses "
            "{context}.",
            held=held,
            context=context,
        )
        return [_idle("vllm_max_model_len", seen)]
    return []


def _packed(config: Config) -> list[Problem]:
    if quantization_of(config) is None:
        return []
    seen = tr(
        "The model's weights are quantized by bitsandbytes, but vLLM samples from unquantized ones: the "
        "two would not be the same policy."
    )
    whole = Fix(text=tr("do not quantize"), edits={"quant_bits": None})
    return [problem("E430", "use_vllm", seen, "", _OWN_ENGINE, whole)]


def _media(config: Config, data: DataFacts) -> list[Problem]:
    name, limits = "vllm_limit_mm_per_prompt", config.vllm_limit_mm_per_prompt
    if limits is None:
        return []
    if not data.sees_images:
        return [_idle(name, tr("{name} is set, but the model sees no images.", name=name))]
    # Without room for one vLLM leaves out the vision tower.
    least = {"image": 1}
    wrong = [n for n, v in limits.items() if not isinstance(v, dict) and not _is_count(v, least.get(n, 0))]
    if not wrong:
        return []
    seen = tr(
        "vllm_limit_mm_per_prompt gives {wrong} another value than a whole number, which for images is 1 or "
        "more.",
        wrong=joined(", ", wrong),
    )
    fix = Fix(text=tr("reserve memory for one image"), edits={name: {"image": 1}})
    return [problem("E430", name, seen, "", fix, Fix(text=tr("leave out --{name}", name=name)))]


def _family(model: ModelFacts) -> list[Problem]:
    if model.type not in FAMILIES or model.type in VLLM_FAMILIES:
        return []
    seen = tr(
        "covey sends images to vLLM for models of type {known}, and this one is of type {type}.",
        known=joined(", ", VLLM_FAMILIES),
        type=model.type,
    )
    return [problem("E430", "use_vllm", seen, "", _OWN_ENGINE)]


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


_CODES = (
    Code(
        code="E430",
        title="Setup in which vLLM cannot run",
        why="In this setup vLLM cannot be reached, does not start, hangs, or samples with other "
        "weights than those in training.",
    ),
    Code(
        code="E432",
        title="Temperature outside vLLM's range",
        why="vLLM refuses a temperature above its maximum, and replaces one below its minimum without "
        "a message: the loss would divide the logits by another temperature than the one used for "
        "sampling.",
    ),
    Code(
        code="E433",
        title="Completions longer than vLLM's maximum length",
        why="vLLM refuses a prompt that is too long, and cuts off a completion at its maximum length.",
    ),
    Code(
        code="W190",
        title="vLLM on a GPU: we have not tested this yet",
        why="covey's tests use vLLM's build for CPUs. The features that only GPUs have (sleep mode, "
        "several GPUs, GPU memory) follow vLLM's documentation.",
    ),
)

CHECK = Check(place=80, judge=lambda config, facts, _: vllm_problems(config, facts), codes=_CODES)
