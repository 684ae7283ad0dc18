"""One transformer layer, and layers under a checkpoint.

Source: core/transformer/transformer_layer.py and transformer_block.py _checkpointed_forward (0.16.1).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from analyzer.modules.attention.core_attention import ATTENTION
from analyzer.modules.attention.self_attention import self_attention
from analyzer.modules.dropout import bias_dropout_add
from analyzer.modules.linear import gathered_linear
from analyzer.modules.mlp import mlp
from analyzer.modules.norm import standalone_norm
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import LAYER, STREAM, Collective, Module, Tensor
from analyzer.specs import BlockSpec

_ALL_OF_IT: Final = BlockSpec()


class LayerKind(NamedTuple):
    """What sets decoder layers of one launch apart."""

    mixture: bool = False
    """Experts in the place of the dense feed-forward block."""
    in_16_bit: bool = False
    """Left out of FP8 (`--first-last-layers-bf16`)."""
    other_kernel: bool = False
    """Attention sees a window only, and that takes another kernel."""

    stays: bool = False
    """Not offloaded to the host: its backward comes next."""
    on_host: bool = False
    """Offloaded as a whole."""
    block: BlockSpec = _ALL_OF_IT
    """What it is made of, where layers differ by configuration."""

    def build(self, shapes: Shapes, *, input_shares: str = "") -> Module:
        """A layer of this kind."""
        if self.in_16_bit:
            shapes = shapes.in_16_bit
        if self.other_kernel:
            shapes = shapes.windowed
        if self.block.ffn_hidden_size is not None:
            shapes = shapes.of_width(self.block.ffn_hidden_size)
        layer = transformer_layer(shapes, mixture=self.mixture, input_shares=input_shares, block=self.block)
        if shapes.job.flags.delay_wgrad_compute:
            from analyzer.passes.delayed_weight_gradients import delayed  # a millisecond that most launches need not spend

            layer = delayed(layer)
        if shapes.job.activation_offload is None or self.stays:
            return layer
        from analyzer.passes.activation_offload import offloaded, offloaded_whole  # likewise

        return offloaded_whole(layer) if self.on_host else offloaded(shapes.job.activation_offload, layer)


def transformer_layer(shapes: Shapes, *, mixture: bool = False, input_shares: str = "", block: BlockSpec = _ALL_OF_IT) -> Module:
    """[s, b, h] → [s, b, h], with experts where `mixture`. `input_shares` says that a checkpoint already keeps its input.

    Transformer Engine fuses the norms into the projections after them, but for latent attention and mixtures.

    A branch that `block` replaces or leaves out takes its norm with it. While a branch runs backward, the gradient of the residual
    stream waits beside it.
    """
    te = shapes.model.implementation == "transformer_engine"
    fused = te and shapes.model.mla is None
    children: tuple[Module, ...] = ()
    made_in, shares = STREAM, input_shares
    if block.attention != "none":
        if not fused:
            children = (standalone_norm(shapes, "input_layernorm", input_made_in=made_in, input_shares=shares),)
        if block.attention == "linear":
            branch = gathered_linear(shapes, ATTENTION, input_made_in=made_in, input_shares=shares)
        else:
            branch = _attention(shapes, fused_norm=fused, input_shares=shares)
        children += (branch, bias_dropout_add(shapes, "self_attn_bda"))
        made_in, shares = LAYER, ""
    if block.feed_forward != "none":
        if mixture or not te:
            children += (standalone_norm(shapes, "pre_mlp_layernorm", input_made_in=LAYER),)
        if block.feed_forward == "linear":
            branch = gathered_linear(shapes, "mlp", input_made_in=made_in, input_shares=shares)
        elif mixture:
            branch = _mixture(shapes)
        else:
            branch = mlp(shapes, fused_norm=te, input_made_in=made_in, input_shares=shares)
        children += (branch, bias_dropout_add(shapes, "mlp_bda"))
    return Module(
        name="layers",
        backward_workspace=(shapes.hidden("residual gradient", dtype=shapes.residual_dtype),) if children else (),
        children=children,
        source="megatron.core.transformer.TransformerLayer",
    )


def _attention(shapes: Shapes, *, fused_norm: bool, input_shares: str) -> Module:
    if shapes.model.mla is None:
        return self_attention(shapes, fused_norm=fused_norm, input_shares=input_shares if fused_norm else "")
    from analyzer.modules.attention.latent_attention import latent_attention  # a millisecond that most launches need not spend

    return latent_attention(shapes)


def _mixture(shapes: Shapes) -> Module:
    from analyzer.modules.moe.layer import moe_layer  # likewise

    return moe_layer(shapes)


def checkpointed(shapes: Shapes, *, kinds: tuple[LayerKind, ...]) -> Module:
    """Layers whose first input alone is kept, or its 1/t with `--distribute-saved-activations`."""
    distributed = shapes.job.recompute.distribute_saved_activations and shapes.t > 1
    kept = shapes.hidden("checkpoint input", dtype=shapes.residual_dtype, made_in=STREAM)
    gather: tuple[Collective, ...] = ()
    if distributed:
        s, b, h = kept.shape
        kept = Tensor(name=kept.name, shape=(s * b * h // shapes.t,), dtype=kept.dtype, formula=kept.formula + "/t")
        gather = shapes.tp("all_gather", "recompute")
    outlives: tuple[Tensor, ...] = ()
    if any(kind.mixture for kind in kinds):
        from analyzer.modules.moe.layer import named_by_probabilities  # a millisecond that most launches need not spend

        outlives = named_by_probabilities(shapes)
    first = kinds[0].build(shapes, input_shares="" if distributed else "checkpoint input")
    children = (first, *(kind.build(shapes) for kind in kinds[1:]))
    if not distributed and not any(child.children for child in children):  # its input goes on to the next one that keeps it
        kept = replace(kept, shares="output")
    if outlives and not distributed:
        kept, outlives = replace(kept, lingers=True), outlives[1:]
    return Module(
        name="checkpoint",
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
    """The layers of one model chunk, those that full recompute covers under checkpoints. Layers that are alike are one object.

    uniform: groups of `--recompute-num-layers`; block: the first so many layers of the chunk, each on its own. `received` says
    that the first input comes from another stage, whose schedule names it anyway.
    """
    recompute = shapes.job.recompute
    plain = {kind: kind.build(shapes) for kind in set(kinds)}
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
