"""The scheduler of a rollout server without the server: which clients it serves."""

from __future__ import annotations

from typing import Any

import pytest

from covey.environments.scheduler_host import start_room
from covey.environments.scheduler_room import SchedulerSettings
from covey.rollout.server.schedulers import ServedScheduler
from covey.rollout.server.values import WireError
from support.schedulers import PLUGIN, SAMPLING, USER


def test_a_client_is_served_until_its_last_connection_ends() -> None:
    """One that connects again may be there before it is seen that its former connection has ended."""
    settings = SchedulerSettings(name="Each", plugins=[PLUGIN])
    room, faults = start_room(settings, timeout_s=20.0)
    assert room is not None, faults
    served = ServedScheduler(settings, False, room)
    row = {"kind": "Again", "prompt": [USER]}

    def ask(client: str, do: str, **more: Any) -> dict[str, Any]:
        return served.ask(client, {"do": do, "key": "0", **more}).result(30)

    try:
        served.attend("a")
        served.attend("b")
        assert set(ask("a", "open", row=row, seed=1, sampling=SAMPLING)) == {"opened"}
        assert set(ask("b", "open", row=row, seed=1, sampling=SAMPLING)) == {"opened"}
        served.attend("a")
        served.leave("a")
        served.leave("b")
        turn = {"text": "Six.", "token_ids": [1], "logprobs": [0.0], "finish": "stop", "length": 3}
        assert set(ask("a", "step", turn=turn)) == {"stepped"}
        served.leave("a")
        for client in ("a", "b"):
            with pytest.raises(WireError):
                ask(client, "step", turn=turn)
    finally:
        served.close()
