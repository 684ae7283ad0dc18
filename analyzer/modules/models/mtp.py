"""Multi-token prediction (MTP): layers after the decoder that each predict one token further, each with a head and a loss.

Legend: D depths (`--mtp-num-layers`). Depth k combines the hidden states of depth k - 1 with the embedding of the token k
positions ahead.

Sources: core/transformer/multi_token_prediction.py, core/models/gpt/gpt_model.py `_postprocess` (0.16.1).
"""

from __future__ import annotations

from dataclasses import replace

from analyzer.modules.checkpoints import moe_checkpoint_leftovers
from analyzer.modules.embedding import embedding, vocabulary_weight
from analyzer.modules.head import cross_entropy, output_layer, summed_weight_gradients
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.layer import LayerKind, checkpoint_sizes, checkpointed, one_layer, with_other_kernel
from analyzer.modules.linear import at_weight_gradient, split_weight, weight_gradient
from analyzer.modules.norm import standalone_norm
from analyzer.modules.quantized import forward_input, gathers, output_gradient, saved_input
from analyzer.modules.shapes import AllShapes, Shapes
from analyzer.modules.tree import MODEL_PATH, OUTPUT_GRADIENT, Collective, Module, Tensor, for_weight, largest
from analyzer.specs import AttentionKind
from analyzer.specs.hybrid import LETTERS

ALL_DEPTHS = "hidden states of all depths"
MTP_HEAD = "mtp_head"
EMBEDDED = "embedded tokens"
PROJECTED = "gathered output of the projection"


def embedding_weights(shapes: Shapes) -> Module:
    """The copy of the word embedding on a stage that has MTP layers and is not the first stage."""
    words = Module(
        name="word_embeddings",
        kind=ModuleKind.WORD_EMBEDDINGS,
        parameters=(vocabulary_weight(shapes, shared=True),),
        source="VocabParallelEmbedding",
    )
    return Module(name="embedding", kind=ModuleKind.EMBEDDING, children=(words,), source="LanguageModelEmbedding")


def mtp_block(shapes: AllShapes, *, after: str, embeds: bool, heads: bool) -> Module:
    """All depths, executed sequentially. During their backward the gradient of the hidden states of all depths is allocated.

    `after` is the path of the module that allocates the input of the first depth. FP4 leaves these layers in 16 bit
    (`_proj_and_transformer_layer`).

    `embeds`: the embedding of the model is on the same stage. Autograd keeps the weight gradient of the last depth's lookup until
    it has those of the others. `heads`: the output layers are. With tied embeddings they count that gradient.
    """
    if shapes.fp8 is not None and shapes.fp8.recipe == "nvfp4":
        shapes = shapes.in_16_bit
    summed = not (heads and shapes.model.tied_embeddings) and not shapes.inputs.separate_graphs
    depths = tuple(_depth(shapes, depth, after=after, summed=summed) for depth in range(shapes.model.mtp_num_layers))
    return Module(
        name="mtp",
        kind=ModuleKind.MTP,
        backward_workspace=(_all_depths(shapes, "gradient of the hidden states of all depths"),),
        waiting=_gradient_of_lookup(shapes) if embeds and not shapes.inputs.separate_graphs else (),
        children=depths,
        source="MultiTokenPredictionBlock",
    )


def _all_depths(shapes: Shapes, name: str, *, made_in: str = "") -> Tensor:
    """[(1 + D)·s, b, h]: the concatenated outputs of the decoder and of each depth."""
    one = shapes.hidden(name)
    s, b, h = one.shape
    depths = 1 + shapes.model.mtp_num_layers
    return Tensor(name=name, shape=(depths * s, b, h), dtype=one.dtype, formula=f"(1+D)·{one.formula}", made_in=made_in)


