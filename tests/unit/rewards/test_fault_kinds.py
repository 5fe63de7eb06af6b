"""What a fault of a reward carries beside its words, out of the workers, too."""

from pathlib import Path
from typing import Any

import pytest

from covey.rewards.reward_set import RewardSet
from covey.rewards.trial import trial
from covey.texts import Text
from covey.types import RewardFault

FILES = {
    "r.py": "def score(completions):\n    return [1.0] * len(completions)\n",
    "broken.py": "1 / 0\n",
    "lacking.py": "import no_such_module_anywhere\n",
    "classes.py": "class Unmade:\n    def __init__(self):\n        raise RuntimeError('no')\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def fault_of(entry: str, **options: Any) -> RewardFault:
    with RewardSet.start([entry], **options) as rewards:
        (fault,) = rewards.faults
    return fault


@pytest.mark.parametrize(
    ("entry", "kind", "cause", "subject", "near"),
    [
        ("r.py", "unknown", "bare_file", "{}/r.py", ""),
        ("absent.py:f", "import", "no_file", "", ""),
        ("broken.py:f", "import", "import", "broken.py", ""),
        ("lacking.py:f", "import", "no_module", "lacking.py", ""),
        ("classes.py:Unmade", "import", "unmade", "Unmade", ""),
        ("r.py:scor", "missing", "", "r.py", "score"),
    ],
)
def test_faults_of_loading(folder: Path, entry: str, kind: str, cause: str, subject: str, near: str) -> None:
    fault = fault_of(f"{folder}/{entry}")
    assert (fault.kind, fault.cause, fault.near) == (kind, cause, near)
    assert fault.subject == subject.format(folder)
    # Its words keep their template on the way out of the worker.
    assert isinstance(fault.words, Text) and fault.words.values


@pytest.mark.parametrize(
    ("returned", "cause"),
    [
        ("[1.0]", "num_values"),
        ("5", "no_number"),
        ("['a', 'b']", "no_number"),
        ("[float('nan')] * 2", "not_finite"),
        ("[[1.0, 'a']] * 2", "no_step_number"),
        ("[[1.0, 2.0, 3.0]] * 2", "num_steps"),
        ("[][0]", ""),
    ],
)
def test_faults_of_a_trial(tmp_path: Path, scored: Any, returned: str, cause: str) -> None:
    (tmp_path / "t.py").write_text(f"def f(completions):\n    return {returned}\n")
    rows = [scored("one"), scored("")]
    with RewardSet.start([f"{tmp_path}/t.py:f"]) as rewards:
        assert rewards.faults == ()
        faults = trial(rewards, rows).faults
    assert [fault.cause for fault in faults] == [cause] * 2
    assert [(fault.row, fault.completion) for fault in faults] == [
        (row.prompt.id + 1, row.text) for row in rows
    ]
    assert all(isinstance(fault.said, Text) and fault.words.startswith(fault.said) for fault in faults)


def test_lacking_arguments_are_named(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("def f(completions, gold):\n    return [1.0]\n")
    with RewardSet.start([f"{tmp_path}/t.py:f"]) as rewards:
        (fault,) = rewards.missing(["answer"])
    assert (fault.kind, fault.lacking) == ("signature", ("gold",))
