"""Quantization and dequantization, and scales of FP8 weights (csrc/extensions/cast.cpp, recipe.cpp, fp8_partial_cast.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.te_kernels.allocate import empty
from allocator_hook.shadow.te_kernels.enums import TORCH_DTYPES
from allocator_hook.shadow.te_kernels.quantizers import create_tensor, create_tensors, logical_shape, run_kernel, update_tensor

IN_PLACE: Final = (
    "compute_amax",
    "fused_amax_and_scale_update_after_reduction",
    "fp8_block_scaling_compute_partial_amax",
    "fp8_block_scaling_partial_cast",
    "mxfp8_scaling_compute_partial_amax",
    "mxfp8_scaling_partial_cast",
    "nvfp4_multi_tensor_compute_partial_amax",
    "nvfp4_compute_global_scale",
    "nvfp4_multi_tensor_fused_scale",
    "nvfp4_multi_tensor_2d_partial_cast",
    "nvfp4_2d_multi_tensor_transpose",
)
"""Kernels that write only to existing tensors."""


def bindings(gpu: Gpu) -> Mapping[str, Callable[..., Any]]:
    def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None) -> Any:
        del noop
        tensor = tensor.contiguous()
        out = create_tensor(quantizer, tensor.shape, tensor.dtype, gpu) if output is None else update_tensor(quantizer, output, gpu)
        run_kernel(quantizer, tensor.shape, tensor.dtype)
        return out

    def multi_tensor_quantize(tensor_list: Sequence[torch.Tensor], quantizer_list: Sequence[Any]) -> list[Any]:
        pairs = list(zip(quantizer_list, tensor_list, strict=True))
        made = [create_tensor(quantizer, tensor.shape, tensor.dtype, gpu) for quantizer, tensor in pairs]
        for quantizer, tensor in pairs:
            run_kernel(quantizer, tensor.shape, tensor.dtype)
        return made

    def fused_multi_quantize(
        input_list: Sequence[torch.Tensor], output_list: Any, quantizer_list: Sequence[Any], *_: Any
    ) -> list[Any]:
        """Of releases before 2.5, which pass no outputs."""
        del output_list
        return multi_tensor_quantize(input_list, quantizer_list)

    def split_quantize(
        tensor: torch.Tensor,
        split_sections: Sequence[int],
        quantizer_list: Sequence[Any],
        disable_bulk_allocation: bool = False,
    ) -> list[Any]:
        tensor = tensor.contiguous()
        shapes = [(rows, *tensor.shape[1:]) for rows in split_sections]
        if disable_bulk_allocation:
            made = [create_tensor(each, shape, tensor.dtype, gpu) for each, shape in zip(quantizer_list, shapes, strict=True)]
        else:
            made = create_tensors(quantizer_list, shapes, tensor.dtype, gpu)
        for quantizer, shape in zip(quantizer_list, shapes, strict=True):
            run_kernel(quantizer, shape, tensor.dtype)
        return made

    def create_empty_quantized_tensor(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, *_: Any) -> Any:
        return create_tensor(quantizer, shape, dtype, gpu)

    return {
        "quantize": quantize,
        "create_empty_quantized_tensor": create_empty_quantized_tensor,
        "multi_tensor_quantize": multi_tensor_quantize,
        "fused_multi_quantize": fused_multi_quantize,
        "split_quantize": split_quantize,
        "dequantize": dequantize,
        **dict.fromkeys(IN_PLACE, _in_place),
    }


def dequantize(input: Any, otype: int) -> torch.Tensor:
    """Return a tensor of the requested dtype."""
    return empty(logical_shape(input), TORCH_DTYPES[otype])  # type: ignore[index]


def _in_place(*_: Any, **__: Any) -> None:
    """Update the arguments in place; allocate nothing."""
