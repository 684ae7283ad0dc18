"""One transformer layer, and layers under activation checkpointing.

Source: core/transformer/transformer_layer.py and transformer_block.py _checkpointed_forward (0.16.1).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Final, NamedTuple

from analyzer.modules.branches import attention_branch, biased_output, fuses_norm, fuses_norms, is_latent, mixer_branch, moe_branch
from analyzer.modules.checkpoints import moe_checkpoint_leftovers
from analyzer.modules.inputs import ExpertInputs, LayerInputs, ModuleInputs
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import gathered_linear
from analyzer.modules.mlp import mlp
from analyzer.modules.norm import standalone_norm
from analyzer.modules.residual.dropout import bias_dropout_add
from analyzer.modules.shapes import RECOMPUTED_OUTPUT, ExpertShapes, Shapes
from analyzer.modules.tree import LAYER, STREAM, Collective, Module, Tensor
from analyzer.specs import AttentionKind, BlockSpec, Branch, ModelSpec, RecomputeSpec

CACHED_LAYERS: Final = 1024
"""Size of each cache of layer trees, in entries. Trees share their branches, of about 50 kB each."""
_COMPLETE: Final = BlockSpec()


class LayerKind(NamedTuple):
    """The properties in which decoder layers of one model differ."""

    moe: bool = False
    """A MoE layer instead of the dense FFN."""
    in_16_bit: bool = False
    """Excluded from FP8 (`--first-last-layers-bf16`)."""
    other_kernel: bool = False
    """Attention has a sliding window and needs a different kernel."""
    global_heads: bool = False
    """Attention has the heads of layers without a window (`ModelSpec.global_heads`)."""
    block: BlockSpec = _COMPLETE
    """The branches of the layer, for models with per-layer configuration."""
    projects_in_userbuffers: bool = False
    """Its output projection of attention uses userbuffers (`inputs.one_projection_in_userbuffers`)."""
    attention: AttentionKind | None = None
    """Its attention, if that is not the full attention of the model (`ModelSpec.attention_of`)."""

    @property
    def reads_mask(self) -> bool:
        """Whether it has attention with scores, and so reads the attention mask."""
        return self.block.attention == "full" and self.attention != "gated_delta_net"


def with_other_kernel(model: ModelSpec) -> tuple[bool, ...]:
    """For each of `ModelSpec.windowed`, whether `LayerKind.other_kernel` holds; empty if all kernels are equal.

    Unfused attention has other masks with a window.
    """
    differ = model.window_backend is not None or (model.attention_backend == "unfused" and not all(model.windowed))
    return model.windowed if differ else ()


@lru_cache(maxsize=CACHED_LAYERS)
def layer_tree(inputs: LayerInputs, kind: LayerKind, input_shares: str = "") -> Module:
    """The tree of one layer. `input_shares`: the tensor of a checkpoint that already stores the layer's input."""
    shapes = _shapes_of_kind(inputs, kind)
    return transformer_layer(
        shapes,
        moe=kind.moe,
        input_shares=input_shares,
        block=kind.block,
        projects_in_userbuffers=kind.projects_in_userbuffers,
        attention=kind.attention,
    )


def _shapes_of_kind(inputs: LayerInputs, kind: LayerKind) -> Shapes:
    shapes = Shapes(inputs)
    if kind.in_16_bit:
        shapes = shapes.in_16_bit
    if kind.other_kernel:
        shapes = shapes.windowed
    if kind.global_heads:
        shapes = shapes.of_global_heads
    if kind.block.ffn_hidden_size is not None:
        shapes = shapes.of_width(kind.block.ffn_hidden_size)
    return shapes


def one_layer(inputs: LayerInputs, kind: LayerKind, input_shares: str = "") -> Module:
    """The tree of a layer, cached by the inputs that layers of this kind depend on."""
    return layer_tree(_of_experts(inputs).of_moe_layers if kind.moe else inputs.of_dense_layers, kind, input_shares)


def _of_experts(inputs: LayerInputs) -> ExpertInputs:
    """The inputs, which must include those of MoE layers."""
    assert isinstance(inputs, ExpertInputs), "a MoE layer depends on expert parallelism"
    return inputs


