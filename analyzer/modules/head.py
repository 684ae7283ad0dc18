"""Final norm, output layer and cross entropy.

Sources: core/models/gpt/gpt_model.py _postprocess; core/tensor_parallel/layers.py ColumnParallelLinear;
core/tensor_parallel/cross_entropy.py; core/fusions/fused_cross_entropy.py (0.16.1);
transformer_engine/pytorch/cross_entropy.py (TE 2.11).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from analyzer.modules.embedding import vocabulary_weight
from analyzer.modules.inputs import LayerInputs
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import at_weight_gradient, column_collectives
from analyzer.modules.norm import standalone_norm
from analyzer.modules.quantized import forward_input, output_gradient, saved_input
from analyzer.modules.reduction import bias_gradient
from analyzer.modules.shapes import EndShapes, Shapes
from analyzer.modules.tree import MODEL_PATH, STREAM, Collective, Module, Parameter, Tensor, for_weight

OF_OUTPUT_LAYER: Final = "weight gradient of the output layer"
"""The gradient of a tied embedding, from its part of the output layer on."""


def logits(shapes: Shapes, name: str, dtype: str) -> Tensor:
    """[s, b, V/t] in `dtype`."""
    size = {"fp32": 4}.get(dtype, 2)
    return Tensor(
        name=name,
        shape=(shapes.s, shapes.b, shapes.model.padded_vocab_size // shapes.t),
        dtype=dtype,
        formula=f"{size}·s·b·V/t",
    )


def output_layer(
    shapes: Shapes,
    *,
    owns_weight: bool,
    shared: bool,
    input_shares: str = "",
    input_made_in: str = "",
    embeds: bool = False,
    biased: bool = False,
) -> Module:
    """[s, b, h] → logits [s, b, V/t]. The function that computes the loss references the logits until it returns.

    `input_made_in`: the module that returns its input; the final norm of the decoder if it is not given. `biased`: it has a bias,
    which is added in a new tensor. `embeds`: an embedding on the same stage has the same weight. Autograd
    keeps the gradient until it has the embedding's part.
    """
    model = shapes.model
    output = logits(shapes, "logits", shapes.dtype)
    weight_gradient = _weight_gradient(shapes)
    overwritten = model.cross_entropy == "te" or shapes.dtype == "fp32"  # then the loss saves this tensor itself
    weight = (vocabulary_weight(shapes, shared=shared),) if owns_weight else ()
    layer = Module(
        name="output_layer",
        kind=ModuleKind.OUTPUT_LAYER,
        parameters=(*weight, *((_bias(shapes),) if biased else ())),
        saved=for_weight((shapes.hidden("input", made_in=input_made_in or f"decoder.{model.final_norm}", shares=input_shares),)),
        forward_workspace=(
            *((output,) if overwritten else ()),
            *((replace(output, name="logits without bias"),) if biased else ()),
        ),
        forward_held=() if overwritten else (output,),
        backward_workspace=(
            logits(shapes, "logits gradient", shapes.dtype),
            shapes.hidden("input gradient", gathered=True),
            *((shapes.hidden("scattered input gradient"),) if shapes.sp else ()),
            *weight_gradient,
            *(bias_gradient(shapes, rows=shapes.s * shapes.b, columns=model.padded_vocab_size // shapes.t) if biased else ()),
        ),
        waiting=tuple(replace(each, name=OF_OUTPUT_LAYER) for each in weight_gradient) if embeds else (),
        collectives=column_collectives(shapes.in_16_bit),
        source="megatron.core.tensor_parallel.ColumnParallelLinear",
    )
    return _quantized(shapes, layer) if shapes.quantizes_output_layer else layer


def _quantized(shapes: Shapes, layer: Module) -> Module:
    """The output layer as a linear layer of Transformer Engine whose GEMMs read FP8 (`TELMHeadColumnParallelLinear`, core 0.18).

    A local variable of `GPTModel._postprocess` references its 16-bit input until the loss is computed.
    """
    [saved] = layer.saved
    read = replace(saved, for_weight=False)
    gathered = (shapes.hidden("gathered input", gathered=True),) if shapes.sp else ()
    gradient, *others = layer.backward_workspace
    own = tuple(each for each in others if each.for_weight)
    return replace(
        layer,
        saved=for_weight(saved_input(shapes, read, gathered=shapes.sp)),
        forward_workspace=(*forward_input(shapes, read, gathered=gathered, in_16_bit=False), *layer.forward_workspace),
        forward_held=(*layer.forward_held, replace(read, made_in="", shares="")),
        backward_workspace=(
            *output_gradient(shapes, gradient),
            *(each for each in others if not each.for_weight),
            *at_weight_gradient(shapes, read, own, gathered=gathered),
        ),
        collectives=column_collectives(shapes),
        source="TELMHeadColumnParallelLinear",
    )


def _bias(shapes: Shapes) -> Parameter:
    rows = shapes.model.padded_vocab_size
    return Parameter(name="bias", shape=(rows // shapes.t,), dtype=shapes.dtype, sharding="tensor", full_shape=(rows,))


def _weight_gradient(shapes: Shapes) -> tuple[Tensor, ...]:
    """The weight gradient of the output layer, or the placeholder that fused accumulation returns to autograd.

    A cached placeholder is counted by `memory.workspaces`.
    """
    return () if _returns_cached(shapes) else for_weight((_like_weight(shapes, "weight gradient"),))


def _returns_cached(shapes: Shapes) -> bool:
    """Whether each backward of an output layer returns the same placeholder."""
    return shapes.inputs.gradient_accumulation_fusion and shapes.inputs.cached_dummies.output_layer


def adds_to_placeholder(inputs: LayerInputs) -> bool:
    """Whether autograd adds the weight gradient of a tied embedding to a cached placeholder: in a new tensor.

    With MTP it adds those of two output layers first (`summed_weight_gradients`), and the embedding's in place.
    """
    sums = inputs.model.tied_embeddings and not (inputs.model.mtp_num_layers or inputs.separate_graphs)
    return sums and _returns_cached(Shapes(inputs))


def _like_weight(shapes: Shapes, name: str) -> Tensor:
    shape = (shapes.model.padded_vocab_size // shapes.t, shapes.model.hidden_size)
    return Tensor(name=name, shape=shape, dtype=shapes.dtype, formula="size of the weight")


def summed_weight_gradients(shapes: Shapes) -> tuple[Tensor, ...]:
    """What autograd allocates to add the weight gradients of two output layers with the same weight.

    The second one is added in place (`InputBuffer::accumulate` of PyTorch), except to a cached placeholder.
    """
    return (_like_weight(shapes, OF_OUTPUT_LAYER),) if _returns_cached(shapes) else ()


def _loss_collectives(shapes: Shapes) -> tuple[Collective, ...]:
    """Per-token maxima and sums over the tensor-parallel group, fp32."""
    if shapes.t == 1:
        return ()
    tokens = (shapes.s, shapes.b)

    def one(kind: str, shape: tuple[int, ...], count: int = 1) -> Collective:
        return Collective(kind=kind, group="tp", shape=shape, dtype="fp32", phase="forward", count=count)  # type: ignore[arg-type]

    if shapes.model.cross_entropy == "te":
        return (one("all_gather", (shapes.t, 3, *tokens)),)
    if shapes.model.cross_entropy == "native":
        return (one("all_reduce", tokens), one("all_reduce", (2, *tokens)))
    return (one("all_reduce", tokens, 3),)


def cross_entropy(shapes: Shapes, *, logits_made_in: str = "output_layer") -> Module:
    """Logits → loss of each token. `logits_made_in`: the path of the output layer.

    Megatron's implementation saves the fp32 softmax, computed in place in a copy of the logits. Backward overwrites it with
    the gradient and casts that to 16 bit. Transformer Engine overwrites the 16-bit logits with the gradient in forward.
    """
    tokens = (shapes.s, shapes.b)
    te = shapes.model.cross_entropy == "te"
    softmax = logits(shapes, "softmax", "fp32")
    if shapes.dtype == "fp32" and not shapes.inputs.core.copies_logits:  # `logits.float()` does not copy
        softmax = replace(softmax, made_in=f"{MODEL_PATH}{logits_made_in}")
    if te:
        softmax = replace(logits(shapes, "gradient in place of the logits", shapes.dtype), made_in=f"{MODEL_PATH}{logits_made_in}")
    small = (
        (Tensor(name="m, d and X of each token", shape=(3, *tokens), dtype="fp32", formula="12·s·b"),)
        if te
        else (
            Tensor(name="target mask", shape=tokens, dtype="bool", formula="s·b"),
            Tensor(name="masked target", shape=tokens, dtype="int64", formula="8·s·b"),
        )
    )
    native = shapes.model.cross_entropy == "native"  # its gradient is in bf16 in each precision (fused_cross_entropy.py)
    keeps = te or (shapes.dtype == "fp32" and not native)
    cast = () if keeps else (logits(shapes, "logits gradient", "bf16" if native else shapes.dtype),)
    # torch.compile turns the in-place operations into new tensors: input and result are allocated at the same time
    compiled = (logits(shapes, "softmax before the in-place update", "fp32"),) if native else ()
    # before core 0.8 the maximum is subtracted into a new tensor while the caller references the fp32 copy
    subtracted = (logits(shapes, "logits in fp32", "fp32"),) if shapes.inputs.core.copies_logits else ()
    return Module(
        name="cross_entropy",
        kind=ModuleKind.LOSS,
        function=True,
        saved=(softmax, *small, Tensor(name="loss", shape=tokens, dtype="fp32", formula="4·s·b")),
        forward_workspace=(
            Tensor(name="predicted logits and sums", shape=(3, *tokens), dtype="fp32", formula="12·s·b"),
            *compiled,
            *subtracted,
        ),
        backward_workspace=(*cast, *compiled),
        collectives=_loss_collectives(shapes),
        source="transformer_engine.pytorch.cross_entropy" if te else "_VocabParallelCrossEntropy",
    )


def head(shapes: EndShapes, *, pre_process: bool, mtp_here: bool = False) -> tuple[Module, ...]:
    """Output layer and loss, after the decoder's final norm. `pre_process`: the embedding is on the same stage.

    With multi-token prediction (MTP) the input is a slice of the concatenated hidden states of all depths. If MTP layers
    are on this stage (`mtp_here`) and embeddings are tied, the MTP copy of the embedding weight is used, and with several
    pipeline stages the output layer's own weight is unused (`GPTModel.__init__`, `shared_embedding_or_output_weight`).
    """
    input_shares = "hidden states of all depths" if shapes.model.mtp_num_layers else ""
    return (
        decoder_output_layer(shapes, pre_process=pre_process, mtp_here=mtp_here, input_shares=input_shares),
        cross_entropy(shapes),
    )


def decoder_output_layer(shapes: EndShapes, *, pre_process: bool, mtp_here: bool = False, input_shares: str = "") -> Module:
    """The output layer of a decoder, whose weight may be that of the embedding. The arguments are those of `head`.

    `input_shares`: the tensor that its input is a part of.
    """
    tied = shapes.model.tied_embeddings
    return output_layer(
        shapes,
        owns_weight=not (tied and pre_process),
        shared=tied and shapes.split.pipelined and not mtp_here,
        input_shares=input_shares,
        embeds=tied and (pre_process or mtp_here) and not shapes.inputs.separate_graphs,
    )


def final_norm(shapes: Shapes) -> Module:
    """The norm at the end of the decoder. The output layer saves its output."""
    made_in = STREAM if shapes.model.hyper_connections is None else f"{MODEL_PATH}decoder"  # the contracted stream
    return standalone_norm(shapes, shapes.model.final_norm, ModuleKind.FINAL_NORM, input_made_in=made_in)
