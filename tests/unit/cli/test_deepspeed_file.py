"""`covey plan --deepspeed FILE.json`: what is planned of it, what is refused, and what a warning names."""

import json
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.types import Severity
from support.planned import read_layout
from support.verbs import codes_in
from unit.cli.test_layout import GPUS, RUN, typed_words

CPU = {"device": "cpu", "pin_memory": True}
BATCH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}


def write(content: Any, name: str = "ds.json") -> str:
    text = content if isinstance(content, str) else json.dumps(content)
    Path(name).write_text(text, encoding="utf-8")
    return name


def zero(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": settings, **BATCH}


@pytest.mark.parametrize(
    ("content", "stage", "offload"),
    [
        ({}, 0, "none"),
        (BATCH, 0, "none"),
        (zero(), 0, "none"),
        (zero(stage=2, offload_optimizer=CPU), 2, "optimizer"),
        (zero(stage=3, offload_optimizer=CPU, offload_param=CPU), 3, "params"),
        (zero(stage=3, offload_optimizer={"device": "none"}, offload_param={"device": "none"}), 3, "none"),
        (zero(stage=3, offload_optimizer=None, offload_param={}), 3, "none"),
        # What a stage offloads at most is looked at later.
        (zero(stage=2, offload_param=CPU), 2, "params"),
    ],
)
def test_what_is_planned(content: Any, stage: int, offload: str) -> None:
    got = read_layout([*GPUS, "--deepspeed", write(content)])
    assert got.problems == ()
    assert (got.layout.zero_stage, got.layout.offload) == (stage, offload)
    assert got.layout.file is not None and got.layout.file.path == "ds.json"
    assert got.layout.is_known


def test_the_same_as_the_name_of_ms_swift(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    path = write(zero(stage=3, offload_optimizer=CPU, offload_param=CPU, reduce_bucket_size="auto"))
    plans = []
    for word in ("zero3_offload", path):
        assert main(["plan", "--model", str(model), *RUN, *GPUS, "--deepspeed", word, "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0]["memory"] == plans[1]["memory"]
    assert plans[1]["facts"]["layout"]["file"]["path"] == path and plans[0]["facts"]["layout"]["file"] is None


@pytest.mark.parametrize(
    ("content", "codes", "words"),
    [
        ("", ["E217"], "Expecting value"),
        ('{"zero_optimization": {', ["E217"], "ds.json cannot be read as a configuration of DeepSpeed"),
        ("[]", ["E217"], "it is not a JSON object"),
        ({"zero_optimization": True}, ["E217"], "zero_optimization is True, not a JSON object"),
        (zero(stage=3, offload_param="cpu"), ["E217"], "offload_param is 'cpu', not a JSON object"),
        ({"train_batch_size": 0}, ["E217"], "train_batch_size is 0"),
        ({"gradient_accumulation_steps": True}, ["E217"], "gradient_accumulation_steps is True"),
        ({"train_micro_batch_size_per_gpu": "8"}, ["E217"], "train_micro_batch_size_per_gpu is '8'"),
        (zero(stage=4), ["E218"], "zero_optimization.stage is 4; DeepSpeed has 0, 1, 2, 3"),
        (zero(stage="auto"), ["E218"], "zero_optimization.stage is 'auto'"),
        (zero(stage=True), ["E218"], "zero_optimization.stage is True"),
        (zero(stage=3, offload_param={"device": "disk"}), ["E218"], "offload_param.device is 'disk'"),
        (
            {"zero_optimization": {"stage": 7, "offload_optimizer": 1}, "train_batch_size": "many"},
            ["E217", "E218", "E217"],
            "zero_optimization.stage is 7",
        ),
    ],
)
def test_what_is_no_configuration(
    capsys: pytest.CaptureFixture[str], model: Path, content: Any, codes: list[str], words: str
) -> None:
    """All of it at once, and nothing that only follows from it."""
    assert main(["plan", "--model", str(model), *RUN, *GPUS, "--deepspeed", write(content)]) == 2
    done = capsys.readouterr()
    assert done.out == "" and codes_in(done.err) == codes
    assert words in " ".join(done.err.split())


def test_files_that_cannot_be_opened() -> None:
    Path("folder.json").mkdir()
    Path("bytes.json").write_bytes(b"\xff\xfe{}")
    for name in ("folder.json", "bytes.json"):
        assert [p.code for p in read_layout([*GPUS, "--deepspeed", name]).problems] == ["E217"]
    (missing,) = read_layout([*GPUS, "--deepspeed", "nowhere.json"]).problems
    assert missing.code == "E104" and missing.seen.endswith(
        "or the path of a JSON file, and there is no such file."
    )


@pytest.mark.parametrize(
    ("numbers", "seen", "can_be_typed"),
    [
        (
            {"train_micro_batch_size_per_gpu": 4},
            "train_micro_batch_size_per_gpu is 4, but this run has 8.",
            True,
        ),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2, but this run has 1.", True),
        ({"train_batch_size": 128}, "train_batch_size is 128, but this run has 64.", True),
        (
            {"train_batch_size": 128, "train_micro_batch_size_per_gpu": 4},
            "train_batch_size is 128 and train_micro_batch_size_per_gpu is 4, but this run has 64 and 8.",
            True,
        ),
        # Three numbers that contradict each other on eight GPUs, and one that no passes add up to.
        (
            {
                "train_batch_size": 32,
                "train_micro_batch_size_per_gpu": 8,
                "gradient_accumulation_steps": 1,
            },
            "train_batch_size is 32, but this run has 64.",
            False,
        ),
        ({"train_batch_size": 100}, "train_batch_size is 100, but this run has 64.", False),
    ],
)
def test_a_batch_that_is_not_the_runs(
    capsys: pytest.CaptureFixture[str], model: Path, numbers: dict[str, int], seen: str, can_be_typed: bool
) -> None:
    path = write({**zero(stage=3, offload_optimizer=CPU, offload_param=CPU), **numbers})
    words = ["plan", "--model", str(model), *RUN, *GPUS, "--deepspeed", path]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert codes_in(error) == ["E219"] and seen in " ".join(error.split())
    offered = [line.split()[1:] for line in error.splitlines() if line.split()[:1] == ["type"]]
    assert bool(offered) == can_be_typed
    for edits in offered:
        assert main([*words, *edits]) == 0
    assert (
        main([*words[:-1], write({**json.loads(Path(path).read_text()), **dict.fromkeys(numbers, "auto")})])
        == 0
    )


def test_a_batch_that_is_the_runs(model: Path) -> None:
    numbers = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
    path = write({**zero(stage=3, offload_optimizer=CPU, offload_param=CPU), **numbers})
    assert main(["plan", "--model", str(model), *RUN, *GPUS, "--deepspeed", path]) == 0


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"reduce_bucket_size": 1e9}, "zero_optimization.reduce_bucket_size"),
        ({"allgather_bucket_size": 1e9}, "zero_optimization.allgather_bucket_size"),
        ({"offload_param": CPU}, "offload_param without offload_optimizer"),
    ],
)
def test_what_the_forecast_leaves_out_is_named(settings: dict[str, Any], names: str) -> None:
    got = read_layout([*GPUS, "--deepspeed", write(zero(stage=3, **settings))])
    (warning,) = got.problems
    assert (warning.code, warning.severity) == ("W117", Severity.WARNING)
    assert warning.seen == f"ds.json has {names}, which the forecast does not count."
    assert got.layout.zero_stage == 3


