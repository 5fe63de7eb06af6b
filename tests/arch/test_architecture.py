"""The structure that everything later stands on: layers, sizes, and what may be imported, stored or opened
where."""

from __future__ import annotations

import ast
import functools
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import covey

ROOT = Path(covey.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
REPOSITORY = ROOT.parent.parent

# A package may import those of lower layers and itself, nothing else of covey.
LAYERS = (
    ("texts",),
    ("types", "meeting", "modules"),
    ("algorithm",),
    (
        "errors",
        "codes",
        "exits",
        "activity",
        "environment",
        "json_lines",
        "paths",
        "weight_files",
        "text_files",
        "checksums",
        "norms",
        "options",
    ),
    ("comm", "config", "media", "media_positions"),
    ("plan", "kernels", "token_streams"),
    ("models", "data", "rewards", "quickstart"),
    ("batching", "checkpoint", "environments"),
    ("rollout",),
    ("learner",),
    ("health", "telemetry"),
    ("checks",),
    ("training", "doctor"),
    ("selftest",),
    ("api", "cli"),
    ("trl",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
ENTRY_POINTS = {"__init__", "__main__"}

TORCH_FREE = (
    *("types", "texts", "errors", "codes", "exits", "meeting", "activity", "environment", "json_lines"),
    *(
        "paths",
        "weight_files",
        "text_files",
        "options",
        "config",
        "plan",
        "data",
        "media",
        "rewards",
        "api",
        "cli",
    ),
    *("doctor", "modules", "algorithm.loss_types", "health.signs", "health.guards"),
    *("checks", "training.together", "trl.trainer", "trl.rewards"),
    *("health.hang", "health.stacks", "health.watchdog", "health.rules"),
)
FOREIGN = ("trl", "swift", "accelerate", "transformers.trainer", "transformers.Trainer")
# Functions that may exceed 60 lines, with the reason; at most five.
LONG_FUNCTIONS: dict[str, str] = {}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The file, parsed once."""
    return ast.parse(path.read_text(encoding="utf-8"))


def part_of(path: Path) -> str:
    """The package or module directly below covey that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def module_name(path: Path) -> str:
    """The dotted name of a file."""
    parts = ["covey", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(p for p in parts if p != "__init__")


@functools.cache
def imports(path: Path, *, top_level_only: bool = False) -> tuple[str, ...]:
    """Dotted names that a file imports; those under TYPE_CHECKING are for readers, not for running."""
    return tuple(_imports(path, top_level_only))


def _imports(path: Path, top_level_only: bool) -> Iterator[str]:
    tree = tree_of(path)
    skipped = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
        for node in ast.walk(branch)
    }
    for node in tree.body if top_level_only else ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def covey_parts(names: Iterable[str]) -> set[str]:
    return {n.split(".")[1] for n in names if n.startswith("covey.")} & LEVEL.keys()


def test_every_part_has_a_layer() -> None:
    parts = {part_of(f) for f in FILES} - ENTRY_POINTS
    assert parts == LEVEL.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_downwards(path: Path) -> None:
    part = part_of(path)
    if part in ENTRY_POINTS:
        return
    for other in covey_parts(imports(path)) - {part}:
        assert LEVEL[other] < LEVEL[part], f"{module_name(path)} imports covey.{other}"


def test_no_cycles() -> None:
    edges: dict[str, set[str]] = {}
    names = {module_name(f) for f in FILES}
    for file in FILES:
        edges[module_name(file)] = {n for n in imports(file, top_level_only=True) if n in names}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for other in sorted(edges[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(edges):
        visit(name, ())


def test_sizes() -> None:
    lengths = {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in FILES}
    assert {name: n for name, n in lengths.items() if n > 400} == {}
    assert statistics.median(lengths.values()) <= 150
    long = set()
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 > 60:
                    long.add(f"{file.relative_to(ROOT)}:{node.name}")
    assert long == LONG_FUNCTIONS.keys()
    assert len(LONG_FUNCTIONS) <= 5


def test_the_loop_is_one_screen() -> None:
    tree = ast.parse((ROOT / "training" / "loop.py").read_text())
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    assert [f.name for f in functions] == ["run"]
    assert functions[0].end_lineno is not None
    assert functions[0].end_lineno - functions[0].lineno < 60


def test_no_torch_where_none_belongs() -> None:
    """Importing every module of the torch-free parts, one after the other, leaves torch and transformers
    unimported; the first that does not is named."""
    bases = [ROOT / name.replace(".", "/") for name in TORCH_FREE]
    files = [f for b in bases for f in (sorted(b.rglob("*.py")) if b.is_dir() else [b.with_suffix(".py")])]
    code = f"import sys, importlib\nfor m in {[module_name(f) for f in files]!r}:\n"
    code += "    importlib.import_module(m)\n    assert not {'torch', 'transformers'} & sys.modules.keys(), m"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_nothing_foreign() -> None:
    """None of the peers' trainers at run time; each optional library in one module."""
    for file in FILES:
        for name in imports(file):
            assert not name.startswith(FOREIGN), f"{module_name(file)} imports {name}"
    for library in ("matplotlib", "datasets", "math_verify", "openai", "regex", "vllm"):
        users = {module_name(f) for f in FILES if any(n.split(".")[0] == library for n in imports(f))}
        assert len(users) == 1, f"{library}: {users}"


def test_what_is_compiled_stands_behind_one_seam() -> None:
    """Calls into C and a compiler are in kernels for a CPU and in the sandbox alone. `exits` has two that
    Python lacks: a process has the system end it with its parent, and one thread interrupts another."""
    callers = {module_name(f) for f in FILES if "ctypes" in imports(f)}
    behind = ("covey.kernels.cpu.", "covey.rewards.sandbox.", "covey.exits")
    assert callers and {name for name in callers if not name.startswith(behind)} == set()
    sources = [f for f in ROOT.rglob("*") if f.suffix in (".c", ".h")]
    assert sources and {f.parent for f in sources} == {ROOT / "kernels" / "cpu"}


def test_parameters_belong_to_the_backend() -> None:
    """What loads, wraps and shards a model handles its parameters; a run asks the backend. Beside it: the
    wiring that casts a model before a backend has it, a model that no step changes, a model of peft that a
    program gives, and engines, which look at sizes and addresses of their sampler, or at vLLM's own copy."""
    owners = ("covey.models.", "covey.kernels.", "covey.learner.", "covey.selftest.")
    beside = {"training.backend", "training.standalone", "training.announce", "checkpoint.model_files"}
    beside |= {"trl.models", "rollout.native.decoding", "rollout.native.caches", "rollout.vllm.names"}
    found = {module_name(f) for f in FILES if re.search(r"\.(named_)?parameters\(", f.read_text("utf-8"))}
    others = {name.removeprefix("covey.") for name in found if not name.startswith(owners)}
    assert others == beside


def test_nothing_outside_the_seam_knows_which_kernels_there_are() -> None:
    """The rest of covey asks for kernels by `choose`, and speaks in the words of `protocol`, `draws` and
    `kept`.

    The engine plays recordings, an attention of transformers may go on from what torch computes, and the
    head copies blocks: what they import is torch's alone.
    """
    words = ("protocol", "draws", "kept")
    plain = (*words, "choose", "compiler", "products", "upload", "torch_.", "gpu.recordings")
    for file in FILES:
        if part_of(file) == "kernels":
            continue
        used = [n.removeprefix("covey.kernels.") for n in imports(file) if n.startswith("covey.kernels.")]
        assert all(n.startswith(plain) for n in used), f"{module_name(file)} imports {used}"


def test_the_models_part_stays_small() -> None:
    assert len(list((ROOT / "models").glob("*.py"))) <= 20


FORBIDDEN = {
    "pickle": r"\b(?:pickle|cloudpickle|dill|shelve|marshal)\b",
    "torch.save or torch.load": r"\btorch\.(?:save|load)\(",
    "object collectives": r"\w+_object(?:_list)?\(",
    "multiprocessing": r"\bmultiprocessing\b",
    "eval or exec": r"(?<![\w.])(?:eval|exec)\(",
    "remote code": r"trust_remote_code\s*=\s*True",
    "an open port": r"0\.0\.0\.0",
    "unsafe loading": r"weights_only\s*=\s*False|yaml\.(?:unsafe_)?load\((?!.*Loader=_Loader)",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_forbidden(what: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in FILES
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if re.search(FORBIDDEN[what], line)
    ]
    assert found == []


def test_forbidden_patterns_find_what_they_name() -> None:
    examples = {
        "pickle": "import pickle",
        "torch.save or torch.load": "torch.load(path)",
        "object collectives": "dist.gather_object(x)",
        "multiprocessing": "from multiprocessing import Pool",
        "eval or exec": "x = eval(text)",
        "remote code": "from_pretrained(d, trust_remote_code=True)",
        "an open port": 'serve("0.0.0.0")',
        "unsafe loading": "yaml.unsafe_load(x)",
    }
    assert examples.keys() == FORBIDDEN.keys()
    for what, line in examples.items():
        assert re.search(FORBIDDEN[what], line), what


def test_no_unowned_state() -> None:
    """A module's own names are constants: no mutable value that a function changes, no `global`."""
    for file in FILES:
        tree = tree_of(file)
        assert not any(isinstance(n, ast.Global) for n in ast.walk(tree)), file
        names = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            changed = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in ("append", "add", "update", "pop", "clear", "setdefault", "extend"):
                    changed = node.func.value
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                changed = node.value
            if isinstance(changed, ast.Name):
                assert changed.id not in names, f"{module_name(file)} changes {changed.id}"
        caches = [n for n in imports(file) if n in ("functools.cache", "functools.lru_cache")]
        assert not caches, f"{module_name(file)} keeps a cache outside any object"


def test_what_is_there_is_asked_of_functions_that_never_raise() -> None:
    """`Path.exists` and its like raise where a permission is missing or a name is too long, and before Python
    3.14 in most other cases; those of `os.path` answer False, and `covey.paths` says why."""
    methods = {"exists", "is_file", "is_dir", "is_symlink", "expanduser"}
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in FILES
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call) and not node.args and isinstance(node.func, ast.Attribute)
        if node.func.attr in methods
    ]
    assert found == []


def test_one_place_writes_to_standard_output() -> None:
    """It makes visible what a terminal would obey; the generators of pages write files of their own."""
    writers = {module_name(f) for f in FILES if re.search(r"sys\.stdout\.write\(", f.read_text("utf-8"))}
    pages = {"covey.config.reference", "covey.codes.__main__", "covey.trl.reference"}
    assert writers == {"covey.texts.terminal", *pages}


def test_strict_zip() -> None:
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "zip":
                assert any(k.arg == "strict" for k in node.keywords), f"{file}:{node.lineno}"


def test_the_tree_names_no_machine() -> None:
    """No path of whoever's machine it was written on: not this checkout's, nor anybody's home."""
    own = [re.escape(f"{path}/") for path in (REPOSITORY, Path.home())]
    pattern = re.compile("|".join([*own, r"(?<!\w)/(?:home|Users)/\w+/"]))
    assert pattern.search(f'path = "{REPOSITORY}/x"') and pattern.search("/home/" + "somebody/x")
    folders = ("src", "tests", "docs", "bench", "recipes", ".ci")
    files = [f for folder in folders for f in (REPOSITORY / folder).rglob("*") if f.is_file()]
    files += [f for f in REPOSITORY.iterdir() if f.is_file()]
    for path in files:
        if path.suffix in (".safetensors", ".png", ".pyc"):
            continue
        match = pattern.search(path.read_text(encoding="utf-8", errors="replace"))
        assert match is None, f"{path.relative_to(REPOSITORY)}: {match}"
