"""fast-hadamard-transform (1.0.4): the transform of the last dimension, with the tensors that the package allocates.

Source: `HadamardTransformFn` of fast_hadamard_transform/fast_hadamard_transform_interface.py, and csrc/fast_hadamard_transform.cpp.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from allocator_hook.shadow.kernel_calls import calls
from allocator_hook.shadow.te_kernels.allocate import like

PACKAGE = "fast_hadamard_transform"


def _transformed(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    output = like(rows)
    calls.launched("fast_hadamard_transform", (rows, output))
    return output.reshape(x.shape)


class HadamardTransform(torch.autograd.Function):
    """Saves nothing: the backward is the same transform of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _transformed(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _transformed(grads[0])


def hadamard_transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """[…, d] → […, d]. `scale` changes values only."""
    return HadamardTransform.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def modules() -> dict[str, ModuleType]:
    """Return the package by its import name."""
    module = ModuleType(PACKAGE)
    module.__path__ = []
    module.hadamard_transform = hadamard_transform  # type: ignore[attr-defined]
    return {PACKAGE: module}
