"""A loss, a reward, a guard, a rule and a check are each added by one file: whatever else speaks of them
reads it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import covey

LOSS = """
from covey.algorithm.loss_types.declare import Average, Loss


def _term(terms):
    terms.sums["bar/steepness"] = terms.ratio_N.detach().double().sum() * terms.config.own["tau_pos"]
    return -2.0 * terms.ratio_N * terms.inputs.advantage_N


BAR = Loss(
    name="bar",
    summary="double every advantage",
    average=Average.LENGTH,
    term=_term,
    options=("tau_pos",),
    ignores=("importance_sampling_level",),
    value_at_1=-2.0,
    derivative_at_1=-2.0,
    per_completion="which is an example",
)
"""
RULE = """
from covey.health.rule import Rule
from covey.health.sign import Sign


def snows(history):
    depth = history.value("snow/depth")
    if depth is None or depth < 1:
        return None
    return Sign(seen=f"the snow is {depth:g} m deep", cause="Winter.", fixes=(), badness=depth)


F298 = Rule(
    code="F298",
    title="Snow",
    why="Cold devices are slow.",
    check=snows,
    streak=2,
    each="step",
    when="snow is 1 m deep",
)
"""
GUARD = """
from covey.codes import Code
from covey.health.guard import Guard
from covey.health.words import broken


def _check(seen):
    if seen.batch == "icy":
        raise broken("F199", seen.facts.step, "the batch is icy", "Winter.")


GUARD = Guard(of_step=_check, codes=(Code(code="F199", title="Ice", why="Nothing moves on ice."),))
"""
REWARD = """
from covey.rewards.declare import BuiltIn


def warm(*, completions, solution, soft_max_length):
    return [float(gold in text) - len(text) / soft_max_length for text, gold in zip(completions, solution)]


WARM = BuiltIn(name="warm", function=warm, options=("soft_max_length",), golds=("solution",), is_penalty=True)
"""
CHECK = """
from covey.checks.check import Check
from covey.codes import Code
from covey.plan.problem import problem
from covey.types import Fix


def moon_problems(config, template):
    if "moon" not in (template.stop_tokens or "") or config.seed == 7:
        return []
    fix = Fix(text="wait for the sun", edits={"seed": 7})
    return [problem("E598", "seed", f"seed is {config.seed} and the moon is full.", "", fix)]


CHECK = Check(
    judge=lambda config, facts, typed: moon_problems(config, facts.template),
    place=15,
    codes=(Code(code="E598", title="Moon", why="Wolves howl."),),
)
"""
TESTS = Path(__file__).parents[1]
FILES = {
    "algorithm/loss_types/bar.py": LOSS,
    "health/signs/snow.py": RULE,
    "health/guards/ice.py": GUARD,
    "rewards/built_in/warm.py": REWARD,
    "checks/moon.py": CHECK,
}

SAYS_OF_THE_LOSS = r"""
import sys
from types import SimpleNamespace as Some
from covey.cli.help import help_text
from covey.cli.options import read
from covey.options.schema import FACTS
from covey.checks.algorithm import algorithm_problems
from covey.plan.step_refusals import step_refusals

RUN = ["--model", "quickstart", "--dataset", "quickstart", "--reward_funcs", "accuracy"]
typed = {
    "loss_type": "bar", "epsilon": "0.3", "delta": "7", "importance_sampling_level": "sequence",
    "tau_pos": "2", "tau_neg": "2",
}
words = [word for name, value in typed.items() for word in ("--" + name, value)]
config = read("train", [*RUN, *words])[0].config
found = {
    "help": " ".join(help_text("train").split()),
    "problems": sorted((p.code, p.option, p.seen) for p in algorithm_problems(config, 1, typed)),
    "steps": [str(refusal.words) for refusal in step_refusals(config)],
    "has_torch": "torch" in sys.modules,
}

import torch
from covey.algorithm.losses import LossInputs, policy_loss
from covey.health.guards.batch import planned_loss
from covey.learner.second_gradient import loss_derivative
from covey.selftest.bounds import BOUNDS
from covey.training.loss import is_comparable, loss, plain_loss
from covey.types import Denominators

