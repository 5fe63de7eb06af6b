"""The trial: what every call of a reward would show is found on two rows."""

from __future__ import annotations

from covey.rewards.reward_set import RewardSet
from covey.rewards.trial import trial


def test_what_the_trial_finds(scored, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import time\n"
        "def good(completions): return [1.0, None]\n"
        "def empty(completions): return [float(c.split()[0]) for c in completions]\n"
        "def single(completions): return [1.0]\n"
        "def word(completions): return ['good' if c else 0.0 for c in completions]\n"
        "def slow(completions): time.sleep(60)\n"
    )
    entries = [f"{path}:{name}" for name in ("good", "empty", "single", "word", "slow")]
    rows = [scored("72", solution="72", number=4), scored("", solution="72", number=4)]
    with RewardSet.start([*entries, "accuracy"], workers=5, timeout_s=0.5) as rewards:
        faults = trial(rewards, rows).faults
    assert {f.kind for f in faults} == {"trial"}
    assert [(f.reward, f.words) for f in faults] == [
        ("single", "returned 1 value for 2 completions; seen on row 5, with the completion '72'"),
        (
            "word",
            "returned a str instead of a number or None: 'good'; seen on row 5, with the completion '72'",
        ),
        (
            "empty",
            "IndexError: list index out of range (mine.py, line 3: def empty(completions): return "
            "[float(c.split()[0]) for c in completions]); seen on row 5, with an empty completion",
        ),
        ("single", "returned 1 value for 2 completions; seen on row 5, with an empty completion"),
    ]
