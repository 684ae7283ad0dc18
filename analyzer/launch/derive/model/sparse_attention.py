"""DeepSeek sparse attention: the sizes of its indexer.

Megatron: `TransformerConfig.__post_init__`, `get_experimental_attention_variant_module_spec`
(core/models/gpt/experimental_attention_variant_module_specs.py) and `DSAttention`
(core/transformer/experimental_attention_variant/dsa.py), 0.16.1 to 0.19.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.model.hybrid import is_hybrid
from analyzer.launch.derive.reading import number, option, positive, since, switched_on
from analyzer.specs import SparseAttentionSpec

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

_VARIANT = "experimental_attention_variant"
_COEFFICIENT = "dsa_indexer_loss_coeff"


def sparse_attention_spec(arguments: Arguments) -> SparseAttentionSpec | None:
    """Sizes of the indexer; None without it, and from core 0.19 on, of which only the weights are counted (`with_plugin`).

    Raises InputError for what Megatron refuses, and for missing sizes.
    """
    if arguments.get(_VARIANT) != "dsa":
        return None
    if since(arguments, "0.19") and is_hybrid(arguments):
        fault, remedy = "the sparse attention of hybrids in core 0.19 is not modelled", "name core 0.18 with --info-megatron 0.18.2"
        raise UnsupportedError(option(arguments, _VARIANT), fault, remedy)
    sizes = index_sizes(arguments)
    return None if since(arguments, "0.19") else sizes


def index_sizes(arguments: Arguments) -> SparseAttentionSpec:
    """The sizes of the indexer of a launch with it. Raises InputError for what Megatron refuses, and for missing sizes."""
    named = option(arguments, _VARIANT)
    _check_release(arguments, named)
    if not switched_on(arguments, "multi_latent_attention"):
        raise InputError(named, "dsa needs multi-latent attention", "add --multi-latent-attention")
    if not switched_on(arguments, "bf16"):
        raise InputError(named, "the indexer of dsa needs 16-bit activations in bfloat16", "add --bf16")
    coefficient = number(arguments, _COEFFICIENT, -1.0)
    if arguments.get(_COEFFICIENT) is None and not since(arguments, "0.19"):
        flag = option(arguments, _COEFFICIENT)
        raise InputError(
            flag, "is missing: Megatron stops at the loss of the indexer without it", f"add it, for example {flag} 0.01"
        )
    head = _size(arguments, "dsa_indexer_head_dim", 128)
    position = positive(arguments, "qk_pos_emb_head_dim") or 64
    if head < position:
        raise InputError(
            option(arguments, "dsa_indexer_head_dim"),
            f"{head} is below {position}, the elements with positions",
            "use more, or a smaller --qk-pos-emb-head-dim",
        )
    return SparseAttentionSpec(
        heads=_size(arguments, "dsa_indexer_n_heads", 64),
        head_dim=head,
        topk=_size(arguments, "dsa_indexer_topk", 2048),
        logged=coefficient > 0,
        sparse_loss=switched_on(arguments, "dsa_indexer_use_sparse_loss"),
    )


def _check_release(arguments: Arguments, named: str) -> None:
    if not since(arguments, "0.18"):
        # `get_experimental_attention_variant_module_spec`
        raise InputError(named, "core 0.16 and 0.17 stop: they build no layers with dsa", "use core 0.18 (--info-megatron 0.18.2)")


def _size(arguments: Arguments, dest: str, example: int) -> int:
    value = positive(arguments, dest)
    if value is None:
        flag = option(arguments, dest)
        raise InputError(flag, "is missing: dsa needs it", f"add it, for example {flag} {example}")
    return value
