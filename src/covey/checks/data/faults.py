"""What the errors of data say to the checks: their words, and what is known beside those."""

from __future__ import annotations

from covey.data.errors import DataError, TemplateError
from covey.plan.facts import DataProblem, HubProblem, UnreadableFile


def data_problem(error: DataError | TemplateError) -> DataProblem:
    """Why the rows do not make a data set."""
    if isinstance(error, TemplateError):
        return DataProblem(words=str(error))
    return DataProblem(words=str(error), option=error.option, source=error.subject, columns=error.columns)


def hub_problem(name: str, error: DataError) -> HubProblem:
    """Why a hub does not give the data set of this name."""
    return HubProblem(name=name, words=str(error), is_offline=error.kind == "offline")


def unreadable_file(path: str, error: DataError) -> UnreadableFile:
    """Why a file of this machine cannot be read."""
    return UnreadableFile(
        path=path,
        words=str(error),
        kind=error.kind,
        subject=error.subject,
        within=error.within,
        line=error.line,
        encoding=error.encoding,
    )
