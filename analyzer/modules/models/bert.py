"""The modules of a BERT: embedding with token types, an encoder, and two heads.

Sources: core/models/bert/{bert_model,bert_lm_head,pooler}.py (0.16.1), and `get_batch` and `loss_func` of pretrain_bert.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Final

from analyzer.modules.attention.unfused_attention import saves_batch_mask
from analyzer.modules.embedding import embedding, saved_mask
from analyzer.modules.head import adds_to_placeholder, cross_entropy, output_layer
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.layer import layer_runs
from analyzer.modules.models.parts import CACHED_ENDS, Parts, Stack, cached_final_norm
from analyzer.modules.norm import norm_parameters, norm_statistics
from analyzer.modules.reduction import bias_gradient
from analyzer.modules.shapes import EndShapes, Shapes
from analyzer.modules.tree import MODEL_PATH, Module, Parameter, Tensor

if TYPE_CHECKING:
    from analyzer.modules.inputs import EndInputs, LayerInputs, ModuleInputs
    from analyzer.modules.models.parts import ChunkKind

BATCH: Final = "batch"
"""Name of the tensor of which all int64 fields of a batch are views (`broadcast_data`, core/tensor_parallel/data.py)."""
FIELDS: Final = 5
"""Fields of [b, s]: tokens, types, labels, loss mask and padding mask. A sixth one is [b]: whether the sentences are in order."""
_HIDDEN: Final = "encoder.final_layernorm"
_CLASSES: Final = 2


def bert_parts(inputs: ModuleInputs, kind: ChunkKind) -> Parts:
    """The modules of a chunk of a BERT. Every stage has the complete batch."""
    first, last = kind.pre_process, kind.post_process
    fields, kept = _batch(inputs.of_batches, first, last)
    layers = layer_runs(inputs, kind.layers, received=not first)
    norm = ((cached_final_norm(inputs.of_ends), 1),) if kind.final_norm else ()
    return (
        fields,
        *((_embedding(inputs.of_ends, last),) if first else ()),
        kept,
        Stack("encoder", (*layers, *norm)),
        *(_heads(inputs.of_ends, first) if last else ()),
    )


@lru_cache(maxsize=CACHED_ENDS)
def _batch(inputs: LayerInputs, first: bool, last: bool) -> tuple[Module, Module]:
    """The batch of one microbatch, and what is saved of it for the backward.

    The lookups of the first stage save views of the fields, and the loss of the last one saves the loss mask. Without an embedding
    the fields are counted until the forward returns: the loss saves one that is freed at the begin of the backward. The mask
    of attention is made on every stage (`BertModel.bert_extended_attention_mask`): of each token, or for local layers of each pair
    of tokens, from their product in int64. A checkpoint around attention saves it, and so does an unfused softmax of megatron-core.
    """
    shapes = Shapes(inputs)
    heads, local = shapes.model.binary_head, shapes.model.implementation == "local"
    fields = batch_fields((FIELDS * shapes.s + 1) * shapes.b)
    loss_mask = Tensor(name="loss mask", shape=(shapes.b, shapes.s), dtype="fp32", formula="4·s·b", made_in=MODEL_PATH)
    pairs = (shapes.b, 1, shapes.s if local else 1, shapes.s)
    mask = Tensor(name="attention mask", shape=pairs, dtype="bool", made_in=MODEL_PATH, formula="b·s²" if local else "b·s")
    product = Tensor(name="product of padding masks", shape=(shapes.b, shapes.s, shapes.s), dtype="int64", formula="8·b·s²")
    saved = [
        *([fields] if first and (heads or shapes.t == 1) else ()),
        *([loss_mask] if last else ()),
        *([mask] if inputs.checkpoints_attention or saves_batch_mask(shapes) else ()),
    ]
    held = tuple(each for each in (fields, loss_mask, mask) if each not in saved)
    return (
        Module(
            name="batch",
            kind=ModuleKind.BATCH,
            function=True,
            forward_held=tuple(replace(each, made_in="") for each in held),
            forward_workspace=(*(replace(each, made_in="") for each in saved), *((product,) if local else ())),
            source="pretrain_bert.py get_batch",
        ),
        saved_mask(tuple(saved)),
    )


def batch_fields(elements: int) -> Tensor:
    """The tensor of which all int64 fields of a batch are views, of this number of elements."""
    return Tensor(name=BATCH, shape=(elements,), dtype="int64", formula="8 bytes for each field", made_in=MODEL_PATH)


@lru_cache(maxsize=CACHED_ENDS)
def _embedding(inputs: EndInputs, last: bool) -> Module:
    return embedding(EndShapes(inputs), summed=last and adds_to_placeholder(inputs), ids_in=BATCH)


@lru_cache(maxsize=CACHED_ENDS)
def _heads(inputs: EndInputs, pre_process: bool) -> tuple[Module, ...]:
    """Pooler, masked language model head, output layer, classifier and loss, in the order of execution."""
    shapes = EndShapes(inputs)
    tied, classifies = shapes.model.tied_embeddings, shapes.model.binary_head
    return (
        *((_pooler(shapes),) if classifies else ()),
        _language_head(shapes),
        output_layer(
            shapes,
            owns_weight=not (tied and pre_process),
            shared=tied and shapes.split.pipelined,
            input_made_in="lm_head.layer_norm",
            embeds=tied and pre_process,
            biased=True,
        ),
        *((_classifier(shapes),) if classifies else ()),
        cross_entropy(shapes),
    )


def _linear(
    shapes: Shapes,
    name: str,
    kind: ModuleKind,
    *,
    width: int,
    read: Tensor,
    output: Tensor,
    input_gradient: Tensor,
    sequence_parallel: bool = False,
) -> Module:
    """A linear layer of PyTorch with a bias, which every tensor-parallel rank has (`get_linear_layer`).

    `sequence_parallel`: the ranks compute different tokens, and sum the gradients of its parameters.
    """
    weight = (width, shapes.model.hidden_size)
    parameters = tuple(
        Parameter(name=each, shape=shape, dtype=shapes.dtype, sequence_parallel=sequence_parallel)
        for each, shape in (("weight", weight), ("bias", weight[:1]))
    )
    return Module(
        name=name,
        kind=kind,
        parameters=parameters,
        saved=(read,),
        forward_workspace=(output,),
        backward_workspace=(
            replace(output, name="output gradient"),
            input_gradient,
            Tensor(name="weight gradient", shape=weight, dtype=shapes.dtype, formula="size of the weight"),
            *bias_gradient(shapes, rows=prod(output.shape[:-1]), columns=width),
        ),
        source="torch.nn.Linear",
    )


def _language_head(shapes: Shapes) -> Module:
    """A linear layer, GELU and a norm on the hidden states of all tokens of this rank (`BertLMHead`)."""
    rows = shapes.s_split * shapes.b
    dense = _linear(
        shapes,
        "dense",
        ModuleKind.HEAD_PROJECTION,
        width=shapes.model.hidden_size,
        read=shapes.hidden("input", made_in=_HIDDEN),
        output=shapes.hidden("output"),
        input_gradient=shapes.hidden("input gradient"),
        sequence_parallel=shapes.sp,
    )
    gelu = Module(
        name="gelu",
        kind=ModuleKind.ACTIVATION,
        function=True,
        saved=(shapes.hidden("input", made_in="lm_head.dense"),),
        forward_workspace=(shapes.hidden("output"),),
        backward_workspace=(shapes.hidden("output gradient"), shapes.hidden("input gradient")),
        source="torch.nn.functional.gelu",
    )
    norm = Module(
        name="layer_norm",
        kind=ModuleKind.NORM,
        parameters=norm_parameters(shapes, shapes.model.hidden_size),
        saved=(shapes.hidden("input", made_in="lm_head"), *norm_statistics(shapes, rows, "4·s·b")),
        forward_workspace=(shapes.hidden("output"),),
        backward_workspace=(shapes.hidden("output gradient"), shapes.hidden("input gradient")),
        source="FusedLayerNorm",
    )
    return Module(name="lm_head", children=(dense, gelu, norm), source="megatron.core.models.bert.bert_lm_head.BertLMHead")


def _first_tokens(shapes: Shapes, name: str, *, width: int | None = None, made_in: str = "") -> Tensor:
    """[b, width] of the first token of each sample, h wide by default."""
    columns = shapes.model.hidden_size if width is None else width
    size = 4 if shapes.dtype == "fp32" else 2
    return Tensor(name=name, shape=(shapes.b, columns), dtype=shapes.dtype, formula=f"{size}·b·h", made_in=made_in)


def _pooler(shapes: Shapes) -> Module:
    """A linear layer and tanh on the first token of each sample. Under sequence parallelism all tokens are gathered, and saved.

    Backward adds the gradient of that token, in a tensor with all tokens, to that of the language model head.
    """
    gathered = shapes.hidden("hidden states of all ranks" if shapes.sp else "hidden states", gathered=True)
    read = replace(gathered, made_in="pooler" if shapes.sp else _HIDDEN, shares="" if shapes.sp else "input")
    dense = _linear(
        shapes,
        "dense",
        ModuleKind.POOLER,
        width=shapes.model.hidden_size,
        read=read,
        output=_first_tokens(shapes, "output"),
        input_gradient=_first_tokens(shapes, "input gradient"),
    )
    return Module(
        name="pooler",
        children=(dense,),
        backward_workspace=(
            shapes.hidden("gradient from the language model head"),
            shapes.hidden("gradient of the first tokens, with zeros", gathered=True),
        ),
        collectives=shapes.tp("all_gather", "forward") if shapes.sp else (),
        source="megatron.core.models.bert.pooler.Pooler",
    )


def _classifier(shapes: Shapes) -> Module:
    """The two logits of the order of sentences."""
    return _linear(
        shapes,
        "binary_head",
        ModuleKind.BINARY_HEAD,
        width=_CLASSES,
        read=_first_tokens(shapes, "output of the pooler", made_in="pooler"),
        output=_first_tokens(shapes, "logits", width=_CLASSES),
        input_gradient=_first_tokens(shapes, "input gradient"),
    )
