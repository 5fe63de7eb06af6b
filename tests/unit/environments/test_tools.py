"""Users' tools in worker processes and in this one: schemas, arguments, results, and every way to fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import support.environments
from covey.environments.schema import schema_of
from covey.environments.tools import start_tools
from covey.types import CallFailure, ToolCall

TOOLS = Path(next(iter(support.environments.__path__))) / "tools.py"


def started(*names, **more):
    """A host of tools of the file, or of callables; they have no faults."""
    options = {"workers": 2, "timeout_s": 10.0, "memory_gb": 1.0, "max_result_chars": 400, **more}
    entries = [f"{TOOLS}:{name}" if isinstance(name, str) else name for name in names]
    host, faults = start_tools(entries, **options)
    assert faults == []
    return host


def results(host, *calls):
    """The results of calls that run side by side, in their order; each is told once."""
    told = [[] for _ in calls]
    for (name, arguments), one in zip(calls, told, strict=True):
        host.call(ToolCall(name=name, arguments=arguments), one.append)
    end = time.monotonic() + 20
    while not all(told):
        assert time.monotonic() < end, told
        time.sleep(0.01)
    assert [len(one) for one in told] == [1] * len(told)
    return [one[0] for one in told]


def result(host, name, **arguments):
    return results(host, (name, arguments))[0]


@pytest.fixture(scope="module")
def host():
    host = started("calculate", "echo", "fail", "give", "nap", "wait")
    yield host
    host.close()


# -- schemas and faults ------------------------------------------------------------------------------------


def test_schemas(host):
    assert list(host.schemas) == ["calculate", "echo", "fail", "give", "nap", "wait"]
    assert host.schemas["calculate"] == {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Add numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {"type": "string", "description": "numbers with + between them"}
                },
                "required": ["expression"],
            },
            "return": {"type": "number", "description": "The sum."},
        },
    }
    assert host.schemas["wait"]["function"]["parameters"]["required"] == ["seconds"]


def test_a_schema_needs_no_torch():
    code = f"import sys; sys.path.insert(0, {str(TOOLS.parent)!r}); import tools\n"
    code += "from covey.environments.schema import schema_of\n"
    code += "schema_of(tools.echo); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_faults_all_at_once():
    names = ("no_hints", "no_docstring", "not_described", "custom", "many", "misspelt", "absent", "Unit")
    entries = [f"{TOOLS}:{name}" for name in names]
    entries += ["nowhere.at:all", "calculate", lambda a: a, f"{TOOLS}:calculate", f"{TOOLS}:calculate"]
    host, faults = start_tools(entries, workers=1, timeout_s=1, memory_gb=None, max_result_chars=100)
    host.close()
    assert [(f.entry.rpartition(":")[2], f.kind, f.lacking) for f in faults] == [
        ("no_hints", "no_hints", ("a",)),
        ("no_docstring", "no_docstring", ()),
        ("not_described", "no_docstring", ("b",)),
        ("custom", "signature", ()),
        ("many", "signature", ("a",)),
        ("misspelt", "signature", ()),
        ("absent", "missing", ()),
        ("Unit", "signature", ()),
        ("all", "import", ()),
        ("calculate", "missing", ()),
        ("lambda", "no_hints", ("a",)),
        ("calculate", "signature", ()),
    ]
    assert faults[0].words == "no_hints(): no type hint for a; write for instance `a: str`"
    assert faults[1].words == "no_docstring() has no docstring, which tells the model what the tool does"
    assert "does not describe the argument b" in faults[2].words
    assert "NameError: name 'Itn' is not defined" in faults[5].words


def test_a_method_has_a_schema():
    class Shop:
        async def price(self, item: str) -> str:
            """Say what it costs.

            Args:
                item: the thing
            """
            return item

    function = schema_of(Shop().price)["function"]
    assert (function["name"], function["parameters"]["required"]) == ("price", ["item"])


# -- arguments and results ---------------------------------------------------------------------------------


def test_arguments_are_made_to_fit(host):
    as_text = {"n": "3", "x": "1e3", "flag": "true", "words": '["a", "b"]', "table": '{"a": 1}'}
    as_text |= {"mode": "b", "unit": "celsius", "text": "7"}
    as_json = {"n": 3.0, "x": 1000, "flag": True, "words": ["a", "b"], "table": {"a": "1"}}
    as_json |= {"mode": "b", "unit": "celsius", "text": 7}
    one, other = results(host, ("echo", as_text), ("echo", as_json))
    assert one.content == other.content
    assert json.loads(one.content) == {
        **{"n": 3, "x": 1000.0, "flag": True, "words": ["a", "b"], "table": {"a": 1}},
        **{"mode": "b", "text": "7", "unit": "C"},
    }
    assert json.loads(result(host, "echo", words="null").content)["words"] is None


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("calculate", {}, "calculate() got no argument 'expression'"),
        ("calculate", {"expr": "1"}, "calculate() takes no argument 'expr'; its arguments are: expression"),
        ("echo", {"n": "three"}, "echo(): argument 'n': Input should be a valid integer"),
        ("echo", {"words": "[1"}, "echo(): argument 'words': Input should be a valid list"),
        ("echo", {"mode": "c"}, "echo(): argument 'mode': Input should be 'a' or 'b'"),
        ("echo", {"table": "{}" * 500}, "echo(): argument 'table': Input should be a valid dictionary"),
        ("wait", {}, "wait() got no argument 'seconds'"),
    ],
)
def test_arguments_that_do_not_fit(host, name, arguments, words):
    told = result(host, name, **arguments)
    assert told.failure is CallFailure.ARGUMENTS
    assert told.content.startswith(f"Error: {words}") and len(told.content) < 300


def test_arguments_that_are_nested_too_deeply(host):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    sync, other = results(host, ("calculate", {"expression": deep}), ("wait", {"seconds": deep}))
    assert (sync.failure, other.failure) == (CallFailure.ARGUMENTS, CallFailure.ENDED)
    assert "recursion" in sync.content and "could not be sent" in other.content


def test_results_are_text(host):
    whats = ("none", "list", "object", "half", "long")
    none, listed, other, half, long = results(host, *(("give", {"what": what}) for what in whats))
    assert (none.content, listed.content, other.content) == ("", '[1, {"a": "ä"}]', "Unit.C")
    assert half.content == "a?b"
    head, tail = "x" * 300, "x" * 93 + "the end"
    assert long.content == f"{head}\n[... 4607 characters of the result are left out ...]\n{tail}"
    assert {r.failure for r in (none, listed, other, half, long)} == {None}
    assert result(host, "calculate", expression="2+3.5").content == "5.5"


# -- failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "failure", "words"),
    [
        ("raise", CallFailure.RAISED, "Error: ValueError: two lines of words"),
        ("unspeakable", CallFailure.RAISED, "Error: Unspeakable"),
        ("key", CallFailure.RAISED, "Error: KeyError: 'gold'"),
        ("interrupt", CallFailure.RAISED, "Error: KeyboardInterrupt"),
        ("sys.exit", CallFailure.ENDED, "Error: fail() called sys.exit(3)"),
        ("os._exit", CallFailure.ENDED, "Error: fail(): ended the worker process with exit code 7"),
        ("daemon", CallFailure.ENDED, "Error: fail(): ended the worker process with exit code 9"),
        ("kill", CallFailure.ENDED, "Error: fail(): the worker process was killed by SIGKILL, as the "),
        ("memory", CallFailure.ENDED, "Error: fail() ran out of memory"),
        ("fork", None, "forked"),
    ],
)
def test_a_tool_that_fails(host, how, failure, words):
    began = time.monotonic()
    told = result(host, "fail", how=how)
    assert (told.name, told.failure) == ("fail", failure)
    assert told.content.startswith(words)
    assert time.monotonic() - began < 5
    assert result(host, "calculate", expression="1+1").content == "2.0"


@pytest.mark.parametrize("how", ["sleep", "python", "c"])
def test_a_call_that_lasts_is_ended(how):
    host = started("spin", timeout_s=1.0, workers=1)
    assert result(host, "spin", how="sleep", seconds=0).failure is None
    told = result(host, "spin", how=how)
    assert (told.failure, told.content) == (CallFailure.TIMEOUT, "Error: spin() returned nothing within 1 s")
    assert result(host, "spin", how="sleep", seconds=0).failure is None
    host.close()


def test_calls_run_side_by_side_and_wait_for_a_worker(host):
    # Both workers run.
    results(host, *[("nap", {"seconds": 0.3})] * 2)
    began = time.monotonic()
    told = results(host, *[("nap", {"seconds": 0.5})] * 4)
    assert len({r.content for r in told}) == 2
    assert 0.9 < time.monotonic() - began < 2.0
    assert all(0.4 < r.seconds < 0.9 for r in told)


def test_prints_are_shown_up_to_a_limit(capfd):
    host = started("shout", workers=1)
    assert result(host, "shout", megabytes=200).content == "done"
    host.close()
    time.sleep(0.2)
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("it begins\nyyy") and len(err) < 5000
    assert err.endswith("y\n[what else this worker process prints is not shown]\n")


def test_close_ends_what_runs():
    host = started("nap", "wait", workers=1)
    assert result(host, "nap", seconds=0).failure is None
    told = []
    for name in ("nap", "wait", "nap"):
        host.call(ToolCall(name=name, arguments={"seconds": 20}), told.append)
    time.sleep(0.3)
    began = time.monotonic()
    host.close()
    host.call(ToolCall(name="nap", arguments={"seconds": 20}), told.append)
    time.sleep(0.3)
    assert time.monotonic() - began < 3
    assert [(r.name, r.failure) for r in told] == [
        (name, CallFailure.ENDED) for name in ("nap", "wait", "nap", "nap")
    ]
    assert told[0].content == "Error: it was not finished, because the run is ending"


# -- async -------------------------------------------------------------------------------------------------


def test_async_calls_share_a_process(host):
    result(host, "wait", seconds=0)
    began = time.monotonic()
    told = results(host, *[("wait", {"seconds": 0.5})] * 100)
    assert len({r.content for r in told}) == 1 and told[0].content != str(os.getpid())
    assert 0.9 < time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("how", "failure", "words"),
    [
        ("raise", CallFailure.RAISED, "Error: ValueError: async"),
        ("sys.exit", CallFailure.ENDED, "Error: wait() called sys.exit(2)"),
        ("os._exit", CallFailure.ENDED, "Error: wait(): ended the worker process with exit code 4"),
    ],
)
def test_an_async_tool_that_fails(host, how, failure, words):
    told = result(host, "wait", seconds=0, how=how)
    assert (told.failure, told.content) == (failure, words)
    assert result(host, "wait", seconds=0).failure is None


def test_async_calls_have_a_limit_each():
    host = started("wait", timeout_s=0.6)
    calls = [("wait", {"seconds": 20, "how": how}) for how in ("", "stubborn")]
    late, stubborn, fine = results(host, *calls, ("wait", {"seconds": 0.4}))
    assert (late.failure, stubborn.failure, fine.failure) == (CallFailure.TIMEOUT, CallFailure.TIMEOUT, None)
    assert late.content == "Error: wait() returned nothing within 0.6 s"
    assert result(host, "wait", seconds=0).content == fine.content
    # The loop does not answer: its process is ended, and a new one takes over.
    blocking, beside = results(host, ("wait", {"seconds": 20, "how": "block"}), ("wait", {"seconds": 0}))
    assert {blocking.failure, beside.failure} <= {CallFailure.TIMEOUT, CallFailure.ENDED}
    end = time.monotonic() + 10
    while (told := result(host, "wait", seconds=0)).failure is not None:
        assert time.monotonic() < end
    assert told.content != fine.content
    host.close()


# -- functions of a program --------------------------------------------------------------------------------


def test_live_tools():
    seen = []

    def note(text: str) -> str:
        """Note it.

        Args:
            text: what
        """
        if text == "slow":
            time.sleep(5)
        if text == "bad":
            sys.exit(1)
        seen.append(text)
        return threading.current_thread().name

    async def fetch(number: int) -> int:
        """Fetch it.

        Args:
            number: which
        """
        if number < 0:
            await __import__("asyncio").sleep(5)
        return number + len(seen)

    host = started(note, fetch, "calculate", timeout_s=0.5)
    assert list(host.schemas) == ["note", "fetch", "calculate"]
    told = results(
        host,
        ("note", {"text": "a"}),
        ("note", {"text": "slow"}),
        ("note", {"text": "bad"}),
        ("note", {}),
        ("fetch", {"number": -1}),
        ("calculate", {"expression": "1"}),
    )
    failures = (None, "timeout", "ended", "arguments", "timeout", None)
    assert tuple(r.failure for r in told) == failures
    assert result(host, "fetch", number="4").content == "5"
    assert seen == ["a"]
    host.close()


def test_a_program_without_a_guard_keeps_its_tools(tmp_path):
    """A script's own function is live; that of a guarded script is imported by a worker."""
    script = tmp_path / "train.py"
    body = '''
    import os, sys, time
    from covey.environments.tools import start_tools
    from covey.types import ToolCall

    def where() -> int:
        """Say where it runs."""
        return os.getpid()

    {guard}
        host, faults = start_tools([where], workers=1, timeout_s=9, memory_gb=1, max_result_chars=99)
        assert not faults, faults
        told = []
        host.call(ToolCall(name="where"), told.append)
        while not told:
            time.sleep(0.01)
        host.close()
        print(int(told[0].content) == os.getpid())
    '''
    for guard, is_here in (("if True:", True), ('if __name__ == "__main__":', False)):
        script.write_text(textwrap.dedent(body).format(guard=guard))
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == [str(is_here)], done.stderr
