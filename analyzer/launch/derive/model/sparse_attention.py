"""DeepSeek sparse attention: the sizes of its indexer.

Megatron: `TransformerConfig.__post_init__`, `get_experimental_attention_variant_module_spec`
(core/models/gpt/experimental_attention_variant_module_specs.py) and `DSAttention`
(core/transformer/experimental_attention_variant/dsa.py), 0.16.1 to 0.19.0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.model.hybrid import is_hybrid
from analyzer.launch.derive.reading import number, option, positive, since, switched_on, text
from analyzer.specs import AbsorbedSpec, SparseAttentionSpec

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput

_VARIANT = "experimental_attention_variant"
_COEFFICIENT = "dsa_indexer_loss_coeff"
_FREQUENCY = "dsa_indexer_topk_freq"
_OFFSET = "dsa_indexer_skip_topk_offset"


def sparse_attention_spec(arguments: Arguments) -> SparseAttentionSpec | None:
    """Sizes of the indexer; None without it, and with kernels of TileLang, of which only the weights are counted (`with_plugin`).

    Raises InputError for what Megatron refuses, and for missing sizes.
    """
    if arguments.get(_VARIANT) != "dsa":
        return None
    if since(arguments, "0.19") and is_hybrid(arguments):
        fault, remedy = "the sparse attention of hybrids in core 0.19 is not modelled", "name core 0.18 with --info-megatron 0.18.2"
        raise UnsupportedError(option(arguments, _VARIANT), fault, remedy)
    sizes = index_sizes(arguments)
    if not since(arguments, "0.19"):
        return sizes
    backend = text(arguments, "dsa_kernel_backend", "none")
    if backend == "tilelang":
        return None
    if backend == "cudnn" and arguments.get("dsa_indexer_scoring_relu") is False:
        named = option(arguments, "dsa_indexer_scoring_relu")
        raise InputError(named, "the kernels of cuDNN apply a ReLU", "leave it out, or use --dsa-kernel-backend none")
    return replace(
        sizes,
        absorbed=AbsorbedSpec(
            backend="cudnn" if backend == "cudnn" else "none",
            every=positive(arguments, _FREQUENCY) or 1,
            after=last_of_first_indexers(arguments),
            rotated=arguments.get("dsa_indexer_rotate_activation") is not False,
            norm_in_fp32=switched_on(arguments, "dsa_indexer_k_norm_fp32"),
        ),
    )


def assume_speed(launch: LaunchInput, sparse: SparseAttentionSpec) -> None:
    """Say what the time of kernels rests on that nobody has published measurements of."""
    if sparse.absorbed is not None and sparse.absorbed.backend == "cudnn":
        launch.assume(
            "Kernels of sparse attention are assumed to be as fast as those of dense attention with as many operations, and the "
            "sort of the chosen keys to be limited by memory: no measurements are known, and the time is probably too low."
        )


def last_of_first_indexers(arguments: Arguments) -> int:
    """The last of the first layers that each have an indexer: the first layer always has one."""
    given = arguments.get(_OFFSET)
    return max(given, 1) if isinstance(given, int) else 1


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
