"""How autograd adds two gradients of one tensor: in place if nothing else references the first, else in a new tensor.

Under a dispatch mode autograd always adds in a new tensor (`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp).
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from allocator_hook.step.marks import in_backward

aten = torch.ops.aten


class _References(NamedTuple):
    """Numbers of references to a tensor and its storage."""

    tensor: int
    python: int
    storage: int


class _Measuring(TorchDispatchMode):
    """Measures the references to a gradient that only autograd holds."""

    found: _References | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.add.Tensor and in_backward():
            self.found = _references(args)
        return func(*args, **(kwargs or {}))


def adds_in_place(func: Any, args: Any) -> bool:
    """Return whether `func` is a sum of two gradients that a GPU run adds in place: only autograd references the first."""
    return func is aten.add.Tensor and in_backward() and not torch.is_grad_enabled() and _references(args) == _unshared()


def prepare() -> None:
    """Measure, before any mode is active, what `adds_in_place` compares with."""
    _unshared()


def _references(args: Any) -> _References:
    first = args[0]
    storage = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    return _References(first._use_count(), sys.getrefcount(first), storage)


@cache
def _unshared() -> _References | None:
    """References to the first of two gradients that only autograd holds, inside a dispatch mode."""
    weight = torch.zeros((2, 1), device="cpu", requires_grad=True)
    row = torch.zeros((1,), dtype=torch.int64, device="cpu")
    with torch.enable_grad(), _Measuring() as measured:
        both = [torch.nn.functional.embedding(row, weight) for _ in range(2)]
        torch.autograd.backward(both, [torch.zeros_like(each) for each in both])
    return measured.found
