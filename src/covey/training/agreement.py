"""What every rank of a run must have alike, compared before weights load: the options, the data, the model's
files, the packages, and the environment that changes numbers or communication.

Paths and machines may differ where what they hold does not. Ranks exchange what they have once; a difference
ends all of them with one problem (E378).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from array import array
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from os.path import exists, isdir, isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import covey
from covey.activity import ranks_word
from covey.checkpoint.manifest import MANIFEST, hash_file
from covey.checks.survey import Survey
from covey.config.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, stored
from covey.config.objects import is_live
from covey.data.prompts import Field, LazyPrompts, fields_of
from covey.errors import ConfigError
from covey.options.schema import Config
from covey.plan.problem import problem
from covey.telemetry.rollouts import rollout_files
from covey.texts import Text, capital, joined, packed_in, plural, tr, unpacked_in
from covey.types import Fix, Problem, Prompt
from covey.weight_files import StoredTensor, stored_tensors

if TYPE_CHECKING:
    from covey.comm import Comm

Values = Mapping[str, Mapping[str, Any]]
"""By kind (a key of FIXES) and name."""

FIXES: Mapping[str, str] = {
    "object": tr(
        "create the same object on every rank, from the same seed and with all rows; covey gives "
        "each rank its part of the work"
    ),
    "option": tr("start every rank with the same command and the same configuration file"),
    "data": tr("give every rank the same files: copy them again, or use a disk that all ranks read"),
    "model": tr("give every rank the same model directory: copy it again, or use a disk that all ranks read"),
    "package": tr("install the same versions for every rank"),
    "environment": tr("set the same environment variables for every rank, or unset them"),
}
"""What is done about a difference of each kind."""

_PACKAGES = ("safetensors", "tokenizers", "numpy", "liger-kernel")
# What is read, and shown, by itself: the contents of these paths are compared as data or model.
_READ_ALREADY = ("model", "dataset", "val_dataset", "replay_rollouts", "resume_from_checkpoint", "pass_rates")
# What only the launching process is asked.
_LEFT_OUT = ("nproc_per_node", "max_restarts")
# What changes the numbers that a rank computes, or how it speaks with the others.
_VARIABLES = (
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_BUFFSIZE"),
    *("NCCL_NTHREADS", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE"),
    *("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("TORCH_BLAS_PREFER_CUBLASLT", "TORCH_CUDNN_SDPA_DEPRIORITIZED", "TORCH_COMPILE_DISABLE"),
    *("TORCHDYNAMO_DISABLE", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "TORCH_NCCL_BLOCKING_WAIT"),
)
_MODEL_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.jinja", "adapter_config.json"),
)
_SHOWN, _GROUPS, _LONGEST = 4, 3, 60


def refuse_differences(config: Config, found: Survey, comm: Comm) -> None:
    """ConfigError on every rank (E378) where the ranks do not agree. Collective."""
    if comm.world == 1:
        return
    own = values_of(config, found, os.environ)
    of_ranks = unpacked_in(comm.gather_json(packed_in(own)))
    # JSON has made plain strings of the names.
    told = of_ranks[comm.rank]
    of_ranks[comm.rank] = {kind: {name: told[kind][name] for name in values} for kind, values in own.items()}
    if problems := disagreement(of_ranks):
        raise ConfigError(problems)


def values_of(config: Config, found: Survey, environment: Mapping[str, str]) -> Values:
    """What this rank has."""
    return {
        "object": _objects(config),
        "option": _options(config),
        "data": _data(config, found),
        "model": {
            **({} if found.live is not None else _model(found.facts.model.directory)),
            **_adapters(config),
        },
        "package": _packages(found.facts.machine.versions),
        "environment": {
            "device": "CUDA" if found.facts.machine.cuda else "CPU",
            **{name: environment[name] for name in _VARIABLES if name in environment},
        },
    }


def _objects(config: Config) -> dict[str, Any]:
    """The names of the program's live objects, of which each rank has made its own."""
    named = {"model": [config.model], "dataset": config.dataset, "val_dataset": config.val_dataset}
    live = {name: [text for text in texts if is_live(text)] for name, texts in named.items()}
    return {name: texts for name, texts in live.items() if texts}


