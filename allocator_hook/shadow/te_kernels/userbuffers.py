"""Userbuffers, which overlap tensor-parallel communication with GEMMs (csrc/extensions/comm_gemm_overlap.cpp).

The CUDA driver allocates a buffer, not PyTorch's allocator, so it is not recorded. Communication is recorded as that of
torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from allocator_hook.shadow.gpu import Gpu, Stream
from allocator_hook.shadow.te_kernels.allocate import outside_allocator
from allocator_hook.shadow.te_kernels.enums import ENUMS


class Overlap:
    """`CommOverlap`: one buffer of `shape`, for `ranks` tensor-parallel ranks."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, helper: Any, ranks: int, *_: Any, num_splits: int = 1, **options: Any
    ) -> None:
        self._splits = num_splits
        self._buffer = outside_allocator(shape, dtype)
        self._ranks = ranks

    def get_buffer(self, local_chunk: bool = False, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Return the buffer, or the part of this rank, as a tensor of this shape."""
        rows, columns = self._buffer.shape
        size = tuple(shape) if shape is not None else (rows // self._ranks if local_chunk else rows, columns)
        return self._buffer.view(-1)[: prod(size)].view(size)

    def copy_into_buffer(self, input: torch.Tensor, local_chunk: bool = False) -> None:
        """Copy to the buffer; allocates nothing."""

    def get_communication_stream(self) -> tuple[Stream, Stream]:
        return Stream(), Stream()

    def is_fp8_ubuf(self) -> bool:
        return self._buffer.dtype is torch.uint8

    def is_atomic_gemm(self) -> bool:
        return False

    def is_p2p_overlap(self) -> bool:
        return False

    def with_cublasmp(self) -> bool:
        """Asked by releases from 2.17 on: whether cuBLASMp communicates."""
        return False

    def communicate(self, kind: int) -> None:
        """Record the collective that overlaps with a GEMM."""
        from megatron.core.parallel_state import get_tensor_model_parallel_group

        full, part, group = self._buffer, self.get_buffer(local_chunk=True), get_tensor_model_parallel_group()
        if kind == ENUMS["CommOverlapType"]["AG"]:
            torch.distributed.all_gather_into_tensor(full, part, group=group)
        else:
            torch.distributed.reduce_scatter_tensor(part, full, group=group)

    def parts(self, size: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        """Return the GEMMs of a product of rows, columns and depth (`split_overlap_rs`): the columns are split."""
        rows, columns, depth = size
        return [(rows, columns // self._splits, depth)] * self._splits


class PeerOverlap(Overlap):
    """`CommOverlapP2P`: exchange in a ring."""

    def is_p2p_overlap(self) -> bool:
        return True

    def parts(self, size: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        """Return the GEMMs of a product (`split_overlap_ag`): the rows of each rank are one."""
        rows, columns, depth = size
        return [(rows // self._ranks, columns, depth)] * self._ranks


class Helper:
    """`CommOverlapHelper`: exchanges addresses between ranks."""

    def __init__(self, *groups: Any) -> None:
        pass


def bindings(gpu: Gpu) -> Mapping[str, Callable[..., Any]]:
    return {
        "CommOverlap": Overlap,
        "CommOverlapP2P": PeerOverlap,
        "CommOverlapHelper": Helper,
        "device_supports_multicast": lambda *_: gpu.capability >= (9, 0),
        "ubuf_built_with_mpi": lambda: False,
        "bulk_overlap_ag_with_external_gemm": lambda overlap, *_: overlap.communicate(ENUMS["CommOverlapType"]["AG"]),
    }
