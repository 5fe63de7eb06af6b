"""The words of `covey plan` that say which machine is planned, taken from those of the run.

With `--plan_gpus` a few words of TRL and ms-swift say how model and engine lie on it: `--deepspeed
zero3_offload`, `--use_vllm true --vllm_mode colocate`. Without it they are refused, as by `covey train`. A
YAML file describes a run, which `covey train` can do, so none of them stands in one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.config.argv import take_out
from covey.config.take import Layer
from covey.options.schema import Config
from covey.options.verbs import PLAN_WORDS, LayoutOptions, PlanOptions
from covey.plan.deepspeed import PRESETS, FromFile, from_content, other_than_typed, unreadable
from covey.plan.layout import ENGINE_SHARE, DeepSpeedFile, Engine, Layout, Offload
from covey.plan.problem import problem
from covey.types import Fix, Problem, Severity

TAKEN = tuple(LayoutOptions.model_fields)
"""Words of TRL and ms-swift that say how a run lies on its GPUs."""

_MOST = 10**6
_OR_FILE = ", or the path of a JSON file"
_UNITS = {"gib": 1 << 30, "gb": 10**9, "mib": 1 << 20, "mb": 10**6}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|gb|mib|mb)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The machine that is planned, None for this one; what is printed of it; the other words.

    `surveyed` takes its place where a word of it is at fault: a machine of which nothing is known, so that
    nothing is said that only follows from the fault.
    """

    words: tuple[str, ...]
    layout: Layout | None = None
    surveyed: Layout | None = None
    ladder: bool = False
    as_json: bool = False
    problems: tuple[Problem, ...] = ()


def take_layout(argv: Sequence[str]) -> Planned:
    """Split the words of `covey plan` into its own and those of the run."""
    own, rest = take_out("plan", argv, PlanOptions, Config)
    layers = [own]
    if "plan_gpus" in own.named:
        others, rest = take_out("plan", rest, LayoutOptions, Config, has_words=False)
        layers.append(others)
    reader = _Reader(layers)
    layout = reader.layout()
    surveyed = layout
    if layout is None and any(name in reader.named for name in PLAN_WORDS if name != "ladder"):
        surveyed = Layout(num_gpus=reader.num_gpus(), gpu_bytes=0)
    return Planned(
        words=tuple(rest),
        layout=layout,
        surveyed=surveyed,
        ladder=reader.given.get("ladder", False),
        as_json=reader.given.get("json", False),
        problems=tuple(reader.problems),
    )


class _Reader:
    """Makes a layout of the options that were given; what is wrong with them goes to `problems`.

    `named` are all that were typed, `given` those with a value of their type.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.named = {name for layer in layers for name in layer.named}
        self.given = {name: typed.value for layer in layers for name, typed in layer.typed.items()}
        self.problems: list[Problem] = [problem for layer in layers for problem in layer.problems]

    def layout(self) -> Layout | None:
        """The layout, or None where none is asked for or a word of it cannot be read."""
        alone = [name for name in PLAN_WORDS if name in self.named and name not in ("ladder", "plan_gpus")]
        if "plan_gpus" not in self.named:
            if alone:
                self._lacks(alone[0], "plan_gpus", Fix(text="eight GPUs", edits={"plan_gpus": 8}))
            return None
        if "plan_gpu_memory" not in self.named:
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
            "asynchronous": self.given.get("async_generate", False),
            "file": file,
        }
        is_faulty = any(p.severity is Severity.ERROR for p in self.problems)
        return None if is_faulty else Layout(**fields)

    def num_gpus(self) -> int:
        """The GPUs that were asked for, 0 where nobody knows."""
        number: int = self.given.get("plan_gpus") or 0
        return number if 0 < number <= _MOST else 0

    def _states(self) -> tuple[int, Offload, DeepSpeedFile | None]:
        """Our own words over ms-swift's names, so that what a plan offers can be typed behind any command;
        beside a file they have to say the same."""
        read = self._file()
        if read is None:
            stage, offload = PRESETS[self._preset()]
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
        return int(self.given.get("plan_zero_stage", otherwise))

    def _typed_offload(self, otherwise: Offload) -> Offload:
        offload: Offload = self.given.get("plan_offload", otherwise)
        return offload

    def _preset(self) -> str:
        word: str = self.given.get("deepspeed", "zero0").lower()
        if word in PRESETS:
            return word
        self._unfit("deepspeed", word, f"one of {', '.join(PRESETS)}{_OR_FILE}", code="E104")
        return "zero0"

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
        sleeps: bool = self.given.get("vllm_enable_sleep_mode", self.number("sleep_level", 0) > 0)
        return sleeps

    def _engine(self) -> Engine:
        """vLLM where a word speaks of it, colocated unless vllm_mode says otherwise."""
        asked = any(name.startswith("vllm_") for name in self.named)
        if not self.given.get("use_vllm", asked):
            return "own"
        mode: Engine = self.given.get("vllm_mode", "colocate")
        return mode

    def _share(self) -> float:
        share: float = self.given.get("vllm_gpu_memory_utilization", ENGINE_SHARE)
        if 0 < share < 1:
            return share
        takes = "a share of a GPU's memory, between 0 and 1"
        self._unfit("vllm_gpu_memory_utilization", f"{share:g}", takes)
        return ENGINE_SHARE

    def _bytes(self, name: str) -> int:
        word = self.given.get(name, "80GB") or "none"
        match = _SIZE.fullmatch(word.strip())
        if match is None or not float(match[1]):
            self._unfit(name, word, "a size with its unit: 96GiB, 80GB")
            return 0
        return int(float(match[1]) * _UNITS[match[2].lower()])

    def number(self, name: str, least: int) -> int:
        """A whole number of at least `least`, which it is where nothing is given."""
        number: int | None = self.given.get(name, least)
        if number is not None and least <= number <= _MOST:
            return number
        word = "none" if number is None else str(number)
        self._unfit(name, word, f"a whole number from {least} on")
        return least

    def _unfit(self, name: str, word: str, takes: str, code: str = "E103") -> None:
        seen = f"{name} is {word} (flag --{name}); it takes {takes}."
        cause = "A slip of the hand, or the spelling of another tool."
        self.problems.append(problem(code, name, seen, cause, Fix(text=f"--{name} takes {takes}")))

    def _lacks(self, name: str, needed: str, fix: Fix) -> None:
        seen = f"{name} is given without {needed}."
        cause = "A part of the machine that is planned was left out."
        self.problems.append(problem("E115", name, seen, cause, fix))
