"""Finds faults in a layout that is planned: parts of it that cannot be together."""

from __future__ import annotations

from covey.options.schema import Config
from covey.plan.disk import size
from covey.plan.facts import Facts, MachineFacts, ModelFacts
from covey.plan.layout import WEIGHT_BYTES, Layout, Offload, computes_low, states_typed
from covey.plan.problem import problem
from covey.texts import counted, plural, tr
from covey.types import Fix, Problem

SHARE = "vllm_gpu_memory_utilization"
PARALLEL = "vllm_tensor_parallel_size"
_HIGHEST = 0.95


def layout_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what cannot be together in the facts' layout; nothing where none is planned."""
    layout = facts.layout
    if layout.is_here and not facts.machine.cuda and facts.machine.npu:
        return [_npu(facts.machine.npu)]
    if layout.is_here and facts.machine.cuda and facts.machine.asks_for_cpu:
        return [_only_cpu()]
    problems = [
        *_of_split(config, layout),
        *_two_dtypes(config, facts.machine, facts.layout),
        *_offload(config, layout),
    ]
    if layout.engine == "colocate" and (layout.is_known or layout.is_here):
        problems += _parallel(layout, facts)
    if layout.engine == "colocate" and layout.is_known:
        problems += _share(layout, facts.model)
    return problems


def _of_split(config: Config, layout: Layout) -> list[Problem]:
    """What a model that is split over processes does not do."""
    is_split = layout.fsdp or (config.deepspeed is not None and layout.zero_stage == 3)
    if not is_split or not config.activation_offloading:
        return []
    seen = tr(
        "activation_offloading is on, but {value} shards the model.",
        value="fsdp" if layout.fsdp else "ZeRO-3",
    )
    cause = tr("It would keep the gathered weights of every layer in memory, together with the activations.")
    less = Fix(
        text=tr("recompute activations in the backward pass instead"),
        edits={"activation_offloading": False, "gradient_checkpointing": "true"},
    )
    return [problem("E115", "activation_offloading", seen, cause, less)]


def _npu(variable: str) -> Problem:
    """A machine with Ascend NPUs, where the run would be on its CPU."""
    seen = tr(
        "The environment variable {variable} is set, and torch finds no GPU. covey trains on "
        "NVIDIA and AMD GPUs and on CPUs, not on Ascend NPUs.",
        variable=variable,
    )
    on_cpu = Fix(
        text=tr("for a run on the CPU: `unset {variable}`, then the same command", variable=variable)
    )
    gpus = Fix(text=tr("start the same command on a machine with NVIDIA or AMD GPUs"))
    return problem("E117", "nproc_per_node", seen, "", on_cpu, gpus)


def _only_cpu() -> Problem:
    """A machine with GPUs, of which accelerate was told to use the CPU."""
    seen = tr("The environment variable ACCELERATE_USE_CPU is true, but the run would use the GPUs.")
    on_cpu = Fix(text=tr("for a run on the CPU: CUDA_VISIBLE_DEVICES= in front of the same command"))
    gpus = Fix(text=tr("for a run on the GPUs: leave out cpu in the file and the command of accelerate"))
    return problem("E379", "nproc_per_node", seen, "", on_cpu, gpus)


def _two_dtypes(config: Config, machine: MachineFacts, layout: Layout) -> list[Problem]:
    """DeepSpeed trains everything in one dtype."""
    is_low = computes_low(config, cuda=bool(machine.cuda))
    is_zero = config.deepspeed is not None and layout.zero_stage > 0
    if not (is_zero and is_low and config.tuner_type == "lora" and config.modules_to_save):
        return []
    seen = tr(
        "With deepspeed, modules_to_save would train whole modules in bfloat16 and the adapter in float32."
    )
    cause = tr("DeepSpeed trains in one dtype.")
    in_float32 = Fix(text=tr("compute in float32"), edits={"torch_dtype": "float32"})
    fixes = (in_float32, Fix(text=tr("train the LoRA matrices only: leave out --modules_to_save")))
    return [problem("E115", "modules_to_save", seen, cause, *fixes)]


