"""Replacements for compiled extensions other than Transformer Engine's (APEX, Megatron's softmax kernels), and for packages."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

import packaging.version
import torch

from allocator_hook.shadow import flash_attention
from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.kernel_calls import calls, element_bits
from allocator_hook.shadow.stand_ins import (
    causal_conv,
    cu_tile,
    deep_ep,
    emerging_optimizers,
    hadamard,
    linear_attention,
    mamba_ssm,
    sparse_attention,
)
from allocator_hook.shadow.te_kernels import extension, multi_tensor, softmax
from allocator_hook.shadow.te_kernels.allocate import empty, like
from analyzer.specs.software import version_number

_CHUNK_SIZE: Final = 2048 * 32
"""Elements that one block of such a kernel processes."""


def extension_modules(gpu: Gpu) -> dict[str, ModuleType]:
    """Return the replacement modules by import name. APEX is assumed to be installed on the training machine."""
    modules = {"transformer_engine_torch": extension(gpu, version="0"), "fused_weight_gradient_mlp_cuda": _weight_gradients()}
    for name in ("scaled_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda"):
        modules[name] = _softmax(name)
    modules |= _multi_tensor(gpu) | _layer_norms(gpu) | _rotation() | flash_attention.modules(gpu)
    for package in (deep_ep, cu_tile, emerging_optimizers, causal_conv, hadamard, linear_attention, mamba_ssm):
        modules |= package.modules()
    return modules | sparse_attention.modules(gpu) | _pkg_resources()


def _pkg_resources() -> dict[str, ModuleType]:
    """The part that megatron-core before 0.9 imports of a module that recent releases of setuptools do not have."""
    if find_spec("pkg_resources") is not None:
        return {}
    module = ModuleType("pkg_resources")
    module.packaging = packaging  # type: ignore[attr-defined]
    return {"pkg_resources": module}


def _weight_gradients() -> ModuleType:
    """APEX: accumulates a weight gradient into the gradient buffer in place."""
    module = ModuleType("fused_weight_gradient_mlp_cuda")
    for name in ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"):
        setattr(module, name, _accumulate)
    return module


def _accumulate(input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    del main_grad
    rows = input.numel() // input.shape[-1]
    calls.gemms([(grad_output.shape[-1], input.shape[-1], rows)], bits=element_bits(input), accumulates=True)


def _multi_tensor(gpu: Gpu) -> dict[str, ModuleType]:
    """APEX's kernels for lists of tensors, which Megatron uses if Transformer Engine lacks one of them (core 0.17 with TE 2.11)."""
    kernels, applier = ModuleType("amp_C"), ModuleType("apex.multi_tensor_apply")
    for name, kernel in multi_tensor.bindings(gpu).items():
        setattr(kernels, name, kernel)
    applier.multi_tensor_applier = _apply  # type: ignore[attr-defined]
    return {"amp_C": kernels, "apex.multi_tensor_apply": applier}


def _apply(kernel: Any, noop_flag: torch.Tensor, lists: list[list[torch.Tensor]], *args: Any) -> Any:
    return kernel(_CHUNK_SIZE, noop_flag, lists, *args)


def _softmax(name: str) -> ModuleType:
    """Megatron's fused softmax for local layers. It allocates the same tensors as Transformer Engine's."""
    module = ModuleType(name)
    module.forward = softmax.forward  # type: ignore[attr-defined]
    module.backward = softmax.backward  # type: ignore[attr-defined]
    module.get_batch_per_block = lambda *_: 4  # type: ignore[attr-defined]
    return module


class LayerNorm(torch.autograd.Function):
    """FastLayerNormFN, whose output has the dtype of the weight. Saved for backward: input, weight, mean, reciprocal deviation."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *options: Any) -> torch.Tensor:
        rows = input.numel() // input.shape[-1]
        output = empty(input.shape, weight.dtype)
        mean, rsigma = empty((rows,), torch.float32), empty((rows,), torch.float32)
        ctx.save_for_backward(input, weight, mean, rsigma)
        ctx.options = len(options)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, _, _ = ctx.saved_tensors
        grads[0].contiguous()
        return (like(input), like(weight), like(weight), *([None] * ctx.options))


class FusedRotation(torch.autograd.Function):
    """APEX's `FusedRoPEFunc`. Saved for backward: the angles."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, freqs: torch.Tensor, transpose_output_memory: bool = False) -> torch.Tensor:
        ctx.save_for_backward(freqs)
        ctx.transposed = transpose_output_memory
        return _rotated(t, transposed=transpose_output_memory)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _rotated(grads[0], transposed=ctx.transposed), None, None


def _rotated(tensor: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """[s, b, a, d] like `tensor`; in memory [b, s, a, d] if transposed."""
    s, b, *rest = tensor.shape
    return empty((b, s, *rest), tensor.dtype).transpose(0, 1) if transposed else like(tensor)


def _rotation() -> dict[str, ModuleType]:
    """APEX's fused rotation, for megatron-core before 0.9. Later releases have a choice, and get that of Transformer Engine."""
    if version_number(metadata.version("megatron-core")) >= (0, 9):
        return {}
    parent, module = ModuleType("apex.transformer"), ModuleType("apex.transformer.functional")
    parent.__path__ = []
    module.fused_apply_rotary_pos_emb = FusedRotation.apply  # type: ignore[attr-defined]
    module.fused_apply_rotary_pos_emb_thd = FusedRotation.apply  # type: ignore[attr-defined]
    return {"apex.transformer": parent, "apex.transformer.functional": module}


def _layer_norms(gpu: Gpu) -> dict[str, ModuleType]:
    """The APEX modules that Megatron's local layers import."""
    del gpu
    names = ("apex", "apex.contrib", "apex.contrib.layer_norm", "apex.contrib.layer_norm.layer_norm")
    modules = {name: ModuleType(name) for name in (*names, "apex.normalization", "apex.normalization.fused_layer_norm")}
    for module in modules.values():
        module.__path__ = []
    modules["apex.contrib.layer_norm.layer_norm"].FastLayerNormFN = LayerNorm  # type: ignore[attr-defined]
    modules["apex.normalization.fused_layer_norm"].FusedLayerNormAffineFunction = LayerNorm  # type: ignore[attr-defined]
    return modules
