"""One rank of a run under an actor of Ray: a process of its own, as torchrun would start it.

Ray imports this file in each actor, on the machine of that actor. What the actor gets and returns is JSON as
bytes; the rank itself knows nothing of Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covey.exits import LAUNCHER, launcher_words, write_code
from covey.meeting import EXIT_FILE

# Output is read in chunks of at most this length; a rank waits while so many of them are not fetched yet.
_CHUNK_BYTES, _MOST_CHUNKS = 1 << 16, 64
# A call returns after so long without output, so that no call of an actor lasts for ever.
_CALL_S = 30.0
# Output is read for so long after the end of a rank: a process that it has started may hold it open.
_LAST_WORDS_S = 2.0
# Above the ports of Ray's workers, below those that Linux gives to outgoing connections.
_PORTS = (20000, 32000)
_OF_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_PASSED_ON = (
    *("COVEY_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH_", "PYTORCH_", "NCCL_", "GLOO_", "OMP_"),
    *("MKL_", "WANDB_", "SWANLAB_", "MLFLOW_", "MODELSCOPE_", "OPENAI_", "LANG", "LC_"),
    *("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"),
)


class RankProcess:
    """The process of one rank, and what it writes."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._said: queue.Queue[tuple[int, bytes] | None] = queue.Queue(_MOST_CHUNKS)
        self._code: int | None = None
        self._exit_file = ""

    def describe(self, asked: bytes) -> bytes:
        """Say where this is: the machine, the GPUs that Ray gave to this actor, a free port, and whether
        there is the folder {"folder"}."""
        gpus = next((os.environ[name] for name in _OF_GPUS if os.environ.get(name)), "")
        return _packed(
            machine=own_machine(),
            host=socket.gethostname(),
            cores=os.cpu_count() or 1,
            gpus=[gpu for gpu in gpus.split(",") if gpu],
            port=_free_port(),
            has_folder=os.path.isdir(json.loads(asked)["folder"]),
        )

    def start(self, order: bytes) -> bytes:
        """Start the rank; the answer has its number, or what the machine said against it.

        `order` is {"words", "environment", "of_rank", "folder", "is_here", "run", "gpus", "size"}: the words
        behind `covey`, the environment of the command, the variables of this rank, the folder, whether this
        is the machine that the command was typed on, the name of the run, the GPUs of all ranks of this
        machine, and the columns and lines of a terminal that shows this rank, or none.
        """
        given = json.loads(order)
        environment = _environment(given)
        self._exit_file = environment[EXIT_FILE]
        try:
            if not given["is_here"]:
                Path(self._exit_file).parent.mkdir(mode=0o700, exist_ok=True)
            command = [sys.executable, "-m", "covey", *given["words"]]
            self._process = self._started(command, environment, given["folder"], given["size"])
        except OSError as error:
            return _packed(error=f"{error.strerror or error}: {error.filename or given['folder']}")
        threading.Thread(target=self._wait, args=(self._process,), daemon=True).start()
        return _packed(pid=self._process.pid)

    def follow(self) -> bytes:
        """Return what the rank has written since the last call, or its end: {"said", "code", "left"}.

        `said` holds pairs of a file descriptor and text in Latin-1, which keeps every byte; `left` is the
        exit code of the run where a rank of this machine has left one.
        """
        said: list[tuple[int, str]] = []
        ended = False
        with contextlib.suppress(queue.Empty):
            chunk = self._said.get(timeout=_CALL_S)
            while chunk is not None:
                said.append((chunk[0], chunk[1].decode("latin-1")))
                chunk = self._said.get_nowait()
            ended = True
        return _packed(said=said, code=self._code if ended else None, left=self._left() if ended else None)

    def send_signal(self, number: bytes) -> bytes:
        """Send the signal {"number"} to the rank."""
        assert self._process is not None
        self._process.send_signal(json.loads(number)["number"])
        return _packed()

    def leave(self, code: bytes) -> bytes:
        """Leave {"code"} here, the exit code of the run that a rank on another machine has left."""
        write_code(self._exit_file, json.loads(code)["code"])
        return _packed()

    def clean(self, asked: bytes) -> bytes:
        """Remove what the ranks of this machine have left for each other."""
        shutil.rmtree(Path(self._exit_file).parent, ignore_errors=True)
        return _packed()

    def _started(
        self, command: list[str], environment: Mapping[str, str], folder: str, size: list[int] | None
    ) -> subprocess.Popen[bytes]:
        """The process, and threads that read what it writes."""
        if size is not None:
            reader, writer = _terminal(size)
            readers, writers = {reader: 1}, (writer, writer)
        else:
            (out, out_writer), (err, err_writer) = os.pipe(), os.pipe()
            readers, writers = {out: 1, err: 2}, (out_writer, err_writer)
        # The threads of an actor have signals blocked, and a process has those blocked that its parent has.
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=writers[0],
                stderr=writers[1],
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            for writer in set(writers):
                os.close(writer)
        self._readers = [
            threading.Thread(target=self._read, args=reader, daemon=True) for reader in readers.items()
        ]
        for thread in self._readers:
            thread.start()
        return process

    def _read(self, reader: int, number: int) -> None:
        # A terminal whose other side is closed is an input/output error.
        with contextlib.suppress(OSError):
            while chunk := os.read(reader, _CHUNK_BYTES):
                self._said.put((number, chunk))
        os.close(reader)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        for thread in self._readers:
            thread.join(_LAST_WORDS_S)
        self._code = code
        self._said.put(None)

    def _left(self) -> int | None:
        try:
            return int(Path(self._exit_file).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None


def _packed(**values: Any) -> bytes:
    return json.dumps(values).encode()


def own_machine() -> str:
    """What the processes of one machine or container have in common, and no others: its name, its boot and
    its process namespace."""
    words = [socket.gethostname()]
    with contextlib.suppress(OSError):
        words.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        words.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return " ".join(words)


def _free_port() -> int:
    """A port for the ranks to meet at."""
    for port in random.sample(range(*_PORTS), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"no free port from {_PORTS[0]} to {_PORTS[1]}")


def _environment(given: Mapping[str, Any]) -> dict[str, str]:
    """The environment of the rank: that of the command where it was typed on this machine; elsewhere that of
    the actor, with the command's variables for libraries."""
    typed: dict[str, str] = given["environment"]
    if given["is_here"]:
        environment = dict(typed)
    else:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {name: value for name, value in typed.items() if name.startswith(_PASSED_ON)}
        environment[EXIT_FILE] = str(Path(os.environ.get("TMPDIR", "/tmp")) / given["run"] / "exit")
    if given["gpus"]:
        name = next((name for name in _OF_GPUS if os.environ.get(name)), _OF_GPUS[0])
        environment[name] = ",".join(given["gpus"])
    # The rank ends with this actor, and the actor with Ray.
    return {**environment, **given["of_rank"], LAUNCHER: launcher_words()}


def _terminal(size: list[int]) -> tuple[int, int]:
    """Both ends of a terminal that passes every byte on as it is."""
    import fcntl
    import pty
    import struct
    import termios
    import tty

    reader, writer = pty.openpty()
    tty.setraw(writer)
    columns, lines = size
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    return reader, writer
