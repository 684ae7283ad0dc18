"""Attention of DeepSeek-V4: to the last tokens, and to keys that are each compressed from a group of earlier tokens.

All heads read one key of each token or group, which is its value too. Keys of 4 tokens are chosen by an indexer for each query;
keys of 128 tokens are all read. Outputs are projected in groups of heads.

Legend: a heads, d elements of a head, r ranks of projections, g groups of heads, m tokens of a compressed key, H heads of the
indexer, di elements of one of its heads.
Source: `DSv4HybridSelfAttention` (core/transformer/experimental_attention_variant/deepseek_v4_hybrid_attention.py), and
`CompressedSparseAttention`, `Compressor` and `CSAIndexer` (csa.py beside it) of the branch dev of Megatron-LM, August 2026
(b3b1e2d7), run on the shadow engine (tests/allocator_hook/shadow/test_compressed_attention.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

from analyzer.modules.attention.core_attention import ATTENTION
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import weight_gradient
from analyzer.modules.norm import norm_parameters, norm_statistics, partial_sums
from analyzer.modules.quantized import backward_input, forward_input, output_gradient, saved_input
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Collective, Module, Parameter, Phase, Tensor, for_weight
from analyzer.specs import AttentionKind
from analyzer.specs.attention import COMPRESSION, OVERLAPPING, CompressedAttentionSpec

_CORE: Final = f"{ATTENTION}.core_attention"


@dataclass(frozen=True)
class Compressed:
    """The sizes of the attention of a layer on one rank. Tensor-parallel ranks do not share it."""

    shapes: Shapes
    kind: AttentionKind

    @property
    def ratio(self) -> int:
        """m: tokens of a compressed key; 0 for a window only."""
        return COMPRESSION[self.kind]

    @cached_property
    def spec(self) -> CompressedAttentionSpec:
        """The sizes of the attention. Raises ValueError for a model without it."""
        spec = self.shapes.model.compressed_attention
        if spec is None:
            raise ValueError("the model has no compressed attention")
        return spec

    @property
    def heads(self) -> int:
        """a."""
        return self.shapes.model.num_attention_heads

    @property
    def width(self) -> int:
        """a·d."""
        return self.heads * self.spec.head_dim

    @property
    def projected(self) -> int:
        """g·r: elements of the outputs of all groups."""
        return self.spec.output_groups * self.spec.output_rank

    @property
    def sequence(self) -> int:
        """Tokens of the sequence on all context-parallel ranks, which have parts that follow each other."""
        return self.shapes.s * self.shapes.split.context

    @property
    def compressed_keys(self) -> int:
        """Compressed keys of a sequence."""
        return self.sequence // self.ratio if self.ratio else 0

    @property
    def read_keys(self) -> int:
        """Keys that a query reads, at most."""
        chosen = min(self.spec.topk, self.compressed_keys) if self.ratio == OVERLAPPING else self.compressed_keys
        return min(self.spec.window, self.sequence) + chosen

    def all_heads(self, name: str, *, dtype: str | None = None, made_in: str = "") -> Tensor:
        """[s, b, a·d]."""
        return self.shapes.wide(name, self.width, "a·d", dtype=dtype, made_in=made_in)

    @property
    def recomputed(self) -> tuple[Tensor, ...]:
        """With `--recompute-modules mla_up_proj`, what the checkpoint of the projections makes again for the core."""
        if not self.shapes.recomputes("mla_up_proj"):
            return ()
        return (
            self.all_heads("recomputed queries"),
            self.all_heads("recomputed queries before their norm"),
            self.keys("recomputed keys", self.shapes.s, self.spec.head_dim),
            self.keys("recomputed keys before their norm", self.shapes.s, self.spec.head_dim),
        )

    def keys(self, name: str, count: int, width: int, *, dtype: str | None = None) -> Tensor:
        """[keys, b, width]."""
        return Tensor(name=name, shape=(count, self.shapes.b, width), dtype=dtype or self.shapes.dtype, formula="2·keys·b·d")


def compressed_attention(shapes: Shapes, kind: AttentionKind) -> Module:
    """[s, b, h] → [s, b, h], after a separate norm."""
    sizes = Compressed(shapes, kind)
    return Module(
        name=ATTENTION,
        kind=ModuleKind.ATTENTION,
        forward_workspace=(*shapes.dropped_norm_output, *shapes.referenced_norm_output),
        backward_workspace=shapes.recomputed_norm_output,
        children=(*_projections(sizes), _core(sizes), _grouped_output(sizes), _output(sizes)),
        source="DSv4HybridSelfAttention",
    )


def _projections(sizes: Compressed) -> tuple[Module, ...]:
    shapes, spec = sizes.shapes, sizes.spec
    hidden = shapes.model.hidden_size
    recomputed = bool(sizes.recomputed)
    queries = _linear(sizes, "linear_q_up_proj", ModuleKind.Q_UP, (sizes.width, spec.q_lora_rank))
    return (
        _linear(sizes, "linear_q_down_proj", ModuleKind.Q_DOWN, (spec.q_lora_rank, hidden)),
        _norm(sizes, "q_layernorm", spec.q_lora_rank),
        queries,
        _linear(sizes, "linear_kv_proj", ModuleKind.KV_DOWN, (spec.head_dim, hidden)),
        _norm(sizes, "kv_layernorm", spec.head_dim, recomputed=recomputed),
        Module(
            name="query_norm",
            kind=ModuleKind.KEY_COPIES,
            function=True,
            saved=() if recomputed else (sizes.all_heads("queries before their norm", made_in=f"{ATTENTION}.linear_q_up_proj"),),
            forward_workspace=(sizes.all_heads("normalized queries"),),
            backward_workspace=(sizes.all_heads("query gradient"), sizes.all_heads("input gradient"), *sizes.recomputed[1:]),
            source="_q_rms_norm, fused_mla_rope_inplace",
        ),
    )


def _linear(sizes: Compressed, name: str, kind: ModuleKind, shape: tuple[int, int], *, quantized: bool = True) -> Module:
    """A linear layer that is not split. The first of those that read the normalized hidden states saves them.

    `quantized`: it runs in FP8, if the launch uses it. Then each layer saves a copy of its own.
    """
    shapes, (rows, columns) = sizes.shapes, shape
    shapes = shapes if quantized else shapes.in_16_bit
    read = shapes.hidden("input", made_in="input_layernorm")
    if name in ("linear_q_up_proj", "linear_wq_b"):
        read = shapes.wide("input", columns, "r", made_in=f"{ATTENTION}.q_layernorm")
    makers = {"linear_kv_proj": ATTENTION, "linear_wq_b": _CORE}
    if shapes.fp8 is not None:
        saved = tuple(replace(each, made_in=makers.get(name, each.made_in)) for each in saved_input(shapes, read))
    else:  # other layers that read it in 16 bit share it
        first = "linear_q_down_proj" if sizes.shapes.fp8 is None else "linear_wkv"
        saves = name in (first, "linear_q_up_proj") and kind is not ModuleKind.INDEX_PROJECTION
        saved = (read,) if saves else ()
    output = shapes.wide("output", rows, "width")
    return Module(
        name=name,
        kind=kind,
        parameters=(Parameter(name="weight", shape=shape, dtype=shapes.dtype, quantized=shapes.fp8 is not None),),
        saved=for_weight(saved),
        forward_workspace=(*forward_input(shapes, read), output),
        backward_workspace=(
            *output_gradient(shapes, replace(output, name="output gradient")),
            shapes.wide("input gradient", columns, "width"),
            *weight_gradient(shapes, shape),
        ),
        source="TELinear",
    )


def _norm(sizes: Compressed, name: str, width: int, *, recomputed: bool = False) -> Module:
    shapes = sizes.shapes
    rows = shapes.s * shapes.b
    # FP8 GEMMs return tensors of their modules
    made_in = f"{ATTENTION}.linear_q_down_proj" if shapes.fp8 is not None and name == "q_layernorm" else ATTENTION
    saved = (shapes.wide("input", width, "r", made_in=made_in), *norm_statistics(shapes, rows, "4·s·b"))
    return Module(
        name=name,
        kind=ModuleKind.NORM,
        parameters=norm_parameters(shapes, width),
        saved=() if recomputed else saved,
        forward_workspace=(shapes.wide("output", width, "r"),),
        backward_workspace=(
            shapes.wide("output gradient", width, "r"),
            shapes.wide("input gradient", width, "r"),
            *partial_sums(shapes, width),
        ),
        source="TENorm",
    )


def _core(sizes: Compressed) -> Module:
    children: tuple[Module, ...] = ()
    recomputed = sizes.recomputed
    if sizes.ratio:
        children = (_compressor(sizes, "compressor", sizes.spec.head_dim, trained=True),)
    if sizes.ratio == OVERLAPPING:
        children += (_indexer(sizes),)
    return Module(
        name="core_attention",
        kind=ModuleKind.ATTENTION,
        backward_workspace=recomputed,
        children=(*children, *((_kernel(sizes),) if sizes.spec.kernels else _unfused(sizes))),
        source="CompressedSparseAttention",
    )


def _compressor(sizes: Compressed, name: str, width: int, *, trained: bool) -> Module:
    """Keys of m tokens each: a weighted sum of their projections. `trained`: the hidden states get a gradient from it.

    Both projections stay in 16 bit. With overlapping groups they have twice the elements of a key.
    """
    shapes = sizes.shapes
    hidden, outputs = shapes.model.hidden_size, width * (2 if sizes.ratio == OVERLAPPING else 1)
    kind = ModuleKind.KV_PROJECTION if trained else ModuleKind.INDEX_PROJECTION
    count = sizes.compressed_keys
    parts = tuple(shapes.wide(each, outputs, "d") for each in ("keys of tokens", "weights of tokens"))
    in_fp32 = shapes.wide("weights in fp32", outputs, "d", dtype="fp32")
    pooled = Module(
        name="pooling",
        kind=ModuleKind.KEY_COPIES,
        function=True,
        parameters=(Parameter(name="ape", shape=(sizes.ratio, outputs), dtype="fp32"), *norm_parameters(shapes, width)),
        saved=(
            *parts,
            in_fp32,
            sizes.keys("keys before their norm", count, width),
            *norm_statistics(shapes, count * shapes.b, "4·keys·b"),
        ),
        forward_workspace=(sizes.keys("compressed keys", count, width),),
        backward_workspace=tuple(replace(each, name=f"gradient of {each.name}") for each in parts),
        source="csa_compressor_forward_wrapper",
    )
    projections = tuple(_linear(sizes, each, kind, (outputs, hidden), quantized=False) for each in ("linear_wkv", "linear_wgate"))
    return Module(name=name, kind=ModuleKind.ATTENTION, children=(*projections, pooled), source="Compressor")


def _indexer(sizes: Compressed) -> Module:
    """Its inputs have no gradients."""
    shapes, spec = sizes.shapes, sizes.spec
    queries = spec.index_heads * spec.index_head_dim
    wq = _linear(sizes, "linear_wq_b", ModuleKind.INDEX_PROJECTION, (queries, spec.q_lora_rank))
    weights = _linear(
        sizes, "linear_weights_proj", ModuleKind.INDEX_PROJECTION, (spec.index_heads, shapes.model.hidden_size), quantized=False
    )
    return Module(
        name="indexer",
        kind=ModuleKind.ATTENTION,
        children=(wq, weights, _compressor(sizes, "compressor", spec.index_head_dim, trained=False)),
        source="CSAIndexer",
    )


def _kernel(sizes: Compressed) -> Module:
    """Attention, with the choice of compressed keys. The loss of the indexer has its gradients computed in forward."""
    shapes, spec = sizes.shapes, sizes.spec
    indices = Tensor(
        name="indices of the read keys", shape=(shapes.b, shapes.s, sizes.read_keys), dtype="int32", formula="4·b·s·keys"
    )
    keys = _all_keys(sizes)
    sums = shapes.wide("logarithms of the sums", sizes.heads, "a", dtype="fp32")
    of_index: tuple[Tensor, ...] = ()
    if sizes.ratio == OVERLAPPING:
        of_index = (
            Tensor(name="numbers of read keys", shape=(shapes.s * shapes.b,), dtype="int32", formula="4·s·b"),
            shapes.wide("gradient of index queries", spec.index_heads * spec.index_head_dim, "H·di"),
            sizes.keys("gradient of index keys", sizes.compressed_keys, spec.index_head_dim),
            shapes.wide("gradient of index weights", spec.index_heads, "H"),
        )
    return Module(
        name=sizes.kind,
        kind=ModuleKind.COMPRESSED_ATTENTION,
        function=True,
        parameters=_sink(sizes),
        saved=(
            *(() if sizes.recomputed else (sizes.all_heads("queries", made_in=ATTENTION),)),
            *(() if sizes.recomputed and not sizes.ratio else (keys,)),
            indices,
            sizes.all_heads("output"),
            sums,
            *of_index,
        ),
        backward_workspace=(
            sizes.all_heads("output gradient"),
            sizes.all_heads("query gradient"),
            replace(keys, name="gradient of keys"),
            replace(keys, name="gradient of keys in fp32", dtype="fp32"),
            replace(sums, name="sums of rows"),
            replace(sums, name="scaled sums of rows"),
        ),
        collectives=_exchanged(sizes),
        source="csa_sparse_attn",
    )


def _sink(sizes: Compressed) -> tuple[Parameter, ...]:
    return (Parameter(name="attn_sink", shape=(sizes.heads,), dtype="fp32"),)


def _all_keys(sizes: Compressed) -> Tensor:
    """The keys of all tokens, and those that are compressed."""
    shapes = sizes.shapes
    keys = sizes.keys("keys", shapes.s + sizes.compressed_keys, sizes.spec.head_dim)
    return replace(keys, made_in="" if sizes.ratio else f"{ATTENTION}.kv_layernorm")


def _unfused(sizes: Compressed) -> tuple[Module, ...]:
    """Attention by operations of PyTorch, which copy the keys of each query and convert them to fp32.

    The backward of the copy sums the gradients in a tensor of all keys for each query. Kernels of the indexer's loss recompute
    its scores, and save what they read.
    Source: `unfused_compressed_sparse_attn`, `gather_backward` (torch/csrc/autograd/FunctionsManual.cpp).
    """
    shapes, spec = sizes.shapes, sizes.spec
    rows = shapes.s * shapes.b
    read = Tensor(
        name="keys of each query", shape=(rows, sizes.read_keys, spec.head_dim), dtype=shapes.dtype, formula="2·s·b·keys·d"
    )
    in_fp32 = replace(read, name="keys of each query in fp32", dtype="fp32", formula="4·s·b·keys·d")
    queries = Tensor(name="queries in fp32", shape=(rows, sizes.width), dtype="fp32", formula="4·s·b·a·d")
    scores = Tensor(name="exponentials", shape=(rows, sizes.heads, sizes.read_keys), dtype="fp32", formula="4·s·b·a·keys")
    of_heads = shapes.wide("largest scores", sizes.heads, "a", dtype="fp32")
    places = Tensor(name="indices of the read keys", shape=(rows, sizes.read_keys), dtype="int64", formula="8·s·b·keys")
    from_output = replace(in_fp32, name="gradient of keys from the output")
    scored = Module(
        name="scores",
        kind=ModuleKind.KEY_COPIES,
        function=True,
        saved=(queries, in_fp32, replace(places, name="mask", dtype="bool", formula="s·b·keys")),
        forward_workspace=(read, replace(scores, name="scores")),
        backward_workspace=(
            from_output,
            replace(in_fp32, name="gradient of keys from the scores"),
            replace(queries, name="gradient of queries in fp32"),
            replace(scores, name="gradient of scores"),
        ),
        source="torch.einsum",
    )
    attention = Module(
        name=sizes.kind,
        kind=ModuleKind.COMPRESSED_ATTENTION,
        function=True,
        parameters=_sink(sizes),
        saved=(
            scores,
            replace(scores, name="weights"),
            replace(of_heads, name="places of the largest scores", dtype="int64"),
            *(replace(of_heads, name=each) for each in ("largest scores", "exponentials of the sinks", "sums")),
        ),
        forward_workspace=(read, replace(scores, name="scores"), replace(queries, name="output in fp32")),
        backward_workspace=(
            replace(queries, name="output gradient in fp32"),
            from_output,
            replace(scores, name="gradient of weights"),
            replace(scores, name="gradient of exponentials"),
        ),
        collectives=_exchanged(sizes),
        source="unfused_compressed_sparse_attn",
    )
    return (*((_index_loss(sizes),) if sizes.ratio == OVERLAPPING else ()), _gather(sizes, read, places), scored, attention)


def _gather(sizes: Compressed, read: Tensor, places: Tensor) -> Module:
    """The copy of the keys of each query."""
    shapes, spec = sizes.shapes, sizes.spec
    keys = _all_keys(sizes)
    every = (shapes.s * shapes.b, shapes.b * keys.shape[0], spec.head_dim)
    return Module(
        name="gather",
        kind=ModuleKind.KEY_COPIES,
        function=True,
        # several samples are copied to follow each other
        saved=(*(() if sizes.recomputed and not sizes.ratio and shapes.b == 1 else (_of_samples(sizes, keys),)), places),
        forward_workspace=(read,),
        backward_workspace=(
            sizes.all_heads("query gradient"),
            replace(read, name="gradient of the keys of each query"),
            replace(read, name="gradients of all keys for each query", shape=every),
        ),
        source="torch.gather",
    )


def _of_samples(sizes: Compressed, keys: Tensor) -> Tensor:
    """What the gather saves of the keys: a copy in the order of the samples, if there are several."""
    return keys if sizes.shapes.b == 1 else replace(keys, name="keys of all samples", made_in="")


def _index_loss(sizes: Compressed) -> Module:
    """The choice of compressed keys by operations of PyTorch. They save what the loss of the indexer needs, also if it is 0."""
    shapes, spec = sizes.shapes, sizes.spec
    count = sizes.compressed_keys
    chosen = min(spec.topk, count)
    scores = Tensor(
        name="scores of all heads", shape=(shapes.b, sizes.heads, shapes.s, count), dtype="fp32", formula="4·b·a·s·keys"
    )
    return Module(
        name="index_loss",
        kind=ModuleKind.KEY_COPIES,
        function=True,
        saved=(
            shapes.wide("index queries", spec.index_heads * spec.index_head_dim, "H·di"),
            shapes.wide("index weights in fp32", spec.index_heads, "H", dtype="fp32"),
            replace(sizes.keys("index keys", count, spec.index_head_dim), made_in=f"{_CORE}.indexer.compressor"),
            *(() if sizes.recomputed else (sizes.all_heads("queries", made_in=ATTENTION),)),
            replace(sizes.keys("compressed keys", count, spec.head_dim), made_in=f"{_CORE}.compressor"),
            Tensor(name="chosen keys", shape=(shapes.b, shapes.s, chosen), dtype="int64", formula="8·b·s·keys"),
            *((shapes.wide("logarithms of the sums of windows", sizes.heads, "a", dtype="fp32"),) if spec.logged else ()),
            Tensor(name="mask of compressed keys", shape=(shapes.s, count), dtype="fp32", formula="4·s·keys", lingers=True),
        ),
        forward_workspace=(scores, replace(scores, name="probabilities of all heads")),
        backward_workspace=(scores, replace(scores, name="probabilities of all heads")),
        source="FusedDSAIndexerLoss",
    )


def _exchanged(sizes: Compressed) -> tuple[Collective, ...]:
    """Context-parallel ranks send the hidden states before their part, and gather the compressed keys (`_forward_thd_cp`)."""
    shapes, spec = sizes.shapes, sizes.spec
    if shapes.split.context == 1:
        return ()
    group = 2 * OVERLAPPING if sizes.ratio == OVERLAPPING else sizes.ratio
    hidden = (max(spec.window, group), shapes.b, shapes.model.hidden_size)
    kinds: tuple[tuple[Literal["send", "all_gather", "reduce_scatter"], tuple[int, ...], Phase], ...] = (
        ("send", hidden, "forward"),
        ("send", hidden, "backward"),
    )
    keys = (sizes.compressed_keys, shapes.b, spec.head_dim)
    if sizes.ratio:
        kinds += (("all_gather", keys, "forward"), ("reduce_scatter", keys, "backward"))
    if sizes.ratio == OVERLAPPING:
        kinds += (("all_gather", (*keys[:2], spec.index_head_dim), "forward"),)
    return tuple(Collective(kind=kind, group="cp", shape=shape, dtype=shapes.dtype, phase=phase) for kind, shape, phase in kinds)


def _grouped_output(sizes: Compressed) -> Module:
    """The rotation of the output in a new tensor, and the projection of each group of heads, in 16 bit."""
    shapes, spec = sizes.shapes, sizes.spec
    weight = (sizes.projected, sizes.width // spec.output_groups)
    output = shapes.wide("projected output", sizes.projected, "g·r")
    return Module(
        name="linear_o_group_proj",
        kind=ModuleKind.GROUPED_OUTPUT,
        function=True,
        parameters=(Parameter(name="weight", shape=weight, dtype=shapes.dtype),),
        saved=(sizes.all_heads("rotated output"),),
        forward_workspace=(output, replace(output, name="output in the order of the tokens")),
        backward_workspace=(
            replace(output, name="output gradient"),
            sizes.all_heads("input gradient"),
            *weight_gradient(shapes, weight, cached=False),
        ),
        source="torch.einsum",
    )


def _output(sizes: Compressed) -> Module:
    shapes, hidden = sizes.shapes, sizes.shapes.model.hidden_size
    read = shapes.wide("input", sizes.projected, "g·r", made_in=ATTENTION)
    original = shapes.fp8 is not None and shapes.fp8.recipe != "delayed"
    return Module(
        name="linear_proj",
        kind=ModuleKind.ATTENTION_OUTPUT,
        parameters=(
            Parameter(name="weight", shape=(hidden, sizes.projected), dtype=shapes.dtype, quantized=shapes.fp8 is not None),
        ),
        saved=for_weight((read,) if original else saved_input(shapes, read)),
        forward_workspace=(*forward_input(shapes, read, original=original), shapes.hidden("output")),
        backward_workspace=(
            *for_weight(backward_input(shapes, read, original=original)),
            *output_gradient(shapes, shapes.hidden("output gradient", shares="residual gradient")),
            replace(read, name="input gradient"),
            *weight_gradient(shapes, (hidden, sizes.projected)),
        ),
        source="TERowParallelLinear",
    )
