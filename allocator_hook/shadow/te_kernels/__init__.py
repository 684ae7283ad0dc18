"""Replacement for `transformer_engine_torch`, the compiled extension of Transformer Engine.

Each binding is a function with the same arguments. It allocates the same tensors as the binding
(transformer_engine/pytorch/csrc/extensions, 2.11) and computes nothing. A call of an unsupported binding raises an error that
names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.kernel_calls import calls
from allocator_hook.shadow.te_kernels import (
    activations,
    attention,
    cast,
    gemm,
    misc,
    moe,
    multi_tensor,
    norms,
    release_1,
    rope,
    softmax,
    userbuffers,
)
from allocator_hook.shadow.te_kernels.enums import ENUMS
from allocator_hook.shadow.te_kernels.releases import is_before
from analyzer.errors import AnalyzerError


class MissingKernelError(AnalyzerError):
    """Transformer Engine called a binding that is not supported."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"--info-engine shadow: Transformer Engine's kernel {name} is not supported; "
            "use --info-engine formula, or remove the option that needs this kernel"
        )


class _Extension(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():  # classes appear in annotations at import time; only creating an object fails
            return _missing_class(name)

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise MissingKernelError(name)

        return missing


def _missing_class(name: str) -> type:
    def fail(self: object, *args: Any, **kwargs: Any) -> None:
        raise MissingKernelError(name)

    return type(name, (), {"__init__": fail})


def extension(gpu: Gpu, *, version: str) -> ModuleType:
    """Return the replacement module `transformer_engine_torch`, which behaves as on `gpu`."""
    module = _Extension("transformer_engine_torch")
    module.__version__ = version  # type: ignore[attr-defined]
    module._num_cublas_streams = gemm.STREAMS  # type: ignore[attr-defined]  # releases before 2.4 have it instead of a function
    for name, enum in ENUMS.items():
        setattr(module, name, enum)
    parts = (activations, attention, cast, gemm, misc, moe, multi_tensor, norms, rope, softmax, userbuffers)
    for part in (*parts, *((release_1,) if is_before("2") else ())):
        for name, kernel in bindings(part, gpu).items():
            setattr(module, name, kernel)
    return module


def bindings(part: ModuleType, gpu: Gpu) -> dict[str, Callable[..., Any]]:
    """Return the functions of one file by binding name. Calls of memory-bound kernels are passed to the trace."""
    found: Mapping[str, Callable[..., Any]] = part.bindings(gpu)
    return {name: kernel if _is_counted_elsewhere(part, kernel) else calls.counted(name, kernel) for name, kernel in found.items()}


def _is_counted_elsewhere(part: ModuleType, kernel: Callable[..., Any]) -> bool:
    """Whether the kernels are those of GEMMs and attention, or it is a class."""
    return part in (attention, gemm, userbuffers) or isinstance(kernel, type)