def transformer_layer(
    shapes: Shapes,
    *,
    moe: bool = False,
    input_shares: str = "",
    block: BlockSpec = _COMPLETE,
    projects_in_userbuffers: bool = False,
    attention: AttentionKind | None = None,
) -> Module:
    """[s, b, h] → [s, b, h]. `input_shares`: the tensor of a checkpoint that already stores its input.

    Transformer Engine fuses the norms into the projections after them, except for multi-latent attention and MoE layers.
    A branch that `block` replaces or leaves out has no norm of its own. While a branch runs backward, the gradient of the
    residual stream stays allocated.
    """
    fused = fuses_norms(shapes)
    children: tuple[Module, ...] = ()
    made_in, shares = STREAM, input_shares
    if block.attention != "none":
        inputs = shapes.inputs.of_attention
        if projects_in_userbuffers:  # of the layers of latent attention, only this one reads `userbuffers`
            inputs = replace(inputs, userbuffers=True)
        children = _attention_with_norm(inputs, attention or shapes.model.full_attention, block.attention, made_in, shares)
        made_in, shares = LAYER, ""
    if block.feed_forward != "none":
        if shapes.model.norm_modules != "none" and (moe or not fused):
            norm = _norm(shapes, "pre_mlp_layernorm", ModuleKind.FEED_FORWARD_NORM, input_made_in=made_in, input_shares=shares)
            children += (norm,)
        if block.feed_forward == "linear":
            branch = gathered_linear(shapes, "mlp", input_made_in=made_in, input_shares=shares)
        elif moe:
            branch = _moe_branch(_of_experts(shapes.inputs).of_experts)
        else:
            branch = mlp(shapes, fused_norm=fused, input_made_in=made_in, input_shares=shares)
        biased = shapes.model.bias_linear and not moe and block.feed_forward != "linear"
        children += (branch, bias_dropout_add(shapes, "mlp_bda", ModuleKind.FEED_FORWARD_ADD, biased=biased))
    of_mamba = block.attention == "mamba"
    layer = Module(
        name="layers",
        kind=ModuleKind.LAYER,
        fsdp_unit=not of_mamba or shapes.inputs.core.fsdp_units_of_mamba,
        backward_workspace=(shapes.hidden("residual gradient", dtype=shapes.residual_dtype),) if children else (),
        children=children,
        source="megatron.core.ssm.MambaLayer" if of_mamba else "megatron.core.transformer.TransformerLayer",
    )
    return _connected(shapes, _scaled(shapes, layer) if shapes.model.layer_scaling else layer, input_shares)


def _norm(shapes: Shapes, name: str, kind: ModuleKind, *, input_made_in: str, input_shares: str) -> Module:
    """A norm that is not fused into the linear layer after it."""
    if shapes.model.norm_modules != "unfused":
        return standalone_norm(shapes, name, kind, input_made_in=input_made_in, input_shares=input_shares)
    from analyzer.modules.unfused_norm import unfused_norm

    return unfused_norm(shapes, name, kind, input_made_in=input_made_in, input_shares=input_shares)


def _connected(shapes: Shapes, layer: Module, input_shares: str) -> Module:
    """The layer with hyper-connections, if the model has them."""
    if shapes.model.hyper_connections is None:
        return layer
    from analyzer.modules.residual.hyper_connections import connected_layer

    return connected_layer(shapes, layer, input_shares=input_shares)


def _scaled(shapes: Shapes, layer: Module) -> Module:
    from analyzer.modules.residual.layer_scaling import scaled_layer

    return scaled_layer(shapes, layer)


@lru_cache(maxsize=CACHED_LAYERS)
def _attention_with_norm(
    inputs: LayerInputs, kind: AttentionKind, extent: Branch, input_made_in: str, input_shares: str
) -> tuple[Module, ...]:
    """The attention branch, cached separately because layers of different kinds share it."""
    shapes = Shapes(inputs)
    if extent == "mamba":
        addition = bias_dropout_add(shapes, "mamba_bda", ModuleKind.ATTENTION_ADD, biased=False)
        return (mixer_branch(shapes, input_shares=input_shares), addition)
    fused = fuses_norm(shapes, kind)
    norm: tuple[Module, ...] = ()
    if shapes.model.norm_modules != "none" and not fused:
        norm = (
            _norm(shapes, "input_layernorm", ModuleKind.ATTENTION_NORM, input_made_in=input_made_in, input_shares=input_shares),
        )
    if extent == "linear":
        branch = gathered_linear(shapes, "self_attention", input_made_in=input_made_in, input_shares=input_shares)
    else:
        branch = _attention_branch(inputs, kind, fused, "" if norm else input_shares)
    biased = biased_output(shapes, kind) and extent != "linear"
    addition = bias_dropout_add(shapes, "self_attn_bda", ModuleKind.ATTENTION_ADD, biased=biased)
    referenced = shapes.referenced_norm_output if is_latent(shapes, kind) else ()
    if referenced:
        addition = replace(addition, forward_workspace=(*addition.forward_workspace, *referenced))
    return (*norm, branch, addition)


@lru_cache(maxsize=CACHED_LAYERS)
def _attention_branch(inputs: LayerInputs, kind: AttentionKind, fused_norm: bool, input_shares: str) -> Module:
    return attention_branch(Shapes(inputs), kind, fused_norm=fused_norm, input_shares=input_shares)


@lru_cache(maxsize=CACHED_LAYERS)
def _moe_branch(inputs: ExpertInputs) -> Module:
    return moe_branch(ExpertShapes(inputs))


def checkpointed(shapes: Shapes, *, kinds: tuple[LayerKind, ...]) -> Module:
    """Layers of these kinds under one checkpoint."""
    outlives: tuple[Tensor, ...] = moe_checkpoint_leftovers(shapes.stream) if any(kind.moe for kind in kinds) else ()
    first = one_layer(shapes.inputs, kinds[0], "" if _distributes(shapes) else "checkpoint input")
    return checkpoint_of(shapes, (first, *(one_layer(shapes.inputs, kind) for kind in kinds[1:])), outlives=outlives)


