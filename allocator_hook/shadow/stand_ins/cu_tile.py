"""The package `cuda.tile`: its kernels write to tensors that their callers allocate, so that a launch does nothing here.

Source: megatron/core/fusions/fused_mhc_kernels.py of the branch dev, August 2026 (b3b1e2d7).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

from allocator_hook.shadow.imports import Launchable
from allocator_hook.step.patching import Patch
from analyzer.specs import TrainingJob

_PACKAGE: Final = "cuda.tile"


class _Kernels(ModuleType):
    """Decorators, types and functions, of which none is used outside kernels but `launch`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Launchable(name)


def modules() -> dict[str, ModuleType]:
    """Return the package by its import name, and the package around it unless it is installed."""
    found: dict[str, ModuleType] = {_PACKAGE: _Kernels(_PACKAGE)}
    if find_spec("cuda") is None:
        found["cuda"] = ModuleType("cuda")
        found["cuda"].__path__ = []
    return found


def patches(job: TrainingJob) -> Iterator[Patch]:
    """Yield the patch of what the compiler is asked: whether it supports the GPU."""
    connections = job.model.hyper_connections
    if connections is not None and connections.fused:
        supported = (job.hardware.compute_capability or (0, 0)) >= (10, 0)
        module = import_module("megatron.core.fusions.fused_mhc_kernels")
        yield Patch(module, "_CUTILE_DEVICE_SUPPORT_CACHE", supported, "the compiler of cuda.tile is a program of its own")
