"""The ranks of a run as actors of Ray: what `covey train --launcher ray` starts in the place of torchrun.

    python -m covey.cli.ray_launcher NUM_RANKS VERB WORDS...

Each actor starts `covey VERB WORDS...` as a rank, with the variables that torchrun would set. This process
prints what the ranks write, passes signals on, and ends all of them as soon as one has failed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import exists
from pathlib import Path
from typing import Any

from covey.checks.ray.judge import unusable
from covey.checks.ray.look import find_ray
from covey.cli import show
from covey.cli.ending import Ending, code_after_signal, killed
from covey.cli.launch import OUTPUT_DIR
from covey.cli.listening import listening
from covey.cli.ray_actors import Actor, ActorGone, Cluster, Following, connected
from covey.cli.ray_rank import own_machine
from covey.cli.signals import CODES
from covey.errors import ConfigError
from covey.exits import AT_FAULT, follow_launcher, leave_code
from covey.meeting import EXIT_FILE
from covey.plan.words import coded
from covey.texts import joined, tr
from covey.texts.language import language_of, spoken
from covey.texts.terminal import say
from covey.training import failure
from covey.types import Fix

# Where a rank has failed the others have as long as torchrun gives them, from SIGTERM to SIGKILL.
_KILL_AFTER_S = 30.0
# Where an actor has died its rank ends soon, and the other ranks need a moment to find out and to say so.
_ACTOR_GONE_S = 6.0


@dataclass(slots=True)
class Rank:
    """A rank, its actor, and what that says of its machine; `local` is the rank's number there, and `code` is
    known once it has ended."""

    actor: Actor
    machine: str
    host: str
    cores: int
    gpus: list[str]
    port: int
    local: int = 0
    pid: int = 0
    code: int | None = None


@dataclass(slots=True)
class _Run:
    """A command as it was typed, in how many ranks it runs, and its environment.

    `ending` has the signals that this process got, `for_ranks` what the ranks get for them; `failed` is the
    first rank that has failed.
    """

    num_ranks: int
    words: list[str]
    environment: dict[str, str]
    ending: Ending
    machine: str = field(default_factory=own_machine)
    for_ranks: list[int] = field(default_factory=list)
    failed: int | None = None
    ends_others_at: float = 0.0

    @property
    def exit_file(self) -> Path:
        """Where rank 0 leaves the exit code of the run."""
        return Path(self.environment[EXIT_FILE])

    def take_signals(self) -> None:
        """Note each signal that comes, instead of ending."""
        for number in CODES:
            signal.signal(number, lambda number, frame: self.for_ranks.append(self.ending.receive(number)))


def main(words: Sequence[str]) -> int:
    """Run the command and return what a launcher returns: 0 where every rank did."""
    follow_launcher()
    ending = Ending(Path(os.environ[OUTPUT_DIR]))
    run = _Run(int(words[0]), list(words[1:]), dict(os.environ), ending)
    run.take_signals()
    try:
        with connected(find_ray(run.environment), run.num_ranks) as cluster:
            # Ray has put handlers of its own in place.
            run.take_signals()
            with cluster.placed(run.num_ranks, ending.received) as actors:
                if actors and not ending.received:
                    return _ranks(run, cluster, actors)
                return code_after_signal(ending.received[0], ())
    except ConfigError as error:
        show.problems(error.problems, language_of(run.environment))
        leave_code(AT_FAULT)
        return AT_FAULT


def _ranks(run: _Run, cluster: Cluster, actors: Sequence[Actor]) -> int:
    """Start the ranks and follow them to their end."""
    ranks = _described(run, actors)
    say("\n".join(map(spoken, _opening(cluster, ranks))))
    _start(run, ranks)
    _follow(run, ranks)
    _say_gone(run, ranks)
    for rank in _elsewhere(run, ranks):
        # Where the machine is gone there is nothing to clean.
        with contextlib.suppress(ActorGone):
            rank.actor.ask("clean")
    codes = [rank.code or 0 for rank in ranks]
    if run.ending.received:
        return code_after_signal(run.ending.received[0], codes)
    return int(any(codes))


def _described(run: _Run, actors: Sequence[Actor]) -> list[Rank]:
    """The ranks in their order: by machine, this one first, and by GPU; ConfigError (E388) where an actor
    does not come up, or has not the folder of the command."""
    folder = os.getcwd()
    ranks = []
    for actor in actors:
        try:
            said = actor.ask("describe", folder=folder)
        except ActorGone as error:
            seen = tr("No actor could be started on {address}: {error}", address=actor.address, error=error)
            install = Fix(text=tr("install the same covey and the same Ray on each machine of the cluster"))
            cause = tr("covey is not installed in Ray's environment on that machine.")
            raise ConfigError([unusable(seen, install, cause=cause)]) from error
        if not said.pop("has_folder"):
            seen = tr(
                "The machine {host} does not have the directory {folder}, in which this command was started.",
                host=said["host"],
                folder=folder,
            )
            shared = tr(
                "put the working directory, the data and output_dir on a disk that all machines share"
            )
            raise ConfigError([unusable(seen, Fix(text=shared))])
        ranks.append(Rank(actor, **said))
    # By length first: GPU 2 comes before GPU 10.
    ranks.sort(key=lambda r: (r.machine != run.machine, r.machine, [(len(gpu), gpu) for gpu in r.gpus]))
    count = Counter[str]()
    for rank in ranks:
        rank.local = count[rank.machine]
        count[rank.machine] += 1
    return ranks


def _start(run: _Run, ranks: Sequence[Rank]) -> None:
    """Start every rank; ConfigError (E388) where a machine cannot."""
    is_one = len({rank.machine for rank in ranks}) == 1
    address = "127.0.0.1" if is_one else ranks[0].actor.address
    for number, rank in enumerate(ranks):
        beside = [other for other in ranks if other.machine == rank.machine]
        of_rank = {
            "RANK": str(number),
            "WORLD_SIZE": str(len(ranks)),
            "LOCAL_RANK": str(rank.local),
            "LOCAL_WORLD_SIZE": str(len(beside)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(ranks[0].port),
        }
        if "OMP_NUM_THREADS" not in run.environment:
            of_rank["OMP_NUM_THREADS"] = str(max(1, rank.cores // len(beside)))
        order = {
            "words": run.words,
            "environment": run.environment,
            "of_rank": of_rank,
            "folder": os.getcwd(),
            "is_here": rank.machine == run.machine,
            "run": run.exit_file.parent.name,
            "gpus": [gpu for other in beside for gpu in other.gpus],
            "size": _terminal_size() if number == 0 else None,
        }
        answer = rank.actor.ask("start", **order)
        if "error" in answer:
            seen = tr(
                "Rank {number} could not be started on {host}: {error}.",
                number=number,
                host=rank.host,
                error=answer["error"],
            )
            raise ConfigError([unusable(seen)])
        rank.pid = answer["pid"]


def _follow(run: _Run, ranks: Sequence[Rank]) -> None:
    """Print what the ranks write until all have ended; pass signals on, and end all with the first that
    fails."""
    following = Following([rank.actor for rank in ranks])
    passed_on, is_told = 0, False
    while any(rank.code is None for rank in ranks):
        for number, news in following.news():
            _take(run, ranks, number, news)
        for number in run.for_ranks[passed_on:]:
            passed_on += 1
            _signal(ranks, number)
        have_ended = [rank.code is not None for rank in ranks]
        if run.ending.received and run.ending.is_overdue(has_one_ended=any(have_ended)):
            _signal(ranks, signal.SIGKILL)
        now = time.monotonic()
        if run.failed is not None and now > run.ends_others_at:
            _signal(ranks, signal.SIGKILL if is_told else signal.SIGTERM)
            is_told, run.ends_others_at = True, now + _KILL_AFTER_S


def _take(run: _Run, ranks: Sequence[Rank], number: int, news: Mapping[str, Any] | None) -> None:
    """Print what a rank wrote; where it has ended, take the exit code that it has left to the other
    machines."""
    rank = ranks[number]
    if news is None:
        rank.code = -signal.SIGKILL
    else:
        for descriptor, text in news["said"]:
            stream = sys.stdout.buffer if descriptor == 1 else sys.stderr.buffer
            stream.write(text.encode("latin-1"))
            stream.flush()
        rank.code = news["code"]
        if news["left"] is not None:
            leave_code(news["left"])
    if rank.code is None:
        return
    if exists(run.exit_file):
        code = int(run.exit_file.read_text(encoding="ascii"))
        for other in _elsewhere(run, ranks):
            other.actor.tell("leave", code=code)
    if rank.code and run.failed is None:
        run.failed = number
        run.ends_others_at = time.monotonic() + (_ACTOR_GONE_S if news is None else 0.0)


def _say_gone(run: _Run, ranks: Sequence[Rank]) -> None:
    """Say F133 where no rank was left to say that one of them was killed."""
    if run.failed is None or exists(run.exit_file) or run.ending.is_hurried:
        return
    output_dir = run.ending.output_dir
    if run.ending.received:
        lost = [n for n, rank in enumerate(ranks) if (rank.code or 0) < 0 and -(rank.code or 0) not in CODES]
        if not lost:
            return
        finding = killed(lost, run.ending)
    else:
        rank = ranks[run.failed]
        if (rank.code or 0) > 0:
            # It has said why itself; one that was killed has a code below 0.
            return
        who = tr("rank {failed} (process {pid} on {host})", failed=run.failed, pid=rank.pid, host=rank.host)
        finding = failure.of_others("F133", who, None, output_dir)
    failure.record(finding, output_dir, None)
    show.finding(finding, language_of(run.environment))
    leave_code(1)


def _signal(ranks: Sequence[Rank], number: int) -> None:
    for rank in ranks:
        if rank.code is None:
            rank.actor.tell("send_signal", number=int(number))


def _elsewhere(run: _Run, ranks: Sequence[Rank]) -> list[Rank]:
    """The first rank of each other machine."""
    return [rank for rank in ranks if rank.local == 0 and rank.machine != run.machine]


def _opening(cluster: Cluster, ranks: Sequence[Rank]) -> list[str]:
    """What is said before the ranks begin: which Ray it is, and who can reach its ports."""
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    each = tr(
        "{num_ranks} actors, each with one {kind}, on {hosts}",
        num_ranks=len(ranks),
        kind=cluster.kind,
        hosts=joined(", ", hosts),
    )
    meet = tr(
        "The ranks meet at port {port} of {hosts} (torch); this port is open on all network addresses.",
        port=ranks[0].port,
        hosts=hosts[0],
    )
    if cluster.address is not None:
        text = tr(
            "{version} at {address}; {each}. Ray that was started without RAY_AUTH_MODE=token lets anyone "
            "who reaches its ports run code in it. {meet}",
            version=cluster.version,
            address=cluster.address,
            each=each,
            meet=meet,
        )
    else:
        text = tr(
            "{version}, started for this run and stopped when the run ends; {each}. Its ports: {ports}; "
            "they accept only the token of this run. {meet}",
            version=cluster.version,
            each=each,
            ports=_ports(),
            meet=meet,
        )
    text += tr(" Ray pickles what its own processes send to each other; covey only passes bytes to it.")
    return coded(tr("ray"), text)


def _ports() -> str:
    """The ports of what this process has started, by address."""
    found = sorted(listening(os.getpid()).items())
    listed = [
        tr("{ports} on {address}", ports=joined(", ", map(str, ports)), address=address)
        for address, ports in found
    ]
    return joined("; ", listed) or tr("not known on this system")


def _terminal_size() -> list[int] | None:
    """Columns and lines where both outputs are one terminal, so that rank 0 shows its line there."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return None
    return list(shutil.get_terminal_size())


if __name__ == "__main__":
    returned = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # What Ray does at the end of Python waits for ever for a cluster that is gone.
    os._exit(returned)
