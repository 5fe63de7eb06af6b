"""What `covey explain` says of a code beside its title and reason: `python -m support.code_facts` writes it.

Causes and ways out are those in the source that stand beside the code; pages are those of docs that name it.
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import covey
from covey.codes import CODES

ROOT = Path(covey.__file__).parent
DOCS = ROOT.parents[1] / "docs"
FACTS = ROOT / "codes" / "facts.json"
_NO_PAGES = ("codes.md", "codes.zh.md", "options.md")
_MOST = 3
_CODE = re.compile(r"\b[EWF][0-9]{3}\b")


def code_facts() -> dict[str, dict[str, list[str]]]:
    """Each code with its causes, ways out and pages, those that have any."""
    facts = {code: {"causes": [], "fixes": [], "pages": []} for code in CODES}
    for code, pages in _pages().items():
        if code in facts:
            facts[code]["pages"] = pages[:_MOST]
    for path in sorted(ROOT.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                for code, kind, text in _of_function(function):
                    if code in facts and text not in facts[code][kind] and len(facts[code][kind]) < _MOST:
                        facts[code][kind].append(text)
    return {code: {k: v for k, v in said.items() if v} for code, said in facts.items() if any(said.values())}


def _of_function(function: ast.FunctionDef) -> Iterator[tuple[str, str, str]]:
    """Code, kind and text; where a function has one code, all of its texts are of that one."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and _code_of(node)]
    is_of_one = len({_code_of(call) for call in calls}) == 1
    for call in calls:
        yield from ((_code_of(call), *said) for said in _texts(call, function if is_of_one else call))


def _code_of(call: ast.Call) -> str:
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name in ("Problem", "Finding"):
        values = [k.value for k in call.keywords if k.arg == "code"]
    else:
        values = call.args[:1] if name.strip("_") in ("problem", "warning") else []
    value = values[0] if values else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _texts(call: ast.Call, around: ast.AST) -> Iterator[tuple[str, str]]:
    is_made = isinstance(call.func, ast.Name) and call.func.id in ("Problem", "Finding")
    causes = [k.value for k in call.keywords if k.arg == "cause"] if is_made else call.args[3:4]
    causes += [
        node.value
        for node in ast.walk(around)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "cause"
    ]
    for cause in causes:
        yield from (("causes", text) for node in ast.walk(cause) if (text := _plain(node)))
    for node in ast.walk(around):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Fix":
            parts = {k.arg: k.value for k in node.keywords}
            if "edits" not in parts and "text" in parts and (text := _plain(parts["text"])):
                yield "fixes", text


def _plain(node: ast.AST) -> str:
    """A text that has no values, so that it says the same of every occurrence."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "tr"):
        return ""
    text = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
    return text if isinstance(text, str) and "{" not in text and "covey explain" not in text else ""


def _pages() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(DOCS.glob("*.md")):
        if path.name in _NO_PAGES:
            continue
        anchor = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            if heading := re.match(r"#{2,} (.+)", line):
                anchor = "#" + re.sub(r"[^\w\- ]", "", heading[1].lower()).replace(" ", "-")
            for code in _CODE.findall(line):
                page = f"docs/{path.name}{anchor}"
                if page not in found[code]:
                    found[code].append(page)
    return found


def rendered() -> str:
    """The content of facts.json."""
    return json.dumps(code_facts(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FACTS.write_text(rendered(), encoding="utf-8")
