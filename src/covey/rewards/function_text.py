"""What is written of a reward function, so that a resumed run sees that it was changed."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from covey.rewards.targets import target_of


def function_digest(entry: str, function: Callable[..., Any] | None) -> str | None:
    """Return a digest of the text of a function or class without its comments; None where the text is not
    known. What it calls is not part of it.

    A reward of a file is read there, whether its name was typed or a program passed it.
    """
    target = target_of(entry)
    node = None
    if target is not None and target.file is not None:
        node = _in_file(Path(target.file), target.name)
    elif function is not None:
        node = _of_callable(function)
    return None if node is None else hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:16]


def _in_file(file: Path, name: str) -> ast.AST | None:
    try:
        node: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    for part in name.split("."):
        found = [n for n in ast.iter_child_nodes(node) if getattr(n, "name", None) == part]
        if not found:
            return None
        node = found[-1]
    return node


def _of_callable(function: Any) -> ast.AST | None:
    while isinstance(function, partial):
        function = function.func
    is_named = inspect.isroutine(function) or inspect.isclass(function)
    try:
        text = inspect.getsource(function if is_named else type(function))
        # A lambda is a part of a line that has more in it.
        (node,) = ast.parse(textwrap.dedent(text)).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return None
    return node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else None
