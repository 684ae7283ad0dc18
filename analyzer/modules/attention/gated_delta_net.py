"""Gated delta net: attention whose state has a fixed size, so that its cost is linear in the sequence length.

Legend: s sequence, b microbatch, t tensor-parallel size, K and V widths of all keys and of all values, a value heads, k and v
elements of a key and of a value head, c context-parallel size.

Sources: `GatedDeltaNet` (core/ssm/gated_delta_net.py, 0.16.1 and 0.18.2; core/ssm/gated_delta_net, 0.19); fla-core 0.6.0
(`l2norm_fwd`, `chunk_gated_delta_rule_fwd` and `chunk_gated_delta_rule_bwd`), `CausalConv1dFunction` of fla 0.5.2,
`CausalConv1dFn` of causal_conv1d 1.6.

Local variables of `GatedDeltaNet.forward` reference the output of the input projection, that of the convolution
and small tensors until it returns. In backward, the gradient of the gate waits for that of the input projection's output.

`--recompute-modules gdn_norm_out` (0.19) puts the output norm, and the exchange that returns its result to all heads, under a
checkpoint whose output is freed after the output projection. Both run again before the backward of that projection.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from analyzer.modules.attention.core_attention import ATTENTION
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import column_parallel, row_parallel
from analyzer.modules.norm import norm_parameters, norm_statistics, partial_sums
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import STREAM, Collective, Module, Parameter, Phase, Tensor, for_weight, largest
from analyzer.specs import LinearAttentionSpec
from analyzer.units import DTYPE_BYTES, ceil_div

CHUNK: Final = 64
"""Tokens of a chunk (`chunk_size` of `chunk_gated_delta_rule`)."""
_RECOMPUTED: Final = "recomputed norm output of each head"
_PASSES: Final[tuple[Phase, ...]] = ("forward", "backward")


@dataclass(frozen=True)
class DeltaNet:
    """Widths of one token on one tensor-parallel rank, and its tensors.

    Context-parallel ranks exchange tokens for heads. From then on `shapes` are those of all tokens, and heads are split again.
    """

    shapes: Shapes
    exchanged: int = 1
    """c: ranks that have exchanged tokens for heads."""

    @cached_property
    def spec(self) -> LinearAttentionSpec:
        """The sizes of the model. Raises ValueError for a model without linear attention."""
        spec = self.shapes.model.linear_attention
        if spec is None:
            raise ValueError("the model has no linear attention")
        return spec

    @property
    def ranks(self) -> int:
        """Ranks that share the heads."""
        return self.shapes.t * self.exchanged

    @property
    def key(self) -> int:
        """K/(t·c)."""
        return self.spec.key_width // self.ranks

    @property
    def value(self) -> int:
        """V/(t·c)."""
        return self.spec.value_width // self.ranks

    @property
    def heads(self) -> int:
        """a/(t·c)."""
        return self.spec.num_value_heads // self.ranks

    @property
    def repeated(self) -> int:
        """a·k/t: queries or keys after each was repeated for the value heads that share it."""
        return self.heads * self.spec.key_head_dim

    @property
    def repeats(self) -> bool:
        """Whether several value heads share a key head."""
        return self.spec.num_value_heads > self.spec.num_key_heads

    @property
    def chunks(self) -> int:
        """Chunks of a sample."""
        return ceil_div(self.shapes.s, CHUNK)

    def of_keys(self, name: str) -> Tensor:
        """[b, s, K/t]."""
        return self.shapes.wide(name, self.key, "K/t")

    def of_heads(self, name: str, *, made_in: str = "") -> Tensor:
        """[b, s, a/t, k]: queries or keys of each value head."""
        return self.shapes.wide(name, self.repeated, "a·k/t", made_in=made_in)

    def of_values(self, name: str, *, made_in: str = "") -> Tensor:
        """[b, s, a/t, v]."""
        return self.shapes.wide(name, self.value, "V/t", made_in=made_in)

    def of_each_head(self, name: str, *, dtype: str | None = None, made_in: str = "") -> Tensor:
        """[b, s, a/t]."""
        return self.shapes.wide(name, self.heads, "a/t", dtype=dtype, made_in=made_in)

    @property
    def in_rows(self) -> bool:
        """Whether the convolution reads the projection in [b, s, channels] (`CoreBehavior.convolves_rows`)."""
        return self.shapes.inputs.core.convolves_rows

    def projected(self, name: str = "projected", *, made_in: str = "") -> Tensor:
        """[s, b, (2K+2V+2a)/t]."""
        return self.shapes.wide(name, self.spec.projected_width // self.ranks, "(2K+2V+2a)/t", made_in=made_in)

    def convolved(self, name: str = "convolved") -> Tensor:
        """[b, (2K+V)/t, s]."""
        return self.shapes.wide(name, self.spec.convolved_width // self.ranks, "(2K+V)/t")

    def states(self, name: str) -> Tensor:
        """[b, chunks, a/t, k, v]: the state before each chunk."""
        spec, shapes = self.spec, self.shapes
        shape = (shapes.b, self.chunks, self.heads, spec.key_head_dim, spec.value_head_dim)
        return Tensor(name=name, shape=shape, dtype=shapes.dtype, formula=f"{DTYPE_BYTES[shapes.dtype]}·b·⌈s/{CHUNK}⌉·a·k·v/t")

    @property
    def gate_gradient(self) -> Tensor:
        """The gradient of the gate, which waits for the backward of the input projection."""
        return self.of_values("gate gradient")

    @property
    def copies_gates(self) -> bool:
        """Whether the inputs of the gates are copied from the input projection (`CoreBehavior.prepares_gates`)."""
        return not self.shapes.inputs.core.prepares_gates

    @property
    def referenced(self) -> tuple[Tensor, ...]:
        """What local variables reference from the convolution until the output projection returns."""
        return (
            *(() if self.in_rows else (self.projected(),)),
            self.convolved(),
            *((self.of_each_head("alpha"),) if self.copies_gates else ()),
            self.of_each_head("decay", dtype="fp32"),
        )


def gated_delta_net(shapes: Shapes, *, fused_norm: bool, input_shares: str = "") -> Module:
    """[s, b, h] → [s, b, h]."""
    split = shapes.split
    whole = Shapes(replace(shapes.inputs, split=replace(split, context=1))) if split.context > 1 else shapes
    own, net = DeltaNet(shapes), DeltaNet(whole, split.context)
    return Module(
        name=ATTENTION,
        kind=ModuleKind.ATTENTION,
        parameters=_parameters_of_heads(net),
        children=(
            _input_projection(own, fused_norm=fused_norm, input_shares=input_shares),
            _convolution(net),
            _prepared_in_one(net) if net.in_rows else _prepared(net),
            _delta_rule(net),
            _gated_norm(net),
            _output_projection(own, net),
        ),
        source="GatedDeltaNet",
    )


def _parameters_of_heads(net: DeltaNet) -> tuple[Parameter, ...]:
    """`dt_bias` and `A_log`: one number for each value head."""
    return tuple(
        Parameter(
            name=name,
            shape=(net.spec.num_value_heads // net.shapes.t,),
            dtype=net.shapes.dtype,
            sharding="tensor",
            full_shape=(net.spec.num_value_heads,),
        )
        for name in ("dt_bias", "A_log")
    )


def _input_projection(net: DeltaNet, *, fused_norm: bool, input_shares: str) -> Module:
    """The gradient of its output is concatenated in [b, s, …], and copied to [s, b, …] for more than one sample."""
    shapes, full = net.shapes, net.spec.projected_width
    linear = column_parallel(
        shapes,
        "in_proj",
        ModuleKind.LINEAR_ATTENTION_INPUT,
        width=full // shapes.t,
        full_width=full,
        symbol="(2K+2V+2a)/t",
        bias=False,
        fused_norm=fused_norm,
        input_made_in=STREAM if fused_norm else "input_layernorm",
        input_shares=input_shares,
    )
    gradient = net.projected("concatenated gradient")
    if shapes.split.context > 1:
        exchanged = _exchanged_gradient(net)
        return replace(linear, backward_workspace=largest(linear.backward_workspace, exchanged))
    transposed = (gradient,) if shapes.b > 1 else ()
    parts = (net.convolved("convolution input gradient"), net.gate_gradient, *_of_gates(net))
    return replace(linear, backward_workspace=largest((*linear.backward_workspace, *transposed), (gradient, *parts)))


def _exchanged_gradient(net: DeltaNet) -> tuple[Tensor, ...]:
    """The gradient of all tokens in the order of the ranks, its exchanged parts, and their concatenation or order."""
    names = ("gradient in the order of the ranks", "exchanged gradient", "gradient of the projection")
    return tuple(net.projected(name) for name in names)


def _exchanges(net: DeltaNet, width: int) -> tuple[Collective, ...]:
    """All-to-alls of tokens for heads, or back, of a tensor of the tokens of this rank, in both passes."""
    shapes = net.shapes
    if net.exchanged == 1:
        return ()
    tokens = shapes.s // net.exchanged
    return tuple(
        Collective(kind="all_to_all", group="cp", shape=(tokens, shapes.b, width), dtype=shapes.dtype, phase=phase)
        for phase in _PASSES
    )


def _before_exchange(net: DeltaNet) -> tuple[Tensor, ...]:
    """When the tokens are put in order: the projection with its columns in the order of the ranks, and its exchanged form."""
    return tuple(net.projected(name) for name in ("projection before the exchange", "exchanged projection"))


def _of_gates(net: DeltaNet) -> tuple[Tensor, ...]:
    return (net.of_each_head("beta gradient"), net.of_each_head("alpha gradient"))


def _convolution(net: DeltaNet) -> Module:
    """The causal convolution of each channel, with SiLU. It saves a copy in [b, channels, s], or the projection without a copy."""
    spec, shapes = net.spec, net.shapes
    width = spec.conv_kernel_dim
    weight = Parameter(
        name="weight",
        shape=(spec.convolved_width // shapes.t, 1, width),
        dtype=shapes.dtype,
        sharding="tensor",
        full_shape=(spec.convolved_width, 1, width),
    )
    projection = net.projected("projection", made_in=ATTENTION if net.exchanged > 1 else f"{ATTENTION}.in_proj")
    forward = (net.convolved("output"),) if net.in_rows else (net.projected(), net.convolved("output"))
    part = Tensor(name="weight of this rank", shape=(spec.convolved_width // net.ranks, width), dtype=shapes.dtype)
    return Module(
        name="conv1d",
        kind=ModuleKind.CONVOLUTION,
        function=True,
        parameters=(weight,),
        saved=(projection, *((part,) if net.exchanged > 1 else ())) if net.in_rows else (net.convolved("channels"),),
        forward_workspace=largest(forward, _before_exchange(net)) if net.exchanged > 1 else forward,
        collectives=_exchanges(net, net.spec.projected_width // shapes.t),
        backward_workspace=(
            net.gate_gradient,
            *_of_gates(net),
            net.convolved("output gradient"),
            net.convolved("output before the activation" if net.in_rows else "output gradient in [b, channels, s]"),
            net.convolved("input gradient"),
        ),
        source="causal_conv1d" if net.in_rows else "causal_conv1d_fn",
    )


def _prepared(net: DeltaNet) -> Module:
    """Queries and keys are normalized and repeated, values and gates copied, and decay and beta computed.

    Norms save their output; if each value head has its own key head, the delta rule saves the same tensors.
    """
    shapes = net.shapes
    rows = shapes.b * shapes.s * (net.spec.num_key_heads // net.ranks)
    norms = tuple(shapes.statistics(f"norms of {name}", rows, "4·s·b·K/(k·t)") for name in ("queries", "keys"))
    outputs = tuple(net.of_keys(f"normalized {name}") for name in ("queries", "keys")) if net.repeats else ()
    copies = (net.of_heads("query"), net.of_heads("key"), net.of_values("value"), net.of_values("gate"))
    gradients = (net.of_values("value gradient"), net.gate_gradient, *_of_gates(net))
    of_heads = (net.of_heads("query gradient"), net.of_heads("key gradient"))
    of_keys = tuple(net.of_keys(f"gradient of {name}") for name in ("queries", "keys"))
    return Module(
        name="prepared",
        kind=ModuleKind.DELTA_RULE_INPUTS,
        function=True,
        saved=(
            *outputs,
            *norms,
            net.of_each_head("biased alpha", dtype="fp32"),
            *for_weight((net.of_each_head("softplus", dtype="fp32"),)),  # of the gradient of `A_log`
        ),
        forward_workspace=(*net.referenced, *copies),
        backward_workspace=largest(
            (*of_heads, of_keys[0], *gradients),
            (*of_keys, *gradients, net.convolved("concatenated gradient")),
        ),
        source="l2norm",
    )


def _prepared_in_one(net: DeltaNet) -> Module:
    """The same as compiled functions, which save their inputs, and one norm of queries and keys, which saves its output.

    From core 0.20 on, the inputs of the gates are slices of the input projection, which the convolution saves.
    """
    shapes = net.shapes
    rows = 2 * shapes.b * shapes.s * (net.spec.num_key_heads // net.ranks)
    copies = (net.of_heads("query"), net.of_heads("key"), net.of_values("value"), net.of_values("gate"))
    gradients = (net.of_values("value gradient"), net.gate_gradient, *_of_gates(net))
    return Module(
        name="prepared",
        kind=ModuleKind.DELTA_RULE_INPUTS,
        function=True,
        saved=(
            shapes.wide("normalized queries and keys", 2 * net.key, "2K/t"),
            shapes.statistics("norms", rows, "8·s·b·K/(k·t)"),
            *((net.of_each_head("alpha"), net.of_each_head("beta before its sigmoid")) if net.copies_gates else ()),
        ),
        forward_workspace=(*net.referenced, *copies),
        backward_workspace=(
            net.of_heads("query gradient"),
            net.of_heads("key gradient"),
            *gradients,
            net.convolved("gradient of the output of the convolution"),
        ),
        source="l2norm",
    )


def _delta_rule(net: DeltaNet) -> Module:
    """The recurrence in chunks of 64 tokens. The norm that follows saves the output."""
    beta = net.of_each_head("beta", made_in=ATTENTION)
    inverse = net.shapes.wide("inverse of each chunk", net.heads * CHUNK, f"{CHUNK}·a/t")
    inside = (net.of_heads("w"), net.of_values("u"), net.states("states"), net.of_values("new values"))
    small = tuple(net.of_each_head(f"decay gradient {i}", dtype="fp32") for i in range(2))
    return Module(
        name="gated_delta_rule",
        kind=ModuleKind.DELTA_RULE,
        function=True,
        saved=(
            net.of_heads("query", made_in=ATTENTION),
            net.of_heads("key", made_in=ATTENTION),
            net.of_values("value", made_in=ATTENTION),
            net.of_each_head("cumulative decay", dtype="fp32"),
            beta,
            inverse,
        ),
        forward_workspace=(*net.referenced, net.of_values("gate"), *inside, net.of_values("output")),
        backward_workspace=(
            net.of_values("output gradient"),
            net.gate_gradient,
            *inside,
            net.states("gradient of the states"),
            net.of_values("gradient of the new values"),
            net.of_heads("query gradient"),
            net.of_heads("key gradient"),
            net.of_heads("w gradient"),
            net.of_heads("key gradient through w"),
            net.of_values("value gradient"),
            *small,
            net.of_each_head("beta gradient"),
        ),
        source="chunk_gated_delta_rule",
    )


def _recomputes_norm(shapes: Shapes) -> bool:
    return shapes.recomputes("gdn_norm_out")


def _saved_by_norm(net: DeltaNet) -> tuple[Tensor, ...]:
    """What the norm and the product save apart from what other modules made."""
    rows = net.shapes.b * net.shapes.s * net.heads
    return (*norm_statistics(net.shapes, rows, "4·s·b·a/t"), net.of_values("norm output"))


def _result_of_norm(net: DeltaNet) -> tuple[Tensor, ...]:
    """The product with the gate, and its copies: to [s, b, V/t] for more than one sample, and for an exchange."""
    copied: tuple[Tensor, ...] = (net.of_values("output in [s, b, …]"),) if net.shapes.b > 1 else ()
    if net.exchanged > 1:
        copied = tuple(net.of_values(name) for name in ("output in the order of the ranks", "exchanged output", "heads in order"))
    return (net.of_values("output"), *copied)


def _gated_norm(net: DeltaNet) -> Module:
    """A norm of each head, and a product with the activated gate, which is compiled: it saves its inputs."""
    shapes = net.shapes
    recomputed = _recomputes_norm(shapes)
    gradients = ("product gradient", "norm output gradient", "gate gradient")
    own, exchanges = _saved_by_norm(net), _exchanges(net, net.spec.value_width // shapes.t)
    return Module(
        name="out_norm",
        kind=ModuleKind.GATED_NORM,
        parameters=norm_parameters(shapes, net.spec.value_head_dim),
        saved=(
            net.of_values("input", made_in=ATTENTION),
            *(() if recomputed else own),
            net.of_values("gate", made_in=ATTENTION),
        ),
        forward_workspace=(*net.referenced, *(own if recomputed else ()), *_result_of_norm(net)),
        backward_workspace=(
            *((*own, net.of_values(_RECOMPUTED)) if recomputed else ()),
            *(net.of_values(name) for name in gradients),
            *partial_sums(shapes, net.spec.value_head_dim),
        ),
        collectives=(*exchanges, *(replace(call, phase="recompute") for call in exchanges[:1] if recomputed)),
        source="RMSNorm, compiled gate",
    )


def _output_projection(net: DeltaNet, over_heads: DeltaNet) -> Module:
    """`over_heads`: the sizes of the norm before it, whose heads context-parallel ranks share."""
    shapes, full = net.shapes, net.spec.value_width
    recomputed = _recomputes_norm(shapes)
    projection = row_parallel(
        shapes,
        "out_proj",
        ModuleKind.ATTENTION_OUTPUT,
        width=net.value,
        full_width=full,
        symbol="V/t",
        bias=False,
        input_made_in=ATTENTION,
        input_shares=_RECOMPUTED if recomputed else "",
    )
    projection = replace(projection, forward_workspace=(*projection.forward_workspace, *net.referenced))
    if not recomputed:
        return projection
    result = net.of_values(_RECOMPUTED)
    again = (*_saved_by_norm(over_heads), *_result_of_norm(over_heads))
    return replace(
        projection,
        forward_workspace=(result, *projection.forward_workspace),
        backward_workspace=largest(again, (*_saved_by_norm(over_heads), result, *projection.backward_workspace)),
    )