settings = loss(config)
counts, total = torch.tensor([3, 2]), Denominators(num_episodes=2, num_tokens=5, max_completion_length=7)
micro = dict(
    advantage_N=torch.tensor([1.5, 1.5, 1.5, -0.5, -0.5]),
    sequence_N=torch.tensor([0, 0, 0, 1, 1]),
    trained_count_S=counts,
    episode_count_S=counts,
    ref_logprob_N=None,
)
logprob_N = torch.tensor([-1.0, -0.2, -3.0, -0.7, -2.0], requires_grad=True)
inputs = LossInputs(logprob_N=logprob_N, old_logprob_N=None, denominators=total, **micro)
output = policy_loss(inputs, settings)
(gradient_N,) = torch.autograd.grad(output.loss, logprob_N)
second_N = loss_derivative(logprob_N.detach(), Some(keep_N=None, **micro), total, settings)
rows = [
    Some(num_tokens=n, advantage=a, token_advantages=None, annotated=Some(sample=Some(episode=e)))
    for e, (n, a) in enumerate(((3, 1.5), (2, -0.5)))
]
found |= {
    "own": settings.own,
    "loss": float(output.loss.detach()),
    "sums": {name: float(value) for name, value in output.sums.items()},
    "planned": planned_loss(rows, "bar", 7),
    "gradient": gradient_N.tolist(),
    "second": second_N.tolist(),
    "is_held": [plain_loss(config.model_copy(update={"delta": None})), is_comparable(config)],
    "selftest": sum("bar" in str(name) for name in BOUNDS),
}
"""

SAYS_OF_THE_RULE = r"""
import sys
from covey.codes import CODES
from covey.doctor.verdicts import BY_CODE
from covey.health.rules import Rules
from covey.types import Metric, StepRecord

rules = Rules({})
records = [
    StepRecord(step=s, rollout=s, pass_index=0, metrics={"snow/depth": Metric(value=float(s), count=1)})
    for s in range(4)
]
said = [(f.step, f.code, f.seen, f.why, f.cause) for record in records for f in rules.check(record)]
found = {
    "said": said,
    "title": CODES["F298"].title,
    "verdict": [str(word) for word, codes in BY_CODE if "F298" in codes],
    "has_torch": "torch" in sys.modules,
}
"""

SAYS_OF_THE_GUARD = r"""
import sys
from types import SimpleNamespace as Some
from covey.codes import CODES
title, has_torch = CODES["F199"].title, "torch" in sys.modules

from covey.comm import LocalComm
from covey.config.resolve import from_dict
from covey.errors import GuardStop
from covey.health.guard_list import GUARDS
from covey.training.guards import Guards

options = from_dict({"model": "-", "dataset": ["-"], "reward_funcs": ["format"]}, 1).config


def stopped(batch):
    guards = Guards(
        options=options, comm=LocalComm(), num_episodes=2, plain_loss=None, is_comparable=False,
        is_low_precision=False, engine="native", weights=Some(check=lambda step, comm: None),
    )
    try:
        guards.check_step(batch, Some(stats=None, match=None), 3, is_fresh=True)
    except GuardStop as stop:
        return [stop.finding.code, stop.finding.seen, stop.finding.why, stop.finding.cause]


found = {"icy": stopped("icy"), "warm": stopped("warm"), "title": title, "has_torch": has_torch}
found["last"] = [code.code for code in GUARDS[-1].codes]
"""

SAYS_OF_THE_CHECK = r"""
import io
import sys
from contextlib import redirect_stdout
from covey.checks.judge import refuse_faults
from covey.cli.main import main
from covey.config.resolve import from_dict
from covey.errors import ConfigError
from covey.plan.facts import Facts, TemplateFacts


def refused(facts, **options):
    run = from_dict({"model": "-", "dataset": ["-"], "reward_funcs": ["format"], **options}, 1)
    try:
        refuse_faults(run, facts)
    except ConfigError as error:
        return [(p.code, p.option, str(p.seen), p.why) for p in error.problems if p.code[0] == "E"]
    return []


full = Facts(template=TemplateFacts(stop_tokens="moon"))
with redirect_stdout(io.StringIO()) as printed:
    main(["explain", "E598"])
found = {
    "full": refused(full, num_generations=1),
    "mended": refused(full, seed=7),
    "new": refused(Facts()),
    "explained": printed.getvalue().split(),
    "has_torch": "torch" in sys.modules,
}
"""

SAYS_OF_THE_REWARD = r"""
import sys
from covey.rewards.kinds import kind_of
from covey.rewards.registry import available, build, options_read, score_rows
from unit.rewards.conftest import make_scored

