"""From words and environment to the number of processes and the output directory."""

from pathlib import Path

import pytest

from covey.cli import launch
from covey.cli.main import main
from covey.cli.options import read, under_torchrun
from support.verbs import WORDS, codes_in, rank_variables


@pytest.mark.parametrize(
    ("environment", "typed", "num_processes", "source"),
    [
        ({}, [], 1, "default"),
        ({"NPROC_PER_NODE": "4"}, [], 4, "environment NPROC_PER_NODE"),
        ({"NPROC_PER_NODE": "1"}, [], 1, "default"),
        ({"NPROC_PER_NODE": ""}, [], 1, "default"),
        ({"NPROC_PER_NODE": "4"}, ["--nproc_per_node", "2"], 2, "flag --nproc_per_node"),
        (rank_variables(1, 8), [], 8, "derived from the number of processes"),
        ({**rank_variables(1, 8), "NPROC_PER_NODE": "4"}, [], 8, "environment NPROC_PER_NODE"),
        (rank_variables(0, 1), ["--nproc_per_node", "2"], 1, "flag --nproc_per_node"),
        # A cluster says so of a pod that is alone.
        ({"WORLD_SIZE": "1", "RANK": "0"}, ["--nproc_per_node", "2"], 2, "flag --nproc_per_node"),
        ({}, ["--nproc_per_node", "0"], 1, "flag --nproc_per_node"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "rlhf", "quickstart"])
def test_processes(
    monkeypatch: pytest.MonkeyPatch, verb: str, environment: dict[str, str], typed: list[str],
    num_processes: int, source: str,
) -> None:  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    resolved, found = read(verb, [*WORDS, *typed])
    assert found == num_processes
    assert resolved.sources["nproc_per_node"] == source
    assert under_torchrun() == ("LOCAL_RANK" in environment)
    size = num_processes * resolved.config.per_device_train_batch_size
    assert resolved.config.generation_batch_size == size * resolved.config.steps_per_generation


def test_a_file_says_more_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("c.yaml").write_text("nproc_per_node: 2\n")
    monkeypatch.setenv("NPROC_PER_NODE", "4")
    resolved, num_processes = read("train", ["c.yaml", *WORDS])
    assert (num_processes, resolved.config.nproc_per_node) == (2, 2)


def test_ranks_share_the_directory_that_was_counted_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.OUTPUT_DIR, "runs/shared-007")
    assert read("train", WORDS)[0].config.output_dir == "runs/shared-007"
    assert read("train", [*WORDS, "--output_dir", "o"])[0].config.output_dir == "o"


def test_the_dialect_is_said_once() -> None:
    for verb, argv in (("rlhf", WORDS), ("train", [*WORDS, "--rlhf_type", "grpo"])):
        assert [p.code for p in read(verb, argv)[0].problems] == ["W113"]
    assert read("train", WORDS)[0].problems == ()


def test_quickstart_under_a_command_of_ms_swift_stays_quickstart() -> None:
    resolved, _ = read("quickstart", ["--rlhf_type", "grpo"])
    assert (resolved.config.model, resolved.config.tuner_type) == ("quickstart", "full")


def test_problems_of_parsing_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    resolved, _ = read("rlhf", ["--num_generation", "4", "--beta", "x"])
    assert [p.code for p in resolved.problems] == ["E101", "E103", "W113", "E105", "E105", "E105"]
    assert main(["rlhf", "--num_generation", "4"]) == 2
    assert codes_in(capsys.readouterr().err)[:1] == ["E101"]