def _offload(config: Config, layout: Layout) -> list[Problem]:
    needed = {"none": 0, "optimizer": 1, "params": 3}[layout.offload]
    if layout.zero_stage >= needed or layout.fsdp:
        return []
    seen = tr(
        "{source} offloads {what} in stage {zero_stage}.",
        source="deepspeed" if layout.file is None else layout.file.path,
        what=tr("the optimizer") if layout.offload == "optimizer" else "weights",
        zero_stage=layout.zero_stage,
    )
    lower: Offload = "none" if layout.zero_stage == 0 else "optimizer"
    return [
        problem(
            "E213",
            "deepspeed",
            seen,
            tr("DeepSpeed can offload the optimizer in stages 1 to 3, and the weights only in stage 3."),
            Fix(text=f"ZeRO-{needed}", edits=states_typed(layout, needed, layout.offload)),
            Fix(
                text=tr("offload what this stage can"),
                edits=states_typed(layout, layout.zero_stage, lower),
            ),
        )
    ]


def _parallel(layout: Layout, facts: Facts) -> list[Problem]:
    """vLLM in as many processes as there are GPUs: whole engines on each machine, whole heads on each GPU."""
    each, model = layout.engine_parallel, facts.model.sizes
    of_machine = layout.machine_gpus or layout.num_gpus
    device = "GPU" if facts.machine.cuda else "process"
    heads, keys = (0, 0) if model is None else (model.heads, model.kv_heads)

    def is_whole(number: int, of_machine: int = of_machine) -> bool:
        # Where there are more GPUs than heads of keys, several GPUs hold the same one.
        return of_machine % number == heads % number == 0 and (keys % number == 0 or number % keys == 0)

    if each < 1 or is_whole(each):
        # A number below 1 is refused as a value.
        return []
    of_heads = (
        tr(", and the model {heads} attention heads ({keys} key-value heads)", heads=heads, keys=keys)
        if heads
        else ""
    )
    seen = tr(
        "{parallel} is {each}, but a machine has {devices}{of_heads}; it has to divide these numbers.",
        parallel=PARALLEL,
        each=each,
        devices=counted(of_machine, device),
        of_heads=of_heads,
    )
    below = next(n for n in range(max(1, min(each, of_machine)), 0, -1) if is_whole(n))
    engines = layout.num_gpus // below
    words = plural(
        engines,
        "{engines} engine of {below}",
        "{engines} engines of {below}",
        engines=engines,
        below=counted(below, device),
    )
    fixes = [Fix(text=words, edits={PARALLEL: below})]
    may_start = (
        layout.is_here
        and not facts.launch.is_rank
        and (facts.machine.nproc_available or 0) >= each > of_machine
    )
    if may_start and is_whole(each, of_machine=each):
        text = tr("start as many processes as one engine has")
        fixes.insert(0, Fix(text=text, edits={"nproc_per_node": each}))
    return [problem("E214", PARALLEL, seen, "", *fixes)]


def _share(layout: Layout, model: ModelFacts) -> list[Problem]:
    weights = 0
    if model.sizes is not None:
        weights = WEIGHT_BYTES * model.sizes.parameters // max(1, layout.engine_parallel)
    if 0 < layout.engine_share < 1 and layout.engine_bytes > weights:
        return []
    seen = tr(
        "{share} is {engine_share:g}, which is {size} of a GPU; the weights of one engine take "
        "{weights} of it, and its KV cache needs memory too.",
        share=SHARE,
        engine_share=layout.engine_share,
        size=size(layout.engine_bytes),
        weights=size(weights),
    )
    # Half as much again as the weights, for the cache, in twentieths of a GPU.
    share = -(-30 * weights // max(1, layout.gpu_bytes)) / 20 or 0.3
    if share <= _HIGHEST:
        fix = Fix(
            text=tr("leave room for the weights and half as much for the KV cache"), edits={SHARE: share}
        )
    else:
        fix = Fix(
            text=tr(
                "use a higher --{parallel}, or an inference server (--vllm_mode server)", parallel=PARALLEL
            )
        )
    return [problem("E215", SHARE, seen, "", fix)]
