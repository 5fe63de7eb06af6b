"""The words of `covey plan` that say which machine is planned, taken from those of the run.

With `--plan_gpus` a few words of TRL and ms-swift say how model and engine lie on it: `--deepspeed
zero3_offload`, `--use_vllm true --vllm_mode colocate`. Without it they are refused, as by `covey train`. A
YAML file describes a run, which `covey train` can do, so none of them stands in one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from covey.config.foreign import PLAN_WORDS
from covey.config.names import normalise
from covey.config.values import FALSE_WORDS, TRUE_WORDS
from covey.plan.deepspeed import PRESETS, FromFile, from_content, other_than_typed, unreadable
from covey.plan.layout import ENGINE_SHARE, OFFLOADS, STAGES, DeepSpeedFile, Engine, Layout, Offload
from covey.plan.problem import problem
from covey.types import Fix, Problem, Severity

TAKEN = (
    "deepspeed",
    "use_vllm",
    "vllm_mode",
    "vllm_gpu_memory_utilization",
    "vllm_tensor_parallel_size",
    "vllm_enable_sleep_mode",
    "sleep_level",
    "async_generate",
)
"""Words of TRL and ms-swift that say how a run lies on its GPUs."""

_STAGES = tuple(map(str, STAGES))
_MOST = 10**6
_OR_FILE = ", or the path of a JSON file"
_UNITS = {"gib": 1 << 30, "gb": 10**9, "mib": 1 << 20, "mb": 10**6}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|gb|mib|mb)", re.IGNORECASE)
_FLAG = re.compile(r"-+[A-Za-z_]")
_SWITCHES = ("ladder", "use_vllm", "vllm_enable_sleep_mode", "async_generate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The machine that is planned, None for this one; whether a ladder is asked for; the other words.

    `surveyed` takes its place where a word of it is at fault: a machine of which nothing is known, so that
    nothing is said that only follows from the fault.
    """

    words: tuple[str, ...]
    layout: Layout | None = None
    surveyed: Layout | None = None
    ladder: bool = False
    problems: tuple[Problem, ...] = ()


def take_layout(argv: Sequence[str]) -> Planned:
    """Split the words of `covey plan` into its own and those of the run."""
    given, rest = _split(argv, PLAN_WORDS)
    if "plan_gpus" in given:
        others, rest = _split(rest, TAKEN)
        given |= others
    reader = _Reader(given)
    ladder = reader.switch("ladder")
    layout = reader.layout()
    surveyed = layout
    if layout is None and any(name in given for name in PLAN_WORDS if name != "ladder"):
        surveyed = Layout(num_gpus=reader.num_gpus(), gpu_bytes=0)
    return Planned(
        words=tuple(rest),
        layout=layout,
        surveyed=surveyed,
        ladder=ladder,
        problems=tuple(reader.problems),
    )


def _split(argv: Sequence[str], names: Any) -> tuple[dict[str, str], list[str]]:
    """The values of flags with these names, and all other words."""
    given: dict[str, str] = {}
    rest: list[str] = []
    current = ""
    for word in argv:
        if _FLAG.match(word):
            name, _, value = word.partition("=")
            current = normalise(name) if normalise(name) in names else ""
            if current:
                given[current] = value
                continue
        is_value = current and not given[current]
        # A file after a switch is the run's, as everywhere.
        if is_value and not (current in _SWITCHES and word.lower().endswith((".yaml", ".yml"))):
            given[current] = word
        else:
            rest.append(word)
    return given, rest


