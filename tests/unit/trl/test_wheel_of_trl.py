"""GRPOConfig and its page hold what TRL's own files say; the files are read, and never imported."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from covey.trl.fields import OTHER_DEFAULTS, Fields
from covey.trl.reference import markdown
from support.needs import lacks

ROOT = Path(__file__).parents[3]
NAMES = json.loads((ROOT / "tests" / "unit" / "config" / "other_tools.json").read_text())
VERSION = "1.16.0"
# transformers chooses the default by the version of torch; this is the one of those that covey runs with.
CHOSEN = {"default_optim": "adamw_torch_fused"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """TRL's wheel, from a registry or from pip's cache."""
    target = tmp_path_factory.mktemp("wheel")
    words = f"-m pip download --quiet --no-deps --retries 1 --timeout 20 --dest {target} trl=={VERSION}"
    done = subprocess.run([sys.executable, *words.split()], capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        lacks("a registry", done.stderr.strip().splitlines()[-1])
    (file,) = target.glob("trl-*.whl")
    return zipfile.ZipFile(file)


def class_of(text: str, name: str) -> ast.ClassDef:
    (found,) = (n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == name)
    return found


def defaults(text: str, name: str) -> dict[str, Any]:
    """The fields that a dataclass declares, each with its default."""
    found = {}
    for line in class_of(text, name).body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            value = line.value
            if isinstance(value, ast.Call):
                given = {word.arg: word.value for word in value.keywords}
                value = given.get("default", ast.List([]))
            is_chosen = isinstance(value, ast.Name)
            found[line.target.id] = CHOSEN[value.id] if is_chosen else ast.literal_eval(value)
    return found


def text_of_transformers() -> str:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).with_name("training_args.py").read_text(encoding="utf-8")


def test_fields_and_defaults(wheel: zipfile.ZipFile) -> None:
    there = defaults(text_of_transformers(), "TrainingArguments")
    for file, name in (("base_config", "_BaseConfig"), ("grpo_config", "GRPOConfig")):
        there |= defaults(wheel.read(f"trl/trainer/{file}.py").decode(), name)
    here = {
        one.name: [] if one.default_factory is list else one.default for one in dataclasses.fields(Fields)
    }
    version = importlib.metadata.version("transformers")
    assert here.keys() == there.keys(), f"transformers {version}, TRL {VERSION}"
    assert next(iter(here)) == next(iter(there)) == "output_dir"
    others = {name: (there[name], value) for name, value in here.items() if value != there[name]}
    assert others == {
        "gradient_checkpointing": (True, None),
        "use_liger_kernel": (False, None),
        "vllm_server_host": ("0.0.0.0", "127.0.0.1"),
    }
    assert others.keys() <= OTHER_DEFAULTS.keys() <= there.keys()
    assert NAMES["config"] == there


def test_arguments_of_the_trainer(wheel: zipfile.ZipFile) -> None:
    body = class_of(wheel.read("trl/trainer/grpo_trainer.py").decode(), "GRPOTrainer").body
    (init,) = (n for n in body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    assert [argument.arg for argument in init.args.args][1:] == NAMES["trainer"]


def test_the_page_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "trl-fields.md").read_text(encoding="utf-8")
    assert page == markdown(), "python -m covey.trl.reference > docs/trl-fields.md"
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([a-z ]+) \|", page, re.MULTILINE))
    assert rows.keys() == {one.name for one in dataclasses.fields(Fields)}
    assert {name for name, here in rows.items() if here == "other default"} == OTHER_DEFAULTS.keys()
    some = ("beta", "multi_objective_aggregation", "log_level", "use_cpu", "generation_kwargs")
    assert [rows[name] for name in some] == ["taken", "taken", "no effect", "one value", "refused"]
    # Whoever reads why something is refused also reads what to type instead, where there is something.
    assert "Instead: --temperature X, --top_p X, --top_k N or --min_p X." in page
