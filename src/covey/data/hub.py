"""Models and data sets of the Hugging Face hub: what is fetched, and each failure in one line.

`huggingface_hub` is imported when first needed; it honours HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import expanduser, isdir, isfile
from pathlib import Path

from covey.data import modelscope
from covey.data.errors import DataError, ModelError, one_line
from covey.plan.reasons import DataFault
from covey.texts import tr
from covey.weight_files import INDEX, weight_map

# The first question decides whether there is a network; nothing is retried before it is answered.
_TIMEOUT_S = 5.0
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SMALL = (
    *("config.json", "generation_config.json", "adapter_config.json", INDEX),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("additional_chat_templates/*", "vocab.*", "merges.txt", "spiece.model", "sentencepiece*"),
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")


@dataclass(frozen=True, slots=True)
class Silence:
    """Why a hub says nothing, and whether that is what HF_HUB_OFFLINE asks for."""

    words: str
    is_asked_for: bool = False


_UNASKED = Silence(tr("the network may not be used"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Where the small files of a model lie, which commit they are, and the size of its weights where
    known."""

    directory: Path
    revision: str | None = None
    weights_bytes: int | None = None


def locate_model(
    name: str, *, revision: str | None = None, use_hf: bool = True, offline: bool = False
) -> ModelFiles:
    """The directory with config, tokenizer and template of a model, fetched without its weights.

    A local directory is returned as it is; `ms::id`, or any id with `use_hf` false, is ModelScope's.
    ModelError says in one line why the files cannot be had; with `offline` nothing is asked of the network.
    """
    if _is_local(name):
        return ModelFiles(directory=Path(expanduser(name)))
    if isfile(expanduser(name)):
        words = tr("{name} is a file, but a model is a directory", name=name)
        raise ModelError(words, kind="file", subject=name)
    hub, name = _hub_id(name, use_hf)
    if hub == "ms":
        directory = modelscope.model_directory(
            name, revision=revision, allow_patterns=_SMALL, offline=offline
        )
        return ModelFiles(directory=directory, revision=revision)
    sizes, silence = _listing(name, revision, offline)
    directory = _snapshot(name, revision, _SMALL, silence)
    if not isfile(directory / "config.json") and not isfile(directory / "adapter_config.json"):
        if sizes is None:
            raise _not_cached(name, name, silence, "config.json")
        raise ModelError(
            tr("{name} does not contain a config.json", name=name), kind="no_config", subject=name
        )
    size = None
    if sizes is not None:
        known = [sizes.get(file) for file in _weight_files(name, directory, list(sizes))]
        size = sum(n for n in known if n is not None) if all(known) else None
    return ModelFiles(directory=directory, revision=directory.name, weights_bytes=size)


def fetch_weights(
    name: str, *, revision: str | None = None, use_hf: bool = True, offline: bool = False
) -> Path:
    """The directory of a model with its safetensors weights in it, fetched where they are not there yet."""
    files = locate_model(name, revision=revision, use_hf=use_hf, offline=offline)
    if _is_local(name):
        return files.directory
    hub, name = _hub_id(name, use_hf)
    if hub == "ms":
        return modelscope.model_directory(
            name, revision=revision, allow_patterns=(*_SMALL, "model*.safetensors"), offline=offline
        )
    sizes, silence = _listing(name, files.revision, offline)
    there = sorted(p.name for p in files.directory.iterdir()) if sizes is None else list(sizes)
    weights = _weight_files(name, files.directory, there)
    directory = _snapshot(name, files.revision, (*_SMALL, *weights), silence)
    missing = [file for file in weights if not isfile(directory / file)]
    if missing:
        raise _not_cached(name, name, silence, ", ".join(missing[:3]))
    return directory


def silence_about(name: str, *, offline: bool) -> Silence | None:
    """Why the hub cannot be asked for a data set; None where it answers.

    DataError where it answers that there is no such data set.
    """
    import huggingface_hub
    from huggingface_hub import errors

    if offline:
        return _UNASKED
    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=_TIMEOUT_S)
    except (errors.HTTPError, OSError, ValueError) as error:
        if _is_no_answer(error):
            return _silence(error)
        raise DataError(explain(error, name, kind=tr("data set")), subject=name) from error
    return None


def cached_dataset(name: str) -> Path | None:
    """The files of a data set in the hub's cache on this machine; None where there are none."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(name, repo_type="dataset", local_files_only=True))
    except (errors.LocalEntryNotFoundError, ValueError):
        return None


def not_cached_dataset(name: str, silence: Silence) -> DataError:
    """The error for a data set that is not in the cache and cannot be fetched."""
    kind: DataFault = "offline" if silence.is_asked_for else ""
    return DataError(_not_in_cache(name, silence), kind=kind, subject=name)


def http_error() -> type[Exception]:
    """The root of what the hub's client raises for a request that failed."""
    from huggingface_hub import errors

    return errors.HTTPError


