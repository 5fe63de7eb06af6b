"""What is recorded of a finding is read back in every language; without templates it is English."""

from __future__ import annotations

import json
import math

from covey.health.record import fields_of, fixes_of, text_of
from covey.telemetry.jsonl import encode
from covey.texts import tr
from covey.texts.catalogue import catalogue
from covey.types import Finding, Fix

FOUND = Finding(
    code="F101",
    seen=tr("gradient norm {newest:.3g}, the median is {usual:.3g}", newest=math.nan, usual=0.25),
    why="w",
    cause=tr("The reference is not the model that the run starts from."),
    fixes=(Fix(text=tr("use a smaller learning rate"), edits={"learning_rate": 1e-6}), Fix(text="plain")),
)
ZH = catalogue("zh").said


def test_a_record_is_read_back_in_chinese() -> None:
    event = json.loads(encode(fields_of(FOUND)))
    assert (text_of(event, "seen"), text_of(event, "cause")) == (FOUND.seen, FOUND.cause)
    assert ZH(text_of(event, "seen")) == ZH(FOUND.seen) == "梯度范数 nan，中位数是 0.25"
    assert ZH(text_of(event, "cause")) == ZH(FOUND.cause)
    assert fixes_of(event) == FOUND.fixes
    assert [ZH(fix.text) for fix in fixes_of(event)] == [ZH(fix.text) for fix in FOUND.fixes]


def test_a_record_whose_english_was_changed_or_has_no_template_is_english() -> None:
    event = json.loads(encode(fields_of(FOUND)))
    for texts in (None, 3, {}, {"seen": 3}, {"seen": {"template": 3}}, {"fixes": [None]}, {"fixes": 7}):
        bare = event | {"texts": texts}
        assert ZH(text_of(bare, "seen")) == FOUND.seen
        assert [fix.text for fix in fixes_of(bare)] == [fix.text for fix in FOUND.fixes]
    assert text_of(event | {"seen": "other"}, "seen") == "other"
