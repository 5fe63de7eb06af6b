"""What a hostile program can do in the sandbox, on every way of shutting it off that this machine has.

Without bubblewrap they are skipped. Where it may not make namespaces, nothing is: the same tests hold that no
program is run at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from covey.rewards.code import grade
from covey.rewards.code_tests import CodeTest
from covey.rewards.sandbox import host, layers
from covey.rewards.sandbox.host import Ending, Limits, SandboxError, Way, endings
from covey.rewards.sandbox.layers import Isolation, Unisolated, isolate, tried
from support.needs import need

SMALL = Limits(cpu_s=1, wall_s=4.0, memory_bytes=256 << 20, output_bytes=100_000, processes=8)
SECRET = "hf_a-token-of-the-trainer"


def open_ways() -> list[Way]:
    """The ways that have every layer here."""
    found = []
    for way in host.ways():
        with contextlib.suppress(SandboxError):
            found += [way] if not tried(way, SMALL).lacks else []
    return found


WAYS = open_ways()


def run(way: Way, program: str, *inputs: str, limits: Limits = SMALL, total_s: float = 20.0) -> list[Ending]:
    return list(endings(way, program, [{"input": text} for text in inputs or [""]], limits, total_s))


def name_of(way: Way | None) -> str:
    return "none" if way is None else f"new_user-{way.new_user}-innermost-{way.is_innermost}"


@pytest.fixture(params=WAYS or [None], ids=name_of)
def way(request) -> Way | None:
    need("bubblewrap")
    return request.param


@pytest.fixture
def marked(monkeypatch, tmp_path) -> Iterator[str]:
    """A word in the command line of every sandbox process, by which those that are left over are found."""
    word = uuid.uuid4().hex
    inside = tmp_path / "inside.py"
    inside.write_text(f"{host._INSIDE.read_text()}\n# {word}\n")
    monkeypatch.setattr(host, "_INSIDE", inside)
    yield word
    assert left_over(word) == []


def left_over(word: str) -> list[str]:
    """Processes with this word in their command line that still run five seconds from now."""
    ends = time.monotonic() + 5
    while True:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                found += [folder.name] if word in (folder / "cmdline").read_text(errors="replace") else []
        if not found or time.monotonic() > ends:
            return found
        time.sleep(0.05)


@dataclass(frozen=True, kw_only=True)
class Attack:
    """A program, how it may end, and what it may have printed: the end of an attack that failed."""

    program: str
    ended: tuple[str, ...]
    output: str = ""

    def holds(self, ending: Ending) -> bool:
        """Whether the attack came to nothing."""
        return ending.ended in self.ended and ending.output.decode() == self.output


TRIED = """
def tried(what):
    try:
        what()
    except BaseException as error:
        return type(error).__name__
    return "done"
