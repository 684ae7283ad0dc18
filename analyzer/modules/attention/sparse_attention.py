"""DeepSeek sparse attention: an indexer scores all keys of each query, and attention uses those with the highest scores.

The scores of all pairs are computed and stored, also those that are not chosen.

Legend: a heads, H heads of the indexer, di elements of one of its heads, K chosen keys, dq and dv as in `latent_projections`.

Source: `DSAttention`, `DSAIndexer`, `FusedDSAIndexerLoss` and `unfused_dsa_fn`
(core/transformer/experimental_attention_variant/dsa.py, 0.18.2). Instants of the workspaces are those between its statements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from analyzer.modules.attention.core_attention import ATTENTION
from analyzer.modules.attention.latent_projections import compressed, maker_of_queries, mla_of
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import weight_gradient
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Collective, Module, Parameter, Tensor, largest
from analyzer.specs import MlaSpec, SparseAttentionSpec


@dataclass(frozen=True)
class Indexed:
    """The tensors of sparse attention on one tensor-parallel rank."""

    shapes: Shapes

    @cached_property
    def spec(self) -> SparseAttentionSpec:
        """The sizes of the indexer. Raises ValueError for a model without sparse attention."""
        spec = self.shapes.model.sparse_attention
        if spec is None:
            raise ValueError("the model has no sparse attention")
        return spec

    @cached_property
    def mla(self) -> MlaSpec:
        """The sizes of multi-latent attention."""
        return mla_of(self.shapes)

    @property
    def heads(self) -> int:
        """a/t."""
        return self.shapes.model.num_attention_heads // self.shapes.t

    @property
    def chosen(self) -> int:
        """Keys of each query: K, or all tokens if there are fewer."""
        return min(self.spec.topk, self.shapes.s)

    @property
    def keys(self) -> int:
        """Tokens whose keys are scored."""
        return self.shapes.s

    @property
    def width(self) -> int:
        """dq: elements of a query of attention."""
        return self.mla.query_head_dim

    @property
    def value_width(self) -> int:
        """dv: elements of a value of attention."""
        return self.mla.v_head_dim

    def of_pairs(self, name: str) -> Tensor:
        """[b, s, s] in fp32."""
        return Tensor(name=name, shape=(self.shapes.b, self.shapes.s, self.keys), dtype="fp32", formula="4·b·s²")

    def mask(self, name: str) -> Tensor:
        """[s, s] in fp32."""
        return Tensor(name=name, shape=(self.shapes.s, self.shapes.s), dtype="fp32", formula="4·s²")

    def of_heads(self, name: str, *, dtype: str = "fp32") -> Tensor:
        """[b, a/t, s, s]."""
        shape = (self.shapes.b, self.heads, self.shapes.s, self.keys)
        return Tensor(name=name, shape=shape, dtype=dtype, formula="b·a·s²/t elements")

    def of_index_heads(self, name: str, *, dtype: str = "fp32") -> Tensor:
        """[s, b, H, s]."""
        shape = (self.shapes.s, self.shapes.b, self.spec.heads, self.keys)
        return Tensor(name=name, shape=shape, dtype=dtype, formula="b·H·s² elements")

    def query(self, name: str, *, dtype: str | None = None, made_in: str = "") -> Tensor:
        """[s, b, a/t, dq]: queries, or keys."""
        return self.shapes.wide(name, self.heads * self.width, "a·dq/t", dtype=dtype, made_in=made_in)

    def value(self, name: str, *, made_in: str = "") -> Tensor:
        """[s, b, a/t, dv]."""
        return self.shapes.wide(name, self.heads * self.mla.v_head_dim, "a·dv/t", made_in=made_in)

    def index_query(self, name: str, *, dtype: str | None = None) -> Tensor:
        """[s, b, H, di]."""
        return self.shapes.wide(name, self.spec.heads * self.spec.head_dim, "H·di", dtype=dtype)

    def index_key(self, name: str, *, dtype: str | None = None) -> Tensor:
        """[s, b, di]."""
        return self.shapes.wide(name, self.spec.head_dim, "di", dtype=dtype)

    def indices(self, name: str) -> Tensor:
        """[b, s, K] in int64."""
        return Tensor(name=name, shape=(self.shapes.b, self.shapes.s, self.chosen), dtype="int64", formula="8·b·s·K")

    @property
    def waiting(self) -> tuple[Tensor, ...]:
        """The gradients of queries, keys and values, while the backward of the indexer runs."""
        return (self.query("query gradient"), self.query("key gradient"), self.value("value gradient"))


def sparse_attention(shapes: Shapes) -> Module:
    """q, k and v → [s, b, a·dv/t]. The mask of the indexer stays allocated until its forward returns."""
    indexed = Indexed(shapes)
    return Module(
        name="core_attention",
        kind=ModuleKind.ATTENTION_KERNEL,
        forward_workspace=(indexed.mask("mask of the scores"),),
        children=(*index_projections(indexed), _index_loss(indexed), _kernel(indexed)),
        source="DSAttention",
    )


def index_projections(indexed: Indexed) -> tuple[Module, ...]:
    """Queries, keys and weights of the indexer, the same on each tensor-parallel rank. Its inputs have no gradients.

    Under sequence parallelism they are gathered and saved. Otherwise other modules save them too.
    """
    shapes, spec, rank = indexed.shapes, indexed.spec, indexed.mla.q_lora_rank
    hidden = shapes.model.hidden_size
    states = shapes.hidden("gathered hidden states", gathered=True)
    latents = replace(states, name="gathered input of the queries")
    if rank is not None:
        latents = compressed(shapes, latents.name, rank, gathered=True)
    joined = tuple(indexed.index_query(f"index queries {step}") for step in ("rotated", "joined"))
    return (
        _projection(indexed, "linear_wq_b", (spec.heads * spec.head_dim, rank or hidden), reads=latents, beside=joined),
        _projection(indexed, "linear_wk", (spec.head_dim, hidden), reads=states),
        index_norm(indexed),
        _projection(indexed, "linear_weights_proj", (spec.heads, hidden)),
    )


def _projection(
    indexed: Indexed, name: str, shape: tuple[int, int], *, reads: Tensor | None = None, beside: tuple[Tensor, ...] = ()
) -> Module:
    """A linear layer that is not split. `reads`: its input, if no projection before it gathered that."""
    shapes = indexed.shapes
    gathers = shapes.sp and reads is not None
    output = shapes.wide("output", shape[0], "width")
    return Module(
        name=name,
        kind=ModuleKind.INDEX_PROJECTION,
        function=True,
        parameters=(Parameter(name="weight", shape=shape, dtype=shapes.dtype, sequence_parallel=shapes.sp),),
        saved=(reads,) if gathers and reads is not None else (),
        forward_workspace=(output, *beside),
        backward_workspace=(*indexed.waiting, replace(output, name="output gradient"), *beside, *weight_gradient(shapes, shape)),
        collectives=shapes.tp("all_gather", "forward", width=shape[1]) if gathers else (),
        source="TELinear, duplicated, without an input gradient",
    )


def index_norm(indexed: Indexed) -> Module:
    """The LayerNorm of the keys, and the rotation of queries and keys with tables of its own."""
    shapes, spec = indexed.shapes, indexed.spec
    tables = tuple(
        Tensor(
            name=f"{which} of index {what}",
            shape=(shapes.s, 1, 1, indexed.mla.qk_pos_emb_head_dim),
            dtype=shapes.dtype,
            formula="2·s·d",
        )
        for what in ("queries", "keys")
        for which in ("cos", "sin")
    )
    statistics = tuple(shapes.statistics(name, shapes.s * shapes.b) for name in ("mu", "rsigma"))
    summed = shapes.t > 1
    return Module(
        name="k_norm",
        kind=ModuleKind.INDEX_NORM,
        function=True,
        parameters=tuple(
            Parameter(name=name, shape=(spec.head_dim,), dtype=shapes.dtype, sequence_parallel=summed and shapes.sp)
            for name in ("weight", "bias")
        ),
        saved=(*tables, indexed.index_key("keys before their norm"), *statistics),
        forward_workspace=(indexed.index_query("index queries"),),
        backward_workspace=(*indexed.waiting, indexed.index_query("gradient of index queries")),
        source="DSAIndexer",
    )


def _index_loss(indexed: Indexed) -> Module:
    """The choice of keys, and the loss that compares the scores of the indexer with those of attention, over all heads.

    Both are computed again in backward. Without gradients only the keys are chosen.
    """
    indices = indexed.indices("indices of the chosen keys")
    return Module(
        name="index_loss",
        kind=ModuleKind.INDEX_LOSS,
        function=True,
        saved=(
            indexed.index_query("index queries"),
            indexed.index_key("index keys"),
            indexed.shapes.wide("weights of the index heads", indexed.spec.heads, "H"),
            indexed.query("query", made_in=maker_of_queries(indexed.shapes)),
            indexed.query("key", made_in=ATTENTION),
            indices,
            Tensor(name="loss", shape=(1,), dtype="fp32"),
        ),
        forward_workspace=beyond(_forward_of_loss(indexed), (indices,)),
        backward_workspace=(
            *indexed.waiting,
            indexed.indices("gradient of the indices"),
            *largest(*scoring(indexed), *backward_of_loss(indexed)),
        ),
        collectives=summed_scores(indexed),
        source="FusedDSAIndexerLoss",
    )


def scoring(indexed: Indexed) -> tuple[tuple[Tensor, ...], ...]:
    """`_compute_index_scores`: the product of queries and keys in fp32, and then ReLU and weights."""
    copies = (indexed.index_query("reordered index queries", dtype="fp32"),) if indexed.shapes.b > 1 else ()
    inputs = (indexed.index_query("index queries in fp32", dtype="fp32"), indexed.index_key("index keys in fp32", dtype="fp32"))
    product = indexed.of_index_heads("products of the index heads")
    return (
        (*inputs, *copies, product),
        (product, indexed.of_index_heads("weighted products")),
        (product, indexed.of_pairs("index scores")),
    )


def _forward_of_loss(indexed: Indexed) -> tuple[tuple[Tensor, ...], ...]:
    """The tensors at each instant of the forward that can be its peak, without those that it saves before."""
    indices, scores = indexed.indices("indices"), indexed.of_pairs("index scores")
    kept = (indices, scores)
    in_fp32 = (indexed.query("query in fp32", dtype="fp32"), indexed.query("key in fp32", dtype="fp32"))
    attention = indexed.of_heads("attention scores")
    masks = (indexed.mask("causal mask"), indexed.of_pairs("mask of the chosen keys"))
    softmax = (*masks, indexed.of_pairs("softmax of index scores"), indexed.of_pairs("sum of attention scores"))
    return (
        *scoring(indexed),
        (*kept, *in_fp32, attention),
        (*kept, attention, indexed.of_heads("scaled attention scores")),
        (*kept, *masks, attention, indexed.of_heads("softmax of attention scores")),
        (*kept, *softmax, attention),
        (*kept, *softmax, *(indexed.of_pairs(f"logarithms and their difference {i}") for i in range(3))),
    )


def backward_of_loss(indexed: Indexed) -> tuple[tuple[Tensor, ...], ...]:
    """The same for the backward, after the scores of the indexer were computed again."""
    scores, attention = indexed.of_pairs("index scores"), indexed.of_heads("attention scores")
    in_fp32 = (indexed.query("query in fp32", dtype="fp32"), indexed.query("key in fp32", dtype="fp32"))
    masks = (indexed.mask("causal mask"), indexed.of_pairs("mask of the chosen keys"))
    products = tuple(indexed.of_index_heads(f"gradients of the products of the index heads {i}") for i in range(3))
    signs = indexed.of_index_heads("signs of the products", dtype="bool")
    return (
        (scores, *in_fp32, attention),
        (scores, attention, indexed.of_heads("masked attention scores"), *masks),
        tuple(indexed.of_pairs(f"scores and their gradients {i}") for i in range(6)),
        (*products, signs, indexed.shapes.wide("gradient of the weights", indexed.spec.heads, "H", dtype="fp32")),
    )


def summed_scores(indexed: Indexed) -> tuple[Collective, ...]:
    """The attention scores are summed over the heads of all tensor-parallel ranks, in forward and again in backward."""
    shapes = indexed.shapes
    if shapes.t == 1:
        return ()
    shape = (shapes.b, shapes.s, indexed.keys)
    return tuple(
        Collective(kind="all_reduce", group="tp", shape=shape, dtype="fp32", phase=phase) for phase in ("forward", "backward")
    )


def _kernel(indexed: Indexed) -> Module:
    """The product of queries and keys, a softmax of the chosen ones, and the product with the values."""
    softmax, probabilities = indexed.of_heads("softmax"), indexed.of_heads("softmax in 16 bit", dtype=indexed.shapes.dtype)
    saved = (
        indexed.query("query in fp32", dtype="fp32"),
        indexed.query("key in fp32", dtype="fp32"),
        indexed.value("value", made_in=ATTENTION),
        softmax,
        probabilities,
    )
    masks = (indexed.mask("causal mask"), indexed.of_pairs("mask of the chosen keys"))
    later = (softmax, probabilities)
    return Module(
        name="chosen_attention",
        kind=ModuleKind.CHOSEN_ATTENTION,
        function=True,
        saved=saved,
        forward_workspace=beyond(
            (
                (indexed.of_heads("scores"), indexed.of_heads("scaled scores")),
                (indexed.of_heads("scores"), softmax, *masks),
                (*later, *masks, indexed.value("context"), indexed.value("output")),
            ),
            later,
        ),
        backward_workspace=_backward_of_kernel(indexed),
        source="unfused_dsa_fn",
    )


def _backward_of_kernel(indexed: Indexed) -> tuple[Tensor, ...]:
    """The gradients at the product with the values, or at the softmax, which frees its result after two more matrices.

    The values and the softmax in 16 bit have been freed then (aten/src/ATen/native/cuda/SoftMax.cu `softmax_backward_cuda_out`).
    """
    gradient, product = indexed.of_heads("softmax gradient"), indexed.of_heads("product of the softmax and its gradient")
    rest = indexed.of_heads("scores gradient, minus the softmax in 16 bit", dtype=indexed.shapes.dtype)
    at_product = (
        indexed.value("output gradient"),
        indexed.value("value gradient"),
        indexed.of_heads("gradient of the softmax in 16 bit", dtype=indexed.shapes.dtype),
    )
    return largest(at_product, (gradient, product, rest))


def beyond(instants: tuple[tuple[Tensor, ...], ...], saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What exists at the largest of some instants beyond the tensors that are `saved` until the end of the forward.

    A tensor of the instant that is saved, or one as large, stands for the saved one.
    """
    peak = list(largest(*instants))
    missing = 0
    for each in saved:
        same = next((other for other in peak if other.bytes == each.bytes), None)
        if same is None:
            missing += each.bytes
        else:
            peak.remove(same)
    if not missing:
        return tuple(peak)
    size = sum(each.bytes for each in peak) - missing
    return (Tensor(name="at the peak, minus tensors that are saved later", shape=(max(size, 0),), dtype="bool"),)
