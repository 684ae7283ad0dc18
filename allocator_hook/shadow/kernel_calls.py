"""Passes the GEMMs, the attention kernels and the memory-bound operations of a step to its trace.

The replacements of kernels are functions without access to the recorder, so they use the object `calls` of this module.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, Final, Literal, Protocol

import torch

from allocator_hook.step.marks import in_backward, tensors_of
from analyzer.trace.events import AttentionCall, GemmCall, KernelCall, MemoryCall

_WITHOUT_KERNEL: Final = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "set_",
        "resize_",
        "_local_scalar_dense",
        "_pin_memory",
    }
)
"""Operations that launch no kernel, although their result is not a view."""
_GEMMS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_grouped_mm"})
_WRITES: Final = frozenset({"zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_"})
"""Operations that overwrite their first argument without a read."""
_SELECTS: Final = frozenset({"index_select", "gather", "index", "embedding", "masked_select", "take_along_dim"})
"""Operations that read as many elements of their first argument as they return."""
_SCATTERS: Final = frozenset(
    {"scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_", "index_put", "index_put_", "masked_scatter",
     "masked_scatter_"}
)  # fmt: skip
"""Operations that write as many elements of their first argument as their source has. Those that add read them, too."""


class KernelSink(Protocol):
    """Receives the calls: the trace writer, or a list in a test."""

    def kernel(self, call: KernelCall) -> None: ...


class KernelCalls:
    """Passes calls to a sink. Without a sink they are ignored."""

    def __init__(self) -> None:
        self._sink: KernelSink | None = None

    @contextmanager
    def passed_to(self, sink: KernelSink) -> Iterator[None]:
        """Pass the calls to `sink` until the end of the context."""
        self._sink = sink
        try:
            yield
        finally:
            self._sink = None

    def gemms(self, sizes: Sequence[tuple[int, int, int]], *, bits: int, accumulates: bool = False) -> None:
        """Products of [m, k] and [k, n] for each (m, n, k). Equal ones are one call; empty ones need no kernel."""
        if self._sink is not None:
            for size, count in Counter(sizes).items():
                if prod(size):
                    self._sink.kernel(GemmCall(*size, count, bits, accumulates))

    def product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """PyTorch's product of two matrices, of batches of matrices, or of a matrix and a vector."""
        *batch, m, k = left.shape
        n = right.shape[-1] if right.dim() > 1 else 1
        self.gemms([(m, n, k)] * prod(batch), bits=element_bits(left))

    def grouped_product(self, left: torch.Tensor, right: torch.Tensor, *, groups: int) -> None:
        """PyTorch's products of equal groups of rows: with a matrix of each group, or of the columns of both factors."""
        *_, m, k = left.shape
        n = right.shape[-1]
        size = (m // groups, n, k) if right.dim() > left.dim() else (m, n, k // groups)
        self.gemms([size] * groups, bits=element_bits(left))

    def attention(
        self,
        direction: Literal["forward", "backward"],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        batch: int,
        causal: bool,
        window: int,
    ) -> None:
        """A fused attention kernel. The last two dimensions of the tensors are heads and elements of a head.

        `window` is the number of keys before its own that a query attends to, or -1.
        """
        queries, keys = (prod(tensor.shape[:-2]) // batch for tensor in (q, k))
        heads, width = q.shape[-2:]
        self.attended(AttentionCall(direction, batch, heads, queries, keys, width, v.shape[-1], causal, window))

    def attended(self, call: AttentionCall) -> None:
        """A fused attention kernel, by its sizes."""
        if self._sink is not None:
            self._sink.kernel(call)

    def operation(self, func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> None:
        """An operation of PyTorch that ran as a kernel of its own. Views and allocations are ignored."""
        if self._sink is not None and (moved := operation_bytes(func, args, kwargs or {}, result)):
            self.memory(func._schema.name.partition("::")[2], moved)

    def memory(self, name: str, bytes_: int) -> None:
        """A memory-bound operation that reads and writes `bytes_` bytes."""
        if self._sink is not None and bytes_:
            self._sink.kernel(MemoryCall("backward" if in_backward() else "forward", name, int(bytes_)))

    def launched(self, name: str, args: Sequence[Any]) -> None:
        """A kernel that reads or writes each of its arguments once."""
        if self._sink is not None:
            with torch._C.DisableTorchFunction():
                self.memory(name, _bytes(args))

    def counted(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement of a kernel that passes each call of `kernel` as a memory-bound operation."""

        @functools.wraps(kernel)
        def called(*args: Any, **kwargs: Any) -> Any:
            result = kernel(*args, **kwargs)
            if self._sink is not None:
                with torch._C.DisableTorchFunction():
                    self.memory(name, _bytes((args, tuple(kwargs.values()), result)))
            return result

        return called


calls = KernelCalls()


def operation_bytes(func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> int:
    """Return the bytes that an operation of PyTorch reads and writes on the GPU; 0 if it launches no memory-bound kernel.

    Each element is read or written once. An expanded dimension is read once.
    """
    name = func._schema.name.partition("::")[2]
    if name in _WITHOUT_KERNEL or name in _GEMMS or func.is_view:
        return 0
    given = list(tensors_of((*args, *kwargs.values())))
    made = [each for each in tensors_of((result,)) if each.is_meta]
    storages = {each.untyped_storage()._cdata for each in given}
    if kwargs.get("out") is not None:  # the result is written, not read
        given = list(tensors_of(args))
    elif not func._schema.is_mutable:
        made = [each for each in made if each.untyped_storage()._cdata not in storages]
        if not made:
            return 0  # a view, or nothing on the GPU
    read = sum(map(element_bytes, given))
    written = sum(map(element_bytes, made))
    first = element_bytes(given[0]) if given else 0
    if name in _WRITES:
        return read
    if name in _SELECTS:
        return read - first + 2 * written
    if name in _SCATTERS:
        source = max(map(element_bytes, given[1:]), default=0)
        copy = 0 if func._schema.is_mutable else 2 * first
        return read - first + (2 if "add" in name else 1) * source + copy
    return read + written


def element_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements in memory of a tensor on the GPU."""
    if not tensor.is_meta:
        return 0
    return prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride) * tensor.element_size()


def _bytes(value: Any) -> int:
    """Bytes of the tensors in nested sequences. Those of a quantized tensor are those of its parts."""
    if isinstance(value, (tuple, list)):
        return sum(map(_bytes, value))
    if hasattr(value, "_quantizer"):
        return sum(element_bytes(each) for each in vars(value).values() if isinstance(each, torch.Tensor) and each is not value)
    return element_bytes(value) if isinstance(value, torch.Tensor) else 0


def element_bits(tensor: Any) -> int:
    """Return the bits of an element of a factor of a GEMM. The data of a quantized tensor has 8, or 4 in NVFP4."""
    if hasattr(tensor, "_fp4_dtype"):
        return 4
    return 8 if hasattr(tensor, "_quantizer") else 8 * int(tensor.element_size())
