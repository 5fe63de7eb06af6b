"""Models and data sets of the hub: a prepared cache, and a loopback server that answers as the hub does."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from huggingface_hub import constants

from covey.data.errors import DataError, ModelError
from covey.data.hub import fetch_weights, locate_model
from covey.data.model_files import model_problem
from covey.data.sources import load_source, parse_source, stream_rows
from covey.data.text import load_codec
from covey.quickstart.task import MODEL_DIR
from support.web import Handler, listening

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = {p.name: p.read_bytes() for p in MODEL_DIR.iterdir() if p.suffix in (".json", ".jinja")}
WEIGHTS = b"weights"
SILENT = "http://127.0.0.1:9 does not answer"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The hub's cache of this test; no token, nothing answers unless a test starts a hub."""
    root = tmp_path / "hub"
    root.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # whatever the tests were started with
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    _point(monkeypatch, "http://127.0.0.1:9")
    return root


def _point(monkeypatch, endpoint):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", endpoint)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)


def put(cache: Path, name: str, files: dict[str, bytes], kind: str = "models") -> Path:
    """A repository in the cache as the hub's client lays it out."""
    root = cache / f"{kind}--{name.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    for folder in (root / "blobs", root / "refs", snapshot):
        folder.mkdir(parents=True)
    (root / "refs/main").write_text(COMMIT)
    for number, (file, content) in enumerate(files.items()):
        (root / "blobs" / str(number)).write_bytes(content)
        (snapshot / file).symlink_to(root / "blobs" / str(number))
    return snapshot


