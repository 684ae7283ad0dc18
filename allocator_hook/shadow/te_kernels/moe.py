"""Token permutation, router and padding kernels of MoE layers (csrc/extensions/permutation.cpp, router.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.te_kernels.allocate import empty, like
from allocator_hook.shadow.te_kernels.releases import with_names

_TOP_K: Final = "num_tokens<2.17 num_experts<2.17 routing_map intermediate_output grad_probs grad_logits>=2.13"


def bindings(gpu: Gpu) -> Mapping[str, Callable[..., Any]]:
    del gpu
    return {
        "moe_permute_fwd": moe_permute_fwd,
        "moe_permute_bwd": moe_unpermute_fwd,
        "moe_unpermute_fwd": moe_unpermute_fwd,
        "moe_unpermute_bwd": moe_unpermute_bwd,
        "fused_topk_with_score_function_fwd": fused_topk_with_score_function_fwd,
        "fused_topk_with_score_function_bwd": with_names(gradient_of_logits, _TOP_K),
        "fused_score_for_moe_aux_loss_fwd": fused_score_for_moe_aux_loss_fwd,
        "fused_score_for_moe_aux_loss_bwd": with_names(gradient_of_logits, ""),
        "fused_moe_aux_loss_fwd": fused_moe_aux_loss_fwd,
        "fused_moe_aux_loss_bwd": fused_moe_aux_loss_bwd,
        "fused_multi_row_padding": lambda *_: None,
        "fused_multi_row_unpadding": lambda *_: None,
    }


def moe_permute_fwd(
    input: torch.Tensor,
    dtype: int,
    indices: torch.Tensor,
    num_out_tokens: int,
    workspace: list[torch.Tensor],
    max_expanded_token_num: int,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the tokens sorted by expert, the row map, and the sorting workspace, which the caller keeps."""
    del dtype
    expanded = input.shape[0] * indices.shape[1]
    if not workspace:
        workspace = [empty((max_expanded_token_num,), torch.int32) for _ in range(3)]
        workspace.append(empty((max_expanded_token_num * 8,), torch.int8))  # CUB's radix sort of (int32, int32) pairs
    permuted = empty((num_out_tokens if num_out_tokens > 0 else expanded, input.shape[1]), input.dtype)
    return permuted, empty((expanded,), torch.int32), workspace


def moe_unpermute_fwd(
    input: torch.Tensor, dtype: int, row_id_map: torch.Tensor, prob: torch.Tensor, num_tokens: int, topk: int
) -> torch.Tensor:
    """Return the tokens in their original order."""
    del dtype, row_id_map, prob, topk
    return empty((num_tokens, input.shape[1]), input.dtype)


def moe_unpermute_bwd(
    input_bwd: torch.Tensor, input_fwd: torch.Tensor, dtype: int, row_id_map: torch.Tensor, prob: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the expert outputs and, in fp32, of the probabilities."""
    del dtype
    shape = tuple(prob.shape) if prob.numel() else (row_id_map.shape[0], 1)
    return empty((input_fwd.shape[0], input_bwd.shape[1]), input_bwd.dtype), empty(shape, torch.float32)


def fused_topk_with_score_function_fwd(logits: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    """Return the probabilities, the routing map, and the scores saved for backward; each [tokens, experts]."""
    return like(logits), empty(logits.shape, torch.bool), like(logits)


def gradient_of_logits(intermediate_output: torch.Tensor, grad_logits: torch.Tensor | None = None) -> torch.Tensor:
    """Return the gradient of the logits. From 2.13 on the caller allocates it."""
    return like(intermediate_output) if grad_logits is None else grad_logits


def fused_score_for_moe_aux_loss_fwd(logits: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    """Return the scores, the routing map, and the scores saved for backward; each [tokens, experts]."""
    return like(logits), empty(logits.shape, torch.bool), like(logits)


def fused_moe_aux_loss_fwd(probs: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and a constant saved for backward."""
    return empty((), probs.dtype), empty((), torch.float32)


def fused_moe_aux_loss_bwd(
    Const_buf: torch.Tensor, tokens_per_expert: torch.Tensor, num_rows: int, num_cols: int, grad_aux_loss: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the probabilities."""
    del Const_buf, tokens_per_expert
    return empty((num_rows, num_cols), grad_aux_loss.dtype)
