"""Which tools a row has, and rows whose prompt an environment writes."""

from __future__ import annotations

import pytest

from covey.data.errors import RowFault
from covey.data.forms import read_row
from covey.data.messages import chosen_tools, tool_name

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "search")]
ROW = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, ["add", "search"]),
        ("", ["add", "search"]),
        ([], []),
        ("search", ["search"]),
        (["search", "add"], ["search", "add"]),
        ('["add"]', ["add"]),
        ([{"type": "function", "function": {"name": "add"}}], ["add"]),
        (['{"name": "search"}'], ["search"]),
    ],
)
def test_a_row_chooses_among_the_tools_of_the_run(value, names) -> None:
    read = read_row({**ROW, "tools": value}, system=None, is_raw=False, tools=TOOLS)
    assert [tool_name(tool) for tool in read.tools] == names
    # The schema is that of the run, whatever the row says of it.
    assert all(tool in TOOLS for tool in read.tools)


def test_a_tool_that_the_run_does_not_have() -> None:
    with pytest.raises(RowFault) as raised:
        chosen_tools(["serch"], TOOLS)
    assert (raised.value.reason, raised.value.detail) == ("unknown_tool", "serch")
    assert read_row({**ROW, "tools": ["serch"]}, system=None, is_raw=False, tools=TOOLS).reason


def test_an_environment_may_write_an_empty_prompt() -> None:
    row = {"prompt": [{"role": "user", "content": ""}]}
    assert read_row(row, system=None, is_raw=False).reason == "no_prompt"
    read = read_row(row, system=None, is_raw=False, may_be_empty=True)
    assert (read.reason, read.messages) == ("", ({"role": "user", "content": ""},))
