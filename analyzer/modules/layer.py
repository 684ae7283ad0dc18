"""One transformer layer, and layers under a checkpoint.

Source: core/transformer/transformer_layer.py and transformer_block.py _checkpointed_forward (0.16.1).
"""

from __future__ import annotations

from analyzer.modules.attention import self_attention
from analyzer.modules.dropout import bias_dropout_add
from analyzer.modules.mlp import mlp
from analyzer.modules.norm import standalone_norm
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import LAYER, STREAM, Collective, Module, Tensor


def transformer_layer(shapes: Shapes, *, input_shares: str = "") -> Module:
    """[s, b, h] → [s, b, h]. `input_shares` says that a checkpoint already keeps the layer's input.

    While a branch runs backward, the gradient of the residual stream waits beside it.
    """
    fused = shapes.model.implementation == "transformer_engine"
    norms = () if fused else (standalone_norm(shapes, "input_layernorm", input_made_in=STREAM, input_shares=input_shares),)
    pre_mlp = () if fused else (standalone_norm(shapes, "pre_mlp_layernorm", input_made_in=LAYER),)
    return Module(
        name="layers",
        backward_workspace=(shapes.hidden("residual gradient", dtype=shapes.residual_dtype),),
        children=(
            *norms,
            self_attention(shapes, fused_norm=fused, input_shares=input_shares if fused else ""),
            bias_dropout_add(shapes, "self_attn_bda"),
            *pre_mlp,
            mlp(shapes, fused_norm=fused),
            bias_dropout_add(shapes, "mlp_bda"),
        ),
        source="megatron.core.transformer.TransformerLayer",
    )


def checkpointed(shapes: Shapes, *, layers: int) -> Module:
    """A group of `layers` layers of which only the input is kept, or its 1/t with `--distribute-saved-activations`."""
    distributed = shapes.launch.recompute.distribute_saved_activations and shapes.t > 1
    kept = shapes.hidden("checkpoint input", dtype=shapes.residual_dtype, made_in=STREAM)
    gather: tuple[Collective, ...] = ()
    if distributed:
        s, b, h = kept.shape
        kept = Tensor(name=kept.name, shape=(s * b * h // shapes.t,), dtype=kept.dtype, formula=kept.formula + "/t")
        gather = shapes.tp("all_gather", "recompute")
    first = transformer_layer(shapes, input_shares="" if distributed else "checkpoint input")
    rest = transformer_layer(shapes)
    return Module(
        name="checkpoint",
        function=True,
        saved=(kept,),
        collectives=gather,
        children=(first, *([rest] * (layers - 1))),
        recomputed=True,
        source="tensor_parallel.checkpoint",
    )


def layers_of_chunk(shapes: Shapes, count: int) -> tuple[Module, ...]:
    """The layers of one model chunk, those that full recompute covers under checkpoints.

    uniform: groups of `--recompute-num-layers`; block: the first so many layers of the chunk, each on its own.
    """
    recompute = shapes.launch.recompute
    plain = transformer_layer(shapes)
    if recompute.granularity != "full":
        return (plain,) * count
    size = 1 if recompute.num_layers is None else recompute.num_layers
    if recompute.method == "block":
        covered = min(size, count)
        return (checkpointed(shapes, layers=1),) * covered + (plain,) * (count - covered)
    groups, rest = divmod(count, size)
    last = (checkpointed(shapes, layers=rest),) if rest else ()
    return (checkpointed(shapes, layers=size),) * groups + last
