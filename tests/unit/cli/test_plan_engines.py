"""Plans of 7, 32 and 70 B parameters: the engine that was typed stays, a plan gives one answer, and what it
prints fits when it is planned again."""

import json
import math
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from support.verbs import codes_in

QWEN_7B = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
LLAMA_70B = {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
OTHERS = {
    "7b": {"intermediate_size": 18944, **QWEN_7B},
    "70b": {"model_type": "llama", "intermediate_size": 28672, "vocab_size": 128256, **LLAMA_70B},
}
RUN = "--dataset quickstart#512 --reward_funcs accuracy --max_completion_length 1024"
EIGHT = f"--model big {RUN} --plan_gpus 8 --plan_gpu_memory 96GiB"
MANY = f"--model 70b {RUN} --plan_gpus 64 --plan_gpu_memory 80GiB"
MACHINES = {EIGHT: 0.9 * 96 * 2**30, MANY: 0.9 * 80 * 2**30}
SERVER = "--use_vllm true --vllm_mode server"


@pytest.fixture(autouse=True)
def _models(model: Path) -> None:
    """Directories with config.json and tokenizer, without weights."""
    described = json.loads((model / "config.json").read_text(encoding="utf-8"))
    for name, other in OTHERS.items():
        shutil.copytree(model, model.parent / name)
        (model.parent / name / "config.json").write_text(json.dumps(described | other), encoding="utf-8")


class Planned:
    """What `covey plan` says of a command: as an object, and what of its errors."""

    def __init__(self, capsys: pytest.CaptureFixture[str], words: str) -> None:
        self.code = main(["plan", *shlex.split(words), "--json"])
        done = capsys.readouterr()
        self.said: dict[str, Any] = json.loads(done.out)
        self.error = " ".join(done.err.split())
        self.codes = codes_in(done.err)
        self.memory = self.said.get("memory", {})
        self.works = self.said.get("works", {})


def again(command: str, machine: str) -> str:
    """A printed command for `covey plan`, on the machine of another one."""
    given = re.search(r"--plan_gpus \d+ --plan_gpu_memory \w+", machine)
    assert given is not None
    return f"{command.removeprefix('covey train ')} {given[0]}"


@pytest.mark.parametrize("states", ["--fsdp full_shard", "--deepspeed zero3"])
@pytest.mark.parametrize("engine", [SERVER, "--use_vllm true --vllm_tensor_parallel_size 8"])
@pytest.mark.parametrize("machine", [EIGHT, MANY], ids=["32b", "70b"])
def test_what_fits(capsys: pytest.CaptureFixture[str], machine: str, engine: str, states: str) -> None:
    plan = Planned(capsys, f"{machine} {states} {engine}")
    assert (plan.code, plan.codes, plan.works) == (0, [], {})
    assert plan.memory["needed_bytes"] < MACHINES[machine]


@pytest.mark.parametrize("engine", ["", "--use_vllm true --vllm_tensor_parallel_size 2"])
@pytest.mark.parametrize("machine", [EIGHT, MANY], ids=["32b", "70b"])
def test_what_is_printed_fits(capsys: pytest.CaptureFixture[str], machine: str, engine: str) -> None:
    """Where nothing is split, of whatever engine."""
    plan = Planned(capsys, f"{machine} {engine}")
    assert plan.code == 2 and set(plan.codes) - {"W190"} == {"E211"} and plan.works
    for name, found in plan.works.items():
        other = Planned(capsys, again(found["command"], machine))
        assert (other.code, other.codes) == (0, []), found["command"]
        assert other.memory["needed_bytes"] == found["needed_bytes"] < MACHINES[machine]
        assert other.said["facts"]["layout"]["engine"] == name
        assert found["command"].endswith("--nproc_per_node 8"), "of each machine"
        assert other.said["batch"]["num_processes"] == plan.said["batch"]["num_processes"]


@pytest.mark.parametrize(("sleeps", "codes"), [("false", {"E211"}), ("true", set[str]())])
def test_an_awake_vllm_holds_its_share_beside_the_states(
    capsys: pytest.CaptureFixture[str], sleeps: str, codes: set[str]
) -> None:
    """Half a GPU for vLLM and 66 GB of a model in 8 shards are more than a GPU has; a sleeping one gives its
    half back."""
    words = (
        f"--fsdp full_shard --use_vllm true --vllm_tensor_parallel_size 8 --vllm_enable_sleep_mode {sleeps}"
    )
    plan = Planned(capsys, f"{EIGHT} {words} --vllm_gpu_memory_utilization 0.5")
    assert (plan.code, set(plan.codes) - {"W190"}) == (2 if codes else 0, codes)


@pytest.mark.parametrize("machine", [EIGHT, MANY], ids=["32b", "70b"])
@pytest.mark.parametrize("named", ["", "--vllm_server_host 127.0.0.1 --vllm_server_port 9"])
def test_typed_servers_stay(capsys: pytest.CaptureFixture[str], machine: str, named: str) -> None:
    """Also those that do not answer yet, which is said beside it."""
    plan = Planned(capsys, f"{machine} {SERVER} {named}")
    assert plan.code == 2 and set(plan.codes) == ({"E211", "E421"} if named else {"E211"})
    assert list(plan.works) == ["server"]
    found = plan.works["server"]
    assert found["edits"] == {"fsdp": "full_shard"} and "--vllm_mode server" in found["command"]
    assert ("server" in found) is not named or not named
    assert "colocate" not in plan.error and "native engine" not in plan.error
    assert "With DDP (ZeRO-0), each process takes" in plan.error


def test_a_server_for_it_holds_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """On GPUs as large as those that are planned: weights of 141 GB take four of 80 GiB."""
    plan = Planned(capsys, f"{MANY} --fsdp full_shard")
    assert list(plan.works) == ["server", "colocate"]
    assert "--vllm_tensor_parallel_size 4" in plan.works["server"]["server"]
    assert "a full copy of the weights in each process" in plan.error
    assert plan.works["colocate"]["edits"]["vllm_tensor_parallel_size"] in (4, 8)


@pytest.mark.parametrize("engine", ["", SERVER])
def test_the_native_engine_is_named_for_its_copy_alone(
    capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    """On 24 GiB the moments of 32 B over eight GPUs are too large whatever samples."""
    machine = EIGHT.replace("96GiB", "24GiB")
    plan = Planned(capsys, f"{machine} --deepspeed zero3 {engine}")
    assert "E211" in plan.codes
    assert ("a full copy of the weights" in plan.error) is (engine == "")


def test_one_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """The least costly change that fits is what `works` has, and what the warning below it names."""
    machine = f"--model 7b {RUN} --plan_gpus 1 --plan_gpu_memory 24GB"
    batch = "--per_device_train_batch_size 8 --gradient_accumulation_steps 8"
    plan = Planned(capsys, f"{machine} --tuner_type lora {batch}")
    assert plan.code == 0
    less = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 16}
    assert plan.works["own"]["edits"] == less
    assert [note["code"] for note in plan.said["notes"]] == ["W114"]
    main(["plan", *shlex.split(f"{machine} --tuner_type lora {batch}")])
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("--per_device_train_batch_size 4 --gradient_accumulation_steps 16") == 2
    assert "offload" not in text


def test_one_number(capsys: pytest.CaptureFixture[str]) -> None:
    """The warning says of the change that `works` has what `works` says of it."""
    engine = "--use_vllm true --vllm_tensor_parallel_size 8"
    main(["plan", *shlex.split(f"{EIGHT.replace('96GiB', '96GB')} --deepspeed zero3 {engine}")])
    text = " ".join(capsys.readouterr().out.split())
    found = re.search(r"can run this with vLLM on these GPUs: (.*?) covey train", text)
    assert found is not None and "W114" in text
    assert text.count(found[1]) == 2


def test_a_copy_on_each_machine_gives_way_to_one_over_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is offloaded."""
    plan = Planned(capsys, f"{MANY} --fsdp hybrid_shard {SERVER}")
    assert plan.code == 2 and plan.works["server"]["edits"] == {"fsdp": "full_shard"}
    assert "With FSDP over 8 GPUs, each process takes" in plan.error


def test_offloaded_bytes_are_those_of_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Of eight that hold the model once."""
    main(["plan", *shlex.split(f"{MANY} --deepspeed zero3_offload {SERVER}")])
    text = " ".join(capsys.readouterr().out.split())
    plan = Planned(capsys, f"{MANY} --deepspeed zero3_offload {SERVER}")
    host = plan.memory["host_bytes"]
    assert f"{host / 8e9:.4g} GB in a machine's memory" in text


def test_what_train_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """By its own code, with what runs without it."""
    split = f"{EIGHT} --fsdp full_shard"
    engines = "--use_vllm true --vllm_tensor_parallel_size 4"
    assert Planned(capsys, f"{split} {engines} --vllm_data_parallel_size 2").code == 0
    plan = Planned(capsys, f"{split} {engines} --vllm_data_parallel_size 3")
    assert plan.code == 2 and "E430" in plan.codes
    plan = Planned(capsys, f"{split} {SERVER} --async_generate true")
    assert plan.code == 0 and plan.memory["phases"]
    plan = Planned(capsys, f"{split} {engines} --async_generate true")
    assert plan.code == 2 and "E115" in plan.codes and plan.memory["phases"]
    other = Planned(capsys, again(plan.works["colocate"]["command"], EIGHT))
    assert other.code == 0
    here = "--model quickstart --dataset quickstart#512 --reward_funcs accuracy --max_completion_length 32"
    assert main(["plan", *shlex.split(f"{here} --learning_rate 1e-4 --async_generate true")]) == 0
    assert "beside it in each server" in capsys.readouterr().out


def weights(directory: Path, tensors: dict[str, list[int]]) -> int:
    """A safetensors file of zeros that takes no room on the disk; the number of its weights."""
    at, header = 0, {}
    for name, shape in tensors.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return at // 2


@pytest.mark.parametrize("states", ["--fsdp full_shard", "--deepspeed zero3", "--deepspeed zero2"])
@pytest.mark.parametrize("one_by_one", [True, False])
def test_experts_that_are_joined(
    capsys: pytest.CaptureFixture[str], model: Path, states: str, one_by_one: bool
) -> None:
    """Each process of a split model reads all of them in float32, which is said of the machine's memory."""
    described = json.loads((model / "config.json").read_text(encoding="utf-8"))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
    small = {"hidden_size": 1280, "num_hidden_layers": 1, "num_attention_heads": 10}
    described |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **experts, **small}
    (model / "config.json").write_text(json.dumps(described), encoding="utf-8")
    plan = Planned(capsys, EIGHT)
    assert plan.codes == ["E301"] and "*.safetensors" in plan.error and "quickstart`" not in plan.error
    mlp = "model.layers.0.mlp.experts"
    joined = {f"{mlp}.gate_up_proj": [4, 2048, 1280], f"{mlp}.down_proj": [4, 1280, 1024]}
    each = {f"{mlp}.{n}.{w}_proj.weight": [1024, 1280] for n in range(4) for w in ("gate", "up", "down")}
    ends = {name: [152_064, 1280] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    parameters = weights(model, ends | (each if one_by_one else joined))
    plan = Planned(capsys, f"{EIGHT} {states}")
    assert plan.code == 0, plan.error
    is_read_whole = one_by_one and "zero2" not in states
    assert plan.memory["load_host_bytes"] == (8 * 4 * parameters if is_read_whole else 0)
    assert any("joins the whole model" in line for line in plan.said["lines"]) is is_read_whole