@contextmanager
def no_network() -> Iterator[None]:
    """The hub's client as if HF_HUB_OFFLINE were set, which it reads only once, when it is imported."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def explain(error: Exception, name: str, *, kind: str, revision: str | None = None) -> str:
    """What the hub meant, in one line with what to do."""
    from huggingface_hub import constants, errors

    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'data set' else ''}{name}"
        return tr(
            "{name} is gated ({status}): request access at {page}, then log in with `hf auth login` or "
            "HF_TOKEN",
            name=name,
            status=status,
            page=page,
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return tr("{name} has no revision {revision!r}", name=name, revision=revision)
    if isinstance(error, errors.RepositoryNotFoundError):
        return tr(
            "{name}: the hub has no such {kind}, or it is private and you may not read it ({status}): "
            "check the spelling, then log in with `hf auth login` or HF_TOKEN",
            name=name,
            kind=kind,
            status=status,
        )
    if status == 401:
        return tr(
            "{name}: the hub did not accept the token (401): log in again with `hf auth login`, or set "
            "HF_TOKEN",
            name=name,
        )
    return tr("{name}: the hub answered: {one_line}", name=name, one_line=one_line(error))


def _is_local(name: str) -> bool:
    return isdir(expanduser(name))


def _hub_id(name: str, use_hf: bool) -> tuple[str, str]:
    hub = "hf" if use_hf else "ms"
    for prefix in ("hf", "ms"):
        if name.startswith(f"{prefix}::"):
            hub, name = prefix, name.removeprefix(f"{prefix}::")
    if name.startswith((".", "/", "~")) or not _ID.fullmatch(name):
        words = tr(
            "{name} is neither a directory on this machine nor the id of a model (owner/name)", name=name
        )
        raise ModelError(words, subject=name)
    return hub, name


def _listing(
    name: str, revision: str | None, offline: bool
) -> tuple[Mapping[str, int | None] | None, Silence | None]:
    """Sizes of the files of a model on the hub, or None and why the hub says nothing."""
    import huggingface_hub
    from huggingface_hub import errors

    if offline:
        return None, _UNASKED
    try:
        info = huggingface_hub.HfApi().model_info(
            name, revision=revision, timeout=_TIMEOUT_S, files_metadata=True
        )
    except (errors.HTTPError, OSError, ValueError) as error:
        if _is_no_answer(error):
            return None, _silence(error)
        raise ModelError(explain(error, name, kind="model", revision=revision), subject=name) from error
    return {file.rfilename: file.size for file in info.siblings or ()}, None


def _silence(error: Exception) -> Silence:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return Silence(tr("HF_HUB_OFFLINE is set"), is_asked_for=True)
    one = one_line(error)
    return Silence(tr("{endpoint} does not answer: {one_line}", endpoint=constants.ENDPOINT, one_line=one))


def _is_no_answer(error: Exception) -> bool:
    """No network, offline by request, or a hub that is down: the cache may still have the files."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 500
    return isinstance(error, errors.HTTPError | OSError)


def _snapshot(name: str, revision: str | None, patterns: Sequence[str], silence: Silence | None) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        directory = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],
            local_files_only=silence is not None,
        )
    except errors.LocalEntryNotFoundError as error:
        called = tr("{name} at {revision}", name=name, revision=revision) if revision else name
        raise _not_cached(name, called, silence) from error
    except (errors.HTTPError, OSError, ValueError) as error:
        raise ModelError(explain(error, name, kind="model", revision=revision), subject=name) from error
    return Path(directory)


def _not_cached(name: str, called: str, silence: Silence | None, missing: str = "") -> ModelError:
    kind = "offline" if silence is not None and silence.is_asked_for else ""
    return ModelError(_not_in_cache(called, silence, missing), kind=kind, subject=name)


def _not_in_cache(name: str, silence: Silence | None, missing: str = "") -> str:
    from huggingface_hub import constants

    why = tr("the download stopped before it was complete") if silence is None else silence.words
    part = tr(" ({missing} is missing)", missing=missing) if missing else ""
    return tr(
        "{name} is missing from the cache {hf_hub_cache} or incomplete there{part}, and {why}",
        name=name,
        hf_hub_cache=constants.HF_HUB_CACHE,
        part=part,
        why=why,
    )


def _weight_files(name: str, directory: Path, there: Sequence[str]) -> list[str]:
    """The safetensors files that hold a model's weights; ModelError where it has none."""
    if INDEX in there and (by_index := weight_map(directory)) is not None:
        return sorted({*by_index.values()})
    if "model.safetensors" in there:
        return ["model.safetensors"]
    own = [f for f in there if f.endswith(".safetensors") and "/" not in f and not f.startswith("adapter")]
    if own:
        return own
    if "adapter_config.json" in there:
        raise ModelError(
            tr(
                "{name} is an adapter, not a model: give its base model as --model, and the directory to "
                "which `hf download` writes the adapter as --adapters",
                name=name,
            ),
            kind="adapter",
            subject=name,
        )
    if any(f.endswith(_PICKLES) for f in there):
        raise ModelError(
            tr(
                "{name} has only pickled weights, which can run code when they are loaded; covey does not "
                "read them: convert them to safetensors",
                name=name,
            ),
            subject=name,
        )
    words = tr("{name} has no weights: it contains no .safetensors file", name=name)
    raise ModelError(words, kind="no_weights", subject=name)
