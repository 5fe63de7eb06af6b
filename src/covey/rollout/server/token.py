"""The token of a server: random, in a file that its owner alone can read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from covey.rollout.server.call import read_token
from covey.rollout.server.values import WireError
from covey.texts import tr

ENDS_WITH_INPUT = "COVEY_ENDS_WITH_INPUT"
"""The environment variable of a server that ends with its standard input, which the run holds that it is
for."""


def own_token(path: Path) -> str:
    """The token in the file, which is written with a new one where there is none.

    OSError where it cannot be read or written, WireError where others may read it or it holds no token.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise WireError(tr("other users can read it (mode {mode:o})", mode=mode)) from None
        return read_token(str(path))
    token = secrets.token_urlsafe(32)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{token}\n")
    except OSError as error:
        # An empty file would be taken for a token's the next time.
        path.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
    return token
