"""The order in which a verb that trains does its work, and when it starts several processes."""

import pytest

from covey.checks.launch import Machines
from covey.checks.rewards.handed import TRIAL
from covey.cli import launch
from covey.cli.launch import Start
from covey.cli.main import main
from covey.errors import ConfigError
from covey.plan.facts import Facts
from covey.types import Fix, Problem
from support.checks import changed
from support.verbs import WORDS, Launched, Run, codes_in, raises, rank_variables


@pytest.mark.parametrize("verb", ["train", "rlhf"])
def test_facts_then_weights_then_the_run(run: Run, verb: str) -> None:
    assert main([verb, *WORDS]) == 0
    assert run.order == ["facts", "fetch", "run", "close"]


def test_what_was_read_is_closed_when_the_run_fails(run: Run) -> None:
    run.ends = raises(RuntimeError("boom"))
    with pytest.raises(RuntimeError, match="boom"):
        main(["train", *WORDS])
    assert run.order == ["facts", "fetch", "run", "close"]


def test_nothing_is_fetched_for_a_run_that_is_refused(run: Run) -> None:
    run.facts = changed(Facts(), data={"missing_paths": ("d.jsonl",)})
    assert main(["train", *WORDS]) == 2
    assert run.order == ["facts", "close"]


def test_weights_that_cannot_be_had_are_a_fault(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    problem = Problem(code="E321", option="model", seen="no", why="w", cause="c", fixes=(Fix(text="f"),))
    run.fetches = raises(ConfigError([problem]))
    assert main(["train", *WORDS, "--nproc_per_node", "2"]) == 2
    assert run.order == ["facts", "fetch", "close"]
    assert codes_in(capsys.readouterr().err) == ["E321"]


def test_several_processes_are_checked_then_launched(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Launched(monkeypatch, run.order)
    words = [*WORDS, "--nproc_per_node", "2"]
    assert main(["train", *words]) == 3
    ((*call, handed),) = launched.calls
    assert call == ["train", words, Start(num_processes=2, output_dir="runs/m-d-001")]
    assert [*handed] == [TRIAL]
    assert run.gathered == [2]
    # The rewards' processes of this one end before those of the run begin.
    assert run.order[:4] == ["facts", "fetch", "close", "launch"]
    assert run.got == []


@pytest.mark.parametrize("verb", ["rlhf", "quickstart"])
def test_each_verb_launches_itself(run: Run, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    launched = Launched(monkeypatch)
    assert main([verb, *WORDS, "--nproc_per_node", "4"]) == 3
    assert [(call[0], call[2].num_processes) for call in launched.calls] == [(verb, 4)]


def test_one_process_is_launched_where_it_may_be_started_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = Launched(monkeypatch)
    assert main(["train", *WORDS, "--max_restarts", "2"]) == 3
    assert launched.calls[0][2] == Start(num_processes=1, output_dir="runs/m-d-001", max_restarts=2)


def test_this_machine_s_part_of_several_is_launched(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """ms-swift's variables: so many processes here, and the batch of all machines."""
    launched = Launched(monkeypatch)
    asked = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node1", "NPROC_PER_NODE": "4"}
    for name, value in {**asked, "WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", *WORDS]) == 3
    (_, _, start, _) = launched.calls[0]
    assert (start.num_processes, start.machines) == (4, Machines(count=2, number=1, address="node1"))
    assert run.gathered == [8]


def test_several_processes_are_not_launched_with_faults(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Launched(monkeypatch)
    run.facts = changed(Facts(), data={"missing_paths": ("d.jsonl",)})
    assert main(["train", *WORDS, "--nproc_per_node", "2"]) == 2
    assert launched.calls == []


def test_under_torchrun_nothing_is_launched(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Launched(monkeypatch)
    for name, value in rank_variables(1, 2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(launch.OUTPUT_DIR, "runs/shared-001")
    assert main(["train", *WORDS, "--nproc_per_node", "2"]) == 0
    assert launched.calls == []
    assert run.got[0].config.output_dir == "runs/shared-001"
    assert run.got[0].config.generation_batch_size == 64
    assert run.got[0].config.gradient_accumulation_steps == 4