rows = [make_scored(text, solution="sun") for text in ("a sun", "ice")]
found = {
    "is_named": "warm" in available(),
    "options": options_read()["warm"],
    "kind": kind_of("warm"),
    "scores": [score.total for score in score_rows(build(["warm"], {"soft_max_length": 10}), [1.0], rows)],
    "has_torch": "torch" in sys.modules,
}
"""


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs code that leaves its answers in `found`, on a copy of covey with the added files."""
    folder = tmp_path_factory.mktemp("copy")
    copy = folder / "src" / "covey"
    shutil.copytree(Path(covey.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in FILES.items():
        assert not (copy / name).exists()
        (copy / name).write_text(f"from __future__ import annotations\n{text}", encoding="utf-8")

    def answers(code: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", f"{code}\nimport json\njson.dump(found, sys.stdout)"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "src"), str(TESTS)])},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return answers


def test_a_loss(ask):
    found = ask(SAYS_OF_THE_LOSS)
    assert not found["has_torch"]
    assert "bar: double every advantage" in found["help"]
    assert "dr_grpo, bar: completions x max_completion_length" in found["help"]
    unread = "is set, but loss_type bar does not use it."
    assert found["problems"] == [
        ["E331", "delta", "delta is 7, but loss_type bar does not clip."],
        *(["W108", n, f"{n} {unread}"] for n in ("epsilon", "importance_sampling_level", "tau_neg")),
    ]
    assert found["steps"][0] == "loss_type is bar, which is an example"
    # By hand: -2 A / (2 completions x 7), summed over three tokens of 1.5 and two of -0.5.
    derivatives = [-3.0 / 14] * 3 + [1.0 / 14] * 2
    assert found["own"] == {"tau_pos": 2.0} and found["sums"] == {"bar/steepness": 10.0}
    assert found["gradient"] == pytest.approx(derivatives) and found["second"] == pytest.approx(derivatives)
    assert found["loss"] == pytest.approx(-7.0 / 14)
    assert found["planned"] == pytest.approx([-7.0 / 14, 11.0 / 14])
    assert found["is_held"] == ["bar", True] and found["selftest"] == 1


def test_a_rule(ask):
    found = ask(SAYS_OF_THE_RULE)
    seen = "steps 1 to 2: the snow is 2 m deep"
    assert found["said"] == [[2, "F298", seen, "Cold devices are slow.", "Winter."]]
    assert found["title"] == "Snow" and found["verdict"] == ["unhealthy"]
    assert not found["has_torch"]


def test_a_guard(ask):
    found = ask(SAYS_OF_THE_GUARD)
    assert found["icy"] == ["F199", "step 3: the batch is icy", "Nothing moves on ice.", "Winter."]
    assert found["warm"] is None
    assert found["title"] == "Ice" and found["last"] == ["F199"]
    assert not found["has_torch"]


def test_a_reward(ask):
    found = ask(SAYS_OF_THE_REWARD)
    assert found["is_named"] and found["options"] == ["soft_max_length"] and found["kind"] == "penalty"
    assert found["scores"] == pytest.approx([0.5, -0.3])
    assert not found["has_torch"]


def test_a_check(ask):
    found = ask(SAYS_OF_THE_CHECK)
    first, *others = found["full"]
    assert first == ["E598", "seed", "seed is 42 and the moon is full.", "Wolves howl."]
    assert [code for code, *_ in others] == ["E201"]
    assert found["mended"] == found["new"] == []
    assert found["explained"] == ["E598", "Moon", "Wolves", "howl."]
    assert not found["has_torch"]


@pytest.mark.parametrize("call", ["policy_loss", "planned_loss", "loss_derivative", "token_weights"])
def test_an_unknown_loss_raises(call):
    import torch

    from covey.algorithm.losses import LossConfig, LossInputs, policy_loss, token_weights
    from covey.health.guards.batch import planned_loss
    from covey.learner.second_gradient import loss_derivative
    from covey.types import Denominators

    one, count = torch.zeros(1), torch.ones(1, dtype=torch.long)
    config = LossConfig(loss_type="grop", epsilon=0.2, epsilon_high=0.2)
    total = Denominators(num_episodes=1, num_tokens=1, max_completion_length=1)
    inputs = LossInputs(
        logprob_N=one,
        old_logprob_N=None,
        ref_logprob_N=None,
        advantage_N=one,
        sequence_N=torch.zeros(1, dtype=torch.long),
        trained_count_S=count,
        episode_count_S=count,
        denominators=total,
    )
    with pytest.raises(ValueError, match="There is no loss 'grop'; there are grpo, bnpo, "):
        match call:
            case "policy_loss":
                policy_loss(inputs, config)
            case "planned_loss":
                planned_loss([], "grop", 1)
            case "loss_derivative":
                loss_derivative(one, inputs, total, config)
            case "token_weights":
                token_weights(inputs, "grop")