"""

ATTACKS = {
    "read /etc/shadow": Attack(
        program='print(tried(lambda: open("/etc/shadow")), tried(lambda: open("/etc/passwd")))',
        ended=("exit 0",),
        output="FileNotFoundError FileNotFoundError\n",
    ),
    "read the home": Attack(
        program="import os\nprint([p for p in WATCHED if os.path.lexists(p)])",
        ended=("exit 0",),
        output="[]\n",
    ),
    "environment": Attack(
        program="import os\nprint([k for k in os.environ if k not in "
        '("PATH", "HOME", "LANG", "PWD", "PYTHONHASHSEED", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")])\n'
        'print(tried(lambda: open("/proc/self/environ")))',
        ended=("exit 0",),
        output="[]\nFileNotFoundError\n",
    ),
    "network": Attack(
        program="import socket\n"
        "print('done' in [tried(lambda: socket.create_connection(('127.0.0.1', PORT), 2)), "
        "tried(lambda: socket.create_connection(('192.0.2.1', 80), 2)), "
        "tried(lambda: socket.socket(socket.AF_UNIX).connect('\\0NAME'))])",
        ended=("exit 0",),
        output="False\n",
    ),
    "fork bomb": Attack(
        program="import os\nwhile True:\n    os.fork()", ended=("exit 1", "late", "gone", "signal 9")
    ),
    "threads without end": Attack(
        program="import threading, time\nn = 0\n"
        "def start():\n    global n\n    while True:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n        n += 1\n"
        "print(tried(start), n < 8)",
        ended=("exit 0",),
        output="RuntimeError True\n",
    ),
    "10 GiB of memory": Attack(
        program="print(tried(lambda: bytearray(10 << 30)))", ended=("exit 0",), output="MemoryError\n"
    ),
    "memory in small pieces": Attack(
        program="held = []\nwhile True:\n    held.append(bytearray(1 << 20))", ended=("exit 1", "late")
    ),
    "memory as a file": Attack(
        program='import os\nprint(tried(lambda: os.write(os.memfd_create("x"), b"x")))',
        ended=("signal 25", "exit 0"),
        output="OSError\n",
    ),
    "infinite loop": Attack(program="while True:\n    pass", ended=("late",)),
    "sleep": Attack(program="import time\ntime.sleep(600)", ended=("late",)),
    "signals ignored": Attack(
        program="import signal\nfor n in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(n, signal.SIG_IGN)\nwhile True:\n    pass",
        ended=("late", "signal 9"),
    ),
    "signal to the parent": Attack(
        program="import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", ended=("gone", "exit 0")
    ),
    "signal to everyone": Attack(
        program="import os, signal\nprint(tried(lambda: os.kill(PID, signal.SIGKILL)), flush=True)\n"
        "os.kill(-1, signal.SIGKILL)",
        ended=("gone", "exit 0"),
    ),
    "a process that stays": Attack(
        program="import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        os.closerange(0, 64)\n        time.sleep(600)\n    os._exit(0)\nprint('left')",
        ended=("exit 0",),
        output="left\n",
    ),
    "write through a symlink": Attack(
        program="import os\n"
        'print({tried(lambda: os.symlink(WATCHED[0], os.path.join(d, "link"))) for d in FOLDERS} <= '
        '{"OSError", "FileNotFoundError", "PermissionError"})\n'
        'print(tried(lambda: open(WATCHED[0], "w")))',
        ended=("exit 0",),
        output="True\nFileNotFoundError\n",
    ),
    "overwrite the checker": Attack(
        program="import json, os, sys\n"
        'print(tried(lambda: open(WATCHED[1], "w")) in ("FileNotFoundError", "OSError"))\n'
        'print(tried(lambda: open(json.__file__, "w")))',
        ended=("exit 0",),
        output="True\nOSError\n",
    ),
    "become root": Attack(
        program="import os\n"
        "print('done' in [tried(lambda: os.setuid(0)), tried(lambda: os.chroot('/'))], os.getuid() == 0)",
        ended=("exit 0",),
        output="False False\n",
    ),
    "capabilities": Attack(
        program="import ctypes\nlibc = ctypes.CDLL(None)\nheld = (ctypes.c_uint32 * 6)()\n"
        "libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), held)\n"
        "effective, permitted = held[0] | held[3], held[1] | held[4]\n"
        "ambient = [n for n in range(64) if libc.prctl(47, *map(ctypes.c_ulong, (1, n, 0, 0))) == 1]\n"
        "print(effective, permitted, ambient, libc.prctl(39, 0, 0, 0, 0))",
        ended=("exit 0",),
        output="0 0 [] 1\n",
    ),
    "mount": Attack(
        program="import ctypes\nlibc = ctypes.CDLL(None)\n"
        "print(libc.mount(b'none', b'/usr', b'tmpfs', 0, None), libc.unshare(0x20000))",
        ended=("exit 0",),
        output="-1 -1\n",
    ),
    "name of the machine": Attack(
        program="import os\nprint(os.uname().nodename)", ended=("exit 0",), output="sandbox\n"
    ),
    "close everything": Attack(program="import os\nos.closerange(0, 4096)\nos._exit(0)", ended=("exit 0",)),
    "an exception of its own": Attack(program="raise SystemExit(3)", ended=("exit 3",)),
    "code that does not parse": Attack(program="def f(:", ended=("exit 1",)),
    "code too deep for the parser": Attack(program="(" * 50_000, ended=("exit 1", "signal 11")),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(name, way, marked, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    watched = tmp_path / "watched"
    watched.write_text(SECRET)
    watched.chmod(0o644)
    attack = ATTACKS[name]
    if way is None:
        with pytest.raises(Unisolated):
            isolate()
        return
    abstract = f"covey-{uuid.uuid4().hex}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{abstract}")
        unix.listen()
        facts = {
            "WATCHED": [str(watched), host.__file__, str(Path.home() / ".ssh"), "/proc", "/sys", "/home"],
            "PORT": server.getsockname()[1],
            "PID": os.getpid(),
            "FOLDERS": ["/", "/tmp", "/dev", "/dev/shm", "/usr", str(tmp_path)],
        }
        given = "".join(f"{key} = {value!r}\n" for key, value in facts.items())
        (ending,) = run(way, given + TRIED + attack.program.replace("NAME", abstract))
    if name == "signal to everyone":
        # It may or may not come to say so before it ends itself.
        assert ending.output in (b"", b"ProcessLookupError\n") and ending.ended in attack.ended
    else:
        assert attack.holds(ending), ending
    assert watched.read_text() == SECRET
    # The machinery still works, and an honest program is judged by what it prints.
    assert run(way, "print(int(input()) + 1)", "4\n") == [Ending(ended="exit 0", output=b"5\n")]


def test_no_user_namespace_within_the_innermost(way, marked):
    if way is None:
        return refused()
    program = "import ctypes\nprint(ctypes.CDLL(None).unshare(0x10000000))"
    (ending,) = run(way, program)
    assert ending == Ending(ended="exit 0", output=b"-1\n") or not way.is_innermost


def test_output_without_end(way, marked):
    if way is None:
        return refused()
    (ending,) = run(way, "while True:\n    print('x' * 1000)")
    assert ending.ended == "output" and len(ending.output) == SMALL.output_bytes


def test_a_fork_bomb_stays_below_the_limit(way, marked):
    program = """
