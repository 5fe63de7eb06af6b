"""Two commands for a model of 32.8 B parameters that cannot run as they are: what binds, what contradicts
what, and a command that works, which is planned here as it is printed."""

import json
import shlex
from typing import Any

import pytest

from covey.cli.main import main
from support.verbs import codes_in

pytestmark = pytest.mark.usefixtures("model")

P = 32_763_876_352
GPUS = ["--plan_gpus", "8", "--plan_gpu_memory", "96GiB"]
# A command of ms-swift that stopped without a word (its issue 3887), with the data of the tests.
REPORT = (
    "rlhf --rlhf_type grpo --model big --model-type qwen2 --train_type full --dataset quickstart#512 "
    "--torch_dtype bfloat16 --num_train_epochs 1 --max_length 2048 --per_device_train_batch_size 1 "
    "--per_device_eval_batch_size 1 --gradient_accumulation_steps 1 --split_dataset_ratio 0 "
    "--learning_rate 1e-6 --warmup_ratio 0.05 --dataloader_num_workers 4 --max_completion_length 1024 "
    "--reward_funcs format --num_generations 4 --use_vllm true --vllm_gpu_memory_utilization 0.5 "
    "--vllm_max_model_len 2048 --deepspeed zero3_offload --temperature 1.0 --top_p 1.0 --top_k 80 "
    "--log_completions true --num_infer_workers 8 --tensor_parallel_size 8 --async_generate true "
    "--offload_optimizer true --offload_model true --gc_collect_after_offload true --move_model_batches 40"
)


def planned(capsys: pytest.CaptureFixture[str], words: list[str]) -> tuple[int, dict[str, Any], list[str]]:
    """The exit code, the plan as an object, and the codes of what was refused."""
    code = main(["plan", *words, "--json"])
    done = capsys.readouterr()
    return code, json.loads(done.out), codes_in(done.err)


def again(command: str, machine: list[str]) -> list[str]:
    """A printed command, for `covey plan`."""
    verb, *words = shlex.split(command)[1:]
    return [*words] if verb == "plan" else [verb, *words, *machine]


def test_the_command_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    code, plan, codes = planned(capsys, [*shlex.split(REPORT), *GPUS])
    assert code == 2
    assert "E102" in codes
    layout = plan["facts"]["layout"]
    assert (layout["zero_stage"], layout["offload"], layout["engine_parallel"]) == (3, "params", 8)
    engine = int(0.5 * 96 * 2**30)
    memory = plan["memory"]
    assert memory["phases"]["update"]["parts"]["engine"] == engine
    assert memory["phases"]["rollout"]["parts"]["engine"] == engine
    # Weights, masters, moments, gradients and the reference of the KL term lie in the machine's memory.
    assert memory["host_bytes"] == (18 + 2) * P
    assert memory["binding"] == "update"
    text = "\n".join(plan["lines"])
    assert "vLLM's 51.54 GB of each GPU: 8.191 GB of weights and 43.35 GB of KV cache" in text


def test_a_command_that_works_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    """With vLLM on these GPUs, as it was typed, and no other; it is as the plan says."""
    _, plan, _ = planned(capsys, [*shlex.split(REPORT), *GPUS])
    assert list(plan["works"]) == ["colocate"]
    found = plan["works"]["colocate"]
    code, other, codes = planned(capsys, again(found["command"], GPUS))
    assert (code, codes) == (0, []), found["command"]
    assert other["memory"]["needed_bytes"] == found["needed_bytes"] < 0.9 * 96 * 2**30
    assert other["options"]["tuner_type"] == "full" and other["options"]["use_vllm"]
    assert other["options"]["vllm_tensor_parallel_size"] == 8


def test_on_24_gb_each_no_own_engine_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole copy that samples is larger than the GPU, whatever is split: that is said, with how large a
    model may be, and how vLLM over some of them, or on servers, would fit."""
    machine = ["--plan_gpus", "8", "--plan_gpu_memory", "24GB"]
    words = ["--model", "big", "--dataset", "quickstart#512", "--reward_funcs", "accuracy"]
    words += ["--max_completion_length", "1024", "--fsdp", "full_shard"]
    assert main(["plan", *words, *machine]) == 2
    done = capsys.readouterr()
    assert codes_in(done.err) == ["E211"]
    error = " ".join(done.err.split())
    assert "gathered weights" in error and "a full copy of the weights in each process" in error
    assert "use a model of at most about" not in error, "one answer: what is found to work"
    _, plan, _ = planned(capsys, [*words, *machine])
    assert plan["memory"]["binding"] == "rollout" and list(plan["works"]) == ["server", "colocate"]
    found = plan["works"]["colocate"]
    assert found["edits"]["vllm_tensor_parallel_size"] in (4, 8)
    code, other, codes = planned(capsys, again(found["command"], machine))
    assert (code, codes) == (0, []) and other["memory"]["needed_bytes"] < 0.9 * 24e9


# Of ms-swift's examples (vllm_72b_4gpu.sh), with the model and the data of the tests.
FOUR = ["--plan_gpus", "4", "--plan_gpu_memory", "80GiB"]
SCRIPT = (
    "rlhf --rlhf_type grpo --model big --train_type lora --use_vllm true --vllm_mode colocate "
    "--vllm_gpu_memory_utilization 0.55 --vllm_max_model_len 2048 --vllm_tensor_parallel_size 4 "
    "--dataset quickstart#512 --torch_dtype bfloat16 --num_train_epochs 1 --max_length 2048 "
    "--per_device_train_batch_size 1 --per_device_eval_batch_size 1 --gradient_accumulation_steps 1 "
    "--eval_steps 1000 --save_steps 1000 --learning_rate 1e-6 --save_total_limit 2 --logging_steps 5 "
    "--output_dir output --warmup_ratio 0.05 --dataloader_num_workers 4 --max_completion_length 1024 "
    "--reward_funcs accuracy --num_generations 4 --deepspeed zero3_offload --temperature 1.0 {filters} "
    "--log_completions true --async_generate false --move_model_batches 16 --offload_optimizer true "
    "--offload_model true --sleep_level 1"
)


def test_a_script_with_top_k_on_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    """Its filters are taken as they stand, and off values mean off."""
    words = shlex.split(SCRIPT.format(filters="--top_p 1.0 --top_k 80"))
    code, plan, codes = planned(capsys, [*words, *FOUR])
    assert (code, codes) == (0, [])
    options = plan["options"]
    assert (options["top_p"], options["top_k"], options["eval_top_k"]) == (1.0, 80, 80)
    assert any("at temperature 1 with top_k 80" in line for line in plan["lines"])


def test_a_script_with_top_p_alone_on_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    """multi_gpu_mp_colocate.sh sets it: refused with what to type, with which it is planned."""
    words = shlex.split(SCRIPT.format(filters="--top_p 0.85"))
    assert main(["plan", *words, *FOUR]) == 2
    error = capsys.readouterr().err
    assert [c for c in codes_in(error) if c.startswith("E")] == ["E120"] and "--top_k 100" in error
    code, _, codes = planned(capsys, [*words, "--top_k", "100", *FOUR])
    assert (code, codes) == (0, [])
    code, plan, codes = planned(capsys, [*words, "--top_k", "-1", "--top_p", "1.0", *FOUR])
    assert (code, codes) == (0, [])
    assert not any(line.startswith("sampling") for line in plan["lines"])
