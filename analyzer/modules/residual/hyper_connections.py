"""Manifold-constrained hyper-connections: the residual stream has n parts, which a branch reads a weighted sum of.

The output of the branch is added to all parts, which are mixed by a doubly stochastic matrix. The weights depend on the token.

Legend: n parts of the residual stream, h elements of a part.
Source: `HyperConnectionModule` (core/transformer/hyper_connection.py) and `TransformerBlock` of the branch dev of Megatron-LM,
August 2026 (b3b1e2d7), run on the shadow engine (tests/allocator_hook/shadow/test_compressed_attention.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from analyzer.modules.kinds import FEED_FORWARD_BRANCH, RESIDUAL_ADDS, ModuleKind
from analyzer.modules.linear import split_weight, weight_gradient
from analyzer.modules.norm import norm_parameters, norm_statistics, partial_sums
from analyzer.modules.quantized import saved_input
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import LAYER, STREAM, Module, Parameter, Tensor, for_weight
from analyzer.specs import HyperConnectionSpec


def connections_of(shapes: Shapes) -> HyperConnectionSpec:
    """The sizes of hyper-connections. Raises ValueError for a model without them."""
    spec = shapes.model.hyper_connections
    if spec is None:
        raise ValueError("the model has no hyper-connections")
    return spec


def connected_layer(shapes: Shapes, layer: Module, *, input_shares: str) -> Module:
    """The layer with a module before each branch, and one that mixes the stream in place of each residual add.

    `input_shares`: the tensor that is the stream before the layer, if a checkpoint saves it.
    """
    first, *others = _connected(shapes, layer.children)
    children: tuple[Module, ...] = (_reading_stream(first, shares=input_shares), *others)
    if connections_of(shapes).recomputed:
        children = tuple(_marked(each, _made_by_norms) for each in children)
    return replace(
        layer,
        children=children,
        backward_workspace=(shapes.stream("residual gradient"),),
        source="megatron.core.transformer.HyperConnectionTransformerLayer",
    )


_Runs = tuple[tuple[Module, int], ...]
_NORMS: Final = {ModuleKind.ATTENTION_NORM: "input_layernorm", ModuleKind.FEED_FORWARD_NORM: "pre_mlp_layernorm"}
"""The norms before the branches, whose inputs and outputs are recomputed with the stream (`mhc` of `recompute_modules`)."""


def _marked(module: Module, discarded: Callable[[Module, Tensor], bool]) -> Module:
    """The module with those of its saved tensors marked that a group of checkpoints discards."""
    saved = tuple(replace(each, discarded=discarded(module, each)) for each in module.saved)
    return replace(module, saved=saved, children=tuple(_marked(child, discarded) for child in module.children))


def _made_by_norms(module: Module, saved: Tensor) -> bool:
    """Whether a tensor is discarded already, or is made or saved by a norm."""
    return saved.discarded or module.kind in _NORMS or saved.made_in in _NORMS.values()


def _kept(module: Module) -> Module:
    return _marked(module, lambda *_: False)


def _reading_stream(module: Module, **changes: str) -> Module:
    """The module with changes to the stream that it saves."""
    return replace(module, saved=tuple(replace(each, **changes) if each.made_in == STREAM else each for each in module.saved))  # type: ignore[arg-type]


def recomputed_together(layers: _Runs) -> _Runs:
    """The layers of a chunk, and the end of the group of checkpoints, if they have one.

    The group frees its tensors when the last layer has run, so that all are allocated during the forward. It recomputes them before
    the backward of that layer. The first layer reads a stream that no checkpoint made.
    Source: `CheckpointManager` (core/tensor_parallel/random.py) and `TransformerBlock._build_mhc_recompute_layer_plan`.
    """
    if not layers:
        return layers
    (module, times), *others = layers
    first = replace(module, children=(_kept(module.children[0]), *module.children[1:]))
    runs = ((first, 1), *(((module, times - 1),) if times > 1 else ()), *others)
    discards = tuple(
        Tensor(name="what checkpoints recompute together", shape=(size * times,), dtype="uint8")
        for each, times in runs
        if (size := _discarded_bytes(each))
    )
    if not discards:
        return layers
    end = Module(name="recomputation", kind=ModuleKind.OTHER, function=True, discards=discards, source="CheckpointManager")
    return (*runs, (end, 1))


def outside_groups(layer: Module, *, path: str) -> Module:
    """A layer of multi-token prediction, which no group of checkpoints covers. It reads the stream that `path` makes."""
    first, *others = _kept(layer).children
    return replace(layer, children=(_reading_stream(first, made_in=path), *others))


def joined_stream(shapes: Shapes, embedded: Module, *, path: str) -> tuple[Module, ...]:
    """The stream of a depth of multi-token prediction: projections of the `embedded` tokens, and of each part of the stream.

    Source: `MultiTokenPredictionLayer._concat_embeddings`.
    """
    spec, hidden = connections_of(shapes), shapes.model.hidden_size
    stream = shapes.stream("input", made_in=f"{path}.hnorm")
    rows = spec.streams * shapes.s * shapes.b
    norm = Module(
        name="hnorm",
        kind=ModuleKind.NORM,
        parameters=norm_parameters(shapes, hidden),
        saved=norm_statistics(shapes, rows, "4·n·s·b"),
        forward_workspace=(shapes.stream("output"),),
        backward_workspace=(shapes.stream("output gradient"), shapes.stream("input gradient"), *partial_sums(shapes, hidden)),
        source="TENorm",
    )

    def projection(name: str, read: Tensor) -> Module:
        return Module(
            name=name,
            kind=ModuleKind.MTP_PROJECTION,
            parameters=(split_weight(shapes, (hidden, hidden), full=(hidden, hidden)),),
            saved=for_weight(saved_input(shapes, read)),
            forward_workspace=(replace(read, name="output"), *((shapes.stream("sum"),) if name == "h_proj" else ())),
            backward_workspace=(
                replace(read, name="output gradient"),
                replace(read, name="input gradient"),
                *weight_gradient(shapes, (hidden, hidden)),
            ),
            source="TEColumnParallelLinear",
        )

    return (
        embedded,
        norm,
        projection("e_proj", shapes.hidden("input", made_in=f"{path}.enorm")),
        projection("h_proj", stream),
    )


def _discarded_bytes(module: Module) -> int:
    own = sum(each.bytes for each in module.saved if each.discarded)
    return own + sum(_discarded_bytes(child) for child in module.children)


def _connected(shapes: Shapes, modules: tuple[Module, ...]) -> Iterator[Module]:
    before = "attention"
    for position, module in enumerate(modules):
        branch = "feed_forward" if module.kind in FEED_FORWARD_BRANCH else "attention"
        if position == 0 or branch != before:
            yield _reading(shapes, "mlp_hyper_connection" if branch == "feed_forward" else "self_attention_hyper_connection")
        before = branch
        if module.kind in RESIDUAL_ADDS:
            attention = "self_attention" if shapes.fp8 is None else "self_attention.linear_proj"
            yield _mixing(shapes, module, branch="mlp" if branch == "feed_forward" else attention)
        elif module.kind in (ModuleKind.ATTENTION_NORM, ModuleKind.FEED_FORWARD_NORM):
            yield replace(module, saved=tuple(_read_sum(each, lingers=branch == "feed_forward") for each in module.saved))
        else:
            yield module


def _read_sum(saved: Tensor, *, lingers: bool) -> Tensor:
    """What a norm saves: its input is the sum that the branch reads. An attribute of the layer references that of the FFN."""
    return replace(saved, made_in=LAYER, shares="", lingers=lingers) if saved.name == "input" else saved


def _reading(shapes: Shapes, name: str) -> Module:
    """The weights of each token, and the sum that the branch reads.

    Without fused kernels PyTorch converts the stream to fp32 for the weights.
    """
    spec = connections_of(shapes)
    width = shapes.model.stream_width
    single = tuple(Parameter(name=f"alpha_{each}", shape=(1,), dtype="fp32") for each in ("pre", "post", "res"))
    converted = () if spec.fused else (shapes.stream("stream in fp32", dtype="fp32"),)
    in_fp32 = shapes.wide("projected stream", spec.mappings, "n² + 2n", dtype="fp32")
    weights = (
        shapes.wide("weights of reading", spec.streams, "n"),
        shapes.wide("weights of writing", spec.streams, "n"),
        shapes.wide("weights of mixing", spec.streams**2, "n²"),
    )
    return Module(
        name=name,
        kind=ModuleKind.HYPER_CONNECTION,
        function=True,
        parameters=(
            Parameter(name="mapping_proj.weight", shape=(spec.mappings, width), dtype="fp32"),
            *single,
            Parameter(name="bias", shape=(spec.mappings,), dtype="fp32"),
        ),
        saved=(
            replace(shapes.stream("stream"), made_in=LAYER if name.startswith("mlp") else STREAM, discarded=spec.recomputed),
            *converted,
            in_fp32,
            *_weights_in_fp32(shapes, in_fp32),
            shapes.wide("norm of the stream", 1, "1", dtype="fp32"),
            *weights,
        ),
        forward_workspace=(shapes.hidden("output"),),
        backward_workspace=(
            *(shapes.stream(f"gradient of the stream {number}") for number in range(3)),
            shapes.stream("sum of the gradients"),
        ),
        source="HyperConnectionModule",
    )


def _weights_in_fp32(shapes: Shapes, all_weights: Tensor) -> tuple[Tensor, ...]:
    """The weights before the mixing is normalized. Fused kernels make three tensors, and save the first step of that too.

    Source: `CutileProjRmsComputeH` and `TritonSinkhorn` (core/fusions/fused_mhc_kernels.py).
    """
    spec = connections_of(shapes)
    if not spec.fused:
        return (replace(all_weights, name="weights before the mixing is normalized"),)
    mixing = shapes.wide("weights of mixing in fp32", spec.streams**2, "n²", dtype="fp32")
    return (
        shapes.wide("weights of reading in fp32", spec.streams, "n", dtype="fp32"),
        shapes.wide("weights of writing in fp32", spec.streams, "n", dtype="fp32"),
        mixing,
        replace(mixing, name="exponentials of the weights of mixing"),
    )


def _mixing(shapes: Shapes, add: Module, *, branch: str) -> Module:
    """The parts of the stream, mixed, with the output of the branch added to each."""
    return Module(
        name=add.name,
        kind=ModuleKind.HYPER_ADD,
        function=True,
        saved=(shapes.hidden("output of the branch", made_in=branch),),
        forward_workspace=(shapes.stream("mixed stream"),),
        backward_workspace=(shapes.stream("gradient of the stream"), shapes.hidden("gradient of the output of the branch")),
        source="HyperConnectionModule.fused_h_res_h_post_bda",
    )


def expansion(shapes: Shapes) -> Module:
    """Each part of the stream begins as a copy of the embedding."""
    return Module(
        name="input_expand",
        kind=ModuleKind.STREAM_COPIES,
        function=True,
        forward_workspace=(shapes.stream("stream"),),
        forward_held=(shapes.hidden("input of the decoder"),),  # `GPTModel.forward` references it until it returns
        backward_workspace=(shapes.hidden("gradient of the embedding"),),
        source="HyperConnectionModule.input_expand",
    )


def contraction(shapes: Shapes) -> Module:
    """One hidden state of a token again, before the final norm: a sum of the parts of the stream with learned weights."""
    spec = connections_of(shapes)
    width = shapes.model.stream_width
    return Module(
        name="hc_head",
        kind=ModuleKind.STREAM_COPIES,
        function=True,
        parameters=(
            Parameter(name="hc_head_fn", shape=(spec.streams, width), dtype="fp32"),
            Parameter(name="hc_head_base", shape=(spec.streams,), dtype="fp32"),
            Parameter(name="hc_head_scale", shape=(1,), dtype="fp32"),
        ),
        saved=(replace(shapes.stream("stream"), made_in=STREAM),),
        forward_workspace=(shapes.stream("stream in fp32", dtype="fp32"), shapes.hidden("output")),
        backward_workspace=(
            shapes.stream("gradient of the stream in fp32", dtype="fp32"),
            shapes.stream("gradient of the stream"),
        ),
        source="learned_output_contract",
    )
