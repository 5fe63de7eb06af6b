"""Every verb reads its words by the same rules: spellings that mean the same, and ways to get them wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from covey.cli.machine import take_machine
from covey.cli.main import main
from covey.cli.refusal import asks_for_json
from covey.cli.verbs import VERBS
from covey.config import parse
from covey.config.argv import read_words
from covey.config.foreign import INSTEAD, MOOT, REFUSED, REFUSED_PREFIXES
from covey.config.take import take_mapping
from covey.config.values import kind_of
from covey.options.declare import fields_of
from covey.options.schema import OPTIONS
from covey.options.verbs import (
    CommonOptions,
    DoctorOptions,
    ExportOptions,
    PlanOptions,
    ReplayOptions,
    SelftestOptions,
    VerbOptions,
)
from covey.plan.layout import Engine
from support.verbs import codes_in

OWN: dict[str, type[VerbOptions]] = {
    "doctor": DoctorOptions,
    "export": ExportOptions,
    "replay": ReplayOptions,
    "selftest": SelftestOptions,
}
OF_A_RUN = [("--save_steps", "5"), ("--run_name", "-a"), ("--save_only_model", "false")]
TYPED: dict[str, list[tuple[str, str]]] = {
    "train": OF_A_RUN,
    "plan": [("--plan_gpus", "8"), ("--plan_gpu_memory", "8GB"), *OF_A_RUN],
    "doctor": [("--live", "7"), ("--json", "false")],
    "export": [("--output_dir", "-o"), ("--base", "--- b"), ("--merge_lora", "false")],
    "replay": [("--rollout", "3"), ("--checkpoint", "-c"), ("--sample", "false")],
    "selftest": [("--device", "cpu"), ("--model", "-m"), ("--ignore_memory_forecast", "false")],
}
"""Of each way in which verbs read their words, options with a value."""


def read(verb: str, words: Sequence[str]) -> Any:
    """What is typed, without where."""
    if verb in OWN:
        return read_words(verb, words, OWN[verb])
    planned = take_machine(words if verb == "plan" else [])
    parsed = parse(planned.words if verb == "plan" else words)
    assert (*planned.problems, *parsed.problems) == ()
    return planned.machine, {name: typed.value for name, typed in parsed.typed.items()}


@pytest.mark.parametrize("verb", TYPED)
def test_spellings_of_the_same(verb: str) -> None:
    pairs = TYPED[verb]
    plain = [word for pair in pairs for word in pair]
    expected = read(verb, plain)
    assert read(verb, [w.replace("_", "-") if w.startswith("--") else w for w in plain]) == expected
    assert read(verb, [w.upper() if w.startswith("--") and " " not in w else w for w in plain]) == expected
    assert read(verb, [f"{flag}={value}" for flag, value in pairs]) == expected
    assert read(verb, [f"--no-{f[2:]}" if v == "false" else f"{f}={v}" for f, v in pairs]) == expected
    # A repeated flag replaces.
    before = [word for flag, value in pairs for word in (flag, "true" if value == "false" else value)]
    assert read(verb, [*before, *plain]) == expected != read(verb, before)


@pytest.mark.parametrize(
    ("words", "codes", "said"),
    [
        ("train --save_step 5", ["E101"], "type --save_steps 5"),
        ("rlhf --save-step=5", ["E101"], "type --save_steps 5"),
        ("quickstart --save_step 5", ["E101"], "type --save_steps 5"),
        ("eval m --val_datset v", ["E101"], "type --val_dataset v"),
        ("plan --plan_gpu 8", ["E101"], "type --plan_gpus 8"),
        ("plan --plan_gpus 8 --plan_gpu_memory 8GB --sleep_leve 1", ["E101"], "type --sleep_level 1"),
        ("export c --outputdir o", ["E101"], "type --output_dir o"),
        ("doctor r --jsn", ["E101"], "--json"),
        ("selftest --devise cpu", ["E101"], "type --device cpu"),
        ("explain --codes E101", ["E101"], "covey explain --help"),
        ("train a.yaml b.yaml", ["E107", "E108"], "`b.yaml` after a.yaml"),
        ("plan --json a.yaml b.yaml", ["E107", "E108"], "`b.yaml` after a.yaml"),
        ("plan --dataset d --plan_gpus 8 e", ["E108", "E115"], "`e` after --plan_gpus"),
        ("plan --dataset d --json e", ["E108"], "`e` after --json"),
        ("eval m a.yaml b.yaml", ["E107", "E108"], "`b.yaml` after a.yaml"),
        ("export --merge c d", ["E108"], "`d` after c"),
        ("doctor --json r s", ["E108"], "`s` after r"),
        ("selftest --device cpu r", ["E108"], "`r` after selftest"),
        ("selftest --device tpu --model --ignore_memory_forecast=x --n",
         ["E104", "E103", "E103", "E101"], "device is tpu"),
        ("export c --merge=x --base", ["E103", "E103"], "merge takes true or false"),
        ("export c --merge --merge_lora false", ["E106"], "merge"),
        ("plan --json=x --plan_gpus=y", ["E103", "E103"], "json takes true or false"),
    ],
)  # fmt: skip
def test_faults_are_said_together(
    words: str, codes: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    done = capsys.readouterr()
    assert bool(done.out) == asks_for_json(words.split())
    found = codes_in(done.err)
    assert [code for code in found if code in {*codes, "E101", "E103", "E104", "E106", "E108"}] == codes
    assert said in " ".join(done.err.split())


@pytest.mark.parametrize("verb", VERBS)
def test_what_every_verb_takes(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([verb, "--help"], [verb, "x", "-h", "--y", "z"], ["--HELP", verb]):
        assert main(words) == 0
        assert f"covey {verb}" in capsys.readouterr().out.splitlines()[0]
    assert main([verb, "--version"]) == 0
    assert capsys.readouterr().out.startswith("covey ")
    assert main([verb, "--lang=fr", "--language", "x"]) == 2
    assert codes_in(capsys.readouterr().err) == ["E104"]


def test_the_help_of_a_verb_is_made_of_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, declares in {**OWN, "plan": PlanOptions}.items():
        assert main([verb, "-h"]) == 0
        text = capsys.readouterr().out
        for name, field in fields_of(declares).items():
            assert f"  --{name} {kind_of(name, declares).placeholder}\n" in text
            assert (field.description or "").split()[0] in text
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  --{name}" in shown for name in fields_of(CommonOptions))


def test_the_names_of_every_verb_are_no_options_of_a_run() -> None:
    """They are taken out of its words, so that an option of such a name would never arrive."""
    assert not {*fields_of(CommonOptions), *fields_of(PlanOptions)} & {*OPTIONS}


def test_the_layout_takes_what_a_plan_can_have() -> None:
    assert kind_of("vllm_mode").choices == get_args(Engine)[1:]


def test_a_refused_name_says_in_one_line_what_to_type() -> None:
    assert set(INSTEAD) <= {*REFUSED, *REFUSED_PREFIXES, *MOOT}
    for name in (*REFUSED, *(f"{prefix}zzz" for prefix in REFUSED_PREFIXES)):
        (problem,) = take_mapping({name: "x"}, "argument").problems
        (fix,) = problem.fixes
        instead = INSTEAD.get(name) or INSTEAD.get(name.removesuffix("zzz"))
        rest = f" and use {instead}" if instead else "; there is no replacement"
        assert fix.text == f"leave out --{name}{rest}"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("rlhf --rlhf_type grpo run.yaml --seed 3", "E108", "`covey rlhf run.yaml --option value`"),
        ("train --disable_tqdm run.yaml", "E108", "`run.yaml`"),
        ("train --add_version false run.yaml", "E108", "`run.yaml`"),
        ("train --val_dataset --seed 3", "E103", "takes one or more values, but no value is given"),
        ("train --config", "E103", "config needs a YAML file"),
        ("eval m --model n --val_dataset v", "E106", "`covey eval n"),
        ("train --streaming --streaming_on", "E101", "streaming"),
    ],
)
def test_no_word_is_lost(words: str, code: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text("seed: 1\n", encoding="utf-8")
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert code in codes_in(error) and said in " ".join(error.split())


def test_what_means_the_same_is_taken() -> None:
    Path("a.yaml").write_text("seed: 1\n", encoding="utf-8")
    Path("b.yaml").write_text("seed: 2\n", encoding="utf-8")

    def typed(words: str) -> dict[str, Any]:
        parsed = parse(words.split())
        assert not [p for p in parsed.problems if p.code.startswith("E")], parsed.problems
        return {name: found.value for name, found in parsed.typed.items()}

    assert typed("--config a.yaml --config b.yaml") == {"seed": 2}
    assert typed("--streaming --no_streaming") == {"streaming": False}
    assert typed("\u2013\u2013max_steps 5 \u2014seed 7") == {"max_steps": 5, "seed": 7}
    assert typed("--gradient_checkpointing --seed 7") == {"gradient_checkpointing": "true", "seed": 7}
    assert typed("--fp16 no --repetition_penalty 1.00 --push_to_hub off") == {}
    many = ",".join(f"model.layers.{n}.self_attn.q_proj" for n in range(40))
    assert len(typed(f"--target_modules {many}")["target_modules"]) == 40
    assert typed("--dataset ~nobody-at-all/a,b") == {"dataset": ["~nobody-at-all/a", "b"]}
