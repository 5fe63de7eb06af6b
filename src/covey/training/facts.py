"""What is true of the machine, the model, the data and the output directory before a run; torch-free."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from covey.checkpoint.manifest import Manifest
from covey.checkpoint.read import find_latest, verify
from covey.checkpoint.write import forecast_bytes
from covey.config.file import read_file
from covey.config.schema import Config
from covey.data.rows import PROMPT_COLUMNS, DataError, PromptTable, prompt_table, read_rows
from covey.data.text import TemplateError, TextCodec, load_codec, model_context, model_problem
from covey.errors import CheckpointError
from covey.plan.facts import Facts, MissingColumn, OutputDirState, ResumeFacts, UnreadableFile
from covey.quickstart import task
from covey.rewards.registry import available
from covey.telemetry.rollouts import list_rollouts, read_rollouts

QUICKSTART = "quickstart"
_GOLD_COLUMNS = ("solution", "answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The facts, and what was read to learn them; codec and prompts are None where they could not be had."""

    facts: Facts
    codec: TextCodec | None
    prompts: PromptTable | None


def model_dir(config: Config) -> Path:
    """Where the model lies: a directory, or the one that ships with covey."""
    return task.MODEL_DIR if config.model == QUICKSTART else Path(config.model)


def survey(config: Config, num_processes: int) -> Survey:
    """Look at everything that the checks ask about; a part that cannot be read leaves its facts unknown."""
    output = Path(config.output_dir)
    facts = Facts(
        num_processes=num_processes,
        rewards_available=available(),
        output_dir_state=_output_state(output),
        resume=_resume(config),
        free_disk_bytes=shutil.disk_usage(_existing(output)).free,
        nproc_available=os.cpu_count(),
    )
    directory = model_dir(config)
    problem = model_problem(directory) if config.model else None
    codec = None
    facts = replace(facts, model_problem=problem)
    if config.model and problem is None:
        facts = replace(facts, model_context=model_context(directory))
        try:
            codec = load_codec(directory)
        except TemplateError as error:
            facts = replace(facts, model_problem=str(error))
        try:
            facts = replace(facts, checkpoint_bytes=_checkpoint_bytes(directory, config))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            facts = replace(facts, model_problem=f"a .safetensors file of {directory} is damaged: {error}")
    if config.replay_rollouts is not None:
        return Survey(facts=_with_replay(facts, config, num_processes), codec=codec, prompts=None)
    return _with_data(facts, config, codec)


def _with_data(facts: Facts, config: Config, codec: TextCodec | None) -> Survey:
    paths = [Path(p) for p in config.dataset if p != QUICKSTART]
    missing = tuple(str(p) for p in paths if not p.is_file())
    facts = replace(facts, dataset_missing=missing)
    if missing or not config.dataset:
        return Survey(facts=facts, codec=codec, prompts=None)
    rows: list[dict[str, Any]] = []
    unreadable = []
    for name in config.dataset:
        try:
            rows += task.training_rows() if name == QUICKSTART else read_rows(Path(name))
        except DataError as error:
            unreadable.append(UnreadableFile(path=name, words=str(error)))
    facts = replace(facts, dataset_unreadable=tuple(unreadable), num_rows=len(rows))
    if unreadable:
        return Survey(facts=facts, codec=codec, prompts=None)
    columns = {name for row in rows for name in row}
    facts = replace(facts, columns=tuple(sorted(columns)), missing_columns=_missing_columns(columns, config))
    if codec is None or not columns & set(PROMPT_COLUMNS):
        return Survey(facts=facts, codec=codec, prompts=None)
    try:
        table = prompt_table(rows, codec, max_length=_longest_allowed(facts, config))
    except TemplateError as error:
        return Survey(facts=replace(facts, model_problem=str(error)), codec=codec, prompts=None)
    facts = replace(
        facts,
        num_prompts=len(table.entries),
        num_prompts_too_long=table.left_out.get("too_long", 0),
        longest_prompt=table.longest,
        longest_prompt_in_data=table.longest_in_data,
    )
    return Survey(facts=facts, codec=codec, prompts=table)


def _longest_allowed(facts: Facts, config: Config) -> int | None:
    """Tokens that a prompt may have: as typed, else what the model's context leaves for it."""
    if config.max_length is not None or facts.model_context is None:
        return config.max_length
    return max(1, facts.model_context - config.max_completion_length)


