"""Passes the GEMMs and the attention kernels of a step to its trace.

The replacements of kernels are functions without access to the recorder, so they use the object `calls` of this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, Literal, Protocol

import torch

from analyzer.trace.events import AttentionCall, GemmCall, KernelCall


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
        if self._sink is None:
            return
        queries, keys = (prod(tensor.shape[:-2]) // batch for tensor in (q, k))
        heads, width = q.shape[-2:]
        self._sink.kernel(AttentionCall(direction, batch, heads, queries, keys, width, v.shape[-1], causal, window))


calls = KernelCalls()


def element_bits(tensor: Any) -> int:
    """Return the bits of an element of a factor of a GEMM. The data of a quantized tensor has 8, or 4 in NVFP4."""
    if hasattr(tensor, "_fp4_dtype"):
        return 4
    return 8 if hasattr(tensor, "_quantizer") else 8 * int(tensor.element_size())
