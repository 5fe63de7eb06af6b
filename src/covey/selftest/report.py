"""The table of a self test, fit to be pasted into an issue: versions and numbers, no names and no secrets."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from covey.selftest.bounds import BOUNDS
from covey.selftest.checks import Measured
from covey.selftest.subject import Subject
from covey.texts import counted, joined, padded, tr
from covey.token_streams import StreamKind
from covey.types import Finding, Fix

_WIDTH = max(len(name) for name in BOUNDS)

_LAYOUTS: Mapping[StreamKind, str] = {
    "prefix": tr("streams of rows that share prompts"),
    "packed": tr("streams of packed rows"),
    "padded": tr("padded rows, because the model mixes packed rows (F105)"),
}

# Everybody's home, and everything from a word on that looks like the name of a secret.
_HOME = re.compile(r"(?:/(?:home|Users)/|[A-Za-z]:\\Users\\)[^/\\\s]+")
_SECRET = re.compile(r"[^\s/\\]*(?:key|token|secret)[^\n]*", re.IGNORECASE)


def redacted(text: str) -> str:
    """Text without secrets and user names: a home is ~, and what follows a word like API_KEY is hidden.

    `redacted("HF_TOKEN=hf_abc")` is "[redacted]".
    """
    text = _SECRET.sub("[redacted]", text)
    home = str(Path.home())
    text = _HOME.sub("~", text.replace(home, "~") if len(home) > 1 else text)
    for name in {Path.home().name, os.environ.get("USER", ""), os.environ.get("USERNAME", "")} - {""}:
        text = re.sub(rf"(?<=[/\\]){re.escape(name)}(?=[/\\\s]|$)", "~", text)
    return text


def header(tested: Subject, model: str | None) -> list[str]:
    """Versions, device, system and model; `model` is what was typed, None for the built-in one."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    named_model = tr("built-in") if model is None else redacted(model)
    checked = padded(tr("check"), _WIDTH)
    device, threads = tested.device, torch.get_num_threads()
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return [
        tr(
            "covey {version}, python {python_version}, {libraries}",
            version=version("covey"),
            python_version=platform.python_version(),
            libraries=libraries,
        ),
        tr(
            "device  {type}: {named}, {threads}",
            type=device.type,
            named=named,
            threads=counted(threads, "thread"),
        ),
        tr("system  {platform}", platform=redacted(platform.platform())),
        tr(
            "model   {redacted}: {family}, {parameters:.2f} M parameters, float32",
            redacted=named_model,
            family=tested.family,
            parameters=tested.parameters / 1e6,
        ),
        tr(
            "layout  {layouts}, {attention} attention",
            layouts=_LAYOUTS[tested.stream],
            attention=tested.attention,
        ),
        "",
        tr("{check}  measured     bound", check=checked),
    ]


def _processor() -> str:
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def line(row: Measured) -> str:
    """One check."""
    verdict = tr("FAIL") if row.failed else tr("pass")
    if row.unused:
        verdict = tr("not used: {unused}", unused=row.unused)
    numbers = f"  {_number(row.value):>8}  {_number(row.limit):>8}  "
    return joined("", (padded(row.name, _WIDTH), numbers, verdict))


def _number(value: float) -> str:
    """Whole numbers stand as they are, so that exactly zero and what rounds to it never look alike."""
    return f"{value:.0f}" if value.is_integer() else f"{value:.1e}"


def verdict(rows: Sequence[Measured]) -> str:
    """One line on all of it."""
    failed = sum(row.failed for row in rows)
    count = sum(not row.unused for row in rows)
    return (
        tr("FAILED: {failed} of {count} checks", failed=failed, count=count)
        if failed
        else tr("passed: {count} of {count} checks", count=count)
    )


def finding(rows: Sequence[Measured], device: torch.device) -> Finding:
    """What failed, in four parts."""
    failed = [row for row in rows if row.failed]
    seen = joined(
        "; ",
        [
            tr(
                "{name} is {number}, but at most {bound} is allowed",
                name=r.name,
                number=_number(r.value),
                bound=_number(r.limit),
            )
            for r in failed
        ],
    )
    first = BOUNDS[failed[0].name]
    elsewhere = "cpu" if device.type == "cuda" else "auto"
    return Finding(
        code="F120",
        seen=seen,
        why=tr(
            "{reason} Training on this machine would differ from the configuration, and no metric would "
            "show it.",
            reason=first.reason,
        ),
        cause=tr("covey, a library or the hardware has an error in {part}.", part=first.part),
        fixes=(
            Fix(text=tr("report the table in an issue")),
            Fix(text=tr("install the versions in constraints.txt, and run it again")),
            Fix(
                text=tr(
                    "run `covey selftest --device {elsewhere}` to see whether the device matters",
                    elsewhere=elsewhere,
                )
            ),
        ),
    )