def _depth(shapes: AllShapes, depth: int, *, after: str, summed: bool) -> Module:
    """[s, b, h] and the token ids → [s, b, h]. `summed`: autograd sums the weight gradients of the lookups of all depths."""
    recompute = shapes.inputs.recompute
    recomputed = recompute.granularity == "full" and recompute.method == "uniform"  # `block` does not cover MTP layers
    repeats = depth > 0 and shapes.model.hybrid is not None and shapes.model.hybrid.mtp_repeated
    before = f"mtp.layers.{0 if repeats else depth - 1}.final_layernorm" if depth else after
    states = shapes.hidden("checkpoint input", made_in=MODEL_PATH + before)
    path = f"{MODEL_PATH}mtp.layers.{0 if repeats else depth}"
    last = depth == shapes.model.mtp_num_layers - 1
    norm = _final_norm(shapes, last=last, recomputed=recomputed)
    layers = _layers(shapes, depth, path=path, under_checkpoint=recomputed)
    inside = (*_joined(shapes, states=states, path=path, under_checkpoint=recomputed), *layers, *_contracted(shapes), norm)
    if recomputed:
        saved: tuple[Tensor, ...] = (states, shapes.hidden(EMBEDDED, made_in=_embedding(shapes)))
        outlives: tuple[Tensor, ...] = ()
        if _has_experts(shapes) and not all(_inner_checkpoints(shapes)):
            saved = tuple(replace(tensor, lingers=True) for tensor in saved)
            outlives = moe_checkpoint_leftovers(shapes.hidden)[1:] * 2
        inside = (
            Module(
                name="checkpoint",
                kind=ModuleKind.CHECKPOINT,
                function=True,
                saved=saved,
                outlives=outlives,
                backward_workspace=() if last else (shapes.hidden(OUTPUT_GRADIENT, dtype=shapes.residual_dtype),),
                recomputed_last=shapes.recomputed_output,
                children=inside,
                recomputed=True,
                source="tensor_parallel.checkpoint",
            ),
        )
    return Module(
        name="layers",
        kind=ModuleKind.MTP_DEPTH,
        backward_workspace=_gradient_of_lookup(shapes) if summed and not last else (),
        collectives=_roll_collectives(shapes, ("int64", "int64")),  # token and position ids
        children=(_lookup(shapes, path=path), *inside),
        repeats=repeats,
        source="MultiTokenPredictionLayer",
    )


def _contracted(shapes: Shapes) -> tuple[Module, ...]:
    """What makes one hidden state of the parts of the residual stream, if it has several."""
    if shapes.model.hyper_connections is None:
        return ()
    from analyzer.modules.residual.hyper_connections import contraction

    return (contraction(shapes),)


def _lookup(shapes: AllShapes, *, path: str) -> Module:
    """The embedding of the next tokens, with the weight that is already on the stage."""
    found = embedding(shapes)
    ids = Tensor(name="rolled token ids", shape=(shapes.b, shapes.s), dtype="int64", formula="8·s·b", made_in=path)
    children = tuple(replace(child, parameters=()) for child in found.children)
    return replace(found, children=children, saved=(ids,) if shapes.t == 1 else (), forward_held=())


def _gradient_of_lookup(shapes: Shapes) -> tuple[Tensor, ...]:
    """The weight gradient of the word embedding, allocated until autograd has added those of all lookups."""
    weight = vocabulary_weight(shapes, shared=False)
    return (Tensor(name="weight gradient of the embedding", shape=weight.shape, dtype=weight.dtype, formula="size of the weight"),)


def _embedding(shapes: AllShapes) -> str:
    """Path of the module that allocates the embedded tokens; empty if the norm converts them from fp32."""
    found = embedding(shapes)
    if found.forward_held:
        return ""
    last = found.output_of
    return f"{MODEL_PATH}embedding.{last}" if last else f"{MODEL_PATH}embedding"


def _joined(shapes: AllShapes, *, states: Tensor, path: str, under_checkpoint: bool) -> tuple[Module, ...]:
    """Norms of the embedding and of `states`, and the projection 2·h → h of their concatenation.

    `under_checkpoint`: a checkpoint saves the inputs of both norms.
    """
    embedded = _embedding(shapes)
    if shapes.model.hyper_connections is not None:
        from analyzer.modules.residual.hyper_connections import joined_stream

        return joined_stream(shapes, standalone_norm(shapes, "enorm", input_made_in=embedded), path=path)
    enorm = standalone_norm(shapes, "enorm", input_made_in=embedded, input_shares=EMBEDDED if under_checkpoint else "")
    hnorm = standalone_norm(shapes, "hnorm", input_made_in=states.made_in, input_shares=states.name if under_checkpoint else "")
    return enorm, hnorm, _projection(shapes, path=path)


