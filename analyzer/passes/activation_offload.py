"""Offloading of activations: which saved tensors of a transformer layer go to the host.

A group of operations is offloaded as one: every large tensor that autograd saves inside it is copied to pinned host memory
when the group's forward is done, its memory on the GPU is let go, and it is copied back before the group's backward.
Transformer Engine offloads the first N of L layers as a whole, so that L - N of them are on the GPU at once.

Sources: core/pipeline_parallel/fine_grained_activation_offload.py and the modules that open its groups (0.16.1),
core/transformer/{transformer_layer,attention,multi_latent_attention}.py, core/transformer/moe/experts.py;
transformer_engine/pytorch/cpu_offload.py `DefaultOffloadSynchronizer` (TE 2.11).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Final

from analyzer.modules.attention.core_attention import ATTENTION
from analyzer.modules.tree import Module
from analyzer.specs import ActivationOffloadSpec

_PROJECTIONS: Final = (
    "linear_qkv",
    "qk_layernorm.q_layernorm",
    "qk_layernorm.k_layernorm",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
)
GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "attn_norm": ("input_layernorm",),
    "qkv_linear": tuple(f"{ATTENTION}.{name}" for name in _PROJECTIONS),
    "core_attn": (f"{ATTENTION}.core_attention",),
    "attn_proj": (f"{ATTENTION}.linear_proj",),
    "mlp_norm": ("pre_mlp_layernorm",),
    "expert_fc1": ("mlp.experts.linear_fc1",),
    "moe_act": ("mlp.experts.activation_func",),
}
"""By the name that `--offload-modules` takes: paths in a layer."""


def offloaded(offload: ActivationOffloadSpec, layer: Module) -> Module:
    """The layer with the large saved tensors of these groups on the host between its forward and its backward."""
    paths = {path for name in offload.modules for path in GROUPS[name]}
    return _offloaded(layer, "", paths, offload.min_elements)


def offloaded_whole(layer: Module) -> Module:
    """The layer with all that it saves on the host."""
    children = tuple(offloaded_whole(child) for child in layer.children)
    gone = tuple(tensor for tensor in layer.saved if tensor.bytes)
    return replace(layer, saved=tuple(tensor for tensor in layer.saved if not tensor.bytes), offloaded=gone, children=children)


def _offloaded(module: Module, path: str, paths: set[str], least: int) -> Module:
    children = tuple(_offloaded(child, f"{path}.{child.name}" if path else child.name, paths, least) for child in module.children)
    if path not in paths:
        return replace(module, children=children)
    gone = tuple(tensor for tensor in module.saved if tensor.bytes and prod(tensor.shape) >= least)
    return replace(module, saved=tuple(tensor for tensor in module.saved if tensor not in gone), offloaded=gone, children=children)


def stays_of_first(tree: Module) -> int:
    """Bytes of the last layer's groups of a chunk: of the microbatch whose backward comes first they are not offloaded.

    From the second iteration on, when the groups are known (`PipelineOffloadManager.post_warmup_callback`).
    """
    return max((_bytes(layer) for layer in _layers(tree)[-1:]), default=0)


def _layers(tree: Module) -> list[Module]:
    if any(child.name == ATTENTION for child in tree.children):
        return [tree]
    return [layer for child in tree.children for layer in _layers(child)]


def _bytes(module: Module) -> int:
    return sum(tensor.bytes for tensor in module.offloaded) + sum(_bytes(child) for child in module.children)
