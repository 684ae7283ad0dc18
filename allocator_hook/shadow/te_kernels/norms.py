"""LayerNorm and RMSNorm (csrc/extensions/normalization.cpp).

Saved for backward: the mean and the reciprocal deviation of each row, in fp32. The workspaces of the tuned kernels are partial
sums of the weight gradients, one fp32 row per thread block (`dgamma_part` and `dbeta_part` in
common/normalization/layernorm/ln_api.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.te_kernels.allocate import empty, like
from allocator_hook.shadow.te_kernels.enums import TORCH_DTYPES
from allocator_hook.shadow.te_kernels.quantizers import Kind, output

FUSED: Final[tuple[Kind, ...]] = ("delayed",)
"""Recipes for which the forward kernels write the quantized tensor directly. mxfp8 needs NVTE_NORM_FWD_USE_CUDNN."""


def bindings(gpu: Gpu) -> Mapping[str, Callable[..., Any]]:
    """Return the replacement functions by binding name.

    They are closures, not functools.partial objects: a call through a partial object keeps a reference to every argument until
    it returns, so that `del` of an argument does not free it.
    """
    return {**_forward(gpu), **_backward(gpu)}


def _forward(gpu: Gpu) -> Mapping[str, Callable[..., Any]]:
    def layernorm_fwd(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: Any,
        eps: float,
        ln_out: Any,
        quantizer: Any,
        otype: Any,
        sm_margin: int,
        zero_centered_gamma: bool,
    ) -> list[Any]:
        del weight, bias, eps, sm_margin, zero_centered_gamma
        rows = input.numel() // input.shape[-1]
        mean, rsigma = empty((rows,), torch.float32), empty((rows,), torch.float32)
        out = output(quantizer, input.shape, TORCH_DTYPES[otype], gpu, fused=FUSED) if ln_out is None else ln_out
        return [out, mean, rsigma]

    def rmsnorm_fwd(
        input: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        ln_out: Any,
        quantizer: Any,
        otype: Any,
        sm_margin: int,
        zero_centered_gamma: bool,
    ) -> list[Any]:
        del weight, eps, sm_margin, zero_centered_gamma
        rsigma = empty((input.numel() // input.shape[-1],), torch.float32)
        out = output(quantizer, input.shape, TORCH_DTYPES[otype], gpu, fused=FUSED) if ln_out is None else ln_out
        return [out, None, rsigma]

    return {"layernorm_fwd": layernorm_fwd, "rmsnorm_fwd": rmsnorm_fwd}


def _backward(gpu: Gpu) -> Mapping[str, Callable[..., Any]]:
    def partial_sums(width: int, sm_margin: int, parts: int) -> list[torch.Tensor]:
        return [empty((gpu.multiprocessors - sm_margin, width), torch.float32) for _ in range(parts)]

    def layernorm_bwd(
        dz: torch.Tensor,
        x: torch.Tensor,
        mu: torch.Tensor,
        rsigma: torch.Tensor,
        gamma: torch.Tensor,
        sm_margin: int,
        zero_centered_gamma: bool,
    ) -> list[torch.Tensor]:
        del mu, rsigma, zero_centered_gamma
        dz = dz.contiguous()
        gradients = [like(x), like(gamma), like(gamma)]
        scratch = partial_sums(x.shape[-1], sm_margin, 2)
        del scratch
        return gradients

    def rmsnorm_bwd(
        dz: torch.Tensor, x: torch.Tensor, rsigma: torch.Tensor, gamma: torch.Tensor, sm_margin: int, zero_centered_gamma: bool
    ) -> list[torch.Tensor]:
        del rsigma, zero_centered_gamma
        dz = dz.contiguous()
        gradients = [like(x), like(gamma)]
        scratch = partial_sums(x.shape[-1], sm_margin, 1)
        del scratch
        return gradients

    def rmsnorm_bwd_add(
        dz: torch.Tensor,
        x: torch.Tensor,
        add: torch.Tensor,
        rsigma: torch.Tensor,
        gamma: torch.Tensor,
        sm_margin: int,
        zero_centered_gamma: bool,
    ) -> list[torch.Tensor]:
        del add
        return rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma)

    return {"layernorm_bwd": layernorm_bwd, "rmsnorm_bwd": rmsnorm_bwd, "rmsnorm_bwd_add": rmsnorm_bwd_add}
