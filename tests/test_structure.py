"""The structure of the code: allowed imports between packages, no import cycles, and size limits of folders, files and functions.

The complexity of functions is limited by ruff (C901 in pyproject.toml).
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = frozenset({"torch", "megatron", "transformer_engine", "numpy"})
MAX_MODULES = 24
"""Maximum number of Python files in a folder, without `__init__.py` and without packages inside it."""
MAX_LINES = 500
"""Maximum number of lines of a file."""
MAX_FUNCTION = 60
"""Maximum number of lines of a function."""

LAYERS = (
    {"units", "errors", "version", "signals"},
    {"files"},
    {"specs", "script"},
    {"launch", "layout", "hardware"},
    {"frameworks"},
    {"modules"},
    {"states"},
    {"passes"},
    {"program"},
    {"results"},
    {"memory", "communication"},
    {"trace"},
    {"predict"},
    {"time"},
    {"layout_search", "inference"},
    {"report"},
    {"api"},
    {"cli"},
)
"""Packages and modules of analyzer/, lowest layer first. A package may import from itself and from lower layers."""
LAUNCH_IMPORTS = {"units", "errors", "files", "specs", "launch"}
"""Packages that `analyzer.launch` may import: it converts options to specs."""
RECORDER_IMPORTS = {
    "units",
    "errors",
    "signals",
    "files",
    "specs",
    "layout",
    "trace",
    "modules",
    "memory",
    "program",
    "passes",
    "time",
}
"""Packages of the analyzer that `allocator_hook` may import."""

BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Fields of a statement with the statements inside it."""

SOURCES = sorted([ROOT / "get_training_info.py", *(ROOT / "analyzer").rglob("*.py"), *(ROOT / "allocator_hook").rglob("*.py")])


def dotted(path: Path, root: Path = ROOT) -> str:
    """Return the module name of a file, such as analyzer.memory.ranks."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


MODULES = {dotted(path): path for path in SOURCES}


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file, which several tests read."""
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path, *, module_level: bool = False) -> frozenset[str]:
    """Return the dotted names that a file imports, except for type checking. `module_level`: only when it is imported itself."""
    found: set[str] = set()
    for node in _running(parsed(path), functions=not module_level):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports are not allowed"
            for name in node.names:
                full_name = f"{node.module}.{name.name}"
                found.add(full_name if full_name in MODULES else node.module or "")
    return frozenset(found)


def _running(tree: ast.AST, *, functions: bool) -> Iterator[ast.AST]:
    """Yield the statements that run when the file is imported, and those in functions if `functions`. Skip TYPE_CHECKING blocks."""
    checked = isinstance(tree, ast.If) and isinstance(tree.test, ast.Name) and tree.test.id == "TYPE_CHECKING"
    for block in BLOCKS[checked:]:
        for node in getattr(tree, block, ()):
            if functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node
                yield from _running(node, functions=functions)


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that import each other, directly or indirectly."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        waiting = list(graph[start])
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += graph.get(name, ())
        reach[start] = seen
    groups = {frozenset({*(other for other in reach[name] if name in reach.get(other, ())), name}) for name in graph}
    return [set(group) for group in groups if len(group) > 1]


def package(module: str) -> str:
    """Return the package or top-level module of an analyzer module: memory for analyzer.memory.ranks."""
    return module.removeprefix("analyzer.").partition(".")[0]


def level(name: str) -> int:
    """Return the index of a package in LAYERS."""
    found = [index for index, names in enumerate(LAYERS) if name in names]
    assert found, f"analyzer.{name} is in no layer: add it to LAYERS"
    return found[0]


def of_analyzer(names: Iterable[str]) -> set[str]:
    return {package(name) for name in names if name.startswith("analyzer.")}


ANALYZER = [path for path in SOURCES if path.is_relative_to(ROOT / "analyzer") and dotted(path) != "analyzer"]
RECORDERS = [path for path in SOURCES if path.is_relative_to(ROOT / "allocator_hook")]


