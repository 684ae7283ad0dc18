"""Creates quantized tensors for Transformer Engine's quantizers, as the extension does (csrc/quantizer.cpp, 2.11).

A quantized tensor is an instance of a Python class of Transformer Engine that wraps data and scale buffers: `Float8Tensor` and
similar classes, or the plain `…Storage` class if the quantizer is `internal`. The usages set on the quantizer determine which
buffers exist. With per-tensor scaling they also depend on the layouts that the FP8 GEMMs of the GPU support.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from math import prod
from typing import Any, Final, Literal

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.te_kernels.allocate import empty
from allocator_hook.shadow.te_kernels.enums import ENUMS
from allocator_hook.shadow.te_kernels.releases import is_before
from analyzer.errors import AnalyzerError
from analyzer.units import round_up

Kind = Literal["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"]
Buffer = tuple[tuple[int, ...], torch.dtype]

_KINDS: Final[Mapping[str, Kind]] = {
    "Float8Quantizer": "delayed",
    "Float8CurrentScalingQuantizer": "tensorwise",
    "Float8BlockQuantizer": "blockwise",
    "MXFP8Quantizer": "mxfp8",
    "NVFP4Quantizer": "nvfp4",
}
_TENSORS: Final[Mapping[Kind, tuple[str, str]]] = {
    "delayed": ("float8_tensor", "Float8Tensor"),
    "tensorwise": ("float8_tensor", "Float8Tensor"),
    "blockwise": ("float8_blockwise_tensor", "Float8BlockwiseQTensor"),
    "mxfp8": ("mxfp8_tensor", "MXFP8Tensor"),
    "nvfp4": ("nvfp4_tensor", "NVFP4Tensor"),
}
"""Module in transformer_engine.pytorch.tensor, and class. The `…Storage` class is in its subpackage `storage`.

Before 2.9: the `…Base` class in the subpackage `_internal`.
"""
_MXFP8_BLOCK: Final = 32


def kind_of(quantizer: Any) -> Kind | None:
    """Return the recipe of a quantizer; None if there is no quantizer. Raises AnalyzerError for an unsupported one."""
    if quantizer is None:
        return None
    name = type(quantizer).__name__
    if name not in _KINDS:
        raise AnalyzerError(
            f"--info-engine shadow: Transformer Engine's {name} is not supported; "
            "use --info-engine formula, or another --fp8-recipe"
        )
    return _KINDS[name]


def is_per_tensor(kind: Kind | None) -> bool:
    """Return whether the recipe has one scale per tensor. The columnwise data is then the transpose."""
    return kind in ("delayed", "tensorwise")


def supports_any_gemm_layout(gpu: Gpu) -> bool:
    """`nvte_is_non_tn_fp8_gemm_supported` (common/transformer_engine.cpp). If true, no transpose is needed."""
    return (10, 0) <= gpu.capability < (12, 0) or gpu.capability >= (13, 0)


def logical_shape(tensor: Any) -> tuple[int, ...]:
    """Return the logical shape of a tensor or of a `…Storage`, which has no shape attribute."""
    if isinstance(tensor, torch.Tensor):
        return tuple(tensor.shape)
    transpose = getattr(tensor, "_transpose", None)
    if transpose is not None:
        return (*transpose.shape[1:], transpose.shape[0])
    return tuple(tensor.size())


def create_tensor(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, gpu: Gpu) -> Any:
    """`Quantizer::create_tensor`: an uninitialized tensor with the buffers of the quantizer's usages."""
    kind = kind_of(quantizer)
    if kind is None:
        return empty(shape, dtype)
    usages = _usages(quantizer, shape, gpu)
    made = {name: empty(*buffer) for enabled, buffers in usages if enabled for name, buffer in buffers.items()}
    if is_per_tensor(kind):
        made["scale_inv"] = empty((1,), torch.float32)
    if kind == "nvfp4":
        made |= {f"amax_{usage}": empty((1,), torch.float32) for usage in ("rowwise", "columnwise") if f"{usage}_data" in made}
    return _wrap(quantizer, shape, dtype, made)


