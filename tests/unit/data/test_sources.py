"""What a `--dataset` argument names, and the rows that are read from files and directories."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import datasets
import pytest

from covey.data import tables
from covey.data.errors import DataError
from covey.data.sources import eval_name, load_source, parse_source, read_rows, stream_rows

ROWS = [{"prompt": f"p{i}", "solution": str(i)} for i in range(20)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """`datasets` keeps its tables of this test in a directory of the test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in ROWS), encoding="utf-8")
    return path


def load(text, *, use_hf=True, seed=0, shuffle=False, offline=True):
    return load_source(parse_source(str(text)), use_hf=use_hf, seed=seed, shuffle=shuffle, offline=offline)


# -- what is typed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hub", "path", "subset", "split", "limit", "name"),
    [
        ("openai/gsm8k", "any", "openai/gsm8k", None, None, None, None),
        ("hf::openai/gsm8k:main@test#100", "hf", "openai/gsm8k", "main", "test", 100, None),
        ("ms::modelscope/gsm8k#5", "ms", "modelscope/gsm8k", None, None, 5, None),
        ("squad@validation", "any", "squad", None, "validation", None, None),
        ("a/b@train[:10%]#3", "any", "a/b", None, "train[:10%]", 3, None),
        ("held=openai/gsm8k@test", "any", "openai/gsm8k", None, "test", None, "held"),
        ("held=hf::openai/gsm8k", "hf", "openai/gsm8k", None, None, None, "held"),
        ("nowhere.jsonl#7", "local", "nowhere.jsonl", None, None, 7, None),
        ("data/nowhere.jsonl.gz", "local", "data/nowhere.jsonl.gz", None, None, None, None),
        ("./nowhere", "local", "./nowhere", None, None, None, None),
        ("/a#b/c@d/e:f/x.parquet#2", "local", "/a#b/c@d/e:f/x.parquet", None, None, 2, None),
        ("test=./x.csv", "local", "./x.csv", None, None, None, "test"),
    ],
)
def test_an_argument_taken_apart(text, hub, path, subset, split, limit, name):
    found = parse_source(text)
    assert (found.hub, found.path) == (hub, path)
    assert (found.subset, found.split, found.limit, found.name) == (subset, split, limit, name)
    assert found.text == text


def test_what_is_there_under_its_whole_name_is_local(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("year=2024", "a#3", "owner", "b@train"):
        (tmp_path / name).mkdir()
    (tmp_path / "owner/data").mkdir()
    for text in ("year=2024", "a#3", "owner/data", "b@train"):
        found = parse_source(text)
        assert (found.hub, found.path, found.limit, found.split, found.name) == (
            "local",
            text,
            None,
            None,
            None,
        )
    found = parse_source("owner/data@test#4")
    assert (found.hub, found.path, found.split, found.limit) == ("local", "owner/data", "test", 4)
    # A prefix asks for the hub, whatever is here.
    assert parse_source("hf::owner/data").hub == "hf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_source("~/owner").path == str(tmp_path / "owner")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a/b#", "the number of rows after # must be a whole number"),
        ("a/b#0", "above 0, not '0'"),
        ("a/b#-3", "above 0"),
        ("x.jsonl#ten", "not 'ten'"),
        ("a/b@#3", "the @ must be followed by a split"),
        ("a/b:@train", "the : must be followed by a subset"),
        ("a/b/c", "neither a file or directory on this machine nor the id"),
        ("hf::a/b c", "neither a file"),
        ("", "is not the name of a data set"),
        ("#3", "is not the name of a data set"),
    ],
)
def test_malformed_arguments(text, words):
    with pytest.raises(DataError, match=words):
        parse_source(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("data/gsm8k test.jsonl", "gsm8k_test"),
        ("./math.jsonl.gz", "math"),
        ("openai/gsm8k:main@test#100", "gsm8k"),
        ("held-out=openai/gsm8k", "held-out"),
        ("./数据.csv", "eval"),
        ("./data/v1.2/", "v1.2"),
    ],
)
def test_names_for_metrics(text, name):
    assert eval_name(parse_source(text)) == name


