"""`covey verify`: every fault of a checkpoint by its name, models without a manifest, exit codes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from covey.checkpoint.manifest import FileEntry, hash_file, list_files, read_manifest, render_manifest
from covey.checkpoint.model_files import ModelFiles
from covey.checkpoint.registry import State
from covey.checkpoint.shards import Shard
from covey.checkpoint.write import write_checkpoint
from covey.cli.main import main
from covey.models.adapter_shapes import LoraSettings
from covey.models.load import load_adapted, save_policy
from support.models import random_model, save_model
from support.reward_models import write_reward_model
from support.threads import on_ranks

MOMENT = torch.arange(12.0).reshape(6, 2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks with the model in two files."""
    model = random_model("qwen2")
    directory = tmp_path_factory.mktemp("run")

    def save(comm: Any) -> Path:
        shard = Shard("exp_avg/w", MOMENT[3 * comm.rank :][:3], 3 * comm.rank, (6, 2))
        files = ModelFiles(model, comm.rank, 2).add_all(model.named_parameters())
        return write_checkpoint(
            directory,
            step=4,
            write_model=files.write,
            states={"rollout": State(json={"done": 1}, tensors={"old": torch.ones(3)})},
            shards={"optimizer": [shard]},
            meta={},
            comm=comm,
        )

    return on_ranks(2, save)[0]


@pytest.fixture
def checkpoint(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "checkpoint-4")


def verify(capsys: Any, *paths: Path) -> tuple[int, list[dict[str, Any]]]:
    code = main(["verify", *map(str, paths), "--json"])
    return code, json.loads(capsys.readouterr().out)


def sealed_again(checkpoint: Path) -> None:
    """The manifest of somebody who has changed files and taken their sums anew."""
    entries = {
        n: FileEntry(size=p.stat().st_size, sha256=hash_file(p)) for n, p in list_files(checkpoint).items()
    }
    text = render_manifest(replace(read_manifest(checkpoint), files=entries))
    (checkpoint / "manifest.json").write_text(text)


def test_a_whole_checkpoint(checkpoint: Path, capsys: Any) -> None:
    code, (found,) = verify(capsys, checkpoint)
    assert code == 0 and found["verdict"] == "whole" and found["goes_on"] and found["step"] == 4
    assert found["faults"] == found["notes"] == [] and found["files"] == len(list_files(checkpoint))
    assert main(["verify", str(checkpoint)]) == 0
    assert "checkpoint of step 4" in " ".join(capsys.readouterr().out.split())


def test_every_fault_is_named_at_once(checkpoint: Path, capsys: Any) -> None:
    rank = checkpoint / "trainer/optimizer/rank-00001.safetensors"
    rank.unlink()
    (checkpoint / "surplus.bin").write_bytes(b"x")
    short, changed = checkpoint / "config.json", checkpoint / "model-00002-of-00002.safetensors"
    short.write_bytes(short.read_bytes()[:-1])
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    code, (found,) = verify(capsys, checkpoint)
    said = "; ".join(found["faults"])
    assert code == 1 and found["verdict"] == "damaged" and len(found["faults"]) == 4
    for words in (
        "rank-00001.safetensors is missing",
        "surplus.bin is not listed in its manifest",
        "config.json has",
        "model-00002-of-00002.safetensors has the SHA-256",
    ):
        assert words in said


def test_one_bit_of_any_file_is_named(checkpoint: Path, capsys: Any) -> None:
    for path in [*list_files(checkpoint).values(), checkpoint / "manifest.json"]:
        content = path.read_bytes()
        damaged = bytearray(content)
        damaged[len(content) // 2] ^= 4
        path.write_bytes(damaged)
        code, (found,) = verify(capsys, checkpoint)
        assert code == 1 and path.name in found["faults"][0], path
        path.write_bytes(content)


def _rows_lost(checkpoint: Path) -> None:
    (checkpoint / "trainer/optimizer/rank-00001.safetensors").unlink()


def _shard_lost(checkpoint: Path) -> None:
    (checkpoint / "model-00002-of-00002.safetensors").unlink()


def _tensor_lost(checkpoint: Path) -> None:
    path = checkpoint / "model-00001-of-00002.safetensors"
    tensors = load_file(str(path))
    del tensors[sorted(tensors)[0]]
    save_file(tensors, str(path))


def _other_shape(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "intermediate_size": 100}))


def _other_state(checkpoint: Path) -> None:
    save_file({"new": torch.ones(3)}, str(checkpoint / "trainer/rollout.safetensors"))


INSIDE: dict[str, tuple[Callable[[Path], None], str]] = {
    "rows of a rank": (_rows_lost, "rank-00001.safetensors is missing"),
    "a shard": (_shard_lost, "model-00002-of-00002.safetensors is missing"),
    "a tensor of the index": (_tensor_lost, "but it is not there"),
    "a shape": (_other_shape, "but config.json says"),
    "a state": (_other_state, "lists for 'rollout'"),
}


