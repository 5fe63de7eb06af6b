"""What some tests need beside Python and make, how it is found, and the line that installs it.

A test says `@pytest.mark.needs("bubblewrap")`; a fixture calls `need("bubblewrap")`, or `lacks("a registry",
why)` after a try that failed. Without what it needs a test is skipped, and the end of the run names the tests
and that line. With COVEY_NEEDS_ALL=1, as CI runs them, it fails.

`python tests/support/needs.py` prints the packages that apt-get would have to install here. Only `.ci/run`
installs them; it asks before there is an environment, so Python's own library has to be enough.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

# Of linux/capability.h: CAP_NET_ADMIN and CAP_SYS_ADMIN.
_ROOTS_RIGHTS = 1 << 12 | 1 << 21


@dataclass(frozen=True)
class Need:
    """Commands, the packages of Debian that hold them, and what else has to hold with how one comes by it."""

    commands: tuple[str, ...] = ()
    packages: str = ""
    holds: Callable[[], bool] = lambda: True
    otherwise: str = ""

    @property
    def missing(self) -> list[str]:
        """The commands that are not there."""
        return [name for name in self.commands if shutil.which(name) is None]

    @property
    def line(self) -> str:
        """How this machine comes by what it lacks."""
        is_installed = self.otherwise and not self.missing
        return self.otherwise if is_installed else f"apt-get install {self.packages}"


def _has_rights() -> bool:
    """Whether this process may make networks and mount file systems; root may not in most containers."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    held = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return held & _ROOTS_RIGHTS == _ROOTS_RIGHTS


@functools.cache
def _reaches_registry() -> bool:
    """Whether pip, with its own settings, finds a package."""
    words = "-m pip --retries 0 --timeout 10 index versions hatchling"
    return subprocess.run([sys.executable, *words.split()], capture_output=True, check=False).returncode == 0


_AS_ROOT = "root with CAP_NET_ADMIN and CAP_SYS_ADMIN (in Docker: --privileged)"
NEEDS = {
    "bubblewrap": Need(("bwrap",), "bubblewrap"),
    "a C compiler": Need(
        (os.environ.get("CC") or "cc",), "gcc libc6-dev", lambda: sys.platform == "linux", "Linux"
    ),
    "openssl": Need(("openssl",), "openssl"),
    "make": Need(("make",), "make"),
    "npm": Need(("npm",), "npm"),
    "two machines": Need(
        *(("ip", "nsenter", "unshare", "hostname"), "iproute2 util-linux hostname"), _has_rights, _AS_ROOT
    ),
    "a small disk": Need(("mount", "umount"), "mount", _has_rights, _AS_ROOT),
    "a registry": Need(
        holds=_reaches_registry, otherwise="a network, or a mirror in pip's and npm's own settings"
    ),
}


def has(name: str) -> bool:
    """Whether this machine has what one of NEEDS names."""
    return not NEEDS[name].missing and NEEDS[name].holds()


def need(*names: str) -> None:
    """Skip this test where one of NEEDS is not there; fail where all of them have to be."""
    for name in names:
        if not has(name):
            lacks(name)


def lacks(name: str, why: str = "") -> NoReturn:
    """Skip this test for want of one of NEEDS, or fail; `why` is what was seen."""
    import pytest

    seen = f" ({why})" if why else ""
    text = f"needs {name}{seen}: {NEEDS[name].line}"
    if os.environ.get("COVEY_NEEDS_ALL"):
        pytest.fail(text, pytrace=False)
    pytest.skip(text)


if __name__ == "__main__":
    sys.stdout.write(" ".join(sorted({need.packages for need in NEEDS.values() if need.missing})) + "\n")