# -- how many rows -----------------------------------------------------------------------------------------


def test_the_first_rows_or_a_seeded_choice_in_file_order(file):
    assert load(file).rows == ROWS
    assert load(f"{file}#3").rows == ROWS[:3]
    chosen = load(f"{file}#6", shuffle=True, seed=4).rows
    assert [r for r in ROWS if r in chosen] == chosen
    assert len(chosen) == 6
    assert chosen != ROWS[:6]
    assert load(f"{file}#6", shuffle=True, seed=4).rows == chosen
    assert load(f"{file}#6", shuffle=True, seed=5).rows != chosen


def test_more_than_there_are_takes_all_and_says_so(file):
    found = load(f"{file}#21", shuffle=True)
    assert found.rows == ROWS
    assert found.notes == (f"{file}#21 asks for 21 rows but has only 20: all of them are used",)
    assert load(f"{file}#20").notes == load(file).notes == ()


# -- files -------------------------------------------------------------------------------------------------


def write(directory, suffix):
    path = directory / f"x{suffix}"
    table = datasets.Dataset.from_list(ROWS)
    match suffix:
        case ".jsonl.gz":
            path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in ROWS).encode()))
        case ".json":
            path.write_text(json.dumps(ROWS))
        case ".csv":
            path.write_text("prompt,solution\n" + "".join(f"p{i},{i}\n" for i in range(20)))
        case ".parquet":
            table.to_parquet(path)
        case ".arrow":
            table.save_to_disk(directory / "saved")
            (part,) = (directory / "saved").glob("*.arrow")
            part.rename(path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".json", ".csv", ".parquet", ".arrow"])
def test_formats_whole_and_streamed(suffix, tmp_path):
    path = write(tmp_path, suffix)
    expected = [{**r, "solution": int(r["solution"])} for r in ROWS] if suffix == ".csv" else ROWS
    assert read_rows(path) == expected
    assert load(f"{path}#4").rows == expected[:4]
    rows = stream_rows([parse_source(f"{path}#4"), parse_source(str(path))], use_hf=True)
    assert list(rows()) == expected[:4] + expected
    assert next(rows()) == expected[0]


def test_a_file_cut_short_is_named_with_its_line(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    text = "".join(json.dumps({"a": str(hash(i))}) + "\n" for i in range(2000))
    path.write_bytes(gzip.compress(text.encode())[:-2000])
    with pytest.raises(DataError, match=r"x\.jsonl\.gz could not be read after line \d+"):
        read_rows(path)


def test_nested_columns_and_missing_values_stay_python(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "tags": ["x", "y"], "n": 1.5},
        {"messages": [{"role": "user", "content": "b"}], "tags": [], "n": None},
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "x.parquet")
    assert read_rows(tmp_path / "x.parquet") == rows


def test_images_are_not_decoded(tmp_path):
    table = datasets.Dataset.from_list([{"prompt": "a", "image": {"bytes": b"no image", "path": None}}])
    table.cast_column("image", datasets.Image(decode=False)).save_to_disk(tmp_path / "x")
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    table.cast(features).to_parquet(tmp_path / "y.parquet")
    several = datasets.Features({"images": datasets.List(datasets.Image())})
    rows = [{"images": [{"bytes": b"1", "path": None}]}]
    datasets.Dataset.from_list(rows, features=several).to_parquet(tmp_path / "z.parquet")
    assert read_rows(tmp_path / "z.parquet") == rows
    (streamed,) = stream_rows([parse_source(str(tmp_path / "z.parquet"))], use_hf=True)()
    assert streamed == rows[0]
    assert load(tmp_path / "x").rows[0]["image"]["bytes"] == b"no image"
    assert read_rows(tmp_path / "y.parquet")[0]["image"]["bytes"] == b"no image"
    (streamed,) = stream_rows([parse_source(str(tmp_path / "y.parquet"))], use_hf=True)()
    assert streamed["image"]["bytes"] == b"no image"


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match=r"x\.jsonl does not exist"):
        load(tmp_path / "x.jsonl")
    with pytest.raises(DataError, match="does not exist"):
        list(stream_rows([parse_source(str(tmp_path / "x.jsonl"))], use_hf=True)())


