"""The RMSNorm of InternViT: separate operations of PyTorch in fp32, and a weight in the precision of the model.

Source: `InternViTRMSNorm` of examples/multimodal/nvlm/internvit.py (0.16.1).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from analyzer.modules.attention.core_attention import Heads
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.reduction import sum_buffer
from analyzer.modules.tree import OUTPUT_GRADIENT, Collective, Module, Parameter, Tensor, for_weight, largest

if TYPE_CHECKING:
    from analyzer.modules.shapes import Shapes


def unfused_norm(shapes: Shapes, name: str, kind: ModuleKind, *, input_made_in: str, input_shares: str) -> Module:
    """A norm of the residual stream. The square saves a copy of the input in fp32, and the product with the weight its factor.

    `pow_backward` multiplies the gradient by 2 · x^1. The power, its double and the gradient are allocated at a time, beside
    the gradients of the product and of the mean.
    """
    hidden = shapes.hidden
    whole = shapes.dtype == "fp32"
    wide = hidden("input in fp32", dtype="fp32")
    if whole:
        wide = replace(wide, name="input", shares=input_shares, made_in=input_made_in)
    factor = hidden("normalized")
    return Module(
        name=name,
        kind=kind,
        parameters=(Parameter(name="weight", shape=(shapes.model.hidden_size,), dtype=shapes.dtype),),
        saved=(wide, _statistics(shapes), *for_weight((factor,))),
        forward_workspace=(hidden("normalized in fp32", dtype="fp32") if not whole else hidden("output"),),
        backward_workspace=_backward(shapes, wide, factor, gradients=2),
        source="examples.multimodal.nvlm.internvit.InternViTRMSNorm",
    )


def _statistics(shapes: Shapes) -> Tensor:
    return shapes.statistics("rsigma", shapes.s * shapes.b)


def _backward(shapes: Shapes, wide: Tensor, factor: Tensor, *, gradients: int) -> tuple[Tensor, ...]:
    """The largest instants of the backward: the products with the weight, and the gradient of the square.

    `gradients`: tensors in fp32 with the gradients that arrive at the square.
    """
    own = replace(factor, name=OUTPUT_GRADIENT, made_in="", shares="")
    rows, columns = wide.shape[0] * wide.shape[1], wide.shape[2]
    products = (own, replace(own, name="input gradient"), *for_weight((replace(own, name="gradients of the weight"),)))
    summed = (*products, *sum_buffer(shapes, rows=rows, columns=columns))
    plain = replace(wide, made_in="", shares="")
    square = tuple(replace(plain, name=f"gradient in fp32 {each}") for each in range(gradients))
    power = tuple(replace(plain, name=each) for each in ("power", "twice the power", "gradient of the square"))
    return largest(summed, (*square, *power))


def gathered_norms(shapes: Shapes) -> Module:
    """The norms of all queries and of all keys of a token. Each rank sums its squares, and gathers the sums of all ranks.

    The square saves a copy of the input in fp32, and so does the product with the statistic.
    """
    heads = Heads(shapes)
    width, full = heads.query, shapes.model.query_projection_size

    def one(name: str, kind: ModuleKind, beside: tuple[Tensor, ...]) -> Module:
        wide = shapes.wide("squared input in fp32", width, "a·d/t", dtype="fp32")
        factor = heads.tensor("normalized", width)
        return Module(
            name=name,
            kind=kind,
            parameters=(Parameter(name="weight", shape=(width,), dtype=shapes.dtype, sharding="tensor", full_shape=(full,)),),
            saved=(wide, replace(wide, name="input in fp32"), _statistics(shapes), *for_weight((factor,))),
            forward_workspace=(
                heads.projected(),
                heads.tensor("copy of the input", width),
                replace(wide, name="normalized in fp32"),
                *beside,
            ),
            backward_workspace=_backward(shapes, wide, factor, gradients=1),
            collectives=_sums(shapes),
            source="examples.multimodal.nvlm.internvit.InternViTRMSNorm",
        )

    queries = one("q_layernorm", ModuleKind.Q_NORM, ())
    keys = one("k_layernorm", ModuleKind.K_NORM, (heads.tensor("normalized query", width),))
    return Module(name="qk_layernorm", kind=ModuleKind.QK_NORMS, function=True, children=(queries, keys))


def _sums(shapes: Shapes) -> tuple[Collective, ...]:
    if shapes.t == 1:
        return ()
    shape = (shapes.s, shapes.b, shapes.t)
    return (Collective(kind="all_gather", group="tp", shape=shape, dtype="fp32", phase="forward"),)
