"""The attention kernel under context parallelism: saved tensors, workspaces and communication.

Legend: s tokens of this rank, b microbatch, c context-parallel ranks, i of them in the inner group of a2a+p2p;
q, k, v, o elements of one token's queries, keys, values and output on one tensor-parallel rank.

Source: transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py (TE 2.11), in 16 bit:
AttnFuncWithCPAndKVP2P (p2p and a2a+p2p), AttnFuncWithCPAndKVAllGather, AttnFuncWithCPAndQKVOA2A. With a causal mask
the last rank of a ring attends to the most keys. The figures are those of this rank.

What is allocated while `cp_stream` is current is on a second stream: tensors restored after an all-to-all
(`flash_attn_a2a_communicate`), every second step of the forward of a ring, and the second chunk with all_gather.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from analyzer.modules.attention.cudnn import score_gradients, stores_score_gradients
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import SIDE_STREAM, Collective, Module, Tensor
from analyzer.units import ceil_div

QKV_TENSOR: Final = "qkv"
"""Name of the output of the qkv projection: queries, keys and values are views of it."""
ONE_COPY: Final = "query with keys and values"
"""Name of a contiguous copy of it."""
HEAD_OF_ONE_COPY: Final = 128
"""Elements of a head that `_PrepareQKVForFA` supports."""
TOKENS_OF_ONE_COPY: Final = 512
"""The smallest number of tokens of a microbatch on one rank for which `_PrepareQKVForFA` is used."""


def works_in_batches(shapes: Shapes) -> bool:
    """Whether the kernel reads copies in [b, s, a, d]; for one sample that is the order of [s, b, a, d]."""
    return shapes.b > 1 and (shapes.model.attention_backend == "flash" or shapes.inputs.attention_in_batches)


@dataclass(frozen=True)
class Exchange:
    """Sizes of an attention kernel under context parallelism."""

    shapes: Shapes
    query: int
    key: int
    value: int
    output: int
    made_by: str = ""
    """Path of the module that allocates queries and keys; {} stands for q or k. Empty: they are slices, which the kernel copies."""
    grouped: bool = False
    before_rotation: tuple[Tensor, ...] = ()
    """The inputs of the rotation, which local variables of the caller reference."""
    rotates: bool = True
    """Whether queries and keys are rotated or have norms of their own."""
    projected: Tensor | None = None
    """The tensor of which queries, keys and values are slices; None if they are not slices of one tensor."""

    @property
    def kind(self) -> str:
        """p2p, a2a, all_gather or a2a+p2p."""
        return self.shapes.split.cp_comm_type

    @property
    def inner(self) -> int:
        """i; 1 without a2a+p2p."""
        return self.shapes.split.cp_inner_size

    @property
    def ring(self) -> int:
        """Ranks in the ring of keys and values, or in the single group of all_gather and a2a."""
        return self.shapes.split.context // self.inner

    @property
    def inputs(self) -> int:
        """q + k + v."""
        return self.query + self.key + self.value

    @property
    def pair(self) -> int:
        """k + v."""
        return self.key + self.value

    @property
    def copied(self) -> bool:
        """FlashAttention works in [b, s, a, d]: tensors are copied to this layout unless b = 1, where both layouts are equal."""
        return works_in_batches(self.shapes)

    @property
    def in_one_copy(self) -> bool:
        """Whether FlashAttention copies slices of one tensor to one tensor, of which queries, keys and values are views.

        Source: `_PrepareQKVForFA` (transformer_engine/pytorch/attention/dot_product_attention/backends.py, 2.11).
        """
        shapes = self.shapes
        slices = (
            self.projected is not None and not self.grouped and not self.made_by and shapes.model.kv_channels == HEAD_OF_ONE_COPY
        )
        return slices and shapes.model.attention_backend == "flash" and shapes.s * shapes.b >= TOKENS_OF_ONE_COPY

    def tensor(self, name: str, width: int, *, made_in: str = "") -> Tensor:
        """[s, b, width], or as many elements in another layout."""
        return self.shapes.wide(name, width, "elements per token", made_in=made_in)


def output_is_new(shapes: Shapes) -> bool:
    """Whether the kernel saves its own output and returns another tensor."""
    return shapes.split.context > 1 and shapes.split.cp_comm_type in ("a2a", "all_gather")


def gradient_scratch(
    shapes: Shapes,
    *,
    query: int,
    grouped: bool,
    expanded: int | None = None,
    inner: int = 1,
    lengths: tuple[int, int] | None = None,
) -> tuple[Tensor, ...]:
    """Workspace of the backward kernel, for `query` elements of queries per token, with heads split over `inner` ranks.

    `lengths`: queries and keys of a sequence in one call, by default those of the rank, gathered over `inner` ranks. Both cuDNN
    (dQ_accum in cudnn_frontend/node/scaled_dot_product_flash_attention.h) and flash-attn 2 (dq_accum in
    csrc/flash_attn/flash_api.cpp) accumulate the query gradient in fp32. Deterministic flash-attn 2 uses as many partial
    sums as fill the GPU (`mha_bwd`: (multiprocessors + b·a - 1) / (b·a)), and deterministic cuDNN on Hopper stores the gradients
    of the scores. With fewer key heads than query heads, flash-attn first computes key and value gradients for every query head:
    `expanded` elements each, `query` by default.
    """
    flash = shapes.model.attention_backend == "flash"
    parts, heads = 1, shapes.model.num_attention_heads // (shapes.t * inner)
    if flash and shapes.inputs.deterministic:
        parts = ceil_div(shapes.inputs.multiprocessors, shapes.b * heads)
    sums = _statistics(shapes, "row sums of the output times its gradient")
    if not flash and stores_score_gradients(shapes.inputs.compute_capability, deterministic=shapes.inputs.deterministic):
        return (score_gradients(shapes, heads, lengths=lengths or (shapes.s * inner, shapes.s * inner)), sums)
    found = [
        shapes.wide("query gradient in fp32", parts * query, "a·d/t" if parts == 1 else "parts·a·d/t", dtype="fp32"),
        sums,
    ]
    if grouped and flash:
        found.append(shapes.wide("key and value gradients of every head", 2 * (expanded or query), "a·d/t"))
    return tuple(found)


def _statistics(shapes: Shapes, name: str, *, parts: int = 1) -> Tensor:
    """fp32: one value per query and head, for 1/parts of the queries."""
    heads = shapes.model.num_attention_heads // shapes.t
    return shapes.statistics(name, shapes.b * heads * shapes.s // parts, "4·b·a·s/t")


def exchanging_kernel(exchange: Exchange, *, tables: tuple[Tensor, ...]) -> Module:
    """The kernel and its communication. `tables` are the rotary tables that the layer saves, if any."""
    return Module(
        name="core_attention",
        kind=ModuleKind.ATTENTION_KERNEL,
        saved=(*tables, *_saved(exchange)),
        forward_workspace=(*_before(exchange), *_forward(exchange)),
        backward_workspace=tuple(_backward(exchange)),
        collectives=tuple(exchange_collectives(exchange)),
        source={"a2a": "AttnFuncWithCPAndQKVOA2A", "all_gather": "AttnFuncWithCPAndKVAllGather"}.get(
            exchange.kind, "AttnFuncWithCPAndKVP2P"
        ),
    )


def _saved(exchange: Exchange) -> tuple[Tensor, ...]:
    """Inputs, output, fp32 softmax statistics, and the random state of each step."""
    shapes = exchange.shapes
    one = exchange.tensor
    steps = {"a2a": 1, "all_gather": 2}.get(exchange.kind, exchange.ring)
    parts = 2 if exchange.kind == "all_gather" else 1  # one kernel call for each of the two chunks of a rank
    small = (
        *(_statistics(shapes, "softmax statistics", parts=parts) for _ in range(parts)),
        *(Tensor(name="random state", shape=(2,), dtype="int64") for _ in range(steps)),
    )
    output = one("output", exchange.output)
    made_by = "" if exchange.copied or exchange.inner > 1 else exchange.made_by
    if exchange.kind == "a2a":
        names = ("exchanged query", "exchanged key", "exchanged value")
        widths = (exchange.query, exchange.key, exchange.value)
        inputs = tuple(_aside(one(name, width)) for name, width in zip(names, widths, strict=True))
        return (*inputs, one("output before the all-to-all", exchange.output), *small)
    query = one("query", exchange.query, made_in=made_by.format("q"))
    if exchange.in_one_copy and exchange.inner == 1:
        query = one(ONE_COPY, exchange.inputs)
    if exchange.kind == "all_gather":
        key = one("key", exchange.key, made_in=made_by.format("k") if exchange.rotates else "")  # else a slice, which is copied
        key_and_value = (key, one("value", exchange.value))
        s, b, width = output.shape
        chunk = replace(output, name="output of a chunk", shape=(s // parts, b, width))
        copied = exchange.copied or not exchange.in_one_copy
        return (query, *(key_and_value if copied else ()), chunk, _aside(chunk), *small)
    # `kv` is copied to the first of the buffers that the ranks exchange
    pair = replace(one("last keys and values", exchange.pair), read_first=True)
    # the output is exchanged first
    return (query, pair, replace(output, read_first=exchange.inner > 1), *small)


def _before(exchange: Exchange) -> Iterator[Tensor]:
    """Tensors that local variables reference while the kernel runs, and that it does not save."""
    one, copied = exchange.tensor, exchange.copied
    yield exchange.projected or one("value", exchange.value)
    if exchange.in_one_copy and exchange.kind in ("p2p", "all_gather"):
        return
    yield from exchange.before_rotation
    if exchange.made_by or not copied:
        if copied or exchange.kind not in ("p2p", "all_gather"):
            yield one("query of the layer", exchange.query)
        if copied or exchange.kind != "all_gather":
            yield one("key of the layer", exchange.key)
            if exchange.projected is not None:
                yield one("contiguous value", exchange.value)
    if copied:
        if exchange.kind not in ("p2p", "all_gather"):
            yield one("query in [b,s,a,d]", exchange.query)
        yield one("key and value in [b,s,a,d]", exchange.pair)


def _forward(exchange: Exchange) -> Iterator[Tensor]:
    """Buffers at the end of the forward. Lists reference the buffers of all ring steps until the function returns."""
    one, ring = exchange.tensor, exchange.ring
    if exchange.kind == "a2a":
        for how in ("reordered", "received"):
            yield one(f"{how} output", exchange.output)
        yield _aside(one("returned output", exchange.output))
        return
    if exchange.kind == "all_gather":
        yield one("returned output", exchange.output)
        yield one("gathered keys and values", ring * exchange.pair)
        if exchange.copied:
            yield one("keys and values of a chunk", ring * exchange.pair)
        return
    yield from _of_steps(one("received keys and values", (ring - 1) * exchange.pair), ring - 1)
    yield from _of_steps(one("output of each step", ring * exchange.output), ring)
    for _ in range(ring):
        yield _statistics(exchange.shapes, "softmax statistics of a step")
    # torch.compile turns the in-place correction into a new tensor, which is copied back
    yield one("corrected output", exchange.output)
    if exchange.kind == "a2a+p2p":
        yield one("exchanged keys and values", exchange.pair)
        yield one("reordered output", exchange.output)
        yield one("received output", exchange.output)


def _aside(tensor: Tensor) -> Tensor:
    return replace(tensor, stream=SIDE_STREAM)


def _of_steps(tensor: Tensor, steps: int) -> Iterator[Tensor]:
    """The parts of `tensor` on both streams. Every second step of a ring runs on the second stream."""
    s, b, width = tensor.shape
    for count, aside in ((steps - steps // 2, False), (steps // 2, True)):
        if count:
            yield replace(tensor, shape=(s, b, count * width // steps), stream=SIDE_STREAM if aside else 0)


def _backward(exchange: Exchange) -> Iterator[Tensor]:
    """Tensors at the peak of backward: in the kernel, or in the communication after it."""
    one = exchange.tensor
    yield one("output gradient", exchange.output)
    if exchange.kind == "all_gather":
        yield from _backward_of_gathered(exchange)
        return
    inner = exchange.shapes.split.context if exchange.kind == "a2a" else exchange.inner
    scratch = gradient_scratch(exchange.shapes, query=exchange.query, grouped=exchange.grouped, inner=inner)
    if exchange.kind == "a2a":
        yield _aside(one("exchanged output gradient", exchange.output))
        yield one("query, key and value gradients", exchange.inputs)
        yield from _larger(scratch, tuple(_exchange_of_gradients(exchange)))
        return
    yield one("query gradient", exchange.query)
    yield one("query gradient of a step", exchange.query)
    yield one("two buffers of keys, values and their gradients", 4 * exchange.pair)
    yield one("key and value gradients of a step", exchange.pair)
    if exchange.kind == "p2p":
        yield from scratch
        return
    yield one("exchanged output", exchange.output)
    yield one("exchanged output gradient", exchange.output)
    yield from _larger(scratch, tuple(_exchange_of_gradients(exchange)))


def _backward_of_gathered(exchange: Exchange) -> Iterator[Tensor]:
    """The first rank has the first and the last of 2c chunks of a sequence. With a causal mask they read 1 and 2c chunks of keys.

    Other ranks need less: the last one, with chunks c and c + 1, reads c + 1 chunks at once.
    """
    one, ring = exchange.tensor, exchange.ring
    yield one("query gradient", exchange.query)
    yield one("query gradients of both chunks", exchange.query)
    yield one("gathered keys and values", ring * exchange.pair)
    yield one("gradients of gathered keys and values", ring * exchange.pair)
    yield one("key and value gradients of both chunks", (2 * ring + 1) * exchange.pair // 2)
    if exchange.copied:
        yield one("query and output gradient of a chunk", exchange.output)
        yield one("keys and values of a chunk", ring * exchange.pair)
    # workspace of the kernel for one chunk; then key gradients are sorted, while the arguments of the kernel are referenced
    scratch = gradient_scratch(
        exchange.shapes,
        query=exchange.query // 2,
        expanded=ring * exchange.query,
        grouped=exchange.grouped,
        lengths=(exchange.shapes.s // 2, ring * exchange.shapes.s),
    )
    sorting = [one("sorted key gradients", ring * exchange.key)]
    if exchange.copied:
        sorting.append(one("key and value gradients in [b,s,a,d]", ring * exchange.pair))
    yield from _larger(scratch, tuple(sorting))


def _larger(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The larger, in bytes, of two groups of tensors that are never allocated at the same time."""
    return max(one, other, key=lambda group: sum(tensor.bytes for tensor in group))


