"""Users' reward functions in worker processes: found, called, limited in time, replaced when they end."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from covey.rewards.pool import chunks
from covey.rewards.protocol import TrainerState
from covey.rewards.reward_set import RewardSet
from covey.types import Metric, Status

STATE = TrainerState(global_step=3, max_steps=10, epoch=0.5)


@pytest.fixture
def file(tmp_path):
    """`file("r.py", text)` writes a file of the user's and returns its path."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


def values(judged, reward=0):
    return [row.parts[reward].value for row in judged.rows]


def statuses(judged, reward=0):
    return [row.parts[reward].status for row in judged.rows]


def messages(judged, reward=0):
    return [row.parts[reward].message for row in judged.rows]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


# -- calls -------------------------------------------------------------------------------------------------


def test_a_function_of_trls_form(file, scored):
    path = file(
        "mine.py",
        """
        import os, sys

        async def reward(prompts, completions, completion_ids, target, level=9, trainer_state=None,
                         log_extra=None, log_metric=None, **kwargs):
            print("to standard output")
            os.system("echo from a child process")
            assert sys.stdin.read() == ""
            assert "torch" not in sys.modules
            log_extra("shouted", [c.upper() for c in completions])
            log_metric("step", trainer_state.global_step)
            log_metric("rows", len(completions))
            assert sorted(kwargs) == ["finish_reason", "is_truncated", "messages", "prompt_id",
                                      "response_token_ids"], kwargs
            return [len(c) + t + level + len(i) for c, t, i in zip(completions, target, completion_ids)]
        """,
    )
    rows = [scored("ä\ud800\u2028\n", target=10), scored("bb", target=20, ids=(1, 2, 3))]
    with RewardSet.start([f"{path}:reward"]) as rewards:
        assert (rewards.names, rewards.faults, rewards.notes) == (("reward",), (), ())
        judged = rewards.score(rows, STATE)
    assert values(judged) == [4 + 10 + 9 + 2, 2 + 20 + 9 + 3], judged
    assert [row.extras for row in judged.rows] == [{"shouted": "Ä\ud800\u2028\n"}, {"shouted": "BB"}]
    assert judged.metrics == {"step": Metric(value=3.0, count=1), "rows": Metric(value=2.0, count=1)}


def test_prints_go_to_standard_error(file, scored, capfd):
    path = file("mine.py", "def f(completions):\n    print('seen')\n    return [1.0] * len(completions)\n")
    with RewardSet.start([f"{path}:f"]) as rewards:
        assert values(rewards.score([scored("a")], STATE)) == [1.0]
    out, err = capfd.readouterr()
    assert (out, err) == ("", "seen\n")


def test_five_megabytes_there_and_back(file, scored):
    path = file(
        "mine.py",
        """
        def f(completions, log_extra):
            log_extra("whole", completions)
            return [float(len(c)) for c in completions]
        """,
    )
    text = "é" * 2_500_000
    with RewardSet.start([f"{path}:f"]) as rewards:
        judged = rewards.score([scored(text)], STATE)
    assert values(judged) == [2_500_000.0]
    assert judged.rows[0].extras == {"whole": text}


def test_columns_that_json_has_no_word_for(file, scored):
    path = file(
        "mine.py",
        """
        def dates(completions, day):
            return [float(d == "2026-01-02") for d in day]

        def pictures(completions, picture):
            return [1.0 for p in picture]
        """,
    )
    rows = [scored("a", day=datetime.date(2026, 1, 2), picture=b"png")]
    with RewardSet.start([f"{path}:dates", f"{path}:pictures"]) as rewards:
        judged = rewards.score(rows, STATE)
    assert values(judged) == [1.0]
    assert statuses(judged, 1) == [Status.ERROR]
    assert messages(judged, 1) == [
        "the column picture cannot be passed to a reward: it contains a builtins.bytes"
    ]


