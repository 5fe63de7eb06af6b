"""What every test shares: one thread, and a comparison that proves of itself that it can fail."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.needs import need
from support.quick import QUICK

# Nothing that is imported and collected is garbage; looking for some takes a fifth of that time.
gc.disable()

# Where these are set, pytest explains in full why two values differ, by difflib: for two lists of numbers
# that takes hours, also inside pytest.raises(AssertionError).
for _name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(_name, None)

# A shell starts what stands in the background with Ctrl-C ignored, and so would every process of a test be.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Whole runs in processes of their own, and the snippets of the documents: run by `make test-whole`.
_WHOLE = (
    *("contract/", "torture/", "docs/test_documents.py::test_snippets_run", "invariance/test_gpu_bench.py"),
    "journeys/test_ahead.py::test_a_run_without_servers",
    "journeys/test_schedulers.py::test_two_processes",
    *("mutants/test_ranks.py", "journeys/test_disk.py", "journeys/test_engine_memory.py"),
    *("journeys/test_launchers.py", "journeys/test_live_objects.py", "journeys/test_memory.py"),
    *("journeys/test_notebook.py", "journeys/test_trl_ranks.py", "journeys/test_reward_models.py"),
    *("unit/trl/test_trainer.py::test_logs", "unit/trl/test_trainer.py::test_events"),
    *("journeys/test_processes.py", "journeys/test_ray.py", "journeys/test_trl_scripts.py"),
    *("journeys/test_trackers.py", "learning/", "faults/test_endings.py", "faults/test_failures.py"),
    *("faults/test_exchange.py", "faults/test_hangs.py", "faults/test_machines.py"),
    *("faults/test_programs.py", "faults/test_ranks.py", "faults/test_restarts.py", "faults/test_server"),
    *("faults/test_signs.py", "faults/test_turns_lost.py", "invariance/test_turns.py", "real/"),
    "invariance/test_images.py",
    "resume/test_turns.py",
)
# Seconds from which a part of a test is named with its time.
_LONG_S = 30.0


class _NamesFailures:
    """Prints each failure as it comes, and what takes long: a run that is ended at its time limit has named
    what failed, and where the time went. At the end, which tests were skipped for want of what this machine
    lacks."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal, self._began = terminal, time.monotonic()
        self._skipped: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        what = f"{report.nodeid} ({report.when})"
        if report.duration > _LONG_S:
            elapsed = time.monotonic() - self._began
            self._terminal.ensure_newline()
            self._terminal.write_line(f"{elapsed:.0f} s: {report.duration:.0f} s for {what}")
        if report.failed:
            self._terminal.ensure_newline()
            self._terminal.write_line(f"FAILED {what}\n{report.longreprtext[-3000:]}")
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if reason.startswith("needs "):
                self._skipped[reason][report.nodeid.partition("[")[0]] += 1

    def pytest_terminal_summary(self) -> None:
        for reason, tests in sorted(self._skipped.items()):
            self._terminal.section(f"{tests.total()} skipped: {reason}")
            for name, number in sorted(tests.items()):
                self._terminal.write_line(f"{name} ({number})" if number > 1 else name)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name.startswith(_WHOLE):
            item.add_marker(pytest.mark.whole)
        if name.startswith(QUICK):
            item.add_marker(pytest.mark.quick)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        need(*marker.args)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_NamesFailures(terminal))


@pytest.fixture(autouse=True, scope="session")
def _threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _libraries_are_no_garbage() -> None:
    """What the modules of the tests have imported is looked through once, not in each full collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _english() -> None:
    """Messages are compared in English, whatever the language of the machine."""
    os.environ["LC_ALL"] = "C.UTF-8"
    os.environ.pop("COVEY_LANG", None)


@pytest.fixture(scope="session")
def assert_close_guarded() -> Callable[..., None]:
    """Equal within `rtol` of the largest expected value; outputs of a broken maths must fail the same check.

    Zeros are compared exactly.
    """

    def check(actual: Any, expected: Any, rtol: float) -> None:
        assert rtol <= 1e-4, "a comparison this loose proves nothing"
        actual = torch.as_tensor(actual, dtype=torch.float64)
        expected = torch.as_tensor(expected, dtype=torch.float64)
        assert actual.shape == expected.shape, f"{tuple(actual.shape)} against {tuple(expected.shape)}"
        if not expected.numel():
            return
        error, largest = (actual - expected).abs().max().item(), expected.abs().max().item()
        assert error <= rtol * largest, f"off by {error:.3e} where the largest value is {largest:.3e}"
        if largest:
            for factor in (0.0, -1.0, 2.0):
                broken = (factor * actual - expected).abs().max().item()
                assert not broken <= rtol * largest, f"{factor:g} times it would pass, too"

    return check