# -- directories -------------------------------------------------------------------------------------------


def test_a_saved_table(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "d")
    assert load(tmp_path / "d").rows == ROWS
    assert list(stream_rows([parse_source(str(tmp_path / "d"))], use_hf=True)()) == ROWS
    with pytest.raises(DataError, match="remove @test"):
        load(f"{tmp_path / 'd'}@test")


def test_a_saved_dictionary_of_splits(tmp_path):
    parts = {"train": ROWS[:15], "test": ROWS[15:]}
    saved = datasets.DatasetDict({n: datasets.Dataset.from_list(r) for n, r in parts.items()})
    saved.save_to_disk(tmp_path / "d")
    assert load(tmp_path / "d").rows == ROWS[:15]
    assert load(f"{tmp_path / 'd'}@test#2").rows == ROWS[15:17]
    with pytest.raises(DataError, match=r"no split tets \(nearest: test\); the splits are: train, test"):
        load(f"{tmp_path / 'd'}@tets")


def test_a_directory_of_data_files(tmp_path):
    for name, part in (("train", ROWS[:15]), ("test", ROWS[15:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in part))
    assert load(tmp_path).rows == ROWS[:15]
    assert load(f"{tmp_path}@test").rows == ROWS[15:]
    assert list(stream_rows([parse_source(f"{tmp_path}@test#3")], use_hf=True)()) == ROWS[15:18]
    with pytest.raises(DataError, match="no split dev; the splits are: train, test") as caught:
        load(f"{tmp_path}@dev")
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="no split dev"):
        list(stream_rows([parse_source(f"{tmp_path}@dev")], use_hf=True)())


def test_a_directory_without_data(tmp_path):
    (tmp_path / "d").mkdir()
    with pytest.raises(DataError, match="could not be read") as caught:
        load(tmp_path / "d")
    assert "\n" not in str(caught.value)


def test_subsets(tmp_path):
    for name in ("main", "socratic"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    card = "".join(f"- config_name: {n}\n  data_files: {n}.jsonl\n" for n in ("main", "socratic"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{card}---\n")
    assert load(f"{tmp_path}:socratic").rows == [{"prompt": "socratic"}]
    with pytest.raises(
        DataError, match=r"has subsets: choose one, as in .*:main; the subsets are: main, socratic"
    ):
        load(tmp_path)
    with pytest.raises(DataError, match=r"no subset mian \(nearest: main\); the subsets are: main, socratic"):
        load(f"{tmp_path}:mian")


def test_a_directory_whose_only_split_is_another_says_what_to_write(tmp_path):
    (tmp_path / "test.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(DataError, match=f"no split train.*write {tmp_path}@test"):
        load(tmp_path)


# -- imports -----------------------------------------------------------------------------------------------


def test_reading_needs_no_torch(file, tmp_path):
    path = write(tmp_path, ".csv")
    code = (
        "import sys\nfrom covey.data.sources import load_source, parse_source\n"
        f"for p in ({str(file)!r}, {str(path)!r}):\n"
        "    assert len(load_source(parse_source(p), use_hf=True, seed=0, shuffle=True).rows) == 20\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("separator", "name"), [(";", "';'"), ("\t", "a tab"), ("|", "'|'")])
def test_a_table_with_another_separator_is_named(separator, name, tmp_path):
    """Read with commas it would be one column that holds the answers, too."""
    path = tmp_path / "rows.csv"
    path.write_text(separator.join(("question", "answer")) + "\n" + separator.join(("1+1?", "2")) + "\n")
    for load in (tables.load_file, lambda p: list(tables.stream_file(p))):
        with pytest.raises(DataError, match="separates its columns with") as found:
            load(path)
        assert name in str(found.value)