import os, time
children = 0
try:
    while children < 1000:
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        children += 1
except OSError:
    pass
print(children, flush=True)
os._exit(0)
"""
    if way is None:
        return refused()
    (ending,) = run(way, program)
    assert ending.ended == "exit 0" and 0 < int(ending.output) < SMALL.processes


EXPECTED = f"expected-{uuid.uuid4().hex}"
CHEATS = {
    "sys.exit(0)": "import sys\nsys.exit(0)",
    "os._exit(0)": "import os\nos._exit(0)",
    "results of its own": "import os\nfor fd in range(3, 64):\n    try:\n"
    '        os.write(fd, b\'{"ended": "exit 0", "bytes": 3}\\nyes\')\n'
    "    except OSError:\n        pass",
    "every object of the interpreter": "import gc, sys\nfound = []\nframe = sys._getframe()\n"
    "while frame:\n    found.append(repr(frame.f_locals))\n    frame = frame.f_back\n"
    "found += [repr(o)[:10000] for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]\n"
    "import re\nprint(*re.findall('expected-[0-9a-f]{32}', ''.join(found)))",
    "functions replaced": "import builtins, json, os, sys\nclass Equal(str):\n    __eq__ = lambda *a: True\n"
    "    __hash__ = str.__hash__\nbuiltins.str = Equal\njson.dumps = lambda *a, **k: 'true'\n"
    "os._exit = sys.exit = lambda *a: None\nprint(Equal('x'))",
    "words of success": "print('OK\\n1 passed\\nAll tests passed')",
}


@pytest.mark.parametrize("name", CHEATS)
def test_no_cheat_passes_a_test(name, way, marked):
    if way is None:
        return refused()
    test = CodeTest(ask={"input": "x\n"}, expected=EXPECTED)
    isolation = tried(way, SMALL)
    assert grade(isolation, CHEATS[name], [test, test], 20.0)[0] == 0.0
    assert grade(isolation, f"print({EXPECTED!r})", [test, test], 20.0) == (1.0, "2 of 2")


def test_what_a_test_expects_is_not_sent_in(way, marked, monkeypatch):
    if way is None:
        return refused()
    sent = []
    started = host._started
    monkeypatch.setattr(host, "_started", lambda w, job: sent.append(json.dumps(job)) or started(w, job))
    test = CodeTest(ask={"call": "f", "arguments": [1]}, expected=EXPECTED)
    assert grade(tried(way, SMALL), "def f(x):\n    return 'no'", [test], 20.0)[0] == 0.0
    assert len(sent) == 2 and "arguments" in sent[1]
    assert all(EXPECTED not in text for text in sent)


def test_tests_do_not_share_a_process(way, marked):
    if way is None:
        return refused()
    program = "import builtins\nn = getattr(builtins, 'n', 0) + 1\nbuiltins.n = n\nprint(n, input())"
    assert [e.output for e in run(way, program, "a\n", "b\n")] == [b"1 a\n", b"1 b\n"]


def test_after_a_late_test_the_rest_do_not_run(way, marked):
    if way is None:
        return refused()
    program = "if input() == 'b':\n    while True: pass\nprint('ran')"
    ended = run(way, program, "a\n", "b\n", "a\n")
    assert [(e.ended, e.output) for e in ended] == [("exit 0", b"ran\n"), ("late", b""), ("late", b"")]


def test_all_tests_together_have_a_limit(way, marked):
    if way is None:
        return refused()
    program = "import time\ntime.sleep(0.4)\nprint('ran')"
    ended = [e.ended for e in run(way, program, *["\n"] * 9, total_s=1.5)]
    assert ended[0] == "exit 0" and ended[-1] == "late" and sorted(ended) == ended


def test_a_function_is_called_and_its_value_comes_back(way, marked):
    if way is None:
        return refused()
    program = "print('noise')\ndef f(a, b):\n    return {'sum': a + b, 'pair': (a, b)}\n" + (
        "class Solution:\n    def g(self, text):\n        return text[::-1]\n"
        "if __name__ == '__main__':\n    input('never asked')"
    )
    tests = [
        {"call": "f", "arguments": [1, 2]},
        {"call": "g", "arguments": ["añ"]},
        {"call": "absent", "arguments": []},
    ]
    ended = list(endings(way, program, tests, SMALL, 20.0))
    assert [json.loads(e.output) for e in ended[:2]] == [{"sum": 3, "pair": [1, 2]}, "ña"]
    assert ended[2] == Ending(ended="exit 1")


def test_common_programs_run(way, marked):
    if way is None:
        return refused()
    program = """
