"""One transformer layer, and layers under activation checkpointing.

Source: core/transformer/transformer_layer.py and transformer_block.py _checkpointed_forward (0.16.1).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple

from analyzer.modules.branches import attention_branch, moe_branch
from analyzer.modules.checkpoints import moe_checkpoint_leftovers
from analyzer.modules.dropout import bias_dropout_add
from analyzer.modules.inputs import ModuleInputs
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import gathered_linear
from analyzer.modules.mlp import mlp
from analyzer.modules.norm import standalone_norm
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import LAYER, STREAM, Collective, Module, Tensor
from analyzer.specs import BlockSpec, Branch

CACHED_LAYERS: Final = 512
"""Layer trees that are kept for later jobs, of about 50 kB each."""
_COMPLETE: Final = BlockSpec()


class LayerKind(NamedTuple):
    """What makes decoder layers of one model differ."""

    moe: bool = False
    """A MoE layer instead of the dense FFN."""
    in_16_bit: bool = False
    """Excluded from FP8 (`--first-last-layers-bf16`)."""
    other_kernel: bool = False
    """Attention has a sliding window, and needs another kernel for it."""
    block: BlockSpec = _COMPLETE
    """What it is made of, where layers differ by configuration."""


@lru_cache(maxsize=CACHED_LAYERS)
def layer_tree(inputs: ModuleInputs, kind: LayerKind, input_shares: str = "") -> Module:
    """The tree of one layer. `input_shares`: the tensor of a checkpoint that already stores the layer's input."""
    shapes = _shapes_of_kind(inputs, kind)
    return transformer_layer(shapes, moe=kind.moe, input_shares=input_shares, block=kind.block)


def _shapes_of_kind(inputs: ModuleInputs, kind: LayerKind) -> Shapes:
    shapes = Shapes(inputs)
    if kind.in_16_bit:
        shapes = shapes.in_16_bit
    if kind.other_kernel:
        shapes = shapes.windowed
    if kind.block.ffn_hidden_size is not None:
        shapes = shapes.of_width(kind.block.ffn_hidden_size)
    return shapes


def one_layer(inputs: ModuleInputs, kind: LayerKind, input_shares: str = "") -> Module:
    """The tree of a layer, cached by the inputs that layers of this kind depend on."""
    return layer_tree(inputs.of_moe_layers if kind.moe else inputs.of_dense_layers, kind, input_shares)


def transformer_layer(shapes: Shapes, *, moe: bool = False, input_shares: str = "", block: BlockSpec = _COMPLETE) -> Module:
    """[s, b, h] → [s, b, h]. `input_shares`: the tensor of a checkpoint that already stores its input.

    Transformer Engine fuses the norms into the projections after them, except for multi-latent attention and MoE layers.
    A branch that `block` replaces or leaves out has no norm of its own. While a branch runs backward, the gradient of the
    residual stream stays allocated.
    """
    te = shapes.model.implementation == "transformer_engine"
    children: tuple[Module, ...] = ()
    made_in, shares = STREAM, input_shares
    if block.attention != "none":
        children = _attention_with_norm(shapes.inputs.of_dense_layers, block.attention, made_in, shares)
        made_in, shares = LAYER, ""
    if block.feed_forward != "none":
        if moe or not te:
            norm = standalone_norm(shapes, "pre_mlp_layernorm", ModuleKind.FEED_FORWARD_NORM, input_made_in=LAYER)
            children += (norm,)
        if block.feed_forward == "linear":
            branch = gathered_linear(shapes, "mlp", input_made_in=made_in, input_shares=shares)
        elif moe:
            branch = moe_branch(shapes)
        else:
            branch = mlp(shapes, fused_norm=te, input_made_in=made_in, input_shares=shares)
        children += (branch, bias_dropout_add(shapes, "mlp_bda", ModuleKind.FEED_FORWARD_ADD))
    return Module(
        name="layers",
        kind=ModuleKind.LAYER,
        backward_workspace=(shapes.hidden("residual gradient", dtype=shapes.residual_dtype),) if children else (),
        children=children,
        source="megatron.core.transformer.TransformerLayer",
    )