def _options(config: Config) -> dict[str, Any]:
    found = {
        name: _typed(value, with_contents=name not in _READ_ALREADY)
        for name, value in config.model_dump(mode="json").items()
        if name not in _LEFT_OUT
    }
    # Each rank says in there how it is.
    return {**found, "output_dir": os.path.realpath(config.output_dir)}


def _typed(value: Any, *, with_contents: bool) -> Any:
    """An option's value, in which a file stands for what it holds and a directory for none of its names."""
    if isinstance(value, Mapping):
        return {key: _typed(of, with_contents=with_contents) for key, of in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_typed(of, with_contents=with_contents) for of in value]
    if not isinstance(value, str):
        return value
    head, name = value.partition("=")[::2] if "=" in value else ("", value)
    path, mark, rest = name.partition("#")
    if not _exists(path):
        path, colon, function = name.rpartition(":")
        if not (colon and _exists(path)):
            return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}… ({_digest([value])})"
        mark, rest = colon, function
    contents = ""
    if with_contents and isfile(Path(path)):
        contents = f" {_digest_of_file(Path(path))}"
    kind = "file" if isfile(Path(path)) else "directory"
    return f"{head + '=' if head else ''}{kind}{contents}{mark}{rest}"


def _exists(path: str) -> bool:
    try:
        return bool(path) and exists(Path(path))
    except (OSError, ValueError):
        # Too long for a name: a text.
        return False


def _data(config: Config, found: Survey) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if found.prompts is not None:
        values[tr("prompts")] = _of_prompts(found.prompts.entries)
    for name, table in found.eval_sets:
        values[tr("prompts of the dataset {name}", name=name)] = _of_prompts(table.entries)
    if found.stream is not None:
        values[tr("files of the data set")] = [_size(text.partition("#")[0]) for text in config.dataset]
    if found.facts.data.pass_rates is not None:
        values[tr("pass rates")] = found.facts.data.pass_rates.digest
    if found.facts.output.resume is not None:
        path = Path(found.facts.output.resume.path)
        values[tr("checkpoint")] = [
            tr("step {step}", step=found.facts.output.resume.step),
            _digest_of_file(path / MANIFEST),
        ]
    if config.replay_rollouts is not None:
        replayed = rollout_files(Path(config.replay_rollouts))
        values[tr("recorded rollouts")] = [(f.path.name, f.path.stat().st_size) for f in replayed]
    for model in found.facts.rewards.models:
        values[tr("reward model {name}", name=model.name)] = [
            model.parameters,
            model.file_bytes,
            model.hidden,
        ]
    return values


def _of_prompts(prompts: Sequence[Prompt]) -> list[str]:
    """How many there are, and a digest of their tokens, their images, and what rewards are given."""
    found = hashlib.sha256()
    names: tuple[Field, ...] = ("token_ids", "id", "task", "pass_rate", "columns")
    for token_ids, *told, columns in zip(*(fields_of(prompts, name) for name in names), strict=True):
        found.update(array("q", token_ids).tobytes())
        beside = [*told, dict(columns)]
        found.update(json.dumps(beside, sort_keys=True, default=_kind).encode("utf-8", "surrogatepass"))
    if not isinstance(prompts, LazyPrompts):
        # Prompts in a file of their own have no images.
        found.update("".join(medium.key for prompt in prompts for medium in prompt.media).encode())
    return [f"{len(prompts):,}", tr("digest {hexdigest}", hexdigest=found.hexdigest()[:12])]


def _kind(value: object) -> str:
    return type(value).__name__


def _size(path: str) -> int:
    return Path(path).stat().st_size if isfile(Path(path)) else 0


def _model(model_dir: str | None) -> dict[str, Any]:
    """The small files of a model, and what the headers of the large ones say."""
    if model_dir is None:
        return {}
    directory = Path(model_dir)
    values: dict[str, Any] = {
        name: _digest_of_file(directory / name) for name in _MODEL_FILES if isfile(directory / name)
    }
    values[tr("tensors of the weights")] = _of_tensors(stored_tensors(directory))
    return values