def create_tensors(quantizers: Sequence[Any], shapes: Sequence[Sequence[int]], dtype: torch.dtype, gpu: Gpu) -> list[Any]:
    """Return the tensors of `split_quantize`.

    With block scaling, the rowwise data of all tensors share one buffer and the columnwise data share another.
    """
    kinds = {kind_of(quantizer) for quantizer in quantizers}
    if len(kinds) != 1 or is_per_tensor(next(iter(kinds))):
        return [create_tensor(quantizer, shape, dtype, gpu) for quantizer, shape in zip(quantizers, shapes, strict=True)]
    made: list[dict[str, torch.Tensor]] = [{} for _ in shapes]
    for usage in range(2):
        usages = [_usages(quantizers[0], shape, gpu)[usage] for shape in shapes]
        if usages[0][0]:
            of_each = [buffers for _, buffers in usages]
            if "nvfp4" in kinds:
                name = ("amax_rowwise", "amax_columnwise")[usage]
                of_each = [{**buffers, name: ((1,), torch.float32)} for buffers in of_each]
            for tensor, views in zip(made, _in_one_buffer(of_each), strict=True):
                tensor.update(views)
    return [
        _wrap(quantizer, shape, dtype, buffers, internal=True)
        for quantizer, shape, buffers in zip(quantizers, shapes, made, strict=True)
    ]


def update_tensor(quantizer: Any, tensor: Any, gpu: Gpu) -> Any:
    """`Quantizer::convert_and_update_tensor`: create missing buffers and drop those without a usage."""
    kind = kind_of(quantizer)
    shape = logical_shape(tensor)
    for enabled, buffers in _usages(quantizer, shape, gpu):
        for name, buffer in buffers.items():
            if not enabled:
                setattr(tensor, f"_{name}", None)
            elif getattr(tensor, f"_{name}") is None:
                setattr(tensor, f"_{name}", empty(*buffer))
    if is_per_tensor(kind):
        tensor._transpose_invalid = tensor._transpose is None
    return tensor


