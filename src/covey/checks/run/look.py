"""Facts about the machine, the output directory, and what is resumed or replayed."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from os.path import exists, isdir, isfile
from pathlib import Path
from typing import Any

from covey.checkpoint.manifest import MANIFEST, Manifest, read_manifest, require_states
from covey.checkpoint.read import Skipped, find_latest, read_json, verify
from covey.checks.launch import is_launched, num_ranks, processes_here
from covey.checks.model.memory import free_memory
from covey.checks.output.look import (
    existing,
    in_the_way,
    is_leftover,
    lost_records,
    records_problem,
    unwritable,
)
from covey.checks.ray.look import find_ray
from covey.checks.run.devices import gpus_have_bfloat16, num_gpus
from covey.config.checkpoints import checkpoints_around, list_checkpoints
from covey.config.file import read_file
from covey.config.quantization import quantization_of
from covey.data.foreign_checkpoints import foreign_kind
from covey.errors import CheckpointError
from covey.options.schema import Config
from covey.plan.deepspeed import states_of
from covey.plan.deepspeed_file import FromFile, from_content, unreadable
from covey.plan.facts import (
    Facts,
    LaunchFacts,
    MachineFacts,
    OutputDirState,
    OutputFacts,
    RayFacts,
    ResumeFacts,
)
from covey.plan.layout import GPUS_OF_A_MACHINE, PRESETS, DeepSpeedFile, Machine, States, layout_of
from covey.plan.versions import TRIED, VLLM_ON_CPU
from covey.telemetry.owner import owner_of
from covey.telemetry.rollout_log import RolloutLimits
from covey.telemetry.trackers.factory import missing as missing_trackers
from covey.texts import joined, tr
from covey.types import Severity

_NPU_VARIABLES = ("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES", "NPU_VISIBLE_DEVICES")
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "asimdbf16"}


def run_facts(config: Config, num_processes: int) -> Facts:
    """The facts that need neither model nor data."""
    output = Path(config.output_dir)
    fault = unwritable(output)
    gpus = num_gpus()
    here = processes_here(os.environ, num_processes)
    resume = _resume(config)
    continues = config.resume_from_checkpoint is not None
    ray = _ray(config)
    return Facts(
        launch=LaunchFacts(
            num_processes=num_processes,
            num_processes_here=here if here < num_processes else None,
            is_rank=num_ranks(os.environ) > 1,
            ray=ray,
        ),
        output=OutputFacts(
            state="not_writable" if fault else _held_by(output),
            fault=fault,
            owner=owner_of(output),
            records_problem=records_problem(output) if resume is not None else None,
            in_the_way=in_the_way(output, (resume and resume.step) or 0) if continues else (),
            resume=resume,
            free_bytes=shutil.disk_usage(existing(output)).free,
        ),
        machine=MachineFacts(
            free_memory_bytes=free_memory(cuda=gpus > 0),
            cuda=gpus > 0,
            npu=_npu(),
            asks_for_cpu=os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true",
            nproc_available=None if ray is not None and ray.address else gpus or os.cpu_count(),
            versions=_versions(),
            has_bfloat16=_has_bfloat16(gpus) if _asks_for_bfloat16(config) else None,
            missing_packages=(
                *(("report_to", package) for _, package in missing_trackers(config.report_to)),
                *(_missing_kernels(config) if gpus else ()),
                *_missing_bitsandbytes(config),
                *_missing_deepspeed(config),
                *([("launcher", "ray")] if ray and importlib.util.find_spec("ray") is None else ()),
                *_missing_optimizer(config),
                *_missing_vllm(config, gpus),
            ),
        ),
    )


_OF_GPUS = ("deepspeed", "use_vllm", "quant_bits", "optim")
"""Options whose packages are for the machine with the GPUs."""


def _npu() -> str:
    """The environment variable that picks Ascend NPUs for the run; empty where none does."""
    return next((name for name in _NPU_VARIABLES if os.environ.get(name)), "")


def _missing_bitsandbytes(config: Config) -> tuple[tuple[str, str], ...]:
    is_asked = quantization_of(config) is not None and importlib.util.find_spec("bitsandbytes") is None
    return (("quant_bits", "bitsandbytes"),) if is_asked else ()


def _ray(config: Config) -> RayFacts | None:
    """The Ray that starts the ranks; None where none does, or where this is such a rank."""
    return find_ray(os.environ) if config.launcher == "ray" and not is_launched(os.environ) else None


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    """Version of each package that something is known of; those that are not installed are left out."""
    found = []
    for package in TRIED:
        try:
            found.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


def with_layout(facts: Facts, config: Config, machine: Machine | None) -> Facts:
    """The facts with how the configuration lies on this machine's devices, or on those of another one, of
    whose disk nothing is known; of what could not be read no more than that there are GPUs."""
    cuda = bool(facts.machine.cuda) or machine is not None
    states, problems = states_of(config, _read_deepspeed(config.deepspeed), cuda=cuda)
    facts = replace(facts, launch=replace(facts.launch, layout_problems=problems))
    if any(problem.severity is Severity.ERROR for problem in problems):
        states, machine = States(), Machine(num_gpus=facts.launch.num_processes)
    if machine is None:
        gpu_bytes = (facts.machine.free_memory_bytes or 0) if facts.machine.cuda else 0
        own = facts.launch.num_processes_here or facts.launch.num_processes
        layout = layout_of(
            config, facts.launch.num_processes, gpu_bytes, states, is_here=True, gpus_of_a_machine=own
        )
        return replace(facts, layout=layout)
    gpus = machine.num_gpus, machine.gpu_bytes
    layout = layout_of(config, *gpus, states, is_here=False, gpus_of_a_machine=GPUS_OF_A_MACHINE)
    return replace(
        facts,
        layout=layout,
        output=replace(facts.output, free_bytes=None),
        machine=replace(
            facts.machine,
            # What the machine that is planned has installed is not known.
            missing_packages=tuple(m for m in facts.machine.missing_packages if m[0] not in _OF_GPUS),
            free_memory_bytes=layout.gpu_bytes if layout.is_known else None,
            cuda=True,
            nproc_available=layout.num_gpus or None,
            has_bfloat16=True,
        ),
    )


def _read_deepspeed(word: str | None) -> FromFile | None:
    """What a file of DeepSpeed says, or its JSON in the place of a path; None for ms-swift's names, and where
    there is no such file."""
    is_json = word is not None and word.lstrip().startswith("{")
    if not word or word.lower() in PRESETS or not (is_json or exists(Path(word))):
        return None
    path = tr("the JSON of --deepspeed") if is_json else word
    try:
        content = json.loads(word if is_json else Path(word).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        words = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return FromFile(file=DeepSpeedFile(path=path), problems=(unreadable(path, words),))
    return from_content(content, path)


def _asks_for_bfloat16(config: Config) -> bool:
    return config.torch_dtype == "bfloat16" or config.attn_impl == "flash_attn"


def _missing_deepspeed(config: Config) -> list[tuple[str, str]]:
    """(option, distribution) of DeepSpeed, where it is asked for and not there; zero0 needs none."""
    is_asked = config.deepspeed is not None and config.deepspeed.lower() != "zero0"
    return [("deepspeed", "deepspeed")] if is_asked and importlib.util.find_spec("deepspeed") is None else []


def _runs_vllm(config: Config) -> bool:
    """Return whether this process is to run vLLM."""
    return config.use_vllm and config.vllm_mode == "colocate" and not config.rollout_servers


def _missing_vllm(config: Config, gpus: int) -> list[tuple[str, str]]:
    """(option, distribution) of vLLM, where it is asked for in this process and not there."""
    if not _runs_vllm(config) or importlib.util.find_spec("vllm") is not None:
        return []
    return [("use_vllm", "vllm" if gpus else VLLM_ON_CPU)]


def with_image_packages(facts: Facts, config: Config) -> Facts:
    """The facts with the package that vLLM asks for where a model sees images, if it is not there."""
    is_asked = _runs_vllm(config) and facts.layout.is_here and importlib.util.find_spec("vllm") is not None
    if not is_asked or importlib.util.find_spec("torchvision") is not None:
        return facts
    missing = (*facts.machine.missing_packages, ("use_vllm", "torchvision"))
    return replace(facts, machine=replace(facts.machine, missing_packages=missing))


def _missing_optimizer(config: Config) -> list[tuple[str, str]]:
    is_asked = config.optim == "adamw_8bit"
    is_there = not is_asked or importlib.util.find_spec("bitsandbytes") is not None
    return [] if is_there else [("optim", "bitsandbytes")]


def _missing_kernels(config: Config) -> list[tuple[str, str]]:
    """(option, distribution) of kernels that are asked for by name; importing them takes seconds."""
    asked = [
        ("attn_impl", config.attn_impl == "flash_attn", "flash_attn", "flash-attn"),
        ("use_liger_kernel", config.use_liger_kernel == "true", "liger_kernel", "liger-kernel"),
    ]
    return [
        (option, distribution)
        for option, is_asked, module, distribution in asked
        if is_asked and importlib.util.find_spec(module) is None
    ]


def _has_bfloat16(gpus: int) -> bool | None:
    """Whether the device computes in bfloat16; None where nobody says."""
    if gpus:
        return gpus_have_bfloat16()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return bool(_BFLOAT16_FLAGS & set(text.split()))


def output_state(output: Path) -> OutputDirState:
    """What a directory is to a run that would write there."""
    return "not_writable" if unwritable(output) else _held_by(output)


def _held_by(output: Path) -> OutputDirState:
    """What a directory holds, but for what a run that was killed before its first record leaves."""
    if not exists(output) or all(is_leftover(path.name) for path in output.iterdir()):
        return "free"
    is_run = any(exists(output / name) for name in ("config.yaml", "metrics.jsonl"))
    if not is_run:
        return "not_empty"
    return "ended" if find_latest(output, with_trainer=True).path is None else "run"


def _resume(config: Config) -> ResumeFacts | None:
    """The checkpoint to go on from; None for a new run, or where `auto` finds none.

    A damaged checkpoint is none only where an older one is whole: it may be all that there is of a run.
    """
    asked = config.resume_from_checkpoint
    if asked is None:
        return None
    if (foreign := _foreign_resume(config, asked)) is not None:
        return foreign
    if asked not in ("latest", "auto"):
        try:
            return _resume_facts(Path(asked), _with_trainer(Path(asked)), config, ())
        except CheckpointError as error:
            newest = _newest_at(Path(asked))
            words = tr("{error}{there}", error=error, there=_there(Path(asked), newest))
            return ResumeFacts(path=asked, problem=words, newest=newest)
    latest = find_latest(Path(config.output_dir), with_trainer=True)
    if latest.path is not None and latest.manifest is not None:
        return _resume_facts(latest.path, latest.manifest, config, latest.skipped)
    if asked == "auto" and not latest.skipped:
        return None
    reasons = joined("; ", [s.reason for s in latest.skipped])
    problem = tr("there is no complete checkpoint with trainer state in it")
    return ResumeFacts(
        path=config.output_dir,
        problem=tr("{problem}{reasons}", problem=problem, reasons=": " + reasons if reasons else ""),
        skipped=tuple(s.reason for s in latest.skipped),
    )


def _foreign_resume(config: Config, asked: str) -> ResumeFacts | None:
    """A checkpoint of another trainer in the place of one of covey's: the one that is named, or the newest of
    the directory that is written to or named."""
    named = Path(config.output_dir if asked in ("latest", "auto") else asked)
    if any(exists(named / name) for name in (MANIFEST, "config.yaml")):
        return None
    for path in (named, *reversed(list_checkpoints(named))):
        kind = foreign_kind(path) if isdir(path) and not isfile(path / MANIFEST) else ""
        if kind:
            words = tr("is a checkpoint of transformers' Trainer (TRL, ms-swift), not of covey.")
            return ResumeFacts(path=str(path), problem=words, foreign=kind)
    return None


def _with_trainer(path: Path) -> Manifest:
    require_states(path, read_manifest(path))
    return verify(path)


def _newest_at(path: Path) -> str:
    """The newest whole checkpoint of the run that a path names, or that it has misnamed one of; or ""."""
    newest = find_latest(path if exists(path) else path.parent, with_trainer=True).path
    return "" if newest is None else str(newest)


def _there(path: Path, newest: str) -> str:
    """What is there where a run, or a checkpoint that it does not have, was named as checkpoint."""
    if exists(path):
        return tr("; its newest checkpoint is {newest}", newest=newest) if newest else ""
    names = ", ".join(each.name for each in checkpoints_around(path))
    return tr("; {run} has {names}", run=path.parent, names=names) if names else ""


def _resume_facts(
    path: Path, manifest: Manifest, config: Config, skipped: tuple[Skipped, ...]
) -> ResumeFacts:
    is_elsewhere = path.absolute().parent.resolve() != Path(config.output_dir).resolve()
    return ResumeFacts(
        path=str(path),
        step=manifest.step,
        is_elsewhere=is_elsewhere,
        skipped=tuple(s.reason for s in skipped),
        is_compared=bool(read_file(str(path.parent / "config.yaml")).typed),
        config_changes=_config_changes(path.parent / "config.yaml", config),
        pass_rates=None if "pass_rates" not in manifest.meta else str(manifest.meta["pass_rates"]),
        reference=None if "reference" not in manifest.meta else str(manifest.meta["reference"]),
        steps_of_rollout=_steps_of_rollout(path),
        reward_texts=_pairs(manifest.meta.get("rewards")),
        lost=() if is_elsewhere else lost_records(path.parent, manifest.step, _rollout_on_file(path, config)),
    )


def _rollout_on_file(checkpoint: Path, config: Config) -> int | None:
    """The newest rollout that was written before a checkpoint was; None where the run writes none, or not
    this one."""
    number = read_json(checkpoint, "progress").get("rollout")
    if not isinstance(number, int):
        return None
    number -= not _steps_of_rollout(checkpoint)
    is_written = RolloutLimits(log=config.rollout_log).includes(number)  # type: ignore[arg-type]
    return number if is_written and number >= 0 else None


def _pairs(value: object) -> tuple[tuple[str, str], ...]:
    return tuple((str(name), str(of)) for name, of in value.items()) if isinstance(value, dict) else ()


def _steps_of_rollout(checkpoint: Path) -> int:
    """Steps taken of the rollout that a checkpoint stands in the middle of; 0 where it stands between two."""
    taken = read_json(checkpoint, "rollout").get("done", 0)
    return taken if isinstance(taken, int) else 0


def _config_changes(path: Path, config: Config) -> tuple[tuple[str, Any, Any], ...]:
    """Options whose value differs from that of the run whose config.yaml is at `path`."""
    old: Mapping[str, Any] = {name: typed.value for name, typed in read_file(str(path)).typed.items()}
    new = config.model_dump()
    return tuple(
        (name, old[name], new[name]) for name in sorted(old.keys() & new.keys()) if old[name] != new[name]
    )
