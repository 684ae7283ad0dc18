"""Kernels: the units of work whose time is predicted, with the sizes that determine it.

A module launches kernels in its forward and in its backward. Sizes are those of one rank and one microbatch.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Precision = Literal["32", "16", "8", "4"]
"""Bits of the elements that a GEMM multiplies."""
MemoryKind = Literal["elementwise", "permute", "cast", "scan", "convolution"]

BYTES: Final[dict[Precision, float]] = {"32": 4, "16": 2, "8": 1, "4": 0.5}


class Gemm(NamedTuple):
    """Equal matrix products: `batch` times [m, k] · [k, n]."""

    name: str
    """forward, data gradient or weight gradient."""
    m: int
    n: int
    k: int
    precision: Precision = "16"
    batch: int = 1
    """Products in one launch: the experts of a grouped GEMM, the heads of unfused attention."""
    grouped: bool = False
    """The products are those of experts."""
    output_bytes: float = 2
    """Bytes read and written for each element of the output: 2 for a new tensor, 8 if it is added to an fp32 buffer."""
    depth_is_tokens: bool = False
    """The products sum over tokens: a weight gradient."""
    launches: int = 1
    """Operations that the host issues. Those of experts are issued one by one, also where one kernel multiplies them together."""

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return 2 * self.m * self.n * self.k * self.batch

    @property
    def bytes(self) -> float:
        """Bytes of both factors and of the output."""
        factors = BYTES[self.precision] * self.k * (self.m + self.n)
        return self.batch * (factors + self.output_bytes * self.m * self.n)

    @property
    def rows(self) -> int:
        """Tokens of one product, which determine the efficiency of a grouped GEMM."""
        return self.k if self.depth_is_tokens else self.m


class Attention(NamedTuple):
    """The forward or the backward of a fused attention kernel."""

    name: Literal["forward", "backward"]
    batch: int
    heads: int
    """Query heads of this rank."""
    queries: int
    """Tokens of a sample whose queries this rank has."""
    keys: int
    pairs: float
    """Pairs of a query and a key that are computed, for one head and sample: half of all pairs under a causal mask."""
    head_dim: int
    value_dim: int
    backend: Literal["flash", "fused"] = "fused"
    of_loss: bool = False
    """For the loss of an indexer, which a forward without gradients does not compute."""

    @property
    def launches(self) -> int:
        """Operations that the host issues."""
        return 1

    @property
    def flops(self) -> float:
        """Floating-point operations. The backward computes five products where the forward computes two."""
        forward = 2 * self.batch * self.heads * self.pairs * (self.head_dim + self.value_dim)
        return forward if self.name == "forward" else 2.5 * forward


class MemoryBound(NamedTuple):
    """Kernels whose time is that of the bytes that they read and write."""

    name: str
    bytes: float
    kind: MemoryKind = "elementwise"
    launches: int = 1
    """Kernels, which the host issues one by one."""


class HostLoop(NamedTuple):
    """Small operations that the host issues for each packed sample. The GPU runs each faster than the host issues it."""

    name: str
    operations: float
    """Operations of PyTorch that launch a kernel."""
    reads: float = 0.0
    """Values that the host reads from the GPU in between, so that the GPU has no other work then."""

    @property
    def launches(self) -> int:
        """None of those that are counted with the modules (`Efficiencies.host_call`)."""
        return 0


GpuKernel = Gemm | Attention | MemoryBound
Kernel = GpuKernel | HostLoop


class Work(NamedTuple):
    """The kernels of a module without children, for one microbatch."""

    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    synchronizes: bool = False
    """The host waits for the GPU in forward: for the number of tokens of each expert."""


NO_WORK: Final = Work()


def flops(kernels: tuple[Kernel, ...]) -> float:
    """Floating-point operations of GEMMs and attention. Those of other kernels are not counted."""
    return sum(kernel.flops for kernel in kernels if isinstance(kernel, Gemm | Attention))