def test_rows_are_cut_at_groups_and_gathered_in_order(file, scored):
    path = file(
        "mine.py",
        """
        import os, time

        def f(completions, prompt_id, log_extra):
            time.sleep(0.3)
            log_extra("call", [[os.getpid(), sorted(set(prompt_id))]] * len(completions))
            return [float(c) for c in completions]
        """,
    )
    rows = [scored(str(i), number=i // 3) for i in range(12)]
    with RewardSet.start([f"{path}:f", "format"], workers=2) as rewards:
        judged = rewards.score(rows, STATE)
        pids = rewards.pids
    assert values(judged) == [float(i) for i in range(12)]
    assert values(judged, 1) == [0.0] * 12
    calls = [row.extras["call"] for row in judged.rows]
    assert [groups for _, groups in calls] == [["0", "1"]] * 6 + [["2", "3"]] * 6
    assert sorted({pid for pid, _ in calls}) == list(pids) and len(pids) == 2


@pytest.mark.parametrize(
    ("groups", "parts", "cut"),
    [
        ([0, 0, 1, 1, 2, 2], 2, [range(0, 4), range(4, 6)]),
        ([0, 0, 1, 1, 2, 2], 8, [range(0, 2), range(2, 4), range(4, 6)]),
        ([5, 5, 5], 2, [range(0, 3)]),
        ([0, 1, 0], 3, [range(0, 1), range(1, 2), range(2, 3)]),
        ([0, 1, 2, 3, 4], 2, [range(0, 3), range(3, 5)]),
    ],
)
def test_chunks(groups, parts, cut):
    assert chunks(groups, parts) == cut


# -- failures ----------------------------------------------------------------------------------------------


def test_raising_on_one_row_and_wrong_counts_and_nones(file, scored):
    path = file(
        "mine.py",
        """
        import sys

        def picky(completions):
            return [1.0 / len(c) for c in completions]

        def single(completions):
            return [1.0]

        def none(completions):
            return [None if c else 0.5 for c in completions]

        def leaving(completions):
            sys.exit("enough")
        """,
    )
    names = ("picky", "single", "none", "leaving")
    with RewardSet.start([f"{path}:{n}" for n in names]) as rewards:
        judged = rewards.score([scored("ab"), scored(""), scored("abcd")], STATE)
        assert len(rewards.pids) == 1
    assert values(judged) == [0.5, None, 0.25]
    assert messages(judged)[1] == (
        "ZeroDivisionError: float division by zero "
        "(mine.py, line 5: return [1.0 / len(c) for c in completions])"
    )
    assert messages(judged, 1) == ["returned 1 value for 3 completions"] * 3
    assert statuses(judged, 1) == [Status.ERROR] * 3
    assert values(judged, 2) == [None, 0.5, None]
    assert statuses(judged, 2) == [Status.OK] * 3
    assert messages(judged, 3) == ['SystemExit: enough (mine.py, line 14: sys.exit("enough"))'] * 3


def test_a_worker_that_ends_or_hangs_is_replaced(file, scored):
    path = file(
        "mine.py",
        """
        import os, re, signal

        def f(completions):
            for c in completions:
                if c == "exit":
                    os._exit(3)
                if c == "fault":
                    os.kill(os.getpid(), signal.SIGSEGV)
                if c == "loop":
                    re.match("(a+)+$", "a" * 64 + "b")
            return [1.0] * len(completions)
        """,
    )
    texts = ("exit", "fine", "fault", "loop", "good")
    with RewardSet.start([f"{path}:f"], workers=5, timeout_s=1) as rewards:
        started = time.monotonic()
        judged = rewards.score([scored(t, number=i) for i, t in enumerate(texts)], STATE)
        assert time.monotonic() - started < 5
        again = rewards.score([scored("again", number=i) for i in range(5)], STATE)
        pids = rewards.pids
    assert values(judged) == [None, 1.0, None, None, 1.0]
    assert [s.value for s in statuses(judged)] == ["error", "ok", "error", "timeout", "ok"]
    assert messages(judged) == [
        "ended the worker process with exit code 3",
        "",
        "the worker process was killed by SIGSEGV",
        "returned nothing within 1 s",
        "",
    ]
    assert values(again) == [1.0] * 5
    assert not any(is_alive(pid) for pid in pids)


def test_functions_that_fork_or_find_the_pipe(file, scored):
    path = file(
        "mine.py",
        """
        import os

        def forking(completions):
            os.fork()
            return [1.0] * len(completions)

        def writing(completions):
            for number in range(3, 64):
                try:
                    os.write(number, b"junk\\n")
                except OSError:
                    pass
            return [1.0] * len(completions)
        """,
    )
    with RewardSet.start([f"{path}:forking", f"{path}:writing"]) as rewards:
        said = [rewards.score([scored("a")], STATE).rows[0].parts for _ in range(2)]
    assert [parts[0].value for parts in said] == [1.0, 1.0]
    assert [parts[1].message for parts in said] == [
        "wrote b'junk\\n' to the pipe that its worker process answers on"
    ] * 2


def test_ctrl_c_ends_a_call_and_its_worker_at_once(file):
    path = file("mine.py", "import time\ndef f(completions):\n    time.sleep(60)\n")
    script = file(
        "parent.py",
        f"""
        import importlib.util, signal
        from covey.rewards.protocol import TrainerState
        from covey.rewards.reward_set import RewardSet
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
        spec = importlib.util.spec_from_file_location("rows", {str(Path(__file__).parent / "conftest.py")!r})
        rows = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(rows)
        try:
            with RewardSet.start([{f"{path}:f"!r}]) as rewards:
                print(*rewards.pids, flush=True)
                rewards.score([rows.make_scored("a")], TrainerState())
        except KeyboardInterrupt:
            print("stopped")
        """,
    )
    parent = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.3)
    parent.send_signal(signal.SIGINT)
    assert parent.communicate(timeout=5) == ("stopped\n", "")
    assert not is_alive(pid)


def test_ctrl_c_is_heard_by_a_thread_that_already_waits(file):
    # The signal goes to another thread, as one does that comes just before the wait: nothing wakes the first.
    script = file(
        "waiting.py",
        """
        import os, signal, threading, time
        from concurrent.futures import Future
        from covey.rewards.pool import awaited

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it

        def press():
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

        threading.Thread(target=press, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            awaited(Future())
        except KeyboardInterrupt:
            print("stopped")
        """,
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("stopped\n", "")


def test_workers_end_with_a_parent_that_is_killed(file, scored, tmp_path):
    # One waits for work, one is in a function of Python's, one inside C code that lets no thread run.
    path = file(
        "mine.py",
        """
        import re, subprocess, time

        def f(completions):
            if completions == ["sleep"]:
                child = subprocess.Popen(["sleep", "60"])
                print("child", child.pid, flush=True)
                child.wait()
            if completions[0] in "abc":
                time.sleep(1)  # so that each of the three calls needs a worker
            if completions == ["loop"]:
                re.match("(a+)+$", "a" * 64 + "b")
            return [1.0] * len(completions)
        """,
    )
    script = file(
        "parent.py",
        f"""
        import importlib.util, sys, threading, time
        from covey.rewards.protocol import TrainerState
        from covey.rewards.reward_set import RewardSet
        spec = importlib.util.spec_from_file_location("rows", {str(Path(__file__).parent / "conftest.py")!r})
        rows = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(rows)
        scored = rows.make_scored
        rewards = RewardSet.start([{f"{path}:f"!r}], workers=3, timeout_s=4)
        rewards.score([scored("a", number=0), scored("b", number=1), scored("c", number=2)], TrainerState())
        job = lambda: rewards.score([scored("sleep", number=0), scored("loop", number=1)], TrainerState())
        threading.Thread(target=job, daemon=True).start()
        time.sleep(0.2)
        print(*rewards.pids, flush=True)
        threading.Event().wait(60)
        """,
    )
    parent = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None and parent.stderr is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        pids.append(int(parent.stderr.readline().removeprefix("child")))
        assert len(pids) == 4 and all(is_alive(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not any(is_alive(pid) for pid in pids), seconds=15)


def test_interrupting_the_parents_group_leaves_a_call_alone(file):
    path = file("mine.py", "import time\ndef f(completions):\n    time.sleep(1)\n    return [1.0]\n")
    script = file(
        "parent.py",
        f"""
        import importlib.util, signal
        from covey.rewards.protocol import TrainerState
        from covey.rewards.reward_set import RewardSet
        spec = importlib.util.spec_from_file_location("rows", {str(Path(__file__).parent / "conftest.py")!r})
        rows = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(rows)
        signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
        with RewardSet.start([{f"{path}:f"!r}]) as rewards:
            print("ready", flush=True)
            judged = rewards.score([rows.make_scored("a")], TrainerState())
        print(judged.rows[0].parts[0].value)
        """,
    )
    parent = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
    time.sleep(0.3)
    os.killpg(parent.pid, signal.SIGINT)
    out, err = parent.communicate(timeout=20)
    assert (out, err) == ("interrupted\n1.0\n", "")


# -- finding functions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "kind", "words"),
    [
        ("{}/fine.py:zzz", "missing", "fine.py does not define zzz; it defines length"),
        ("{}/fine.py:NUMBER", "not_callable", "int is neither a function nor a callable object"),
        ("{}/slow.py:f", "import", "slow.py: the import returned nothing within 1 s"),
        ("{}/ending.py:f", "import", "ending.py: the import ended the worker process with exit code 5"),
        (
            "no_such_package.f",
            "import",
            "no_such_package cannot be imported: ModuleNotFoundError: No module named",
        ),
        ("json.dmups", "missing", "json does not define dmups; the nearest name is dumps"),
    ],
)
def test_what_cannot_be_found(entry, kind, words, file, tmp_path):
    file("fine.py", "NUMBER = 1\ndef length(completions):\n    return []\n")
    file("slow.py", "import time\ntime.sleep(30)\n")
    file("ending.py", "import os\nos._exit(5)\n")
    entry = entry.format(tmp_path)
    with RewardSet.start([entry], load_limit_s=1) as rewards:
        (fault,) = rewards.faults
    assert (fault.reward, fault.kind) == (entry, kind)
    assert words in fault.words, fault.words


def test_faults_come_together_and_name_the_line(file, tmp_path):
    path = file(
        "mine.py",
        "def f(completions, gold):\n    return []\nclass C:\n    def __init__(self):\n        1 / 0\n",
    )
    entries = ["nope", f"{path}:g", f"{path}:C", f"{path}:f", f"{path}:f"]
    with RewardSet.start(entries) as rewards:
        assert [(f.reward, f.kind) for f in rewards.faults] == [
            ("nope", "unknown"),
            (f"{path}:g", "missing"),
            (f"{path}:C", "import"),
            (f"{path}:f", "twice"),
        ]
        assert rewards.faults[2].words == (
            "no object of the class C could be created: ZeroDivisionError: division by zero "
            "(mine.py, line 5: 1 / 0)"
        )
        assert [f.reward for f in rewards.missing(["answer"])] == ["mine.f", "mine.f_2"]


def test_two_functions_of_one_name(file, scored):
    one = file(
        "one.py", "def f(completions):\n    return [1.0]\ndef accuracy(completions):\n    return [5.0]\n"
    )
    two = file("two.py", "def f(completions):\n    return [2.0]\n")
    again = file("sub/one.py", "def f(completions):\n    return [3.0]\n")
    entries = [f"{one}:f", f"{two}:f", f"{again}:f", "accuracy", f"{one}:accuracy"]
    with RewardSet.start(entries) as rewards:
        assert rewards.names == ("one.f", "two.f", "one.f_2", "accuracy", "one.accuracy")
        judged = rewards.score([scored("72", solution="72")], STATE)
    assert [p.value for p in judged.rows[0].parts] == [1.0, 2.0, 3.0, 1.0, 5.0]


def test_modules_and_neighbours_of_a_file(file, scored, tmp_path, monkeypatch):
    file("pack/__init__.py", "")
    file("pack/inner.py", "from .helper import two\ndef f(completions):\n    return [two]\n")
    file("pack/helper.py", "two = 2.0\n")
    path = file("lone/mine.py", "import beside\ndef g(completions):\n    return [beside.three]\n")
    file("lone/beside.py", "three = 3.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with RewardSet.start(["pack.inner.f", "pack.inner:f", f"{path}:g"]) as rewards:
        assert rewards.faults == ()
        assert rewards.names == ("inner.f", "inner.f_2", "g")
        judged = rewards.score([scored("a")], STATE)
    assert [p.value for p in judged.rows[0].parts] == [2.0, 2.0, 3.0]


def module_level(completions):
    return [float(os.getpid())] * len(completions)


def another_one(completions):
    return module_level(completions)


def test_python_functions_go_to_workers_and_closures_stay(scored):
    def closure(completions):
        return [float(os.getpid())] * len(completions)

    with RewardSet.start([module_level, closure, another_one]) as rewards:
        assert rewards.names == ("module_level", "closure", "another_one")
        assert rewards.notes == (
            "Functions of a file run in worker processes: lists and counters that they change, and what they "
            "send to wandb, stay there. log_extra and log_metric record values of a function.",
            "The reward closure runs in this process, without a time limit: it is not defined at the "
            "top level of a module (a lambda or a nested function).",
        )
        judged = rewards.score([scored("a")], STATE)
        first, second, third = (p.value for p in judged.rows[0].parts)
        assert second == os.getpid() and {first, third} <= set(rewards.pids)


@pytest.mark.parametrize(("guard", "place"), [('if __name__ == "__main__":', "worker"), ("if True:", "here")])
def test_a_script_is_sent_to_workers_only_where_it_can_be_imported(guard, place, file):
    script = file(
        "train.py",
        f"""
        import os
        from covey.rewards.reward_set import RewardSet

        def f(completions):
            return [1.0]

        {guard}
            with RewardSet.start([f]) as rewards:
                print("worker" if rewards.pids else "here", len(rewards.faults), len(rewards.notes))
        """,
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == [place, "0", "1"], done.stderr


def test_a_file_that_trains_on_import_does_not_start_over_in_the_worker(file):
    path = file(
        "train.py",
        """
        from covey.rewards.reward_set import RewardSet

        def f(completions):
            return [1.0]

        RewardSet.start([f])
        """,
    )
    with RewardSet.start([f"{path}:f"]) as rewards:
        (fault,) = rewards.faults
    assert "importing a file that defines a reward started a run" in fault.words


def test_built_ins_start_no_process(scored):
    with RewardSet.start(["accuracy", "trl.rewards.think_format_reward"], workers=4) as rewards:
        rewards.score([scored("72", solution="72")], STATE)
        assert rewards.pids == ()
