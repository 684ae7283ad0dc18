"""The head of a model that scores or embeds samples, in place of output layer and cross entropy, or of the cross entropy alone.

Source: `GPTModel.__init__`, `OutputLayerLinear` and `GPTModel._postprocess` of mcore-bridge 1.6.5 (model/gpt_model.py), and
`get_last_tokens` of ms-swift 4.6. The head of a critic is `LinearForLastLayer` of Megatron-Bridge (training/utils/train_utils.py).
The loss reads the last token of each sample; its tensors are not counted.
"""

from __future__ import annotations

from dataclasses import replace

from analyzer.modules.head import decoder_output_layer, logits
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import weight_gradient
from analyzer.modules.shapes import EndShapes, Shapes
from analyzer.modules.tree import Collective, Module, Parameter, Tensor, for_weight, total_bytes


def sample_head(shapes: Shapes) -> tuple[Module, ...]:
    """The modules after the final norm of the decoder."""
    return (_linear(shapes) if shapes.model.head_outputs else _normalized(shapes),)


def _linear(shapes: Shapes) -> Module:
    """[s, b, h] → [s, b, n], with a weight that tensor-parallel ranks share. Under sequence parallelism each has its tokens."""
    model = shapes.model
    outputs = model.head_outputs
    assert outputs, "the head has outputs"
    rows = shapes.s_split
    weight = Parameter(
        name="weight", shape=(outputs, model.hidden_size), dtype=shapes.dtype, sequence_parallel=shapes.t > 1 and shapes.sp
    )
    of_weight = weight_gradient(shapes, (outputs, model.hidden_size), cached=False) if model.value_head else ()
    values = Tensor(name="values in fp32", shape=(rows, shapes.b, outputs), dtype="fp32", formula="4·s·b·n")
    return Module(
        name="output_layer",
        kind=ModuleKind.VALUE_HEAD if model.value_head else ModuleKind.SAMPLE_HEAD,
        parameters=(weight,),
        saved=for_weight((shapes.hidden("input", made_in=f"decoder.{model.final_norm}"),)),
        forward_workspace=(
            Tensor(name="output", shape=(rows, shapes.b, outputs), dtype=shapes.dtype, formula="2·s·b·n"),
            *([values] if model.value_head else []),
        ),
        backward_workspace=(shapes.hidden("input gradient"), *of_weight),
        collectives=_gather(shapes, outputs, dtype="fp32" if model.value_head else shapes.dtype),
        source="megatron.bridge.training.utils.train_utils.LinearForLastLayer"
        if model.value_head
        else "mcore_bridge.model.gpt_model.OutputLayerLinear",
    )


def _normalized(shapes: Shapes) -> Module:
    """`F.normalize`: hidden states divided by their length. Under sequence parallelism all ranks gather them."""
    model = shapes.model
    lengths = Tensor(name="lengths", shape=(shapes.s_split, shapes.b, 1), dtype=shapes.dtype, formula="2·s·b")
    output = shapes.hidden("normalized hidden states", gathered=True)
    in_fp32 = shapes.hidden("hidden states in fp32", gathered=True, dtype="fp32")  # `Float16Module.forward`
    gradient = replace(output, name="output gradient")
    conversion = (replace(in_fp32, name="output gradient in fp32"), gradient)
    names = ("quotient gradient", "negative gradient", "square", "product")
    division = (gradient, *(shapes.hidden(name) for name in names))
    return Module(
        name="output_layer",
        kind=ModuleKind.NORMALIZED_OUTPUT,
        saved=(shapes.hidden("input", made_in=f"decoder.{model.final_norm}"), lengths, replace(lengths, name="divisors")),
        forward_workspace=(output, in_fp32),
        backward_workspace=max(conversion, division, key=total_bytes),
        collectives=_gather(shapes, model.hidden_size, dtype=shapes.dtype),
        source="torch.nn.functional.normalize",
    )


def _gather(shapes: Shapes, width: int, *, dtype: str) -> tuple[Collective, ...]:
    """The gathered output; its gradient is split without a message (`tensor_parallel_output_grad=False`)."""
    if not shapes.sp:
        return ()
    shape = (shapes.s, shapes.b, width)
    return (Collective(kind="all_gather", group="tp", shape=shape, dtype=dtype, phase="forward"),)


def token_score_head(shapes: EndShapes, *, pre_process: bool) -> tuple[Module, ...]:
    """Output layer, and the difference of the logits of two tokens. `pre_process`: the embedding is on the same stage.

    Tensor-parallel ranks gather the logits of the vocabulary. The gradient of the logit of a token has the size of all logits.
    """
    layer = decoder_output_layer(shapes, pre_process=pre_process)
    of_rank = logits(shapes, "logits", shapes.dtype)
    shape = (shapes.s, shapes.b, shapes.model.padded_vocab_size)
    whole = Tensor(name="gathered logits", shape=shape, dtype=shapes.dtype, formula="2·s·b·V")
    exchanged = (whole, replace(whole, name="gathered logits in order")) if shapes.t > 1 else ()
    gradients = tuple(replace(whole, name=f"gradient of the logits of the {each} token") for each in ("first", "second"))
    score = Module(
        name="token_score",
        kind=ModuleKind.TOKEN_SCORE,
        function=True,
        forward_workspace=(of_rank, *exchanged),
        backward_workspace=gradients,
        collectives=(Collective(kind="all_gather", group="tp", shape=shape, dtype=shapes.dtype, phase="forward"),)
        if exchanged
        else (),
        source="mcore_bridge.model.gpt_model.GPTModel._postprocess",
    )
    return (replace(layer, forward_held=(), forward_workspace=(of_rank,)), score)
