"""The command as a shell sees it: exit codes, what is printed, and that nothing heavy is imported for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.cli.refusal import asks_for_json
from covey.cli.verbs import VERBS
from support.verbs import rank_variables


def covey(*argv: str, cwd: Path | None = None, **env: str) -> "subprocess.CompletedProcess[str]":
    clean = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    return subprocess.run(
        [sys.executable, "-m", "covey", *argv],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**clean, **env},
        check=False,
    )


@pytest.mark.parametrize(
    ("argv", "codes", "words"),
    [
        ("train --num_generations 1 --temperature 0", ["E302", "E201", "E110"],
         ["a prompt has no second completion", "greedy", "4 problems"]),
        ("quickstart --num_generations 7", ["E202"], ["E202 num_generations"]),
        ("merge-lora DIR", ["E112"], ["covey export CHECKPOINT --merge"]),
        ("plan --temperature 0", ["E105", "E110"], ["model is not given", "dataset is not given"]),
        ("plan --model org/none", ["E105", "E321"], ["org/none"]),
        ("plan rlhf --num_generations 7 --json", ["E105", "E202"], ["num_generations 7"]),
        ("rlhf --rlhf_type grpo", ["E105"], ["model is not given", "reward_funcs is not given"]),
        ("eval", ["E105"], ["No model is given to `covey eval`"]),
        ("eval ./absent", ["E105", "E301"], ["./absent is neither", "val_dataset is not given"]),
        ("export absent", ["E413"], ["absent: no such file or directory"]),
        ("export a b --force", ["E101", "E108"], ["--force", "`b` after a"]),
        ("--model m", ["E112"], ["put the command first"]),
        ("run.yaml", ["E112"], ["covey train run.yaml"]),
        ("explain E999", ["E113"], ["covey explain E"]),
    ],
)  # fmt: skip
def test_faults_end_with_two_and_everything_that_is_wrong(
    argv: str,
    codes: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = argv.replace("train --", "train --dataset d.jsonl --reward_funcs accuracy --")
    if "quickstart" in given:
        given += " --model= --dataset="  # without a model nothing else is gathered
    assert main(given.split()) == 2
    done = capsys.readouterr()
    assert bool(done.out) == asks_for_json(given.split())
    for part in [*codes, *words, "seen", "why", "nothing was started"]:
        assert part in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_shell_sees_the_same(tmp_path: Path) -> None:
    done = covey("train", "--num_generations", "7", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert "E202" in done.stderr and "\x1b" not in done.stderr
    assert max(map(len, done.stderr.splitlines())) <= 100
    assert list(tmp_path.iterdir()) == []


def test_help_and_version_import_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'datasets', 'matplotlib', 'rich'}"
    texts = [["--help"], ["--version"], ["explain", "E201"], *([verb, "-h"] for verb in VERBS)]
    program = (
        f"import sys; from covey.cli.main import main; codes = [main(argv) for argv in {texts!r}]; "
        f"sys.stderr.write(str(sorted({heavy} & set(sys.modules)))); sys.exit(any(codes))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]")
    for verb in VERBS:
        assert f"covey {verb}" in done.stdout


def test_help_names_the_verbs_and_no_others() -> None:
    shown = covey("--help").stdout
    listed = shown[shown.index("Commands:") :].splitlines()[1:]
    assert [line.split()[0] for line in listed if line] == list(VERBS)


def test_other_ranks_are_silent(tmp_path: Path) -> None:
    done = covey("train", cwd=tmp_path, **rank_variables(1, 2))
    assert (done.returncode, done.stderr) == (2, "")


@pytest.mark.parametrize("words", ["--output_dir run --resume_from_checkpoint latest",
                                   "--resume_from_checkpoint run/checkpoint-3"])  # fmt: skip
def test_a_resume_without_the_options_of_the_run_names_its_configuration(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text("model:\n  model: quickstart\n")
    assert main(["rlhf", *words.split()]) == 2
    err = capsys.readouterr().err
    assert f"`covey rlhf run/config.yaml {words}`" in err
    assert "model, dataset, reward_funcs are not given" in err


def test_a_resume_of_a_run_with_an_environment_needs_no_rewards(capsys: pytest.CaptureFixture[str]) -> None:
    """The environment rewards, in a resumed run too."""
    Path("run").mkdir()
    Path("run/config.yaml").write_text("model:\n  model: quickstart\n")
    resume = "--output_dir run --resume_from_checkpoint auto --environment_factory absent.py:Sums"
    assert main(["train", *resume.split()]) == 2
    assert "model, dataset are not given" in capsys.readouterr().err
    assert main(["train", *resume.split(), "--model", "quickstart", "--dataset", "quickstart#8"]) == 2
    err = capsys.readouterr().err
    assert "E105" not in err and "absent.py" in err