class _Reader:
    """Reads the words one by one; what is wrong with them goes to `problems`."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.given = given
        self.problems: list[Problem] = []

    def layout(self) -> Layout | None:
        """The layout, or None where none is asked for or a word of it cannot be read."""
        alone = [name for name in PLAN_WORDS if name in self.given and name not in ("ladder", "plan_gpus")]
        if "plan_gpus" not in self.given:
            if alone:
                self._lacks(alone[0], "plan_gpus", Fix(text="eight GPUs", edits={"plan_gpus": 8}))
            return None
        if "plan_gpu_memory" not in self.given:
            self._lacks(
                "plan_gpus", "plan_gpu_memory", Fix(text="of 80 GB", edits={"plan_gpu_memory": "80GB"})
            )
        stage, offload, file = self._states()
        fields: dict[str, Any] = {
            "num_gpus": self.number("plan_gpus", 1),
            "gpu_bytes": self._bytes("plan_gpu_memory"),
            "zero_stage": stage,
            "offload": offload,
            "engine": self._engine(),
            "engine_share": self._share(),
            "engine_parallel": self.number("vllm_tensor_parallel_size", 1),
            "engine_sleeps": self._sleeps(),
            "asynchronous": self.switch("async_generate"),
            "file": file,
        }
        is_faulty = any(p.severity is Severity.ERROR for p in self.problems)
        return None if is_faulty else Layout(**fields)

    def num_gpus(self) -> int:
        """The GPUs that were asked for, 0 where nobody knows."""
        word = self.given.get("plan_gpus", "")
        return int(word) if word.isdigit() and int(word) <= _MOST else 0

    def _states(self) -> tuple[int, Offload, DeepSpeedFile | None]:
        """Our own words over ms-swift's names, so that what a plan offers can be typed behind any command;
        beside a file they have to say the same."""
        read = self._file()
        if read is None:
            stage, offload = PRESETS[self.choice("deepspeed", tuple(PRESETS), _OR_FILE)]
            return self._typed_stage(stage), self._typed_offload(offload), None
        self.problems += read.problems
        if any(p.severity is Severity.ERROR for p in read.problems):
            return 0, "none", None
        path, stage, offload = read.file.path, read.stage, read.offload
        if (typed := self._typed_stage(stage)) != stage:
            self.problems.append(other_than_typed(path, "plan_zero_stage", str(typed), str(stage)))
        if (word := self._typed_offload(offload)) != offload:
            self.problems.append(other_than_typed(path, "plan_offload", word, offload))
        return stage, offload, read.file

    def _typed_stage(self, otherwise: int) -> int:
        word = self._typed("plan_zero_stage", _STAGES)
        return otherwise if word is None else int(word)

    def _typed_offload(self, otherwise: Offload) -> Offload:
        word = self._typed("plan_offload", OFFLOADS)
        return next((offload for offload in OFFLOADS if offload == word), otherwise)

    def _typed(self, name: str, choices: tuple[str, ...]) -> str | None:
        """The word that is typed, None where none is, or one that is at fault."""
        if name not in self.given:
            return None
        word = self.choice(name, choices)
        return word if word == self.given[name].lower() else None

    def _file(self) -> FromFile | None:
        """What a file of DeepSpeed says; None for ms-swift's names, and where there is no such file."""
        path = self.given.get("deepspeed", "")
        if not path or path.lower() in PRESETS or not Path(path).exists():
            return None
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            words = (error.strerror if isinstance(error, OSError) else None) or str(error)
            return FromFile(file=DeepSpeedFile(path=path), problems=(unreadable(path, words),))
        return from_content(content, path)

    def _sleeps(self) -> bool:
        if "vllm_enable_sleep_mode" in self.given:
            return self.switch("vllm_enable_sleep_mode")
        return self.number("sleep_level", 0) > 0

    def _engine(self) -> Engine:
        """vLLM where a word speaks of it, colocated unless vllm_mode says otherwise."""
        asked = any(name.startswith("vllm_") for name in self.given)
        if not (self.switch("use_vllm") if "use_vllm" in self.given else asked):
            return "own"
        if "vllm_mode" not in self.given:
            return "colocate"
        modes: tuple[Engine, ...] = get_args(Engine)[1:]
        return next(mode for mode in modes if mode == self.choice("vllm_mode", modes))

    def _share(self) -> float:
        word = self.given.get("vllm_gpu_memory_utilization")
        try:
            share = ENGINE_SHARE if word is None else float(word)
        except ValueError:
            share = 0.0
        if not 0 < share < 1:
            self._unfit(
                "vllm_gpu_memory_utilization", word or "", "a share of a GPU's memory, between 0 and 1"
            )
            return ENGINE_SHARE
        return share

    def _bytes(self, name: str) -> int:
        word = self.given.get(name, "80GB")
        match = _SIZE.fullmatch(word.strip())
        if match is None or not float(match[1]):
            self._unfit(name, word, "a size with its unit: 96GiB, 80GB")
            return 0
        return int(float(match[1]) * _UNITS[match[2].lower()])

    def number(self, name: str, least: int) -> int:
        """A whole number of at least `least`, which it is where nothing is given."""
        word = self.given.get(name, str(least))
        if not word.isdigit() or not least <= int(word) <= _MOST:
            self._unfit(name, word, f"a whole number from {least} on")
            return least
        return int(word)

    def choice(self, name: str, choices: tuple[str, ...], or_else: str = "") -> str:
        """One of a few words, the first where nothing is given; `or_else` is what else could be."""
        word = self.given.get(name, choices[0]).lower()
        if word in choices:
            return word
        self._unfit(name, word, f"one of {', '.join(choices)}{or_else}", code="E104")
        return choices[0]

    def switch(self, name: str) -> bool:
        """Whether a switch is on; alone it is."""
        word = self.given.get(name, "false").lower()
        if word and word not in TRUE_WORDS | FALSE_WORDS:
            self._unfit(name, word, "true or false")
        return not word or word in TRUE_WORDS

    def _unfit(self, name: str, word: str, takes: str, code: str = "E103") -> None:
        seen = f"{name} is {word or 'without a value'} (flag --{name}); it takes {takes}."
        cause = "A slip of the hand, or the spelling of another tool."
        self.problems.append(problem(code, name, seen, cause, Fix(text=f"--{name} takes {takes}")))

    def _lacks(self, name: str, needed: str, fix: Fix) -> None:
        seen = f"{name} is given without {needed}."
        cause = "A part of the machine that is planned was left out."
        self.problems.append(problem("E115", name, seen, cause, fix))