def _of_tensors(tensors: Mapping[str, StoredTensor], *beside: str) -> list[str]:
    """How many there are, and a digest of what the headers say of them, and of what is told beside it."""
    told = sorted(f"{name} {tensor.dtype} {tensor.shape}" for name, tensor in tensors.items())
    return [f"{len(told):,}", tr("digest {digest}", digest=_digest([*told, *beside]))]


def _adapters(config: Config) -> dict[str, Any]:
    """What the headers and the configurations of the adapters say that a run starts from."""
    values = {}
    for name, directory in (("adapters", config.adapters), ("ref_adapters", config.ref_adapters)):
        if directory is not None and isdir(Path(directory)):
            files = [_digest_of_file(Path(directory) / f) for f in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
            values[tr("tensors of {name}", name=name)] = _of_tensors(stored(Path(directory)), *files)
    return values


def _packages(versions: Iterable[tuple[str, str]]) -> dict[str, str]:
    found = {"python": platform.python_version(), **dict(versions)}
    for package in ("covey", *_PACKAGES):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {**found, tr("covey's source"): tr("digest {source}", source=_source())}


def _source() -> str:
    """A digest of the files that covey is made of."""
    root = Path(covey.__file__).parent
    files = sorted(path for kind in ("*.py", "*.c") for path in root.rglob(kind))
    return _digest(f"{path.relative_to(root)} {_digest_of_file(path)}" for path in files)


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _digest_of_file(path: Path) -> str:
    return hash_file(path)[:12]


class Difference(NamedTuple):
    """One thing that is not the same on every rank, in words."""

    kind: str
    name: str
    words: str


def disagreement(of_ranks: Sequence[Values]) -> list[Problem]:
    """The problem of ranks that do not have the same, one for everything; nothing where they agree."""
    differences = _differences(of_ranks)
    if not differences:
        return []
    seen = joined(". ", [capital(d.words) for d in differences[:_SHOWN]])
    more = len(differences) - _SHOWN
    seen += plural(more, ". {more} more differs.", ". {more} more differ.", more=more) if more > 0 else "."
    fixes = [Fix(text=FIXES[kind]) for kind in dict.fromkeys(d.kind for d in differences)]
    return [problem("E378", differences[0].name, seen, "", *fixes)]


def _differences(of_ranks: Sequence[Values]) -> list[Difference]:
    """By kind; where live objects differ, these alone, since what is read from them differs too."""
    found = []
    for kind in FIXES:
        names: dict[str, str] = {}
        for name in (name for values in of_ranks for name in values.get(kind, {})):
            names[name] = name if isinstance(name, Text) else names.get(name, name)
        for name in names.values():
            values = [values.get(kind, {}).get(name) for values in of_ranks]
            if any(value != values[0] for value in values):
                found.append(Difference(kind, name, _words(kind, name, values)))
    return [d for d in found if d.kind == "object"] or found


def _words(kind: str, name: str, values: Sequence[Any]) -> str:
    """`rank 1: transformers 5.17.0; ranks 0, 2-7: 5.23.0`: the fewest ranks first, a few values at most."""
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(_in_words(kind, value), []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: (len(group[1]), -group[1][0]))
    if len(ordered) > _GROUPS:
        *others, last = ordered
        shown, rest = others[: _GROUPS - 1], others[_GROUPS - 1 :]
        ranks = sorted(rank for _, of in rest for rank in of)
        ordered = [*shown, (tr("{num_rest} other values", num_rest=len(rest)), ranks), last]
    label = f"--{name}" if kind == "option" else name
    first, *later = ordered
    words = [
        tr("{ranks_word}: {label} {first}", ranks_word=ranks_word(first[1]), label=label, first=first[0])
    ]
    return joined(
        "; ",
        [
            *words,
            *(
                tr("{ranks_word}: {value}", ranks_word=ranks_word(ranks), value=value)
                for value, ranks in later
            ),
        ],
    )


def _in_words(kind: str, value: Any) -> str:
    if value is None:
        return {"package": tr("not installed"), "environment": tr("not set")}.get(kind, tr("none"))
    if isinstance(value, list):
        return joined(", ", [v if isinstance(v, str) else str(v) for v in value]) if value else tr("none")
    return value if isinstance(value, str) else str(value)
