"""Imports point one way, files stay small, and the main job loads neither torch nor megatron."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = frozenset({"torch", "megatron", "transformer_engine", "numpy"})
LONGEST = 400
"""Lines of a file."""

LAYERS = (
    ("units", "errors"),
    ("specs", "gpus", "trace", "caching_allocator"),
    ("modules.tree",),
    ("results",),
    ("modules", "schedule", "layout", "stages"),
    ("timeline", "fp8_weights", "buffers", "states", "runtime", "device", "exchange", "sharded", "unsharded"),
    (
        "iteration",
        "graphs",
        "overlap",
        "blocks",
        "memory",
        "communication",
        "verdict",
        "advice",
        "recorded",
        "compare",
        "check",
        "replay",
    ),
    ("predict",),
    ("report",),
)
"""The modules of `analyzer` from the bottom up. `x` stands for `x`, all of `x.…` and `x_…`; a module imports from its own layer
and those below it. The options of a launch, `analyzer.launch`, know of the units, the errors and the specs alone."""
OF_LAUNCH = ("units", "errors", "specs", "launch")
OF_RECORDERS = ("units", "errors", "specs", "launch", "trace", "caching_allocator", "schedule", "runtime")
"""What `allocator_hook` may know of the analyzer."""
JOINERS = ("allocator_hook.engines", "allocator_hook.shadow.report")
"""They put predictions and recordings together, and know both."""

SOURCES = sorted([ROOT / "get_training_info.py", *(ROOT / "analyzer").rglob("*.py"), *(ROOT / "allocator_hook").rglob("*.py")])
ANALYZER = [path for path in SOURCES if path.is_relative_to(ROOT / "analyzer") and path.name != "__init__.py"]
RECORDERS = [path for path in SOURCES if path.is_relative_to(ROOT / "allocator_hook")]


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, *, module_level: bool = False) -> set[str]:
    """Dotted names that a file imports: anywhere in it, or only where importing the file runs the line."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in running(tree) if module_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            base = node.module or ""
            submodules = {f"{base}.{name.name}" for name in node.names if is_module(f"{base}.{name.name}")}
            found |= submodules or {base}
    return found


def running(tree: ast.Module) -> list[ast.AST]:
    """Nodes that run when the file is imported: not those of functions, nor those for type checkers."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        found.append(node)
        waiting += ast.iter_child_nodes(node)
    return found


def is_module(name: str) -> bool:
    place = ROOT.joinpath(*name.split("."))
    return place.is_dir() or place.with_suffix(".py").exists()


def stands_for(entry: str, name: str) -> bool:
    return name == entry or name.startswith((f"{entry}.", f"{entry}_"))


def layer(name: str) -> int:
    """The layer of `analyzer.NAME`, by the longest entry that stands for it."""
    fits = [(len(entry), level) for level, entries in enumerate(LAYERS) for entry in entries if stands_for(entry, name)]
    assert fits, f"analyzer.{name} stands in no layer: say in LAYERS what it may import"
    return max(fits)[1]


def of_analyzer(names: set[str]) -> set[str]:
    return {name.removeprefix("analyzer.") for name in names if name.startswith("analyzer.")}


@pytest.mark.parametrize("path", [path for path in ANALYZER if path.parent.name != "launch"], ids=dotted)
def test_imports_point_down(path: Path) -> None:
    own = layer(dotted(path).removeprefix("analyzer."))
    upward = {name for name in of_analyzer(imports(path)) if layer(name) > own}
    assert not upward


@pytest.mark.parametrize("path", sorted((ROOT / "analyzer" / "launch").glob("*.py")), ids=dotted)
def test_the_launch_knows_only_specs(path: Path) -> None:
    assert {name for name in of_analyzer(imports(path)) if not any(stands_for(entry, name) for entry in OF_LAUNCH)} == set()


@pytest.mark.parametrize("path", ANALYZER, ids=dotted)
def test_the_analyzer_is_pure(path: Path) -> None:
    assert {name.partition(".")[0] for name in imports(path, module_level=True)}.isdisjoint(HEAVY)
    assert not {name for name in imports(path) if name.split(".")[0] in ("allocator_hook", "get_training_info")}


@pytest.mark.parametrize("path", RECORDERS, ids=dotted)
def test_recorders_know_only_launch_and_trace(path: Path) -> None:
    known = of_analyzer(imports(path))
    if dotted(path) in JOINERS:
        assert not any(stands_for("report", name) for name in known)
        return
    assert {name for name in known if not any(stands_for(entry, name) for entry in OF_RECORDERS)} == set()
    assert "get_training_info" not in imports(path)


@pytest.mark.parametrize("path", SOURCES, ids=dotted)
def test_files_are_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) < LONGEST


def test_the_walk_sees_what_it_must(tmp_path: Path) -> None:
    """The helpers of this file can find what they forbid."""
    file = tmp_path / "file.py"
    file.write_text(
        "import torch.nn\nif True:\n    from megatron import core\ndef f():\n    import numpy\nfrom analyzer import memory\n"
    )
    assert imports(file, module_level=True) == {"torch.nn", "megatron", "analyzer.memory"}
    assert "numpy" in imports(file)
    assert layer("modules.tree") < layer("results") < layer("modules.mlp") < layer("communication_rows") < layer("report.text")
    with pytest.raises(AssertionError, match="stands in no layer"):
        layer("memorial")


@pytest.mark.parametrize("report", [(), ("--info-json", "-")], ids=["console", "json"])
def test_the_main_job_loads_no_heavy_library(report: tuple[str, ...]) -> None:
    launch = (
        "--nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
        "--max-position-embeddings 2048 --micro-batch-size 1 --bf16 --lr 1e-4 --train-iters 10 --info-gpu H100-80GB"
    )
    program = (
        "import sys\nimport get_training_info\n"
        f"status = get_training_info.main({[*launch.split(), *report]!r})\n"
        "print(*sorted(sys.modules), file=sys.stderr)\nsys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "analyzer" in loaded
    assert loaded.isdisjoint({*HEAVY, "allocator_hook", "yaml", "pynvml"})
