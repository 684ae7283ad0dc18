"""Kernels of DeepSeek sparse attention: the namespace `DSA` of nvidia-cudnn-frontend (1.32.0), and FlashMLA's sparse forward.

Each function allocates what the package allocates with PyTorch: results, and a workspace that it frees at its end.

Sources: cudnn/deepseek_sparse_attention/{indexer_forward,indexer_top_k,indexer_backward,score_recompute,sparse_attention_backward};
flash_mla/flash_mla_interface.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, Literal

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.kernel_calls import calls, element_bits
from allocator_hook.shadow.te_kernels.allocate import empty, like
from allocator_hook.step.patching import Patch, Patches
from analyzer.specs import TrainingJob
from analyzer.trace.events import AttentionCall
from analyzer.units import round_up

_ALIGNMENT: Final = 128
"""Bytes to which each part of a workspace is aligned (`ws_align`)."""
_COLUMNS: Final = 4
"""Elements to which a row of scores is padded (`TMA_ALIGN_ELEMS`: 16 bytes)."""


def _aligned(size: int) -> int:
    return round_up(size, _ALIGNMENT)


def _workspace(size: int) -> torch.Tensor | None:
    return empty((size,), torch.uint8) if size else None


class Kernels:
    """The functions that megatron-core calls (`CudnnDsaInterface`), on one kind of GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self._hopper = gpu.capability[0] == 9

    def indexer_forward_wrapper(self, q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        """Scores of all pairs: [b, sq, sk] in fp32."""
        b, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        scores = empty((b, queries, round_up(keys, _COLUMNS)), torch.float32)[..., :keys]
        calls.gemms([(queries * q.shape[2], keys, q.shape[-1])] * b, bits=element_bits(q))
        return {"scores": scores}

    def indexer_top_k_wrapper(
        self, scores: torch.Tensor, lengths: torch.Tensor, *, top_k: int, return_val: bool, **_: Any
    ) -> dict[str, torch.Tensor | None]:
        """The keys with the highest scores of each row. The workspace has two numbers for each score in fp32."""
        rows = scores.shape[0]
        indices = empty((rows, top_k), torch.int32)
        values = empty((rows, top_k), scores.dtype) if return_val else None
        workspace = _workspace(_aligned(scores.numel() * 2 * 4))
        calls.launched("indexer_top_k", [each for each in (scores, lengths, indices, values) if each is not None])
        del workspace
        return {"indices": indices, "values": values}

    def compactify_wrapper(self, indices: torch.Tensor) -> dict[str, torch.Tensor]:
        """The indices of each row that are not negative first, and their number."""
        compact, lengths = like(indices), empty((indices.shape[0],), torch.int32)
        calls.launched("compactify", (indices, compact, lengths))
        return {"indices": compact, "topk_length": lengths}

    def indexer_backward_wrapper(
        self, q: torch.Tensor, w: torch.Tensor, k: torch.Tensor, attention: torch.Tensor, index: torch.Tensor,
        indices: torch.Tensor, **_: Any,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Gradients of queries, weights and keys. The workspace has those of the keys in fp32."""
        gradients = {"d_index_q": like(q), "d_weights": like(w), "d_index_k": like(k)}
        workspace = _workspace(0 if k.dtype is torch.float32 else _aligned(k.numel() * 4))
        calls.launched("indexer_backward", (q, w, k, attention, index, indices, *gradients.values()))
        del workspace
        return gradients

    def sparse_attn_score_recompute_wrapper(
        self, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, indices: torch.Tensor, scale: float, **_: Any
    ) -> dict[str, torch.Tensor]:
        """Probabilities of the chosen keys, summed over heads: [b, sq, topk] in fp32."""
        target = empty((q.shape[0], q.shape[1], indices.shape[-1]), torch.float32)
        calls.launched("sparse_attn_score_recompute", (q, k, lse, indices, target))
        return {"target": target}

    def sparse_attention_backward_wrapper(
        self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, d_out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor,
        indices: torch.Tensor, **_: Any,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Gradients of queries, and of keys and values. The workspace has sums of rows, and the gradients of the keys in fp32."""
        workspace = _workspace(self._backward_workspace(q, kv))
        dq, dkv, d_sink = like(q), like(kv), like(sink)
        _attended("backward", q, kv, out.shape[-1], _Batch.chosen)
        del workspace
        return {"dq": dq, "dkv": dkv, "d_sink": d_sink}

    def _backward_workspace(self, q: torch.Tensor, kv: torch.Tensor) -> int:
        rows, heads, width = q.shape
        keys = kv.shape[0]
        if self._hopper:  # `flash_attn_bwd_sm90_workspace_size`
            return 2 * _aligned(round_up(rows, 64) * heads * 4) + _aligned(round_up(keys, 64) * round_up(width, 32) * 4)
        return _aligned(heads * round_up(rows, 8) * 8) + _aligned(round_up(keys, 8) * round_up(width, 8) * 4)


class _Batch:
    """The samples of the tensors that kernels get without this dimension, and the keys of a query before they are padded."""

    size = 1
    chosen = 1
    queries = 1
    """Of a sample. The backward adds a row."""


def _attended(direction: Literal["forward", "backward"], q: torch.Tensor, kv: torch.Tensor, value: int, chosen: int) -> None:
    """Attention of each query to at most `chosen` keys that are not later than it."""
    _, heads, width = q.shape
    queries, keys = _Batch.queries, kv.shape[0] // _Batch.size
    calls.attended(AttentionCall(direction, _Batch.size, heads, queries, keys, width, value, True, chosen - 1))


def flash_mla_sparse_fwd(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, *, d_v: int, **_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output [rows, heads, d_v], and the largest logit and the logarithm of the sum of each row in fp32."""
    rows, heads = q.shape[:2]
    _attended("forward", q, kv, d_v, _Batch.chosen)
    output = empty((rows, heads, d_v), q.dtype)
    largest, lse = empty((rows, heads), torch.float32), empty((rows, heads), torch.float32)
    return output, largest, lse


def patches(job: TrainingJob) -> Iterator[Patch]:
    """Yield the patch of a backward that selects the queries with keys to attend to: all of them, because masks are causal."""
    absorbed = job.model.absorbed_attention
    if absorbed is None:
        return
    attention = import_module("megatron.core.transformer.experimental_attention_variant.dsa")
    name = "_validate_nonpacked_cp_uniform_length"
    yield Patch(attention, name, _received(getattr(attention, name)), "nothing is received from other ranks")
    if absorbed.backend != "cudnn":
        return
    module = import_module("megatron.core.transformer.experimental_attention_variant.dsa_cudnn_kernels")
    name = "_run_sparse_attention_backward"
    yield Patch(module, name, _with_all_rows(getattr(module, name)), "the number of queries with keys depends on values")
    name = "_run_sparse_attention_forward"
    yield Patch(module, name, _of_batch(getattr(module, name)), "the kernel gets tensors without the dimension of samples")


def _received(real: Callable[..., Any]) -> Callable[..., Any]:
    """The check of the lengths of all context-parallel ranks, whose all-gather is recorded."""

    def check(*args: Any, **arguments: Any) -> None:
        with Patches([Patch(torch, "all", lambda _: True, "tensors have no values")]):
            real(*args, **arguments)

    return check


def _with_all_rows(real: Callable[..., Any]) -> Callable[..., Any]:
    def run(**arguments: Any) -> Any:
        _Batch.size, _Batch.chosen, _Batch.queries = arguments["b"], arguments["global_idxs"].shape[-1], arguments["sq"]
        with Patches([Patch(torch, "nonzero", _all, "tensors have no values")]):
            return real(**arguments)

    return run


def _of_batch(real: Callable[..., Any]) -> Callable[..., Any]:
    def run(query: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, *args: Any, **arguments: Any) -> Any:
        _Batch.size, _Batch.chosen, _Batch.queries = query.shape[1], indices.shape[-1], query.shape[0]
        return real(query, kv, indices, *args, **arguments)

    return run


def _all(mask: torch.Tensor, *, as_tuple: bool = False) -> torch.Tensor:
    """`torch.nonzero` of a vector without zeros: [n, 1]."""
    assert not as_tuple
    assert mask.dim() == 1
    return empty((1, mask.numel()), torch.int64).t()


def modules(gpu: Gpu) -> dict[str, ModuleType]:
    """Return the packages by their import names."""
    cudnn, flash_mla = ModuleType("cudnn"), ModuleType("flash_mla")
    for module in (cudnn, flash_mla):
        module.__path__ = []
        module.__spec__ = ModuleSpec(module.__name__, None)
    cudnn.DSA = Kernels(gpu)  # type: ignore[attr-defined]
    flash_mla.flash_mla_sparse_fwd = flash_mla_sparse_fwd  # type: ignore[attr-defined]
    return {"cudnn": cudnn, "flash_mla": flash_mla}