def _double_width(shapes: Shapes, name: str, *, gathered: bool = False, made_in: str = "") -> Tensor:
    """[s, b, 2·h], or its shard under sequence parallelism unless `gathered`."""
    one = shapes.hidden(name, gathered=gathered)
    s, b, h = one.shape
    return Tensor(name=name, shape=(s, b, 2 * h), dtype=one.dtype, formula=f"2·{one.formula}", made_in=made_in)


def _projection(shapes: Shapes, *, path: str) -> Module:
    """[s, b, 2·h] → [s, b, h/t], gathered to [s, b, h] over tensor-parallel ranks.

    Under sequence parallelism a rank uses its shard of the output. The shard is a view that the transformer layer saves, so the
    full tensor stays allocated (`_layer`). The gradient of the full tensor is freed before the GEMMs.
    """
    h, t = shapes.model.hidden_size, shapes.t
    gathered = (_double_width(shapes, "gathered input", gathered=True),) if shapes.sp else ()
    read = _double_width(shapes, "input", made_in=path)
    part = shapes.wide("output", h // t, "h/t")
    full = (shapes.hidden(PROJECTED, gathered=True, made_in=path),) if t > 1 else ()
    gradient = output_gradient(shapes, shapes.wide("output gradient", h // t, "h/t"))
    return Module(
        name="eh_proj",
        kind=ModuleKind.MTP_PROJECTION,
        parameters=(split_weight(shapes, (h // t, 2 * h), full=(h, 2 * h)),),
        saved=for_weight(saved_input(shapes, read, gathered=shapes.sp)),
        forward_workspace=(*forward_input(shapes, read, gathered=gathered), part, *full),
        backward_workspace=(
            *gradient,
            *largest(
                full,
                (
                    _double_width(shapes, "input gradient", gathered=True),
                    *((_double_width(shapes, "scattered input gradient"),) if shapes.sp else ()),
                    *at_weight_gradient(shapes, read, weight_gradient(shapes, (h // t, 2 * h)), gathered=gathered),
                ),
            ),
        ),
        collectives=_projection_collectives(shapes),
        source="TEColumnParallelLinear / ColumnParallelLinear",
    )


def _projection_collectives(shapes: Shapes) -> tuple[Collective, ...]:
    """Collectives of a column-parallel layer of width 2·h, and the all-gather of its output.

    Under sequence parallelism the output is split again. The backward of the split is an all-gather.
    """
    wide = 2 * shapes.model.hidden_size
    gather = shapes.tp("all_gather", "forward")
    if not shapes.sp:
        return (*gather, *shapes.tp("all_reduce", "backward", width=wide))
    return (
        *gathers(shapes, "forward", width=wide, quantizes=True),
        *gather,
        *shapes.tp("all_gather", "backward"),
        *(replace(each, for_weight=True) for each in gathers(shapes, "backward", width=wide)),
        *shapes.tp("reduce_scatter", "backward", width=wide),
    )


def _has_experts(shapes: Shapes) -> bool:
    """Whether MTP layers are MoE layers, like the last decoder layer, or a hybrid model has such layers in an MTP depth."""
    if shapes.model.hybrid is not None:
        return any(LETTERS[letter].moe for letter in shapes.model.hybrid.mtp_pattern)
    return shapes.model.moe is not None and shapes.model.moe.layers[-1]


def _layers(shapes: AllShapes, depth: int, *, path: str, under_checkpoint: bool) -> tuple[Module, ...]:
    """A transformer layer like the last one of the decoder, but for the window of its attention; in hybrid models several layers.

    Without gradients a local variable references the first input, a view of the whole output of the projection, until the first
    layer returns.
    """
    names = _layer_names(shapes)
    kinds = _layer_kinds(shapes, depth)
    covered = _inner_checkpoints(shapes)
    first, *following = (
        _checkpoint(shapes, kind, names[number], replaced=_replaces_last_run(shapes, depth))
        if covered[number]
        else replace(one_layer(shapes.inputs, kind, PROJECTED if shapes.sp and not number else ""), name=names[number])
        for number, kind in enumerate(kinds)
    )
    if shapes.model.hyper_connections is not None:
        from analyzer.modules.residual.hyper_connections import outside_groups

        return (outside_groups(first, path=path), *following)
    return (_reading_projection(shapes, first, path=path, under_checkpoint=under_checkpoint), *following)


def _inner_checkpoints(shapes: Shapes) -> tuple[bool, ...]:
    """Whether each of the layers in a depth has a checkpoint of its own.

    The stack of a hybrid model recomputes its layers (`HybridStack.forward`), also in a depth that is in a checkpoint already.
    The inner checkpoints then run the forward with gradients, and the graph of what they leave does not reach the outer one.
    """
    if shapes.model.hybrid is None or not shapes.inputs.core.recomputes_hybrid_stacks:
        return (False,) * len(_layer_names(shapes))
    return tuple(size > 0 for size in checkpoint_sizes(shapes.inputs.recompute, len(_layer_names(shapes))))


def _replaces_last_run(shapes: Shapes, depth: int) -> bool:
    """Whether the layers of a depth have run in a later depth before: what that run left allocated is then freed."""
    hybrid = shapes.model.hybrid
    return hybrid is not None and hybrid.mtp_repeated and depth < shapes.model.mtp_num_layers - 1


def _checkpoint(shapes: AllShapes, kind: LayerKind, name: str, *, replaced: bool) -> Module:
    """A layer of a depth in a checkpoint of its own. `replaced`: what it leaves takes the place of what an earlier run left."""
    made = checkpointed(Shapes(shapes.inputs.of_checkpoints), kinds=(kind,))
    if replaced:
        made = replace(made, outlives=(), saved=tuple(replace(each, lingers=False) for each in made.saved))
    (layer,) = made.children
    return replace(made, children=(replace(layer, name=name),))


def _layer_kinds(shapes: Shapes, depth: int) -> tuple[LayerKind, ...]:
    if shapes.model.hybrid is not None:
        letters = (LETTERS[letter] for letter in shapes.model.hybrid.mtp_pattern)
        return tuple(LayerKind(moe=letter.moe, block=letter.block, attention=letter.attention) for letter in letters)
    windowed = with_other_kernel(shapes.model)[shapes.model.num_layers :]
    model = shapes.model
    attention: AttentionKind | None = "plugin" if model.plugin is not None and model.plugin.in_mtp else None
    if model.compressed_attention is not None:
        attention = model.compressed_attention.kind_of(model.num_layers + depth)
    return (LayerKind(moe=_has_experts(shapes), other_kernel=bool(windowed) and windowed[depth], attention=attention),)


def _layer_names(shapes: Shapes) -> tuple[str, ...]:
    """Names of the layers in a depth. Those of a hybrid model are in a stack of their own."""
    name = shapes.inputs.core.mtp_layer
    if shapes.model.hybrid is None:
        return (name,)
    return tuple(f"{name}.layers.{number}" for number in range(len(shapes.model.hybrid.mtp_pattern)))


def _reading_projection(shapes: Shapes, layer: Module, *, path: str, under_checkpoint: bool) -> Module:
    viewed = (shapes.hidden(PROJECTED, gathered=True, made_in=path),) if shapes.sp else ()
    layer = replace(layer, saved=(*layer.saved, *viewed))
    if not under_checkpoint:
        return layer
    return replace(layer, forward_workspace=(*layer.forward_workspace, *viewed), recompute_workspace=layer.forward_workspace)


def _final_norm(shapes: Shapes, *, last: bool, recomputed: bool) -> Module:
    """Its output is concatenated with those of the other depths after the last depth, outside of a checkpoint.

    The last depth reads a view of the gradient of that. Autograd adds the gradient from the next depth for the others, which a
    checkpoint references until its backward ends.
    """
    made_in = _layer_names(shapes)[-1] if shapes.model.hyper_connections is None else f"{MODEL_PATH}mtp"
    norm = standalone_norm(shapes, "final_layernorm", ModuleKind.FINAL_NORM, input_made_in=made_in)
    joined = (_all_depths(shapes, ALL_DEPTHS),) if last and not recomputed else ()
    counted = last or recomputed
    read = tuple(tensor for tensor in norm.backward_workspace if not (counted and tensor.name == OUTPUT_GRADIENT))
    return replace(norm, forward_workspace=(*norm.forward_workspace, *joined), backward_workspace=read)


def _roll_collectives(shapes: Shapes, dtypes: tuple[str, ...]) -> tuple[Collective, ...]:
    """Under context parallelism the first token of each of the two chunks of a rank is sent to a neighbour (`roll_tensor`).

    Counted for the first or the last rank of the group, which the formulas describe. Other ranks have two neighbours.
    """
    if shapes.split.context == 1:
        return ()
    return tuple(Collective(kind="send", group="cp", shape=(shapes.b,), dtype=dtype, phase="forward") for dtype in dtypes)


def _counted_predictions(shapes: Shapes) -> tuple[Collective, ...]:
    """The largest logit of each token and its index, gathered from the shards of the vocabulary (`_vocab_parallel_argmax`)."""
    if shapes.t == 1 or not shapes.inputs.core.counts_mtp_predictions:
        return ()
    shape = (shapes.t, shapes.s, shapes.b)
    return tuple(
        Collective(kind="all_gather", group="tp", shape=shape, dtype=dtype, phase="forward") for dtype in (shapes.dtype, "int64")
    )


def received_depths(shapes: Shapes, *, made_in: str) -> Tensor:
    """What a stage after the one with MTP layers receives."""
    return _all_depths(shapes, "received hidden states of all depths", made_in=made_in)


def mtp_heads(shapes: Shapes, *, made_in: str, embeds: bool) -> tuple[Module, ...]:
    """Output layer and loss of each depth, before those of the model, with the same weight.

    `made_in` is the module that returns the hidden states of all depths: the MTP block, or on another stage the decoder.

    A local variable references the logits of the previous depth until those of the next are computed, and up to 0.16 those of
    the last depth until the loss of the model is. During backward the input gradients of later heads stay allocated. `embeds`: an
    embedding on the same stage has the same weight.
    """
    depths = shapes.model.mtp_num_layers
    heads = tuple(_mtp_head(shapes, depth=depth, depths=depths, made_in=made_in) for depth in range(depths))
    if not (heads and embeds):
        return heads
    # its backward is the second after that of the model's output layer
    return (*heads[:-1], replace(heads[-1], waiting=summed_weight_gradients(shapes)))


def _mtp_head(shapes: Shapes, *, depth: int, depths: int, made_in: str) -> Module:
    held = depth == depths - 1 and shapes.inputs.core.holds_mtp_logits
    layer = output_layer(shapes, owns_weight=False, shared=False, input_shares=ALL_DEPTHS)
    loss = cross_entropy(shapes)
    referenced = layer.forward_held
    before = tuple(replace(tensor, name="logits of the previous depth") for tensor in referenced) if depth else ()
    if depth == 0:
        layer = replace(layer, saved=for_weight((_all_depths(shapes, ALL_DEPTHS, made_in=made_in),)))
    tokens = (shapes.b, shapes.s)
    saved = tuple(Tensor(name=name, shape=tokens, dtype="fp32", formula="4·s·b") for name in ("rolled loss mask", "scaled loss"))
    pending = tuple(shapes.hidden(f"gradient of {1 + depth} hidden states") for depth in range(depths - depth))
    return Module(
        name=MTP_HEAD,
        function=True,
        backward_workspace=pending,
        collectives=(*_roll_collectives(shapes, ("int64", "fp32")), *_counted_predictions(shapes)),  # of labels and loss mask
        children=(
            replace(
                layer,
                forward_workspace=(*layer.forward_workspace, *before, *(() if held else referenced)),
                forward_held=referenced if held else (),
            ),
            replace(
                loss,
                saved=(*loss.saved, *saved),
                forward_workspace=(*loss.forward_workspace, *(() if held else referenced)),
            ),
        ),
        source="GPTModel._postprocess, from 0.17 on process_mtp_loss",
    )
