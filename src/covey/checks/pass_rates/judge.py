"""Check measured pass rates, and the number of rows that a selection by them leaves."""

from __future__ import annotations

from collections.abc import Sequence

from covey.checks.check import Check
from covey.checks.pass_rates.codes import CODES
from covey.options.schema import Config
from covey.plan.facts import DataFacts, OutputFacts, PassRateFacts
from covey.plan.problem import problem, warning
from covey.plan.report_data import histogram
from covey.plan.words import flags
from covey.texts import counted, tr
from covey.types import Fix, Problem

READERS = ("min_pass_rate", "max_pass_rate", "curriculum")
_SOURCES = ("pass_rates", "pass_rate_column")
# The other options that decide which prompts a rollout has, and how these read.
_DRAWN_BY = (
    *("dataset", "split_dataset_ratio", "interleave_prob", "dataset_shuffle", "streaming"),
    *("seed", "data_seed", "num_generations", "generation_batch_size"),
    *("model", "columns", "system", "apply_chat_template", "chat_template", "chat_template_kwargs"),
    *("enable_thinking", "max_length", "max_completion_length", "truncation_strategy"),
)
_FEW = 0.5


def pass_rate_problems(config: Config, data: DataFacts, output: OutputFacts) -> list[Problem]:
    """Return what is said about pass rates."""
    asked = [n for n in (*_SOURCES, *READERS) if getattr(config, n) != type(config).model_fields[n].default]
    if not asked:
        return []
    sources = [n for n in _SOURCES if n in asked]
    readers = [n for n in READERS if n in asked]
    if config.streaming:
        return [_streamed(config, asked)]
    if not sources:
        return [_unmeasured(config, readers)]
    if len(sources) == 2:
        return [_two(config)]
    if config.min_pass_rate > config.max_pass_rate:
        return [_crossed(config)]
    rates = data.pass_rates
    said = [] if readers else [_idle(config, sources[0])]
    if rates is None:
        return said
    if rates.problem is not None:
        return [_unreadable(rates, sources[0])]
    if rates.num_rows and not rates.num_kept:
        return [_none_left(config, rates)]
    return [*said, *_few(rates, sources[0]), *_changed(config, data, output, rates)]


def is_reordered(config: Config, data: DataFacts, output: OutputFacts) -> bool:
    """Whether a resumed run goes on with other rows, or in another order, by the user's word."""
    if output.resume is None or not config.allow_changes:
        return False
    names = {name for name, _, _ in output.resume.config_changes}
    return bool(names & {*_SOURCES, *READERS, *_DRAWN_BY}) or bool(_new_digest(data, output))


def _new_digest(data: DataFacts, output: OutputFacts) -> bool:
    if output.resume is None or data.pass_rates is None or not output.resume.pass_rates:
        return False
    return bool(data.pass_rates.digest) and data.pass_rates.digest != output.resume.pass_rates


def _set(config: Config, names: Sequence[str]) -> str:
    return flags({n: getattr(config, n) for n in names})


def _usual(config: Config, names: Sequence[str]) -> dict[str, object]:
    return {n: type(config).model_fields[n].default for n in names}


def _streamed(config: Config, asked: Sequence[str]) -> Problem:
    return problem(
        "E348",
        asked[0],
        tr(
            "streaming is on, so rows are read only when they are needed, but {set} is set too.",
            set=_set(config, asked),
        ),
        tr("Filtering and ordering rows needs all rows before the run."),
        Fix(text=tr("read all rows before the run starts"), edits={"streaming": False}),
        Fix(text=tr("filter first: write a file with only the rows to train on")),
    )


def _unmeasured(config: Config, readers: Sequence[str]) -> Problem:
    return problem(
        "E115",
        readers[0],
        tr("{set} needs pass rates, but none are given.", set=_set(config, readers)),
        "",
        Fix(text=tr("measure them: `covey eval MODEL --val_dataset FILE --num_generations_eval 8`")),
        Fix(text=tr("give measured pass rates: --pass_rates FILE, or a column: --pass_rate_column NAME")),
        Fix(text=tr("neither filter nor order the rows"), edits=_usual(config, readers)),
    )