def test_what_is_within_the_forecast_is_not_named() -> None:
    usual = {
        "reduce_bucket_size": "auto",
        "allgather_bucket_size": 5e8,
        "zero_hpz_partition_size": 1,
        "mics_shard_size": -1,
        "zero_quantized_weights": False,
        "offload_optimizer": {**CPU, "ratio": 1.0},
        "overlap_comm": True,
    }
    assert read_layout([*GPUS, "--deepspeed", write(zero(stage=3, **usual))]).problems == ()


def test_a_warning_is_shown_with_the_plan(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    path = write(zero(stage=3, offload_optimizer=CPU, offload_param=CPU, reduce_bucket_size=1e9))
    assert main(["plan", "--model", str(model), *RUN, *GPUS, "--deepspeed", path]) == 0
    assert "W117      ds.json has zero_optimization.reduce_bucket_size" in capsys.readouterr().out


@pytest.mark.parametrize("numbers", [{}, {"train_micro_batch_size_per_gpu": 8}])
def test_what_is_offered_can_be_typed_behind_it(
    capsys: pytest.CaptureFixture[str], model: Path, numbers: dict[str, int]
) -> None:
    """The fixes of E211 and E213: none contradicts the file."""
    run = [*RUN, "--max_completion_length", "4096"]
    for content in (zero(stage=2), zero(stage=2, offload_param=CPU), zero(stage=0, offload_optimizer=CPU)):
        words = ["plan", "--model", str(model), *run, *GPUS, "--deepspeed", write({**content, **numbers})]
        assert main(words) == 2
        lines = [typed_words(line) for line in capsys.readouterr().err.splitlines()]
        offered = [line[1:] for line in lines if line[:1] in (["type"], ["or"]) and line[1].startswith("--")]
        assert offered
        for edits in offered:
            main([*words, *edits])
            assert not {"E213", "E219"} & {*codes_in(capsys.readouterr().err)}, edits
