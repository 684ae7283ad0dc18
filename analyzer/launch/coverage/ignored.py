"""Options that Megatron accepts but ignores, because an option that they depend on is not set. They are listed as assumptions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from analyzer.launch.derive.reading import integer, option, switched_on

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

_LATENT: Final = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_WITHOUT: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("multi_latent_attention", "--multi-latent-attention is not set", _LATENT),
    ("cuda_graph_impl", "there are no CUDA graphs", ("cuda_graph_scope", "cuda_graph_modules", "cuda_graph_warmup_steps")),
    ("fine_grained_activation_offloading", "nothing is offloaded", ("offload_modules", "min_offloaded_tensor_size")),
    ("optimizer_cpu_offload", "the optimizer is not offloaded", ("optimizer_offload_fraction",)),
    ("mtp_num_layers", "there are no MTP layers", ("mtp_loss_scaling_factor",)),
    ("window_size", "--window-size is not set", ("window_attn_skip_freq",)),
    ("recompute_granularity", "nothing is recomputed", ("recompute_method", "recompute_num_layers", "recompute_modules")),
)
"""An option, the reason that is given without it, and the options that then have no effect."""
_GRAPHS: Final = ("enable_cuda_graph", "external_cuda_graph")
_RECOMPUTE: Final = ("recompute_activations", "moe_layer_recompute")
_INSTEAD: Final[dict[str, tuple[str, ...]]] = {"cuda_graph_impl": _GRAPHS, "recompute_granularity": _RECOMPUTE}
"""Other options that enable the same feature."""


def ignored_options(arguments: Arguments, *, tensor: int) -> tuple[str, ...]:
    """One sentence for each reason, with the given options that have no effect."""
    return tuple(f"{_listed(arguments, dests)} no effect: {why}." for dests, why in _found(arguments, tensor=tensor) if dests)


def _found(arguments: Arguments, *, tensor: int) -> Iterator[tuple[list[str], str]]:
    if tensor == 1 and switched_on(arguments, "sequence_parallel") and "sequence_parallel" in arguments.given:
        yield ["sequence_parallel"], "there is one tensor-parallel rank"
    if not integer(arguments, "num_experts"):
        experts = sorted(dest for dest in arguments.given if dest.startswith("moe_"))
        yield [*experts, *_given(arguments, ("expert_tensor_parallel_size",))], "there are no experts"
    for needed, why, dests in _WITHOUT:
        asked = any(arguments.get(dest) not in (None, False, 0, "none") for dest in (needed, *_INSTEAD.get(needed, ())))
        if not asked:
            yield _given(arguments, dests), why


def _given(arguments: Arguments, dests: tuple[str, ...]) -> list[str]:
    return [dest for dest in dests if dest in arguments.given]


def _listed(arguments: Arguments, dests: list[str]) -> str:
    names = [option(arguments, dest) for dest in dests]
    if len(names) == 1:
        return f"{names[0]} has"
    return f"{', '.join(names[:-1])} and {names[-1]} have"
