"""Environments of covey's protocol, and those that fail."""

import ctypes
import os
import random
import sys
import time


class Maze:
    """Walk to a number."""

    closed = 0

    def reset(self, row, seed):
        self.goal, self.at = row["goal"], 0
        self.thread_of_reset = __import__("threading").get_ident()
        return f"Walk to {self.goal}. Luck: {random.random()}", [self.walk]

    def walk(self, steps: int):
        """Walk.

        Args:
            steps: how far
        """

    def step(self, turn):
        assert self.thread_of_reset == __import__("threading").get_ident()
        for call in turn["tool_calls"]:
            self.at += call["arguments"]["steps"]
        where = [{"role": "tool", "content": f"At {self.at}."}]
        match turn["text"]:
            case "plain":
                return where
            case "pair":
                return where, self.at == self.goal
            case "object":
                return {"messages": where, "done": True, "reward": 0.25}
            case "end":
                return None, True
        return where, self.at >= self.goal, self.at / self.goal

    def close(self):
        Maze.closed += 1


class Bad:
    """Fails as its row says."""

    def __init__(self):
        self.opened = time.monotonic()

    def reset(self, row, seed):
        return self.do(row.get("how"), ["hello"]) or "hello"

    def step(self, turn):
        return self.do(turn["text"], None)

    def do(self, how, value):
        match how:
            case "raise":
                raise KeyError("gold")
            case "five":
                return 5
            case "strings":
                return ["a", "b"]
            case "nan":
                return "x", False, float("nan")
            case "nothing":
                return None
            case "bytes":
                return [{"role": "user", "content": b"png"}]
            case "keys":
                return {"message": "x"}
            case "leave":
                sys.exit(3)
            case "die":
                os._exit(5)
            case "sleep":
                time.sleep(20)
            case "spin":
                while True:
                    pass
            case "hold":
                ctypes.PyDLL(None).usleep(30_000_000)
            case "pid":
                return str(os.getpid())
        return "fine"


class Raises:
    def __init__(self):
        raise OSError("no server at port 80")

    def reset(self, row, seed):
        return "x"


class NoReset:
    def step(self, turn):
        return "x"


class NoHints:
    def reset(self, **kwargs):
        return None

    def first(self, a):
        """Do it."""

    def second(self, a: int):
        return a


class WantsMore:
    def reset(self, row, seed, difficulty):
        return "x"

    def step(self, turn, mood):
        return "x"


class ByPosition:
    def reset(self, row, /):
        return "x"
