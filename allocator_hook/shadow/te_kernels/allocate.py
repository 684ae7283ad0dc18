"""Making tensors as the bindings do: on the GPU, uninitialised."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from analyzer.errors import AnalyzerError


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """`at::empty(shape, at::CUDA(dtype))`."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def like(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of the same shape and type."""
    return empty(tensor.shape, tensor.dtype)


def workspace(bytes_: int) -> torch.Tensor | None:
    """`allocateSpace`: kept until the binding returns, by its local variable."""
    return empty((bytes_,), torch.uint8) if bytes_ else None


def refuse_quantizer(quantizer: object, kernel: str) -> None:
    """Attention in FP8 is not stood in for; a run that needs it is refused rather than counted wrongly."""
    if quantizer is not None:
        raise AnalyzerError(f"--info-engine shadow: {kernel} has no quantised output yet; use --info-engine formula")
