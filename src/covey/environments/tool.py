"""One tool in the process that calls it: arguments are fitted, what it gives is made a text for the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from covey.data.messages import MARK
from covey.environments.calls import Late, Outcome, Raised
from covey.environments.protocol import ToolFault
from covey.environments.schema import Signature
from covey.rewards.callee import is_async
from covey.rewards.images import told_pil
from covey.rewards.loading import Unloadable
from covey.texts import packed, unpacked
from covey.types import CallFailure, ToolResult

_LONGEST_ERROR = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Says how many seconds a call may take, and how many characters its result may have."""

    timeout_s: float
    max_result_chars: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Holds a function that a model can call."""

    name: str
    function: Callable[..., Any]
    signature: Signature
    is_async: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Return the tool of a function that has a schema."""
        return cls(
            name=function.__name__,
            function=function,
            signature=Signature.of(function),
            is_async=is_async(function),
        )


def result_of(name: str, outcome: Outcome, max_result_chars: int) -> ToolResult:
    """Return what the model is told of a call."""
    if isinstance(outcome, Late):
        words = f"returned nothing within {outcome.seconds:g} s"
        return failed(name, CallFailure.TIMEOUT, f"{name}() {words}", outcome.seconds)
    if isinstance(outcome, Raised):
        return _raised(name, outcome)
    try:
        text, images = with_images(outcome.value)
        text = cut(text, max_result_chars)
    except BaseException as error:  # noqa: BLE001 - the `__str__` of an object is somebody's code, too
        return _raised(name, Raised(error, outcome.seconds))
    return ToolResult(name=name, content=text, images=images, seconds=outcome.seconds)


def failed(name: str, failure: CallFailure, words: str, seconds: float = 0.0) -> ToolResult:
    """Return the result of a call that failed: `Error: ` and a line of words."""
    return ToolResult(name=name, content=f"Error: {words}", failure=failure, seconds=seconds)


def with_images(value: Any) -> tuple[str, tuple[Any, ...]]:
    """Return a value as text with a mark for each image of it, and the images as JSON. It has images where it
    is one (of PIL), or a list with one or with content blocks of one among its parts."""
    parts = list(value) if isinstance(value, list | tuple) else [value]
    images = [told_pil(part["image"] if _is_image_block(part) else part) for part in parts]
    if not any(images):
        return text_of(value).replace(MARK, ""), ()
    texts = [
        MARK if image else text_of(part["text"] if _is_text_block(part) else part).replace(MARK, "")
        for part, image in zip(parts, images, strict=True)
    ]
    return "".join(texts), tuple(image for image in images if image)


def _is_image_block(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image" and "image" in part


def _is_text_block(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and "text" in part


def text_of(value: Any) -> str:
    """Return a value as text: text as it is, lists and objects as JSON, None as "", else its `str`."""
    if value is None:
        return ""
    is_json = isinstance(value, Mapping | list | tuple)
    text = json.dumps(value, ensure_ascii=False, default=str) if is_json else str(value)
    # Half a character, as file names may have it, is none that a tokenizer could take.
    return text.encode("utf-8", "replace").decode()


def cut(text: str, most: int) -> str:
    """Return at most so many characters of a text; a mark stands where more were."""
    if len(text) <= most:
        return text
    head = most - most // 4
    mark = f"\n[... {len(text) - most} characters of the result are left out ...]\n"
    return text[:head] + mark + text[len(text) - most // 4 :]


def packed_result(result: ToolResult) -> dict[str, Any]:
    """Return a result as JSON holds it."""
    return asdict(result)


def unpacked_result(value: Mapping[str, Any]) -> ToolResult:
    """Return the result that `packed_result` made this of."""
    failure, images = value["failure"], tuple(value["images"])
    return ToolResult(**{**value, "failure": CallFailure(failure) if failure else None, "images": images})


def unloadable(fault: Unloadable) -> ToolFault:
    """Return the fault of a function or class that is not there, or whose import raised."""
    kind = fault.kind if fault.kind in ("import", "missing") else "signature"
    return ToolFault(entry=fault.subject, kind=kind, words=str(fault))


def packed_faults(faults: Sequence[ToolFault]) -> dict[str, Any]:
    """Return the reply of a worker that cannot use what it was to load."""
    return {"unusable": [{**asdict(fault), "words": packed(fault.words)} for fault in faults]}


def faults_of(entry: str, reply: Mapping[str, Any]) -> list[ToolFault]:
    """Return the faults that `packed_faults` made this of, as those of an entry."""
    return [
        ToolFault(entry=entry, kind=f["kind"], words=unpacked(f["words"]), lacking=tuple(f["lacking"]))
        for f in reply["unusable"]
    ]


def _raised(name: str, raised: Raised) -> ToolResult:
    error = raised.error
    if isinstance(error, SystemExit):
        return failed(
            name, CallFailure.ENDED, f"{name}() called sys.exit({error.code!r:.80})", raised.seconds
        )
    if isinstance(error, MemoryError):
        return failed(name, CallFailure.ENDED, f"{name}() ran out of memory", raised.seconds)
    try:
        said = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - an exception whose text raises has none
        said = ""
    said = text_of(said if len(said) <= _LONGEST_ERROR else f"{said[:_LONGEST_ERROR]}...")
    words = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return failed(name, CallFailure.RAISED, words, raised.seconds)