def test_packages_import_only_from_lower_layers() -> None:
    upward = {
        (dotted(path), name)
        for path in ANALYZER
        for name in of_analyzer(imports(path)) - {package(dotted(path))}
        if level(name) >= level(package(dotted(path)))
    }
    assert not upward


def test_the_json_report_imports_no_other_report() -> None:
    """Not even for type checking: records that several reports show belong to the package that computes them."""
    others = {
        (dotted(path), node.module)
        for path in (ROOT / "analyzer" / "report" / "json").glob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("analyzer.report.console", "analyzer.report.html"))
    }
    assert not others


def test_the_launch_package_imports_only_specs() -> None:
    launch = [path for path in ANALYZER if package(dotted(path)) == "launch"]
    assert {(dotted(path), name) for path in launch for name in of_analyzer(imports(path)) - LAUNCH_IMPORTS} == set()


def test_the_analyzer_imports_no_heavy_library() -> None:
    at_import = {(dotted(path), name.partition(".")[0]) for path in ANALYZER for name in imports(path, module_level=True)}
    assert not {(module, name) for module, name in at_import if name in HEAVY}
    ever = {(dotted(path), name.partition(".")[0]) for path in ANALYZER for name in imports(path)}
    others = {(module, name) for module, name in ever if name in ("allocator_hook", "get_training_info")}
    assert {package(module) for module, _ in others} <= {"cli"}


def test_recorders_import_only_allowed_packages() -> None:
    assert {(dotted(path), name) for path in RECORDERS for name in of_analyzer(imports(path)) - RECORDER_IMPORTS} == set()
    assert not [dotted(path) for path in RECORDERS if "get_training_info" in imports(path)]


def test_there_are_no_import_cycles() -> None:
    graph = {name: {other for other in imports(path) if other in MODULES and other != name} for name, path in MODULES.items()}
    assert cycles(graph) == []


def test_folders_are_small() -> None:
    counts = Counter(path.parent for path in SOURCES if path.name != "__init__.py")
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_files_are_small() -> None:
    lines = {dotted(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {module: count for module, count in lines.items() if count > MAX_LINES} == {}


def test_functions_are_small() -> None:
    functions = [
        (f"{dotted(path)}.{node.name}", (node.end_lineno or 0) - node.lineno + 1)
        for path in SOURCES
        for node in _running(parsed(path), functions=True)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert len(functions) > len(SOURCES)
    assert {name: lines for name, lines in functions if lines > MAX_FUNCTION} == {}


def test_the_checks_find_violations(tmp_path: Path) -> None:
    """The helpers of this file detect imports, layers and cycles."""
    file = tmp_path / "file.py"
    file.write_text(
        "import torch.nn\n"
        "from typing import TYPE_CHECKING\n"
        "if True:\n    from megatron import core\n"
        "if TYPE_CHECKING:\n    import numpy\nelse:\n    import math\n"
        "def f():\n    from analyzer.memory import ranks\n"
    )
    assert imports(file, module_level=True) == {"torch.nn", "typing", "megatron", "math"}
    assert imports(file) == {"torch.nn", "typing", "megatron", "math", "analyzer.memory.ranks"}
    assert level("modules") < level("memory") < level("report") < level("cli")
    with pytest.raises(AssertionError, match="in no layer"):
        level("memorial")
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
    assert cycles({"a": {"b"}, "b": set()}) == []


def test_an_analysis_loads_no_heavy_library() -> None:
    """With the report on the console and as JSON."""
    launch = (
        "--nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
        "--max-position-embeddings 2048 --micro-batch-size 1 --bf16 --lr 1e-4 --train-iters 10 --info-gpu H100-80GB"
    )
    program = (
        "import sys\nimport get_training_info\n"
        f"launch = {launch.split()!r}\n"
        "status = get_training_info.main(launch) or get_training_info.main([*launch, '--info-json', '-'])\n"
        "print(*sorted(sys.modules), file=sys.stderr)\nsys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "analyzer" in loaded
    assert loaded.isdisjoint({*HEAVY, "allocator_hook", "yaml", "pynvml"})
