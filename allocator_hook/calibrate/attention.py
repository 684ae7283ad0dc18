"""Fused attention: of Transformer Engine if it is installed, as Megatron-LM runs it, otherwise of PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from allocator_hook.calibrate.clock import Run
from analyzer.time.work.kernels import Attention

ENGINE: Final = "Transformer Engine"
PYTORCH: Final = "PyTorch"


class AttentionLibrary:
    """Runs attention with the first library that can."""

    def __init__(self, *, device: str, dtype: torch.dtype, engine: bool) -> None:
        self._device, self._dtype, self._engine = device, dtype, engine
        self.used: set[str] = set()
        """Names of the libraries whose attention ran."""

    def runs(self, attention: Attention) -> tuple[Run, Run]:
        """The forward, and forward and backward together. Raises the error of the last library that failed."""
        if self._engine:
            try:
                return self._checked(ENGINE, partial(self._of_engine, attention))
            except Exception as error:
                failure = error
                self._engine = attention.head_dim != attention.value_dim  # latent attention fails on its own
            try:
                return self._of_pytorch(attention)
            except Exception:
                raise failure from None
        return self._of_pytorch(attention)

    def _of_pytorch(self, attention: Attention) -> tuple[Run, Run]:
        from torch.nn.attention import SDPBackend

        cudnn = [SDPBackend.CUDNN_ATTENTION] if attention.backend == "fused" and self._device != "cpu" else []
        failure: Exception | None = None
        for backend in (*cudnn, SDPBackend.FLASH_ATTENTION):
            try:
                return self._checked(PYTORCH, partial(self._of_backend, attention, backend))
            except Exception as error:
                failure = error
        assert failure is not None
        raise failure

    def _checked(self, name: str, make: Callable[[], tuple[Run, Run]]) -> tuple[Run, Run]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns of each reason for which a kernel is not used
            runs = make()
            for run in runs:
                run()
        self.used.add(name)
        return runs

    def _inputs(self, attention: Attention, *shape: int) -> tuple[Any, Any, Any]:
        def new(width: int) -> Any:
            return torch.randn(*shape, width, device=self._device, dtype=self._dtype, requires_grad=True)

        return new(attention.head_dim), new(attention.head_dim), new(attention.value_dim)

    def _of_backend(self, attention: Attention, backend: Any) -> tuple[Run, Run]:
        from torch.nn.attention import sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        inputs = self._inputs(attention, attention.batch, attention.heads, attention.queries)

        def forward() -> Any:
            with sdpa_kernel([backend]):
                return scaled_dot_product_attention(*inputs, is_causal=True)

        return _both(forward, inputs)

    def _of_engine(self, attention: Attention) -> tuple[Run, Run]:
        from transformer_engine.pytorch import DotProductAttention

        equal = attention.head_dim == attention.value_dim  # releases before latent attention take one size only
        sizes = attention.head_dim if equal else (attention.head_dim, attention.value_dim)
        module = DotProductAttention(attention.heads, sizes, qkv_format="sbhd", attn_mask_type="causal")
        inputs = self._inputs(attention, attention.queries, attention.batch, attention.heads)
        return _both(lambda: module(*inputs), inputs)


def _both(forward: Callable[[], Any], inputs: tuple[Any, ...]) -> tuple[Run, Run]:
    """A forward, and a forward with its backward. The forward keeps what the backward needs in both."""
    gradient = torch.randn_like(forward())
    return forward, lambda: torch.autograd.grad(forward(), inputs, gradient)
