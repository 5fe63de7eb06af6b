"""The built-in models by name: small folders that a package may hold, whose tokenizers agree with them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from covey.config.quickstart import BUILT_IN_NAMES, QUICKSTART_TOOLS
from covey.quickstart import tools_task
from covey.quickstart.built_in import BUILT_IN, directory_of

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

import make_model
import make_shapes_model
import make_tools_model

SIZE_LIMITS = {"quickstart": 4_000_000, "quickstart-tools": 2_500_000, "quickstart-shapes": 2_000_000}
VOCABULARIES = {
    "quickstart": make_model.VOCABULARY,
    "quickstart-tools": make_tools_model.VOCABULARY,
    "quickstart-shapes": make_shapes_model.VOCABULARY,
}
SEES = {"quickstart-shapes": {"preprocessor_config.json"}}


def test_the_built_in_names_are_those_of_the_table():
    assert tuple(BUILT_IN) == BUILT_IN_NAMES == tuple(SIZE_LIMITS)
    assert directory_of("quickstart-tools") == tools_task.MODEL_DIR
    assert directory_of("some/path") == Path("some/path")
    assert QUICKSTART_TOOLS["model"] in BUILT_IN
    assert QUICKSTART_TOOLS["tools"] == [tools_task.TOOL]


def test_tasks_and_calculator_import_no_heavy_package():
    heavy = "{'torch', 'transformers', 'numpy'}"
    names = "covey.quickstart.built_in, covey.quickstart.calculator"
    code = f"import sys, {names}; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", SIZE_LIMITS)
def test_the_model_directory_is_small_and_holds_no_local_path(name: str) -> None:
    files = sorted(path for path in BUILT_IN[name].model_dir.iterdir() if path.is_file())
    assert {path.name for path in files} - SEES.get(name, set()) == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in files) <= SIZE_LIMITS[name]
    for path in files:
        assert not re.search(rb"/(home|root|tmp|work|Users)/|_name_or_path", path.read_bytes()), path.name


@pytest.mark.parametrize("name", SIZE_LIMITS)
def test_model_and_tokenizer_agree_on_ids(name: str) -> None:
    folder = BUILT_IN[name].model_dir
    tokenizer, plain = (
        AutoTokenizer.from_pretrained(folder),
        Tokenizer.from_file(str(folder / "tokenizer.json")),
    )
    auto = AutoModelForImageTextToText if name in SEES else AutoModelForCausalLM
    model = auto.from_pretrained(folder)
    assert tokenizer.get_vocab() == plain.get_vocab()
    text = model.config.get_text_config()
    assert len(tokenizer) <= text.vocab_size == VOCABULARIES[name]
    for config in (text, model.generation_config):
        assert config.eos_token_id == tokenizer.eos_token_id == plain.token_to_id("<|im_end|>")
        assert config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