def _distributes(shapes: Shapes) -> bool:
    return shapes.inputs.recompute.distribute_saved_activations and shapes.t > 1


def checkpoint_of(shapes: Shapes, children: tuple[Module, ...], *, outlives: tuple[Tensor, ...] = ()) -> Module:
    """Layers under one checkpoint: only the first input is saved, or 1/t of it with `--distribute-saved-activations`.

    `outlives`: what it leaves allocated after its backward.
    """
    distributed = _distributes(shapes)
    saved = shapes.stream("checkpoint input", made_in=STREAM)
    gather: tuple[Collective, ...] = ()
    if distributed:
        s, b, h = saved.shape
        formula = saved.formula + "/t"
        saved = Tensor(name=saved.name, shape=(s * b * h // shapes.t,), dtype=saved.dtype, formula=formula, read_first=True)
        gather = shapes.tp("all_gather", "recompute")
    if not distributed and not any(child.children for child in children):  # the input is also the output
        saved = replace(saved, shares="output")
    if outlives and not distributed:
        saved, outlives = replace(saved, lingers=True), outlives[1:]
    return Module(
        name="checkpoint",
        kind=ModuleKind.CHECKPOINT,
        function=True,
        saved=(saved,),
        outlives=outlives,
        backward_workspace=() if saved.shares else (shapes.stream(RECOMPUTED_OUTPUT),),
        collectives=gather,
        children=children,
        recomputed=True,
        source="tensor_parallel.checkpoint",
    )


LayerRuns = tuple[tuple[LayerKind, int], ...]
"""Kinds of layers in order, equal ones in a row with their number."""
ModuleRuns = tuple[tuple[Module, int], ...]
"""Modules in order, the same object in a row with its number."""


def layer_runs(inputs: ModuleInputs, kinds: LayerRuns, *, received: bool = False) -> ModuleRuns:
    """The layers of one model chunk; those that full recompute covers are under checkpoints. Equal layers are one object.

    uniform: one checkpoint per `--recompute-num-layers` layers; block: the first layers of the chunk, one checkpoint each.
    `received`: the first input comes from another stage, and the schedule references it in any case.
    """
    recompute = inputs.recompute
    ignored = inputs.model.hybrid is not None and not inputs.core.recomputes_hybrid_stacks
    if recompute.granularity != "full" or ignored:
        return tuple((one_layer(inputs, kind), times) for kind, times in kinds)
    size = 1 if recompute.num_layers is None else recompute.num_layers
    covered, rest = _covered(kinds, size) if recompute.method == "block" else (_groups(kinds, size), ())
    found = [(_checkpoint(inputs.of_checkpoints, group, False), times) for group, times in covered]
    if received and covered:
        group, times = covered[0]
        found[:1] = [(_checkpoint(inputs.of_checkpoints, group, True), 1), *([(found[0][0], times - 1)] if times > 1 else [])]
    return (*found, *((one_layer(inputs, kind), times) for kind, times in rest))


def checkpoint_sizes(recompute: RecomputeSpec, count: int) -> tuple[int, ...]:
    """The layers of each checkpoint of a block with `count` equal layers, and a 0 for each layer without one."""
    if recompute.granularity != "full":
        return (0,) * count
    size = 1 if recompute.num_layers is None else recompute.num_layers
    if recompute.method == "block":
        covered = min(size, count)
        return (*((1,) * covered), *((0,) * (count - covered)))
    return tuple(min(size, count - start) for start in range(0, count, size))


_Groups = list[tuple[tuple[LayerKind, ...], int]]
"""Kinds of the layers in one checkpoint, and how many equal checkpoints follow each other."""


def _groups(kinds: LayerRuns, size: int) -> _Groups:
    """Checkpoints around `size` layers each; the last may have fewer."""
    if size == 1:
        return [((kind,), times) for kind, times in kinds]
    layers = [kind for kind, times in kinds for _ in range(times)]
    groups = (tuple(layers[start : start + size]) for start in range(0, len(layers), size))
    return [(group, sum(1 for _ in equal)) for group, equal in groupby(groups)]


def _covered(kinds: LayerRuns, count: int) -> tuple[_Groups, LayerRuns]:
    """Checkpoints around each of the first `count` layers, and the layers after them."""
    covered: _Groups = []
    rest: list[tuple[LayerKind, int]] = []
    for kind, times in kinds:
        inside = min(times, count)
        count -= inside
        if inside:
            covered.append(((kind,), inside))
        if times > inside:
            rest.append((kind, times - inside))
    return covered, tuple(rest)


@lru_cache(maxsize=CACHED_LAYERS)
def _checkpoint(inputs: ExpertInputs, kinds: tuple[LayerKind, ...], received: bool) -> Module:
    """`received`: the schedule references the input, so it does not stay because of the checkpoint."""
    made = checkpointed(Shapes(inputs), kinds=kinds)
    return replace(made, saved=tuple(replace(each, lingers=False) for each in made.saved)) if received else made
