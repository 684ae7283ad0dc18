"""Token and position embeddings. Source: core/models/common/embeddings/language_model_embedding.py (0.16.1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from analyzer.modules.attention.unfused_attention import saves_batch_mask
from analyzer.modules.checkpoints import INPUT_GRADIENT
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.residual.dropout import dropout_mask
from analyzer.modules.shapes import EndShapes, Shapes
from analyzer.modules.tree import MODEL_PATH, Collective, Module, Parameter, Tensor

TOKEN_TYPES: Final = 2
"""`num_tokentypes` of pretrain_bert.py."""


def vocabulary_weight(shapes: Shapes, *, shared: bool) -> Parameter:
    """[V/t, h]: the weight of the word embedding, or of an output layer."""
    model = shapes.model
    return Parameter(
        name="weight",
        shape=(model.padded_vocab_size // shapes.t, model.hidden_size),
        dtype=shapes.dtype,
        sharding="tensor",
        full_shape=(model.padded_vocab_size, model.hidden_size),
        shared_embedding=shared,
    )


def token_ids(shapes: Shapes, name: str, *, shares: str = "") -> Tensor:
    """[b, s] int64 ids of the batch, which an embedding lookup saves for backward."""
    return Tensor(name=name, shape=(shapes.b, shapes.s), dtype="int64", formula="8·s·b", made_in=MODEL_PATH, shares=shares)


def _lookup_collectives(shapes: Shapes) -> tuple[Collective, ...]:
    """Each rank embeds the tokens of its vocabulary shard. The partial embeddings are summed over tensor-parallel ranks.

    Under sequence parallelism this is a reduce-scatter, unless learned position embeddings are added before the split.
    """
    if not shapes.sp:
        return shapes.tp("all_reduce", "forward")
    forward = "all_reduce" if shapes.model.position_embedding == "learned_absolute" else "reduce_scatter"
    return (*shapes.tp(forward, "forward"), *shapes.tp("all_gather", "backward"))


def embedding(shapes: EndShapes, *, summed: bool = False, kept_gradient: bool = False, ids_in: str = "") -> Module:
    """Token ids [b, s] → [s, b, h]. The first layer saves the result.

    `ids_in`: the tensor with all fields of the batch, of which the ids are a part. The position ids are then made by the model.

    `summed`: autograd adds the weight gradient to that of the output layer in a new tensor. `kept_gradient`: the first layer keeps
    the gradient of its input allocated after its backward.
    """
    model, converts = shapes.model, _converts(shapes)
    children = [_word_embeddings(shapes, summed=summed, kept_gradient=kept_gradient, ids_in=ids_in)]
    if model.position_embedding == "learned_absolute":
        children.append(_position_embeddings(shapes, made=bool(ids_in)))
    if model.binary_head:
        children.append(_token_type_embeddings(shapes, ids_in=ids_in))
    if model.hidden_dropout > 0:
        children.append(
            Module(
                name="embedding_dropout",
                saved=dropout_mask(shapes),
                forward_workspace=(shapes.hidden("input"), shapes.hidden("output")),
                backward_workspace=(shapes.hidden("output gradient"), shapes.hidden("input gradient")),
                source="torch.nn.Dropout",
            )
        )
    if model.scaled_embedding:  # Gemma3LanguageModelEmbedding and EmbeddingScalingMixin of Megatron-Bridge
        children.append(
            Module(
                name="scaling",
                function=True,
                forward_workspace=(shapes.hidden("input"), shapes.hidden("output")),
                backward_workspace=(shapes.hidden("output gradient"), shapes.hidden("input gradient")),
                source="embeddings * hidden_size**0.5",
            )
        )
    return Module(
        name="embedding",
        kind=ModuleKind.EMBEDDING,
        saved=(shapes.hidden("part of the fp32 output beyond its size in 16 bit"),) if converts and _saves_fp32(shapes) else (),
        children=tuple(children),
        forward_held=(shapes.hidden("output", dtype="fp32"),) if converts and not _saves_fp32(shapes) else (),
        output_of=_output_allocator(shapes),
        source="LanguageModelEmbedding",
    )


def _converts(shapes: Shapes) -> bool:
    """Whether the output is converted to fp32 (`--fp32-residual-connection`), and back by the first layer."""
    return shapes.model.fp32_residual_connection and shapes.residual_dtype != "fp32"


def _saves_fp32(shapes: Shapes) -> bool:
    """Whether the first layer saves its fp32 input.

    Megatron's own norms and checkpoints do. Norms of Transformer Engine convert it to 16 bit.
    """
    return shapes.model.implementation == "local" or shapes.inputs.recompute.granularity == "full"


def _word_embeddings(shapes: EndShapes, *, summed: bool, kept_gradient: bool, ids_in: str) -> Module:
    """The word embedding, split over tensor-parallel ranks by rows of the vocabulary."""
    model = shapes.model
    shared = (model.tied_embeddings or model.mtp_num_layers > 0) and shapes.split.pipelined
    masks = (
        (
            Tensor(name="mask of tokens of other ranks", shape=(shapes.b, shapes.s), dtype="bool", formula="s·b"),
            Tensor(name="masked token ids", shape=(shapes.b, shapes.s), dtype="int64", formula="8·s·b"),
        )
        if shapes.t > 1
        else (token_ids(shapes, "tokens", shares=ids_in),)
    )
    gradient = Tensor(
        name="weight gradient",
        shape=(model.padded_vocab_size // shapes.t, model.hidden_size),
        dtype=shapes.dtype,
        formula="V/t·h, not accumulated in the GEMM",
    )
    output_gradient = shapes.hidden("output gradient", gathered=True)  # freed before autograd adds the weight gradients
    if kept_gradient and _reads_layer_gradient(shapes):
        output_gradient = replace(output_gradient, shares=INPUT_GRADIENT)
    total = replace(gradient, name="sum of the weight gradients of the embedding and the output layer")
    return Module(
        name="word_embeddings",
        kind=ModuleKind.WORD_EMBEDDINGS,
        parameters=(vocabulary_weight(shapes, shared=shared),),
        saved=masks,
        forward_workspace=(shapes.hidden("embedded tokens", gathered=True), shapes.hidden("output")),
        backward_workspace=(max(output_gradient, total, key=lambda each: each.bytes) if summed else output_gradient, gradient),
        collectives=_lookup_collectives(shapes),
        source="VocabParallelEmbedding",
    )


def _reads_layer_gradient(shapes: Shapes) -> bool:
    """Whether the backward of the lookup reads the gradient of the first layer's input itself.

    It reads a new tensor after the backward of dropout, of a gather, of a conversion from fp32, or of the selection of the tokens
    in the local part of the vocabulary, and a contiguous copy if the transposed gradient is strided.
    """
    model = shapes.model
    changed = model.hidden_dropout > 0 or model.scaled_embedding or model.fp32_residual_connection
    return not (changed or shapes.t > 1 or shapes.b > 1)


def _position_embeddings(shapes: Shapes, *, made: bool) -> Module:
    """The lookup of learned positions, and its sum with the embedded tokens.

    The sum is transposed to [s, b, h], which copies it unless b is 1. `made`: the model makes the ids of one sample, which all
    samples share.
    """
    ids = Tensor(name="position ids", shape=(shapes.s,), dtype="int64", made_in=MODEL_PATH)
    names = ("embedded tokens", "embedded positions", "sum", *(("transposed sum",) if shapes.b > 1 else ()))
    table = (shapes.model.max_position_embeddings, shapes.model.hidden_size)
    return Module(
        name="position_embeddings",
        kind=ModuleKind.POSITION_EMBEDDINGS,
        parameters=(Parameter(name="weight", shape=table, dtype=shapes.dtype),),
        saved=(ids if made else token_ids(shapes, "position ids"),),
        forward_workspace=tuple(shapes.hidden(name, gathered=True) for name in names),
        backward_workspace=(
            shapes.hidden("output gradient", gathered=True),
            Tensor(name="weight gradient", shape=table, dtype=shapes.dtype, formula="size of the weight"),
        ),
        source="torch.nn.Embedding",
    )


def _token_type_embeddings(shapes: Shapes, *, ids_in: str) -> Module:
    """The lookup of the two token types of BERT, and its sum with the other embeddings."""
    names = ("embedded tokens", "embedded positions", "their sum", "embedded types", "sum")
    table = (TOKEN_TYPES, shapes.model.hidden_size)
    return Module(
        name="tokentype_embeddings",
        kind=ModuleKind.TOKEN_TYPE_EMBEDDINGS,
        parameters=(Parameter(name="weight", shape=table, dtype=shapes.dtype),),
        saved=(token_ids(shapes, "token types", shares=ids_in),),
        forward_workspace=tuple(shapes.hidden(name, gathered=True) for name in names),
        backward_workspace=(
            shapes.hidden("output gradient", gathered=True),
            Tensor(name="weight gradient", shape=table, dtype=shapes.dtype, formula="size of the weight"),
        ),
        source="torch.nn.Embedding",
    )


def _output_allocator(shapes: Shapes) -> str:
    """The child that allocates the output; empty if the embedding itself does.

    The transpose of [b, s, h] copies unless b is 1, and sequence parallelism clones the local shard.
    """
    model = shapes.model
    if model.scaled_embedding:
        return ""
    if model.hidden_dropout > 0:
        return "embedding_dropout"
    copied = shapes.b > 1 or shapes.sp or model.position_embedding == "learned_absolute" or model.fp32_residual_connection
    return "" if copied else "word_embeddings"


def batch(shapes: Shapes, *, embeds: bool, layers: bool) -> Module:
    """Tensors that the data loader puts on the GPU for one microbatch, on the first and last stage.

    The first tensor-parallel rank has all fields of a batch, the other ranks those that the stage needs. `embeds`: the stage has an
    embedding. `layers`: the stage has layers. Ids and masks stay allocated until the chunk's forward returns. A checkpoint around
    attention saves the attention mask, and so does an unfused softmax of megatron-core.
    Source: megatron/training/utils.py get_batch_on_this_tp_rank: int64 ids, fp32 loss mask, and the bool attention mask
    [b, 1, s, s] of the full sequence unless `--no-create-attention-mask-in-dataloader`. A context-parallel rank stores its
    rows of each. Before, every rank of the stage has the mask of the full sequence, until its rows are copied.
    """
    s = shapes.inputs.sequence_length
    ids = (shapes.b, shapes.s)
    learned = shapes.model.position_embedding == "learned_absolute"
    referenced = [
        *(
            Tensor(name=name, shape=ids, dtype="int64", shares="ids that the embedding saves" if embeds and saved else "")
            for name, saved in (("tokens", shapes.t == 1), ("position ids", learned))
        ),
        Tensor(name="labels", shape=ids, dtype="int64"),
        Tensor(name="loss mask", shape=ids, dtype="fp32"),
    ]
    saved: tuple[Tensor, ...] = ()
    if shapes.inputs.attention_mask_in_dataloader:
        mask = Tensor(name="attention mask", shape=(shapes.b, 1, shapes.s, s), dtype="bool", formula="b·s²", made_in=MODEL_PATH)
        if shapes.inputs.checkpoints_attention or (layers and saves_batch_mask(shapes)):
            saved = (mask,)
        else:
            referenced.append(mask)
    return Module(
        name="batch",
        kind=ModuleKind.BATCH,
        function=True,
        saved=saved,
        forward_held=tuple(referenced),
        forward_workspace=_whole_mask(shapes),
        source="megatron/training/utils.py get_batch_on_this_tp_rank",
    )


def _whole_mask(shapes: Shapes) -> tuple[Tensor, ...]:
    """The attention mask of the full sequence, from which a context-parallel rank copies its rows, and all position ids.

    `get_batch_on_this_cp_rank` replaces one field after the other, the position ids after the mask. Then nothing references the
    full mask (megatron/training/utils.py until core 0.10, core/utils.py from 0.11 on).
    """
    s = shapes.inputs.sequence_length
    if shapes.split.context == 1 or not shapes.inputs.attention_mask_in_dataloader:
        return ()
    return (
        Tensor(name="attention mask of the full sequence", shape=(shapes.b, 1, s, s), dtype="bool", formula="b·s²"),
        Tensor(name="position ids of other context-parallel ranks", shape=(shapes.b, s - shapes.s), dtype="int64"),
    )


def saved_mask(mask: tuple[Tensor, ...]) -> Module:
    """The attention mask of the batch that layers save: until the backward of the first layer, before that of the embedding."""
    return Module(
        name="attention_mask",
        kind=ModuleKind.BATCH,
        function=True,
        saved=mask,
        source="megatron/training/utils.py get_batch_on_this_tp_rank",
    )