def _exchange_of_gradients(exchange: Exchange) -> Iterator[Tensor]:
    """Gradients of queries, keys and values are sequentially reordered, sent and restored (`flash_attn_a2a_communicate`)."""
    one = exchange.tensor
    yield one("reordered gradients", exchange.inputs)
    in_flight = max(2 * exchange.query + exchange.key, exchange.query + exchange.key + 2 * exchange.value)
    yield one("gradients sent and received", in_flight)


def exchange_collectives(exchange: Exchange) -> Iterator[Collective]:
    """Communication of one rank. All-gathers and reduce-scatters have the shape of the full tensor."""
    shapes = exchange.shapes
    tokens = (shapes.s, shapes.b)
    inner = "cp_a2a" if exchange.inner > 1 else "cp"
    outer = "cp_p2p" if exchange.inner > 1 else "cp"

    def one(kind: str, group: str, width: int, phase: str, *, count: int = 1, ranks: int = 1) -> Collective:
        shape = (ranks * tokens[0], tokens[1], width)
        return Collective(kind=kind, group=group, shape=shape, dtype=shapes.dtype, phase=phase, count=count)  # type: ignore[arg-type]

    if exchange.kind == "all_gather":
        for width in (exchange.key, exchange.value):
            for kind, phase in (("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward")):
                yield one(kind, "cp", width, phase, ranks=exchange.ring)
        return
    if exchange.kind != "p2p":
        for phase in ("forward", "backward"):
            for width in (exchange.query, exchange.key, exchange.value, exchange.output):
                yield one("all_to_all", inner, width, phase)
    if exchange.kind == "a2a":
        if shapes.model.softmax_type != "vanilla":
            sinks = (shapes.model.num_attention_heads // shapes.t,)
            yield Collective(kind="all_gather", group="cp", shape=sinks, dtype="fp32", phase="backward")
        return
    if exchange.kind == "a2a+p2p":  # the output again, which was saved after its all-to-all
        yield one("all_to_all", inner, exchange.output, "backward")
    ring = exchange.ring
    yield one("send", outer, exchange.pair, "forward", count=ring - 1)
    # only keys and values, then keys and values with their gradients, then only the gradients
    yield one("send", outer, exchange.pair, "backward", count=2)
    if ring > 2:
        yield one("send", outer, 2 * exchange.pair, "backward", count=ring - 2)
