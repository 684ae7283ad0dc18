"""The indexer and the kernels of sparse attention in core 0.19 (`absorbed_attention` has the legend).

Sources: `DSAIndexer` and `unfused_dsa_fn` (core/transformer/experimental_attention_variant/dsa.py, 0.19.0) and
dsa_cudnn_kernels.py beside it: `FusedQKTopKWithSparseLossFunc`, `FusedSparseAttentionFunc`, `FusedIndexerSparseAttnFunc`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Final

from analyzer.modules.attention.core_attention import ATTENTION
from analyzer.modules.attention.sparse_attention import Indexed, backward_of_loss, beyond, index_projections, scoring, summed_scores
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Collective, Module, Tensor, largest
from analyzer.specs import AbsorbedSpec
from analyzer.units import GIB

_ROWS: Final = 512
"""Queries whose scores are computed together are a multiple of it (`_INDEXER_SCORE_CHUNK_ROW_ALIGNMENT`)."""
_INDEX_HEADS: Final = 64
"""The least heads of the indexer in its backward: copies with zeros are made of fewer (`_pad_indexer_heads_for_backward`)."""
_LOSS_TENSORS: Final = 10
"""Tensors [b, s, K] of 4 bytes at the backward of the indexer: indices and scores as chosen, the same for attention, logarithms,
probabilities, targets, and those that the kernel reads (`_compute_sparse_indexer_loss_and_grads`)."""


class Absorbed(Indexed):
    """The tensors of absorbed attention on one rank."""

    @cached_property
    def absorbed(self) -> AbsorbedSpec:
        """What differs from earlier releases."""
        absorbed = self.spec.absorbed
        assert absorbed is not None
        return absorbed

    @property
    def width(self) -> int:
        """w: elements of a query, and of a key."""
        return self.mla.kv_lora_rank + self.mla.qk_pos_emb_head_dim

    @property
    def value_width(self) -> int:
        """r: elements of a value."""
        return self.mla.kv_lora_rank

    @property
    def keys(self) -> int:
        """S."""
        return self.shapes.s * self.shapes.split.context

    @property
    def chosen(self) -> int:
        """K."""
        return min(self.spec.topk, self.keys)

    @property
    def tokens(self) -> int:
        """T."""
        return self.shapes.s * self.shapes.b

    @cached_property
    def padded_heads(self) -> int:
        """Heads that the kernels compute: some that are not used, if there are few."""
        capability = self.shapes.inputs.compute_capability or (9, 0)
        return self.absorbed.computed_heads(self.heads, capability) or self.heads

    @property
    def pads_heads(self) -> bool:
        """Whether the kernels read copies with more heads."""
        return self.padded_heads != self.heads

    def _of_rows(self, name: str, padded: bool, width: int, rows: int, *, dtype: str | None = None, made_in: str = "") -> Tensor:
        shape = (self.tokens + rows, self.padded_heads if padded else self.heads, width)
        symbol = "T·a·w elements" if width == self.width else "T·a·r elements"
        return Tensor(name=name, shape=shape, dtype=dtype or self.shapes.dtype, formula=symbol, made_in=made_in)

    def query(self, name: str, *, dtype: str | None = None, made_in: str = "", padded: bool = False, rows: int = 0) -> Tensor:
        """[T + rows, a, w]. `padded`: with the heads that the kernels compute."""
        return self._of_rows(name, padded, self.width, rows, dtype=dtype, made_in=made_in)

    def latents(self, name: str, *, padded: bool = False, rows: int = 0) -> Tensor:
        """[T + rows, a, r]."""
        return self._of_rows(name, padded, self.mla.kv_lora_rank, rows)

    def row_statistics(self, name: str, *, rows: int = 0) -> Tensor:
        """[T + rows, a] in fp32."""
        return Tensor(name=name, shape=(self.tokens + rows, self.padded_heads), dtype="fp32", formula="4·T·a")

    def weights_of_values(self, name: str) -> Tensor:
        """[a, dv, r]."""
        shape = (self.heads, self.mla.v_head_dim, self.mla.kv_lora_rank)
        return Tensor(name=name, shape=shape, dtype=self.shapes.dtype, formula="2·a·dv·r")

    @property
    def waiting(self) -> tuple[Tensor, ...]:
        """The gradients of queries and keys, while the backward of the indexer runs."""
        return (self.query("query gradient"), self.key("key gradient"))

    def key(self, name: str, *, made_in: str = "") -> Tensor:
        """[S, b, w]."""
        shape = (self.keys, self.shapes.b, self.width)
        return Tensor(name=name, shape=shape, dtype=self.shapes.dtype, formula="2·S·b·w", made_in=made_in)

    def index_keys(self, name: str) -> Tensor:
        """[S, b, di]."""
        shape = (self.keys, self.shapes.b, self.spec.head_dim)
        return Tensor(name=name, shape=shape, dtype=self.shapes.dtype, formula="2·S·b·di")

    def choice(self, name: str, dtype: str) -> Tensor:
        """[b, s, K]."""
        return Tensor(name=name, shape=(self.shapes.b, self.shapes.s, self.chosen), dtype=dtype, formula="b·s·K elements")


def indexer(absorbed: Absorbed) -> tuple[Module, ...]:
    """The projections of the indexer. Without a loss they run without gradients, and save nothing."""
    modules = [_averaged(each) for each in index_projections(absorbed)]
    if absorbed.shapes.split.context > 1:
        gathered = tuple(_gathered_keys(absorbed, absorbed.spec.head_dim, with_gradient=absorbed.spec.logged))
        modules = [replace(each, collectives=gathered) if each.kind is ModuleKind.INDEX_NORM else each for each in modules]
    if absorbed.spec.logged:
        return tuple(modules)
    return tuple(_without_gradients(each) for each in modules)


def _averaged(module: Module) -> Module:
    """The module with weights that each rank has, and whose gradients are averaged (`average_gradients_across_tp_domain`)."""
    return replace(module, parameters=tuple(replace(each, sequence_parallel=False, averaged=True) for each in module.parameters))


def _without_gradients(module: Module) -> Module:
    """The module under `torch.no_grad`. Its largest temporary tensors are those of its forward."""
    return replace(
        module,
        forward_workspace=(*module.saved, *module.forward_workspace),
        saved=(),
        backward_workspace=(),
        frozen=True,
        input_gradient=False,
    )


def choice_of_keys(absorbed: Absorbed) -> Module:
    """The keys with the highest scores, and the loss of the indexer."""
    return _choice_by_cudnn(absorbed) if absorbed.absorbed.backend == "cudnn" else _choice_by_torch(absorbed)


def _choice_by_torch(absorbed: Absorbed) -> Module:
    """The loss is computed again in the backward. Without one only the keys are chosen."""
    shapes = absorbed.shapes
    indices = absorbed.choice("indices of the chosen keys", "int64")
    scores, pairs = absorbed.of_heads("attention scores"), absorbed.of_pairs("index scores")
    attention = (*(replace(scores, name=f"{scores.name} {number}") for number in range(4)), absorbed.of_heads("mask", dtype="bool"))
    masks = tuple(replace(pairs, name=f"index scores and masks {number}") for number in range(3))
    with_loss = absorbed.spec.logged
    saved = (
        absorbed.index_query("index queries"),
        absorbed.index_keys("index keys"),
        shapes.wide("weights of the index heads", absorbed.spec.heads, "H"),
        absorbed.query("query", made_in=ATTENTION),
        *_keys_of_loss(absorbed),
        indices,
        Tensor(name="loss", shape=(1,), dtype="fp32"),
    )
    return Module(
        name="index_loss",
        kind=ModuleKind.INDEX_LOSS,
        function=True,
        saved=saved if with_loss else (),
        referenced=_shared_choice(absorbed, dtype="int64"),
        forward_workspace=largest(*scoring(absorbed), *(((*attention, *masks),) if with_loss else ())),
        backward_workspace=(
            *absorbed.waiting,
            *largest(*scoring(absorbed), (*attention, *masks, pairs), *backward_of_loss(absorbed)),
        )
        if with_loss
        else (),
        collectives=summed_scores(absorbed) if with_loss else (),
        source="FusedDSAIndexerLoss",
    )


def _keys_of_loss(absorbed: Absorbed) -> tuple[Tensor, ...]:
    """The keys in 16 bit, which the kernel saves, too, if there is one sample."""
    made_in = ATTENTION if absorbed.shapes.split.context == 1 else ""
    return (replace(absorbed.key("key", made_in=made_in), shares="key of the kernel" if absorbed.shapes.b == 1 else ""),)


def _choice_by_cudnn(absorbed: Absorbed) -> Module:
    """The forward computes the gradients of the loss, too."""
    shapes = absorbed.shapes
    queries, keys = absorbed.index_query("gradient of index queries"), absorbed.index_keys("gradient of index keys")
    weights = shapes.wide("gradient of index weights", absorbed.spec.heads, "H")
    loss = Tensor(name="loss", shape=(1,), dtype="fp32")
    with_loss = absorbed.spec.logged
    return Module(
        name="index_loss",
        kind=ModuleKind.INDEX_LOSS,
        function=True,
        saved=(queries, keys, weights, loss) if with_loss else (),
        referenced=_shared_choice(absorbed),
        forward_workspace=largest(_scores(absorbed), _loss(absorbed) if with_loss else _order(absorbed)),
        backward_workspace=(*absorbed.waiting, queries, keys, weights) if with_loss else (),
        collectives=_of_choice(absorbed),
        source="FusedQKTopKWithSparseLossFunc",
    )


def _shared_choice(absorbed: Absorbed, *, dtype: str = "int32") -> tuple[Tensor, ...]:
    """The choice for the layers without an indexer. The configuration of the model references it, if there is no attention mask."""
    if not absorbed.absorbed.shares or absorbed.shapes.inputs.attention_mask_in_dataloader:
        return ()
    lengths = Tensor(name="numbers of shared keys", shape=(absorbed.tokens,), dtype="int32", formula="4·T")
    return (absorbed.choice("indices of shared keys", dtype), *((lengths,) if dtype == "int32" else ()))


def _of_choice(absorbed: Absorbed) -> tuple[Collective, ...]:
    """The probabilities of the chosen keys, summed over the heads of all tensor-parallel ranks."""
    if absorbed.shapes.t == 1 or not absorbed.spec.logged:
        return ()
    shape = absorbed.choice("", "fp32").shape
    return (Collective(kind="all_reduce", group="tp", shape=shape, dtype="fp32", phase="forward"),)


def _gathered_keys(absorbed: Absorbed, width: int, *, with_gradient: bool = True) -> list[Collective]:
    shape, dtype = (absorbed.keys, absorbed.shapes.b, width), absorbed.shapes.dtype
    calls = [Collective(kind="all_gather", group="cp", shape=shape, dtype=dtype, phase="forward")]
    if with_gradient:
        calls.append(Collective(kind="reduce_scatter", group="cp", shape=shape, dtype=dtype, phase="backward"))
    return calls


def _of_kernel(absorbed: Absorbed) -> tuple[Collective, ...]:
    """The keys of all context-parallel ranks, after a check that all have as many. Packed samples have no such check."""
    if absorbed.shapes.split.context == 1:
        return ()
    lengths = Collective(kind="all_gather", group="cp", shape=(absorbed.shapes.split.context,), dtype="int64", phase="forward")
    checked = () if absorbed.shapes.model.sample_length is not None else (lengths,)
    return (*checked, *_gathered_keys(absorbed, absorbed.width))


def rows_of_scores(absorbed: Absorbed) -> int:
    """Queries whose scores are computed together: those of 1 GiB (`_indexer_score_chunk_rows`)."""
    rows = max(1, GIB // (4 * absorbed.shapes.b * absorbed.keys))
    if rows >= _ROWS:
        rows -= rows % _ROWS
    return min(absorbed.shapes.s, rows)


def _scores(absorbed: Absorbed) -> tuple[Tensor, ...]:
    """The scores of some queries, and two numbers for each in the workspace that chooses keys."""
    scores = Tensor(
        name="scores, and a workspace of two numbers for each",
        shape=(3, absorbed.shapes.b, rows_of_scores(absorbed), absorbed.keys),
        dtype="fp32",
        formula="12·b·S of some queries",
    )
    in_fp32 = Tensor(
        name="index keys in fp32",
        shape=(absorbed.shapes.b, absorbed.spec.head_dim, absorbed.keys),
        dtype="fp32",
        formula="4·b·di·S",
    )
    return (scores, in_fp32, absorbed.choice("indices", "int32"), absorbed.choice("scores of the chosen keys", "fp32"))


def _order(absorbed: Absorbed) -> tuple[Tensor, ...]:
    """The chosen keys, sorted by their positions."""
    positions = tuple(absorbed.choice(f"positions and their order {number}", "int64") for number in range(3))
    return (*positions, *(absorbed.choice(f"indices {number}", "int32") for number in range(3)))


def _loss(absorbed: Absorbed) -> tuple[Tensor, ...]:
    """The loss, at the gradient of the queries of the indexer: attention was computed for its statistics (`_LOSS_TENSORS`)."""
    shapes, heads = absorbed.shapes, max(absorbed.spec.heads, _INDEX_HEADS)
    padded = shapes.wide("padded index queries", heads * absorbed.spec.head_dim, "H·di")
    kept = absorbed.spec.heads >= _INDEX_HEADS  # then no copy is made
    return (
        absorbed.latents("output", padded=True),
        absorbed.row_statistics("softmax statistics"),
        *(() if kept else (padded, replace(padded, name="padded gradient of index queries"))),
        *(
            absorbed.choice(f"indices, scores and probabilities of the chosen keys {number}", "fp32")
            for number in range(_LOSS_TENSORS)
        ),
        absorbed.choice("mask", "bool"),
    )


def sparse_kernel(absorbed: Absorbed, *, chooses: bool) -> Module:
    """Attention of each query to the chosen keys. `chooses`: this layer chose them."""
    return (
        _kernel_of_flash_mla(absorbed, chooses=chooses) if absorbed.absorbed.backend == "cudnn" else _operations_of_torch(absorbed)
    )


def _operations_of_torch(absorbed: Absorbed) -> Module:
    """The scores of all pairs, a softmax of the chosen ones, and the product with the compressed keys (`_unfused_absorbed_dsa_fn`).

    The masks of the scores are copied for all heads.
    """
    scores = absorbed.of_heads("scores")
    masks = tuple(absorbed.of_heads(f"mask {number}", dtype="bool") for number in range(3))
    probabilities = absorbed.of_heads("probabilities in 16 bit", dtype=absorbed.shapes.dtype)
    saved = (
        absorbed.query("query in fp32", dtype="fp32"),
        *_keys_of_torch(absorbed),
        replace(scores, name="exponentials"),
        replace(scores, name="masked exponentials"),
        *masks,
        *(
            Tensor(
                name=f"{name} of each row",
                shape=(absorbed.shapes.b, absorbed.heads, absorbed.shapes.s),
                dtype="fp32",
                formula="4·T·a",
            )
            for name in ("sum", "least sum")
        ),
        Tensor(
            name="position of the largest score",
            shape=(absorbed.shapes.b, absorbed.heads, absorbed.shapes.s),
            dtype="int64",
            formula="8·T·a",
        ),
        probabilities,
    )
    pairs = tuple(absorbed.of_pairs(f"mask of the chosen keys {number}") for number in range(2))
    return Module(
        name="chosen_attention",
        kind=ModuleKind.CHOSEN_ATTENTION,
        function=True,
        saved=saved,
        forward_workspace=beyond(((*(replace(scores, name=f"scores {number}") for number in range(4)), *pairs),), (probabilities,)),
        backward_workspace=_five_scores(absorbed),
        collectives=_of_kernel(absorbed),
        source="_unfused_absorbed_dsa_fn",
    )


def _keys_of_torch(absorbed: Absorbed) -> tuple[Tensor, ...]:
    """Keys in fp32, and in 16 bit as values. A product of several samples copies both for each head."""
    if absorbed.shapes.b == 1:
        return (replace(absorbed.key("key in fp32"), dtype="fp32"), *_keys_of_kernel(absorbed))
    each = absorbed.keys * absorbed.shapes.b * absorbed.heads
    keys = Tensor(name="key in fp32 of each head", shape=(each, absorbed.width), dtype="fp32", formula="4·S·b·a·w")
    values = Tensor(name="value of each head", shape=(each, absorbed.value_width), dtype=absorbed.shapes.dtype, formula="2·S·b·a·r")
    return (keys, values, *(_keys_of_kernel(absorbed)[1:]))


def _five_scores(absorbed: Absorbed) -> tuple[Tensor, ...]:
    """Gradients of the softmax. The probabilities in 16 bit and one of the masks, 3 bytes of each score, have been freed then."""
    scores = tuple(absorbed.of_heads(f"scores and their gradients {number}") for number in range(4))
    return (*scores, absorbed.of_heads("another one, minus tensors that are freed before", dtype="bool"))


def _keys_of_kernel(absorbed: Absorbed) -> tuple[Tensor, ...]:
    """The keys of all tokens, gathered in this module under context parallelism, and then in the order of the tokens."""
    if absorbed.shapes.split.context == 1:
        return (absorbed.key("key", made_in=ATTENTION),)
    return (absorbed.key("key"), Tensor(name="order of the keys", shape=(absorbed.keys,), dtype="int64", formula="8·S"))


def _kernel_of_flash_mla(absorbed: Absorbed, *, chooses: bool) -> Module:
    shapes = absorbed.shapes
    statistics = absorbed.row_statistics("softmax statistics")
    lengths = Tensor(name="numbers of chosen keys", shape=(shapes.b, shapes.s), dtype="int32", formula="4·T")
    if shapes.b == 1 and not chooses:  # otherwise it is a copy, in the order of the queries
        lengths = replace(lengths, shares="those of the layer that chose the keys")
    return Module(
        name="chosen_attention",
        kind=ModuleKind.CHOSEN_ATTENTION,
        function=True,
        saved=(
            absorbed.query("query", made_in=ATTENTION),
            *_keys_of_kernel(absorbed),
            Tensor(name="sinks", shape=(absorbed.heads,), dtype="fp32"),
            absorbed.choice("indices of the chosen keys", "int32"),
            absorbed.latents("output", padded=True),
            lengths,
            statistics,
        ),
        forward_workspace=(
            replace(statistics, name="largest logits"),
            *((absorbed.query("padded query", padded=True),) if absorbed.pads_heads else ()),
        ),
        backward_workspace=_backward_of_kernel(absorbed),
        collectives=_of_kernel(absorbed),
        source="FusedSparseAttentionFunc",
    )


def _backward_of_kernel(absorbed: Absorbed) -> tuple[Tensor, ...]:
    """Of queries, outputs and their gradients there are a copy with an additional row, and one of the rows that have keys."""
    query, output = absorbed.query("query", padded=True, rows=1), absorbed.latents("output", padded=True, rows=1)
    gradient = replace(output, name="output gradient")
    indices = Tensor(name="indices", shape=(absorbed.tokens + 1, absorbed.chosen), dtype="int32", formula="4·T·K")
    statistics = absorbed.row_statistics("softmax statistics", rows=1)
    copied = (query, output, gradient, indices, statistics)
    return (
        absorbed.weights_of_values("gradient of the weights of the values"),
        absorbed.latents("gradient of the output"),
        *copied,
        *(replace(each, name=f"{each.name} of queries with keys") for each in copied),
        replace(query, name="query gradient"),
        absorbed.key("key gradient"),
        *_kernel_workspace(absorbed),
    )


def _kernel_workspace(absorbed: Absorbed) -> tuple[Tensor, ...]:
    """Sums of rows, and the gradients of keys in fp32 (`flash_attn_bwd_sm90_workspace_size` and `..._sm100_...`)."""
    keys = absorbed.keys * absorbed.shapes.b
    sums = Tensor(name="sums of rows", shape=(2, absorbed.tokens + 1, absorbed.padded_heads), dtype="fp32", formula="8·T·a")
    return (sums, Tensor(name="key gradient in fp32", shape=(keys, absorbed.width), dtype="fp32", formula="4·S·b·w"))