import sys, threading, collections, heapq, math, functools, itertools, decimal, random, re, dataclasses
import numpy
sys.setrecursionlimit(10**6)
threading.stack_size(2**26)

@dataclasses.dataclass
class Point:
    x: int

def deep(n):
    return 0 if n == 0 else 1 + deep(n - 1)

def main():
    lines = sys.stdin.read().split()
    print(deep(int(lines[0])), numpy.arange(3).sum(), Point(4).x, "ü")

worker = threading.Thread(target=main)
worker.start()
worker.join()
"""
    (ending,) = run(way, program, "20000\n", limits=Limits())
    assert ending == Ending(ended="exit 0", output="20000 3 4 ü\n".encode())


def refused() -> None:
    with pytest.raises(Unisolated):
        isolate()


def test_a_way_that_cannot_start_is_refused_with_its_words(monkeypatch, tmp_path):
    tool = script(tmp_path, "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    monkeypatch.setattr(host, "bubblewrap", lambda: tool)
    with pytest.raises(Unisolated, match="No permissions to create new namespace") as caught:
        isolate()
    # Said once for each user that could make the namespaces: root and another one, or this one.
    assert len(caught.value.reasons) == 1 + (os.getuid() == 0)


def test_an_older_bubblewrap_is_run_without_the_option_that_it_lacks(monkeypatch, tmp_path):
    def tried(way: Way, limits: Limits) -> Isolation:
        if way.is_innermost or not way.new_user:
            raise SandboxError("bwrap: Unknown option --disable-userns")
        return Isolation(way=way, name="bubblewrap 0.6.1", limits=limits, has=layers.LAYERS)

    tool = script(tmp_path, "exit 0")
    monkeypatch.setattr(host, "bubblewrap", lambda: tool)
    monkeypatch.setattr(layers, "tried", tried)
    assert isolate().name == "bubblewrap 0.6.1"
    options = [host.command(way, None) for way in host.ways() if way.new_user]
    assert ["--disable-userns" in words for words in options] == [True, False]


def test_bubblewrap_is_also_found_beside_python(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert host.bubblewrap() is None and host.ways() == []
    (tmp_path / "bin").mkdir()
    assert host.bubblewrap() is None
    tool = script(tmp_path / "bin", "exit 0")
    assert host.bubblewrap() == tool and {way.tool for way in host.ways()} == {tool}


def test_a_way_that_shuts_nothing_off_is_seen_through(monkeypatch, tmp_path):
    # It takes every word that is meant for bubblewrap and runs the program all the same.
    tool = script(tmp_path, 'while [ "$1" != "--" ]; do shift; done; shift; exec "$@"')
    fake = Way(tool=tool)
    # Counted with all else that runs under this user, it could not start as much as a thread.
    uncounted = replace(SMALL, processes=None)
    assert set(tried(fake, uncounted).lacks) >= {
        "no network",
        "other processes are hidden",
        "only Python's own files, read-only",
    }
    monkeypatch.setattr(layers, "ways", lambda: [fake])
    with pytest.raises(Unisolated, match=r"does not provide: .*no network"):
        isolate(uncounted)


def test_without_isolation_programs_run_only_on_request(monkeypatch):
    monkeypatch.setattr(host, "bubblewrap", lambda: None)
    with pytest.raises(Unisolated, match="bubblewrap is not installed"):
        isolate()
    found = isolate(SMALL, unsafe=True)
    assert found.way.tool is None and "no network" in found.lacks and "empty environment" in found.has
    test = CodeTest(ask={"input": "4\n"}, expected="5")
    assert grade(found, "print(int(input()) + 1)", [test], 20.0) == (1.0, "1 of 1")
    assert grade(found, "import sys\nsys.exit(0)", [test], 20.0) == (0.0, "0 of 1; test 1: wrong output")
    assert grade(found, "while True: pass", [test, test], 20.0) == (0.0, "0 of 2; test 1: late")
    assert grade(found, "x = bytearray(10 << 30)", [test], 20.0) == (0.0, "0 of 1; test 1: exit 1")


def test_a_sandbox_that_breaks_is_no_word_on_the_program(monkeypatch, tmp_path):
    tool = script(tmp_path, "exit 0")
    with pytest.raises(SandboxError, match="ended without a word"):
        run(Way(tool=tool), "print(1)")
    with pytest.raises(SandboxError, match="could not be started"):
        run(Way(tool=str(tmp_path / "absent")), "print(1)")


@pytest.mark.parametrize(
    "said",
    [
        "nonsense",
        '{"ended": "exit 0"}',
        '{"ended": "exit 0", "bytes": -1}',
        '{"ended": "exit 0", "bytes": 99999999999}',
        '{"ended": "\\u001b[31mred", "bytes": 0}',
        '{"ended": ["exit 0"], "bytes": 0}',
        "[" * 100,
        "x" * 100_000,
        '{"ended": "exit 0", "bytes": 5}',
    ],
)
def test_a_sandbox_that_says_anything_is_not_believed(said, tmp_path):
    tool = script(tmp_path, f"echo '{{\"ready\": true}}'\ncat <<'END'\n{said}\nEND")
    assert run(Way(tool=tool), "print(1)", "", "") == [Ending(ended="gone")] * 2


def script(folder: Path, text: str) -> str:
    path = folder / "bwrap"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)