def _two(config: Config) -> Problem:
    return problem(
        "E111",
        "pass_rate_column",
        tr("pass_rates and pass_rate_column are both set, so a row would have two pass rates."),
        "",
        Fix(text=tr("use the column"), edits={"pass_rates": None}),
        Fix(text=tr("use the measured pass rates"), edits={"pass_rate_column": None}),
    )


def _crossed(config: Config) -> Problem:
    low, high = config.min_pass_rate, config.max_pass_rate
    return problem(
        "E111",
        "min_pass_rate",
        tr(
            "min_pass_rate {low:g} is above max_pass_rate {high:g}, so no pass rate lies between them.",
            low=low,
            high=high,
        ),
        tr("The two may be swapped."),
        Fix(text=tr("swap them"), edits={"min_pass_rate": high, "max_pass_rate": low}),
    )


def _idle(config: Config, source: str) -> Problem:
    return warning(
        "W108",
        source,
        tr("{set} is given, but no rows are filtered or ordered by pass rate.", set=_set(config, [source])),
        tr("The bounds may be missing."),
        Fix(
            text=tr("leave out rows that are never or always solved: --min_pass_rate 0.1 --max_pass_rate 0.9")
        ),
        Fix(text=tr("train on easy rows first"), edits={"curriculum": "easy_to_hard"}),
    )


def _unreadable(rates: PassRateFacts, source: str) -> Problem:
    is_column = source == "pass_rate_column"
    return problem(
        "E348",
        source,
        tr("{where} gives no pass rates: {problem}.", where=rates.where, problem=rates.problem),
        "",
        Fix(text=tr("name a column with numbers from 0 to 1: --pass_rate_column NAME"))
        if is_column
        else Fix(text=tr("give pass_rates.jsonl of `covey eval`, or the directory of a run with rollouts/")),
    )


def _none_left(config: Config, rates: PassRateFacts) -> Problem:
    # With a measured row outside of both bounds there is a row inside wider ones.
    return problem(
        "E349",
        "min_pass_rate",
        tr(
            "None of {prompts} has a pass rate from {min_pass_rate:g} to {max_pass_rate:g}. Rows by "
            "pass rate: {histogram}.",
            prompts=counted(rates.num_rows, "prompt"),
            min_pass_rate=config.min_pass_rate,
            max_pass_rate=config.max_pass_rate,
            histogram=histogram(rates),
        ),
        tr("The measured model always solves these rows, or never."),
        Fix(text=tr("use every row"), edits=_usual(config, ("min_pass_rate", "max_pass_rate"))),
        Fix(text=tr("use other data, or measure with more completions per prompt")),
    )


def _few(rates: PassRateFacts, source: str) -> list[Problem]:
    if rates.num_measured >= _FEW * rates.num_rows:
        return []
    share = rates.num_measured / rates.num_rows
    return [
        warning(
            "W127",
            source,
            tr(
                "{where} has a pass rate for {num_measured:,} of {prompts} ({share:.0%}). The others "
                "are kept.",
                where=rates.where,
                num_measured=rates.num_measured,
                prompts=counted(rates.num_rows, "prompt"),
                share=share,
            ),
            tr(
                "They were measured on other rows, or with another system message: prompts are "
                "matched by their text."
            )
            if source == "pass_rates"
            else tr("The column is empty in most rows."),
            Fix(
                text=tr(
                    "measure these prompts: `covey eval MODEL --val_dataset FILE --num_generations_eval 8`"
                )
            ),
        )
    ]


def _changed(config: Config, data: DataFacts, output: OutputFacts, rates: PassRateFacts) -> list[Problem]:
    if not _new_digest(data, output) or config.allow_changes:
        return []
    assert output.resume is not None
    return [
        problem(
            "E405",
            "pass_rates",
            tr(
                "{where} has other pass rates now than when {path} was saved.",
                where=rates.where,
                path=output.resume.path,
            ),
            tr("They were measured again, or belong to a run that has continued."),
            Fix(text=tr("continue with the change"), edits={"allow_changes": True}),
            Fix(text=tr("restore the file as it was")),
        )
    ]


CHECK = Check(
    place=170,
    judge=lambda config, facts, _: pass_rate_problems(config, facts.data, facts.output),
    codes=CODES,
)
