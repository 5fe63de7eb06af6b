"""Tools as people write them, and tools that fail in every way."""

import asyncio
import ctypes
import os
import random
import signal
import sys
import time
from enum import Enum
from typing import Literal


class Unit(Enum):
    C = "celsius"
    F = "fahrenheit"


def calculate(expression: str) -> float:
    """
    Add numbers.

    Args:
        expression: numbers with + between them

    Returns:
        The sum.
    """
    return sum(float(part) for part in expression.split("+"))


def echo(
    n: int = 0,
    x: float = 0.0,
    flag: bool = False,
    words: list[str] | None = None,
    table: dict[str, int] | None = None,
    mode: Literal["a", "b"] = "a",
    unit: Unit = Unit.C,
    text: str = "",
) -> dict:
    """Give back what it is given.

    Args:
        n: a whole number
        x: a number
        flag: yes or no
        words: some words
        table: numbers by name
        mode: how
        unit: the unit
        text: a text
    """
    return {"n": n, "x": x, "flag": flag, "words": words, "table": table, "mode": mode, "text": text} | {
        "unit": unit.name
    }


def spin(how: str, seconds: float = 30.0) -> str:
    """Take long.

    Args:
        how: in which way
        seconds: how long
    """
    if how == "c":
        # Sleeps in C with the interpreter's lock held.
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    elif how == "python":
        while True:
            pass
    time.sleep(seconds)
    return f"slept in {os.getpid()}"


def nap(seconds: float) -> int:
    """Sleep.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return os.getpid()


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no")


def fail(how: str) -> object:
    """Fail.

    Args:
        how: in which way
    """
    match how:
        case "raise":
            raise ValueError("two\nlines of\n words")
        case "unspeakable":
            raise Unspeakable
        case "key":
            return {}["gold"]
        case "sys.exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "os._exit":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory":
            return len(bytearray(4 * 2**30))
        case "fork":
            os.fork()
            return "forked"
        case "daemon":
            if os.fork() == 0:
                os.setsid()
                time.sleep(20)
                os._exit(0)
            os._exit(9)
    return how


def give(what: str) -> object:
    """Give a result.

    Args:
        what: which one
    """
    return {
        "none": None,
        "list": [1, {"a": "ä"}],
        "long": "x" * 5000 + "the end",
        "object": Unit.C,
        "half": "a\ud800b",
    }[what]


def shout(megabytes: int) -> str:
    """Print a lot.

    Args:
        megabytes: how much
    """
    sys.stdout.write("it begins\n")
    for _ in range(megabytes):
        sys.stdout.write("y" * 2**20)
    return "done"


async def wait(seconds: float, how: str = "") -> str:
    """Wait.

    Args:
        seconds: how long
        how: in which way
    """
    match how:
        case "block":
            time.sleep(seconds)
        case "stubborn":
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                await asyncio.sleep(seconds)
        case "raise":
            raise ValueError("async")
        case "sys.exit":
            sys.exit(2)
        case "os._exit":
            os._exit(4)
    await asyncio.sleep(seconds)
    return str(os.getpid())


def no_hints(a, b: int):
    """Do it.

    Args:
        a: one
        b: two
    """


def no_docstring(a: int):
    return a


def not_described(a: int, b: int):
    """Do it.

    Args:
        a: one
    """


def custom(a: random.Random):
    """Do it.

    Args:
        a: one
    """


def many(*a: int):
    """Do it.

    Args:
        a: one
    """


def misspelt(a: "Itn"):  # noqa: F821
    """Do it.

    Args:
        a: one
    """