class Hub:
    """Repositories by name, and how each answers: files, or a status with the hub's own error code."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.refused: dict[str, tuple[int, str]] = {}
        self.gated: set[str] = set()
        self.asked: list[tuple[str, str | None]] = []

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        path = path.partition("?")[0].strip("/")
        parts = path.removeprefix("api/").removeprefix("models/").removeprefix("datasets/").split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        if name in self.refused:
            status, code = self.refused[name]
            return status, {"X-Error-Code": code, "X-Error-Message": "refused"}, b"{}"
        files = self.repos.get(name)
        if files is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if not path.startswith("api/"):
            return self._file(name, files, rest[-1])
        if rest and rest[0] == "tree":
            tree = [{"type": "file", "path": f, "size": len(c), "oid": f} for f, c in files.items()]
            return 200, {}, json.dumps(tree).encode()
        siblings = [{"rfilename": f, "size": len(c)} for f, c in files.items()]
        return 200, {}, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()

    def _file(self, name: str, files: dict[str, bytes], file: str) -> tuple[int, dict[str, str], bytes]:
        if name in self.gated:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "ask"}, b""
        if file not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{file}"', "X-Repo-Commit": COMMIT}, files[file]


@pytest.fixture
def hub(monkeypatch):
    """A hub on the loopback interface, where the client is pointed."""
    state = Hub()

    class Answers(Handler):
        def do_GET(self):
            state.asked.append((self.path, self.headers.get("Authorization")))
            status, headers, body = state.answer(self.path)
            self.answer(status, body, headers)

        do_HEAD = do_GET

    with listening(Answers) as address:
        _point(monkeypatch, address)
        yield state


def words(call, *args, **kwargs):
    """The one line of the error that a call ends with."""
    with pytest.raises((ModelError, DataError)) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text


# -- what lies here ----------------------------------------------------------------------------------------


def test_a_local_directory_is_itself():
    assert locate_model(str(MODEL_DIR)).directory == MODEL_DIR
    assert fetch_weights(str(MODEL_DIR), offline=True) == MODEL_DIR


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/model", "~/nowhere", "a/b/c", "a b"])
def test_a_path_that_is_not_there_is_no_id(name):
    assert (
        words(locate_model, name)
        == f"{name} is neither a directory on this machine nor the id of a model (owner/name)"
    )


# -- from the cache ----------------------------------------------------------------------------------------


def test_a_cached_model_without_a_network(cache):
    snapshot = put(cache, "owner/tiny", {**SMALL, "model.safetensors": WEIGHTS})
    for offline in (True, False):  # port 9 answers nobody
        files = locate_model("owner/tiny", offline=offline)
        assert (files.directory, files.revision, files.weights_bytes) == (snapshot, COMMIT, None)
        assert fetch_weights("owner/tiny", offline=offline) == snapshot
    assert load_codec(files.directory).stop_token_ids == load_codec(MODEL_DIR).stop_token_ids
    assert locate_model("hf::owner/tiny", use_hf=False, revision=COMMIT).directory == snapshot


def test_hf_hub_offline_is_honoured(cache, monkeypatch, hub):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    put(cache, "owner/tiny", SMALL)
    assert locate_model("owner/tiny").revision == COMMIT
    text = words(locate_model, "owner/other")
    assert "from the cache" in text and "HF_HUB_OFFLINE is set" in text
    assert hub.asked == []


def test_not_cached_and_no_network_is_said_at_once(cache):
    started = time.monotonic()
    text = words(locate_model, "owner/tiny")
    assert text.startswith(
        f"owner/tiny is missing from the cache {cache} or incomplete there, and {SILENT}: "
    )
    assert "the network may not be used" in words(locate_model, "owner/tiny", offline=True)
    put(cache, "owner/tiny", SMALL)
    assert "owner/tiny at v2 is missing from the cache" in words(locate_model, "owner/tiny", revision="v2")
    assert time.monotonic() - started < 5


def test_a_cache_that_holds_part_of_a_model(cache):
    put(cache, "owner/tiny", {"tokenizer.json": b"{}"})
    assert "(config.json is missing)" in words(locate_model, "owner/tiny", offline=True)
    put(cache, "owner/pickled", {**SMALL, "pytorch_model.bin": b""})
    assert "convert them to safetensors" in words(fetch_weights, "owner/pickled", offline=True)
    index = json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}).encode()
    put(cache, "owner/part", {**SMALL, "model.safetensors.index.json": index, "m-1.safetensors": WEIGHTS})
    assert "(m-2.safetensors is missing)" in words(fetch_weights, "owner/part", offline=True)


# -- from the hub ------------------------------------------------------------------------------------------


def test_small_files_first_and_weights_when_asked(hub):
    hub.repos["owner/tiny"] = {
        **SMALL,
        "model.safetensors": WEIGHTS,
        "pytorch_model.bin": b"",
        "tokenizer/vocab.json": b"",
        "README.md": b"",
    }
    files = locate_model("owner/tiny")
    assert (files.revision, files.weights_bytes) == (COMMIT, len(WEIGHTS))
    assert {p.name for p in files.directory.iterdir()} == SMALL.keys()
    assert model_problem(files.directory, with_weights=False) is None
    directory = fetch_weights("owner/tiny")
    assert directory == files.directory
    assert {p.name for p in directory.iterdir()} == SMALL.keys() | {"model.safetensors"}
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    # What was fetched is there without a network.
    assert fetch_weights("owner/tiny", offline=True) == directory


def test_the_shards_that_the_index_names(hub):
    shards = {f"model-{n}.safetensors": WEIGHTS * n for n in (1, 2)}
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    hub.repos["owner/big"] = {
        **SMALL,
        **shards,
        "model.safetensors.index.json": index,
        "consolidated.safetensors": b"x",
    }
    assert locate_model("owner/big").weights_bytes == 3 * len(WEIGHTS)
    assert {p.name for p in fetch_weights("owner/big").glob("*.safetensors")} == shards.keys()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"pytorch_model.bin": b""},
            "has only pickled weights, which can run code when they are loaded; covey does not read them: "
            "convert them to safetensors",
        ),
        ({}, "has no weights"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, "is an adapter, not a model"),
    ],
)
def test_models_whose_weights_are_not_read(files, expected, hub):
    hub.repos["owner/tiny"] = {**SMALL, **files}
    assert expected in words(locate_model, "owner/tiny")


def test_a_token_is_sent(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.repos["owner/tiny"] = {**SMALL, "model.safetensors": WEIGHTS}
    locate_model("owner/tiny")
    assert {token for _, token in hub.asked} == {"Bearer hf_secret"}


def test_gated(hub):
    hub.repos["owner/tiny"] = {**SMALL, "model.safetensors": WEIGHTS}
    hub.gated.add("owner/tiny")
    text = words(locate_model, "owner/tiny")
    assert text.startswith(f"owner/tiny is gated (403): request access at {constants.ENDPOINT}/owner/tiny")
    assert "HF_TOKEN" in text


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (401, "RepoNotFound", "has no such model, or it is private and you may not read it (401)"),
        (404, "RepoNotFound", "has no such model, or it is private and you may not read it (404)"),
        (401, "", "did not accept the token (401)"),
        (403, "GatedRepo", "is gated (403)"),
        (418, "", "the hub answered: "),
    ],
)
def test_refusals_in_one_line(status, code, expected, hub):
    hub.refused["owner/tiny"] = (status, code)
    assert expected in words(locate_model, "owner/tiny")


def test_no_such_revision(hub):
    hub.repos["owner/tiny"] = {**SMALL, "model.safetensors": WEIGHTS}
    assert words(locate_model, "owner/tiny", revision="v9") == "owner/tiny has no revision 'v9'"


def test_a_hub_that_is_down_leaves_the_cache(hub, cache):
    hub.refused["owner/tiny"] = (503, "")
    assert "does not answer" in words(locate_model, "owner/tiny")
    put(cache, "owner/tiny", SMALL)
    assert locate_model("owner/tiny").revision == COMMIT


# -- data sets ---------------------------------------------------------------------------------------------

ROWS = [{"prompt": f"p{i}", "solution": str(i)} for i in range(6)]
LINES = "".join(json.dumps(r) + "\n" for r in ROWS).encode()


def load(text, **options):
    options = {"use_hf": True, "seed": 0, "shuffle": False, **options}
    return load_source(parse_source(text), **options).rows


def test_a_data_set_whose_files_are_cached(cache):
    put(cache, "owner/data", {"train.jsonl": LINES, "test.jsonl": LINES}, "datasets")
    assert load("owner/data#4", offline=True) == ROWS[:4]
    assert load("hf::owner/data", use_hf=False) == ROWS
    rows = stream_rows([parse_source("owner/data#2")], use_hf=True, offline=True)
    assert list(rows()) == ROWS[:2]
    text = words(load, "owner/data@dev", offline=True)
    assert text == "owner/data has no split dev; the splits are: train, test"
    assert not datasets.config.HF_HUB_OFFLINE and not constants.HF_HUB_OFFLINE


def test_a_data_set_that_is_not_cached_and_no_network(cache):
    started = time.monotonic()
    text = words(load, "owner/data")
    assert text.startswith(
        f"owner/data is missing from the cache {cache} or incomplete there, and {SILENT}: "
    )
    assert "the network may not be used" in words(load, "owner/data", offline=True)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (401, "RepoNotFound", "has no such data set, or it is private and you may not read it (401)"),
        (404, "RepoNotFound", "has no such data set"),
        (403, "GatedRepo", "/datasets/owner/data, then log in"),
    ],
)
def test_data_sets_that_are_refused(status, code, expected, hub):
    hub.refused["owner/data"] = (status, code)
    assert expected in words(load, "owner/data")
    assert expected in words(lambda: list(stream_rows([parse_source("owner/data")], use_hf=True)()))


def test_a_data_set_of_the_hub(hub):
    hub.repos["owner/data"] = {"train.jsonl": LINES, "test.jsonl": LINES[: len(LINES) // 2], "README.md": b""}
    assert load("owner/data#4") == ROWS[:4]
    assert load("hf::owner/data@test", use_hf=False) == ROWS[:3]
    assert words(load, "owner/data@dev") == "owner/data has no split dev; the splits are: train, test"
    rows = stream_rows([parse_source("owner/data@test#2")], use_hf=True)
    assert list(rows()) == ROWS[:2]
    # What was fetched is there without a network.
    hub.refused["owner/data"] = (503, "")
    assert load("owner/data") == ROWS


def test_a_data_set_whose_files_are_gated(hub):
    hub.repos["owner/data"] = {"train.jsonl": LINES, "README.md": b""}
    hub.gated.add("owner/data")
    assert "owner/data is gated: request access" in words(load, "owner/data")


# -- ModelScope --------------------------------------------------------------------------------------------


def test_without_its_client_modelscope_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    for call in (lambda: load("ms::owner/data"), lambda: load("owner/data", use_hf=False)):
        assert "pip install modelscope" in words(call)
    assert "pip install modelscope" in words(locate_model, "ms::owner/tiny")
    assert "pip install modelscope" in words(fetch_weights, "owner/tiny", use_hf=False)


@pytest.fixture
def client(tmp_path, monkeypatch):
    """A stand-in for ModelScope's client, which serves directories and records what it was asked."""
    package = tmp_path / "site/modelscope/hub"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "snapshot_download.py").write_text(
        "asked = []\n"
        "def snapshot_download(model_id, **options):\n"
        "    asked.append((model_id, options))\n"
        f"    place = {str(tmp_path)!r} + '/' + model_id\n"
        "    if not __import__('os').path.isdir(place):\n"
        "        raise ValueError('no such\\nrepository')\n"
        "    return place\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name in ("modelscope", "modelscope.hub", "modelscope.hub.snapshot_download"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("modelscope", "modelscope.hub", "modelscope.hub.snapshot_download"):
        sys.modules.pop(name, None)


def test_modelscope_gives_directories(client):
    for file, content in {"owner/tiny/config.json": b"{}", "owner/data/train.jsonl": LINES}.items():
        (client / file).parent.mkdir(parents=True)
        (client / file).write_bytes(content)
    assert locate_model("ms::owner/tiny").directory == client / "owner/tiny"
    assert fetch_weights("owner/tiny", use_hf=False, offline=True) == client / "owner/tiny"
    assert load("ms::owner/data#2") == ROWS[:2]
    assert load("owner/data", use_hf=False) == ROWS
    from modelscope.hub.snapshot_download import asked

    first, weights = asked[0][1], asked[2][1]
    assert "model*.safetensors" not in first["allow_patterns"]
    assert "model*.safetensors" in weights["allow_patterns"]
    assert (first["local_files_only"], weights["local_files_only"]) == (False, True)
    assert (
        words(load, "ms::owner/other")
        == "owner/other could not be downloaded from ModelScope: no such repository"
    )