@lru_cache(maxsize=CACHED_LAYERS)
def _attention_with_norm(inputs: ModuleInputs, attention: Branch, input_made_in: str, input_shares: str) -> tuple[Module, ...]:
    """The attention branch, which layers of different kinds share."""
    shapes = Shapes(inputs)
    fused = shapes.model.implementation == "transformer_engine" and shapes.model.mla is None
    norm: tuple[Module, ...] = ()
    if not fused:
        norm = (
            standalone_norm(
                shapes, "input_layernorm", ModuleKind.ATTENTION_NORM, input_made_in=input_made_in, input_shares=input_shares
            ),
        )
    if attention == "linear":
        branch = gathered_linear(shapes, "self_attention", input_made_in=input_made_in, input_shares=input_shares)
    else:
        branch = attention_branch(shapes, fused_norm=fused, input_shares=input_shares)
    return (*norm, branch, bias_dropout_add(shapes, "self_attn_bda", ModuleKind.ATTENTION_ADD))


def checkpointed(shapes: Shapes, *, kinds: tuple[LayerKind, ...]) -> Module:
    """Layers of which only the first input is saved, or 1/t of it with `--distribute-saved-activations`."""
    distributed = shapes.inputs.recompute.distribute_saved_activations and shapes.t > 1
    kept = shapes.hidden("checkpoint input", dtype=shapes.residual_dtype, made_in=STREAM)
    gather: tuple[Collective, ...] = ()
    if distributed:
        s, b, h = kept.shape
        kept = Tensor(name=kept.name, shape=(s * b * h // shapes.t,), dtype=kept.dtype, formula=kept.formula + "/t")
        gather = shapes.tp("all_gather", "recompute")
    outlives: tuple[Tensor, ...] = moe_checkpoint_leftovers(shapes) if any(kind.moe for kind in kinds) else ()
    first = one_layer(shapes.inputs, kinds[0], "" if distributed else "checkpoint input")
    children = (first, *(one_layer(shapes.inputs, kind) for kind in kinds[1:]))
    if not distributed and not any(child.children for child in children):  # its input goes on to the next one that saves it
        kept = replace(kept, shares="output")
    if outlives and not distributed:
        kept, outlives = replace(kept, lingers=True), outlives[1:]
    return Module(
        name="checkpoint",
        kind=ModuleKind.CHECKPOINT,
        function=True,
        saved=(kept,),
        outlives=outlives,
        backward_workspace=() if kept.shares else shapes.made_again,
        collectives=gather,
        children=children,
        recomputed=True,
        source="tensor_parallel.checkpoint",
    )


def layers_of_chunk(shapes: Shapes, kinds: tuple[LayerKind, ...], *, received: bool = False) -> tuple[Module, ...]:
    """The layers of one model chunk; those that full recompute covers are under checkpoints. Equal layers are one object.

    uniform: groups of `--recompute-num-layers`; block: the first layers of the chunk, each in a checkpoint of its own.
    `received`: the first input comes from another stage, and the schedule references it anyway.
    """
    recompute = shapes.inputs.recompute
    plain = {kind: one_layer(shapes.inputs, kind) for kind in set(kinds)}
    if recompute.granularity != "full":
        return tuple(plain[kind] for kind in kinds)
    size = 1 if recompute.num_layers is None else recompute.num_layers
    if recompute.method == "block":
        covered = min(size, len(kinds))
        groups = [kinds[layer : layer + 1] for layer in range(covered)]
    else:
        covered = len(kinds)
        groups = [kinds[start : start + size] for start in range(0, len(kinds), size)]
    under = {group: checkpointed(shapes, kinds=group) for group in set(groups)}
    checkpoints = [under[group] for group in groups]
    if received and checkpoints:
        checkpoints[0] = replace(checkpoints[0], saved=tuple(replace(each, lingers=False) for each in checkpoints[0].saved))
    return (*checkpoints, *(plain[kind] for kind in kinds[covered:]))