@pytest.mark.parametrize("case", INSIDE)
def test_what_a_manifest_does_not_show(case: str, checkpoint: Path, capsys: Any) -> None:
    damage, words = INSIDE[case]
    damage(checkpoint)
    sealed_again(checkpoint)
    code, (found,) = verify(capsys, checkpoint)
    assert code == 1 and words in "; ".join(found["faults"]) and not found["goes_on"]


def test_a_plain_model(tmp_path: Path, capsys: Any) -> None:
    directory = save_model("qwen2", tmp_path / "checkpoint-7")
    code, (found,) = verify(capsys, directory)
    assert (code, found["kind"], found["faults"]) == (0, "model", [])
    assert "contents cannot be checked" in found["notes"][0]
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    code, (found,) = verify(capsys, directory)
    assert code == 1 and "model.safetensors is" in found["faults"][0]
    file.unlink()
    code, (found,) = verify(capsys, directory)
    assert code == 1 and "there is neither" in found["faults"][0]


def test_an_index_that_names_no_files(tmp_path: Path, capsys: Any) -> None:
    """What is wrong with config.json is said too."""
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')
    (tmp_path / "config.json").write_text("{")
    code, (found,) = verify(capsys, tmp_path)
    said = "; ".join(found["faults"])
    assert code == 1 and "index.json lists no weight files" in said and "config.json is missing" in said


def test_shards_are_read_whatever_config_json_is(checkpoint: Path, capsys: Any) -> None:
    _tensor_lost(checkpoint)
    (checkpoint / "config.json").write_text("{")
    sealed_again(checkpoint)
    code, (found,) = verify(capsys, checkpoint)
    said = "; ".join(found["faults"])
    assert code == 1 and "config.json is missing or cannot be read" in said and "but it is not there" in said


def test_a_file_without_tensors_is_not_called_absent(tmp_path: Path, capsys: Any) -> None:
    directory = save_model("qwen2", tmp_path / "model")
    save_file({}, str(directory / "model.safetensors"))
    code, (found,) = verify(capsys, directory)
    assert code == 1 and found["faults"] == ["model.safetensors contains no tensors"]


def test_a_family_whose_shapes_are_not_known(tmp_path: Path, capsys: Any) -> None:
    code, (found,) = verify(capsys, save_model("gpt2", tmp_path / "model"))
    assert code == 0 and "model_type gpt2" in found["notes"][1]