def _missing_columns(columns: set[str], config: Config) -> tuple[MissingColumn, ...]:
    missing = []
    if not columns & set(PROMPT_COLUMNS):
        missing.append(MissingColumn(column=" or ".join(PROMPT_COLUMNS), needed_by="every prompt"))
    if "accuracy" in config.reward_funcs and not columns & set(_GOLD_COLUMNS):
        missing.append(MissingColumn(column=" or ".join(_GOLD_COLUMNS), needed_by="the reward accuracy"))
    return tuple(missing)


def _with_replay(facts: Facts, config: Config, num_processes: int) -> Facts:
    directory = Path(str(config.replay_rollouts))
    if not directory.is_dir():
        return replace(facts, replay_problem="is not a directory")
    if not list_rollouts(directory):
        return replace(facts, replay_problem="holds no rollout-*.jsonl or rollout-*.jsonl.gz file")
    wanted = num_processes * config.per_device_train_batch_size * config.steps_per_generation
    try:
        sizes = {number: len(records) for number, records in read_rollouts(directory)}
    except (OSError, ValueError) as error:
        return replace(facts, replay_problem=f"cannot be read: {error}")
    wrong = [f"rollout {number} holds {size}" for number, size in sizes.items() if size != wanted]
    if wrong:
        text = f"a rollout of this configuration is {wanted} completions, and {', '.join(wrong[:3])}"
        return replace(facts, replay_problem=text)
    return facts


def _existing(path: Path) -> Path:
    """The nearest ancestor that is there."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _output_state(output: Path) -> OutputDirState:
    try:
        # Permission bits do not tell: root passes them everywhere, network file systems have rules of their
        # own.
        with tempfile.TemporaryDirectory(prefix=".covey-", dir=_existing(output)):
            pass
    except OSError:
        return "not_writable"
    if not output.exists() or not any(output.iterdir()):
        return "free"
    is_run = any((output / name).exists() for name in ("config.yaml", "metrics.jsonl"))
    return "run" if is_run else "not_empty"


def _resume_point(config: Config) -> tuple[Path, Manifest] | None:
    """The checkpoint to resume from, verified; None for a new run, or where `auto` finds none.

    CheckpointError says why there is no good one.
    """
    wanted = config.resume_from_checkpoint
    if wanted is None:
        return None
    if wanted in ("latest", "auto"):
        latest = find_latest(Path(config.output_dir), with_trainer=True)
        if latest.path is not None and latest.manifest is not None:
            return latest.path, latest.manifest
        if wanted == "auto":
            return None
        reasons = "; ".join(s.reason for s in latest.skipped)
        raise CheckpointError(
            f"there is no complete checkpoint with trainer state in it{': ' + reasons if reasons else ''}"
        )
    path = Path(wanted)
    manifest = verify(path)
    if not manifest.trainer:
        raise CheckpointError("it keeps the model only (trainer/ is not there), so nothing can go on from it")
    return path, manifest


def _resume(config: Config) -> ResumeFacts | None:
    if config.resume_from_checkpoint is None:
        return None
    asked = config.resume_from_checkpoint
    where = config.output_dir if asked in ("latest", "auto") else asked
    try:
        point = _resume_point(config)
    except CheckpointError as error:
        return ResumeFacts(path=where, problem=str(error))
    if point is None:
        return None
    path, manifest = point
    return ResumeFacts(
        path=str(path),
        step=manifest.step,
        config_changes=_config_changes(path.parent / "config.yaml", config),
    )


def _config_changes(path: Path, config: Config) -> tuple[tuple[str, Any, Any], ...]:
    """Options whose value differs from that of the run whose config.yaml is at `path`."""
    if not path.is_file():
        return ()
    old: Mapping[str, Any] = {name: typed.value for name, typed in read_file(str(path)).typed.items()}
    new = config.model_dump()
    return tuple(
        (name, old[name], new[name]) for name in sorted(old.keys() & new.keys()) if old[name] != new[name]
    )


def _checkpoint_bytes(directory: Path, config: Config) -> int | None:
    """Weights as they are held, plus twice their float32 size for AdamW; from the sizes of the weight
    files."""
    count = 0
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length < file.stat().st_size:
                raise ValueError(f"{file.name} has no header")
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                count += math.prod(entry["shape"])
    is_low, keeps_state = config.torch_dtype == "bfloat16", not config.save_only_model
    return forecast_bytes(count, 2 if is_low else 4, keeps_state, is_low and keeps_state)