def run_kernel(quantizer: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
    """`Quantizer::quantize`. With current scaling of a sharded tensor, the amax is all-reduced.

    The columns of an NVFP4 input are transformed (`NVFP4Quantizer::quantize_impl`). A fused kernel needs multiples of 64 rows and
    128 columns in bf16; otherwise the transformed transpose is a temporary tensor.
    """
    kind, elements = kind_of(quantizer), prod(shape)
    if elements and kind == "tensorwise" and quantizer.with_amax_reduction:
        group = quantizer._canonicalized_amax_reduction_group()
        amax = getattr(quantizer, "amax", None)  # from 2.16 on the kernel allocates it
        amax = empty((1,), torch.float32) if amax is None else amax
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
    if elements and kind == "nvfp4":
        random_state = empty((2,), torch.int64) if quantizer.stochastic_rounding else None
        rows, columns = prod(shape[:-1]), shape[-1]
        fused = dtype is torch.bfloat16 and rows % 64 == 0 and columns % 128 == 0
        transformed = quantizer.with_rht and quantizer.columnwise_usage and not fused
        transposed = empty((columns, rows), dtype) if transformed else None
        del random_state, transposed


def output(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, gpu: Gpu, *, fused: Sequence[Kind]) -> Any:
    """Return the quantized output of a kernel.

    For recipes not in `fused`, the kernel first writes an unquantized output, which is then quantized and freed.
    """
    out = create_tensor(quantizer, shape, dtype, gpu)
    kind = kind_of(quantizer)
    if kind is not None:
        plain = None if kind in fused else empty(shape, dtype)
        run_kernel(quantizer, shape, dtype)
        del plain
    return out


def _usages(quantizer: Any, shape: Sequence[int], gpu: Gpu) -> tuple[tuple[bool, dict[str, Buffer]], ...]:
    """Return for rowwise and columnwise usage: whether it is enabled, and its buffers, data first."""
    kind = kind_of(quantizer)
    rowwise, columnwise = bool(quantizer.rowwise_usage), bool(quantizer.columnwise_usage)
    size = tuple(shape)
    transposed = (size[-1], *size[:-1])
    if is_per_tensor(kind):
        any_layout = supports_any_gemm_layout(gpu)
        return (
            (rowwise or any_layout, {"data": (size, torch.uint8)}),
            (columnwise and not any_layout, {"transpose": (transposed, torch.uint8)}),
        )
    if kind == "nvfp4":
        rows, width = prod(size[:-1]), size[-1]
        scales = [(tuple(quantizer.get_scale_shape(size, by_columns)), torch.uint8) for by_columns in (False, True)]
        return (
            (rowwise, {"rowwise_data": ((*size[:-1], width // 2), torch.uint8), "rowwise_scale_inv": scales[0]}),
            (columnwise, {"columnwise_data": ((width, rows // 2), torch.uint8), "columnwise_scale_inv": scales[1]}),
        )
    if kind == "blockwise":
        columns = size if _is_compact(quantizer) else transposed
        scales = [(tuple(quantizer.get_scale_shape(size, by_columns)), torch.float32) for by_columns in (False, True)]
    else:
        columns = size
        rows, width = prod(size[:-1]), size[-1]
        scales = [
            ((round_up(rows, 128), round_up(width // _MXFP8_BLOCK, 4)), torch.uint8),
            ((round_up(rows // _MXFP8_BLOCK, 4), round_up(width, 128)), torch.uint8),
        ]
    return (
        (rowwise, {"rowwise_data": (size, torch.uint8), "rowwise_scale_inv": scales[0]}),
        (columnwise, {"columnwise_data": (columns, torch.uint8), "columnwise_scale_inv": scales[1]}),
    )


def _is_compact(quantizer: Any) -> bool | None:
    """Return whether blocks are not transposed because they are gathered. None before 2.4 and from 2.12 on: there is no choice."""
    usage: bool | None = getattr(quantizer, "all_gather_usage", None)
    return usage


def _in_one_buffer(tensors: Sequence[Mapping[str, Buffer]]) -> list[dict[str, torch.Tensor]]:
    """`bulk_allocate_*_tensors` (csrc/extensions/cast.cpp): first all data, aligned to 256 bytes, then all scales, to 16,
    and the amax values of NVFP4."""
    names = list(tensors[0])
    offsets: dict[tuple[int, str], int] = {}
    total = 0
    for name, alignment in zip(names, (256, 16, 16), strict=False):
        for index, buffers in enumerate(tensors):
            shape, dtype = buffers[name]
            offsets[index, name] = total = round_up(total, alignment)
            total += prod(shape) * dtype.itemsize
    storage = empty((total,), torch.uint8).untyped_storage()
    return [{name: _view(storage, offsets[index, name], *buffers[name]) for name in names} for index, buffers in enumerate(tensors)]


def _view(storage: torch.UntypedStorage, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """`at::from_blob`: a new tensor that keeps the storage alive, but no other tensor."""
    tensor = empty((0,), dtype)
    if not prod(shape):
        return empty(shape, dtype)
    stride = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    with torch.no_grad():
        return tensor.set_(storage, offset // dtype.itemsize, shape, stride)


def _wrap(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, made: Mapping[str, torch.Tensor], *, internal: bool | None = None
) -> Any:
    kind = kind_of(quantizer)
    assert kind is not None
    internal = quantizer.internal if internal is None else internal
    module, name = _TENSORS[kind]
    if internal:
        folder, base = ("_internal", "Base") if is_before("2.9") else ("storage", "Storage")
        module, name = f"{folder}.{module}_{base.lower()}", f"{name}{base}"
    dtype_name = "fp4_dtype" if kind == "nvfp4" else "fp8_dtype"
    options: dict[str, Any] = {dtype_name: quantizer.dtype, "quantizer": quantizer}
    if not internal:
        options |= {"shape": tuple(shape), "dtype": dtype}
    if is_per_tensor(kind):
        options |= {
            "data": made.get("data"),
            "fp8_scale_inv": made["scale_inv"],
            "data_transpose": made.get("transpose"),
        }
    else:
        parts = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
        options |= {part: made.get(part) for part in parts}
    if kind == "nvfp4":
        options |= {name: made.get(name) for name in ("amax_rowwise", "amax_columnwise")}
    if kind == "blockwise":
        options["is_2D_scaled"] = quantizer.block_scaling_dim == 2
        if _is_compact(quantizer) is not None:
            options["data_format"] = ENUMS["Float8BlockScaleTensorFormat"]["COMPACT" if _is_compact(quantizer) else "GEMM_READY"]
    if kind in ("mxfp8", "nvfp4") and not is_before("2.12"):
        options["with_gemm_swizzled_scales"] = kind == "mxfp8" and bool(quantizer.optimize_for_gemm)
    return getattr(import_module(f"transformer_engine.pytorch.tensor.{module}"), name)(**options)