IMPOSSIBLE = {
    "no family": ("{}", "does not name a model_type"),
    "a list": ("[]", "config.json is missing or cannot be read"),
    "layers below 0": ({"n_layer": -1}, "n_layer is -1, but must be from 1 to 2,000"),
    "no heads": ({"n_head": 0}, "n_head is 0, but must be from 1 to"),
    "a width that is a text": ({"n_embd": "64"}, "n_embd is '64', which is no whole number"),
    "a part of a vocabulary": ({"vocab_size": 0.5}, "vocab_size is 0.5, which is no whole number"),
    "a width of one layer": (
        {"num_key_value_heads": [2, -2]},
        "num_key_value_heads is -2, but must be from 0 to",
    ),
    "a number inside": ({"text_config": {"hidden_size": -8}}, "hidden_size is -8, but must be from 1 to"),
    "more layers than there is time": ({"n_layer": 10**12}, "n_layer is 1000000000000, but must be from"),
    "more layers than tensors": ({"n_layer": 900}, "900 layers, but the files contain"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_config_that_describes_no_model(case: str, tmp_path: Path, capsys: Any) -> None:
    """Also where the layers of the family are not known."""
    changes, words = IMPOSSIBLE[case]
    path = save_model("gpt2", tmp_path / "model") / "config.json"
    config = json.loads(path.read_text())
    path.write_text(changes if isinstance(changes, str) else json.dumps({**config, **changes}))
    code, (found,) = verify(capsys, tmp_path / "model")
    assert code == 1 and words in "; ".join(found["faults"]) and len(found["faults"]) == 1


@pytest.mark.parametrize("changes", [{"num_key_value_heads": None}, {"n_inner": None}, {"n_head": [2, 2]}])
def test_numbers_that_a_family_may_have(changes: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    path = save_model("gpt2", tmp_path / "model") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert verify(capsys, tmp_path / "model")[0] == 0


def test_quantized_weights_are_no_damage(tmp_path: Path, capsys: Any) -> None:
    path = save_model("qwen2", tmp_path / "model") / "config.json"
    other = {"intermediate_size": 8, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **other}))
    code, (found,) = verify(capsys, tmp_path / "model")
    assert code == 0 and "gptq" in "; ".join(found["notes"])


def test_a_tokenizer_that_is_missing_is_said(tmp_path: Path, capsys: Any) -> None:
    directory = save_model("qwen2", tmp_path / "model")
    assert "tokenizer" not in "; ".join(verify(capsys, directory)[1][0]["notes"])
    (directory / "tokenizer.json").unlink()
    code, (found,) = verify(capsys, directory)
    assert code == 0 and f"{directory} has no tokenizer.json" in "; ".join(found["notes"])
    (directory / "tokenizer_config.json").write_text("[1]")
    code, (found,) = verify(capsys, directory)
    assert code == 1 and found["faults"] == ["tokenizer_config.json is not a JSON object"]


def test_a_trainer_state_that_is_gone_leaves_a_whole_model(checkpoint: Path, capsys: Any) -> None:
    shutil.rmtree(checkpoint / "trainer")
    code, (found,) = verify(capsys, checkpoint)
    assert code == 1 and not found["goes_on"] and "the model in it is complete" in "; ".join(found["notes"])
    (checkpoint / "config.json").write_text("{")
    assert "the model in it is complete" not in "; ".join(verify(capsys, checkpoint)[1][0]["notes"])


def test_an_adapter(tmp_path: Path, capsys: Any) -> None:
    base = save_model("llama", tmp_path / "base")
    lora = LoraSettings(rank=2, alpha=4.0, target_modules=("q_proj",))
    given = {"device": torch.device("cpu"), "disable_dropout": True}
    policy = load_adapted(base, lora, adapter=None, seed=0, compute_dtype=torch.float32, **given)
    save_policy(policy, base, tmp_path / "adapter")
    assert verify(capsys, tmp_path / "adapter")[0] == 0
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    code, (found,) = verify(capsys, tmp_path / "adapter")
    assert code == 1 and "adapter_model.safetensors is missing" in found["faults"][0]


def test_what_is_no_checkpoint_exits_with_2(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    """The others are looked at all the same."""
    run = checkpoint.parent
    for path, words in ((tmp_path / "absent", "no such file"), (run, "newest checkpoint is")):
        assert main(["verify", str(path), str(checkpoint)]) == 2
        said = capsys.readouterr()
        # Lines are cut where a terminal ends.
        assert "E413" in said.err and words in " ".join(said.err.split()) and "whole" in said.out
    assert main(["verify", str(checkpoint), "--unknown"]) == 2
    assert main(["verify", "--json"]) == 2
    assert "E105" in capsys.readouterr().err


def test_a_write_that_did_not_end_is_damage(checkpoint: Path, capsys: Any) -> None:
    (checkpoint / "manifest.json").unlink()
    code, (found,) = verify(capsys, checkpoint)
    assert code == 1 and "manifest.json is missing" in found["faults"][0]


def test_a_reduction_that_was_ended_is_no_damage(checkpoint: Path, capsys: Any) -> None:
    manifest = read_manifest(checkpoint)
    kept = {n: e for n, e in manifest.files.items() if not n.startswith("trainer/")}
    (checkpoint / "manifest.json").write_text(render_manifest(replace(manifest, trainer=False, files=kept)))
    (checkpoint / ".manifest.json.tmp").write_text("{")
    code, (found,) = verify(capsys, checkpoint)
    assert code == 0 and "trainer state" in found["notes"][0] and not found["goes_on"]
    (checkpoint / "other").write_text("")
    code, (found,) = verify(capsys, checkpoint)
    assert code == 1 and found["faults"] == ["other is not listed in its manifest"]


def test_an_older_format_is_whole_and_goes_on_nowhere(checkpoint: Path, capsys: Any) -> None:
    older = replace(read_manifest(checkpoint), format=1)
    (checkpoint / "manifest.json").write_text(render_manifest(older))
    code, (found,) = verify(capsys, checkpoint)
    assert code == 0 and not found["goes_on"] and "format 1" in found["notes"][0]


def test_a_reward_model_has_a_head_of_its_own(tmp_path: Path, capsys: Any) -> None:
    directory = write_reward_model(tmp_path / "rm")
    code, (found,) = verify(capsys, directory)
    assert (code, found["faults"]) == (0, [])
    tensors = load_file(directory / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    code, (found,) = verify(capsys, directory)
    assert code == 1 and "score.weight" in found["faults"][0]


def test_no_torch_is_imported(checkpoint: Path) -> None:
    program = (
        "import sys; from covey.cli.main import main\n"
        "code = main(['verify', sys.argv[1]]); sys.exit(code or 'torch' in sys.modules)"
    )
    words = [sys.executable, "-c", program, str(checkpoint)]
    assert subprocess.run(words, check=False, stdout=subprocess.DEVNULL).returncode == 0
