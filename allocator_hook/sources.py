"""The sources of megatron-core and Transformer Engine that this interpreter imports: their folder, release and content.

A checkout on PYTHONPATH comes before an installed package, so the version of the installed package does not say what runs. The
packages are found on the module search path, without importing them.
"""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MEGATRON: Final = "megatron.core"
TRANSFORMER_ENGINE: Final = "transformer_engine"
_NUMBER: Final = re.compile(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", re.MULTILINE)
_SUFFIX: Final = re.compile(r"""^PRE_RELEASE\s*=\s*["']([^"']*)["']""", re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """A package as a folder of Python files."""

    folder: Path

    @property
    def release(self) -> str | None:
        """The release in the `package_info.py` of megatron-core, such as '0.18.2'. None if the folder has no such file."""
        try:
            text = (self.folder / "package_info.py").read_text(errors="replace")
        except OSError:
            return None
        parts = dict(_NUMBER.findall(text))
        if parts.keys() != {"MAJOR", "MINOR", "PATCH"}:
            return None
        suffix = _SUFFIX.search(text)
        return ".".join(parts[name] for name in ("MAJOR", "MINOR", "PATCH")) + (suffix[1] if suffix else "")

    def digest(self) -> str:
        """A hash of the paths and contents of all Python files. It takes 25 ms for the 500 files of megatron-core 0.20."""
        found = hashlib.sha256()
        for path in sorted(self.folder.rglob("*.py")):
            try:
                content = path.read_bytes()
            except OSError:  # a broken link, or the lock file of an editor
                continue
            found.update(f"{path.relative_to(self.folder)}\0{len(content)}\0".encode())
            found.update(content)
        return found.hexdigest()


def source_of(package: str) -> Source | None:
    """The folder that an import of `package` runs, such as 'megatron.core'. None if the package is not found."""
    imported = getattr(sys.modules.get(package), "__file__", None)
    if imported:
        return Source(Path(imported).parent)
    path: list[str] | None = None
    spec: Any = None
    name = ""
    for part in package.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = _spec(name, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return Source(Path(spec.origin).parent) if spec.origin else None


def _spec(name: str, path: list[str] | None) -> Any:
    """What the import system finds. `importlib.util.find_spec` would import the parent package."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is not None and (spec := find(name, path)) is not None:
            return spec
    return None


def digests() -> dict[str, str]:
    """The hash of each package that is found. Traces depend on it."""
    sources = {package: source_of(package) for package in (MEGATRON, TRANSFORMER_ENGINE)}
    return {package: source.digest() for package, source in sources.items() if source is not None}
