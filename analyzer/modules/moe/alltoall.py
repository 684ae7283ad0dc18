"""How tokens reach their experts and come back: rows on this rank, buffers on the way, messages.

Legend: T tokens of this rank (s·b, or s·b/t under sequence parallelism), k experts of a token, E experts, P ranks of
the tp_ep group (expert-tensor size times expert size), hx width of a row (h, or the latent size).

Source: core/transformer/moe/token_dispatcher.py and moe_utils.py permute, unpermute, sort_chunks_by_idxs (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from analyzer.modules.quantized import align_size
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Collective, Module, Tensor
from analyzer.specs import FlexSpec, MoeSpec
from analyzer.units import ceil_div


@dataclass(frozen=True)
class Routing:
    """Sizes of routed tokens. Routing is balanced but for `--info-moe-imbalance`, which scales the rows of the experts."""

    shapes: Shapes

    @property
    def moe(self) -> MoeSpec:
        """The mixture; only asked where there is one."""
        assert self.shapes.model.moe is not None
        return self.shapes.model.moe

    @property
    def flex(self) -> FlexSpec:
        """Settings of the flex dispatcher; only asked where it is used."""
        assert self.moe.flex is not None
        return self.moe.flex

    @cached_property
    def ep(self) -> int:
        """Expert-parallel size."""
        return self.shapes.job.parallel.expert

    @cached_property
    def etp(self) -> int:
        """Expert-tensor-parallel size."""
        return self.shapes.job.parallel.expert_tensor

    @cached_property
    def local_experts(self) -> int:
        """E/ep."""
        return self.moe.num_experts // self.ep

    @cached_property
    def tokens(self) -> int:
        """T."""
        return self.shapes.s_split * self.shapes.b

    @cached_property
    def width(self) -> int:
        """hx."""
        return self.moe.latent_size or self.shapes.model.hidden_size

    @cached_property
    def sent(self) -> int:
        """Rows that this rank sends: T·k, or E times the capacity where inputs are padded to it."""
        if self.moe.pad_to_capacity and self.moe.capacity_factor is not None:
            capacity = ceil_div(int(self.moe.topk * self.tokens * self.moe.capacity_factor), self.moe.num_experts)
            return capacity * self.moe.num_experts
        padding = self._padding(self.moe.num_experts) if self.moe.pad_for_quantization else 0
        return self.tokens * self.moe.topk + padding

    @cached_property
    def rows(self) -> int:
        """Rows that this rank's experts work on; HybridEP pads them where they arrive."""
        padding = self._padding(self.local_experts) if self._padded_on_arrival else 0
        return int(self.sent * self.etp * self.moe.imbalance) + padding

    @property
    def _padded_on_arrival(self) -> bool:
        return self.moe.flex is not None and self.moe.flex.backend == "hybridep" and not self.moe.pad_to_capacity

    def _padding(self, groups: int) -> int:
        """Rows that bring each of so many groups to the multiple that FP8 products need: half a multiple each, on average.

        Source: core/fp8_utils.py get_fp8_align_size (0.16.1).
        """
        fp8 = self.shapes.fp8
        if fp8 is None:
            return 0
        return groups * align_size(fp8.recipe) // 2

    @cached_property
    def pads(self) -> bool:
        """Whether the experts copy their rows to pad them for FP8: not where each already gets a multiple."""
        if self.shapes.fp8 is None or self.moe.pad_for_quantization or self._padded_on_arrival:
            return False
        return not self.moe.pad_to_capacity or self.rows // self.local_experts % 32 > 0

    @cached_property
    def multiplied_rows(self) -> int:
        """Rows of the experts' products, padding counted in."""
        return self.rows + (self._padding(self.local_experts) if self.pads else 0)

    @cached_property
    def probability_dtype(self) -> str:
        """Element type of routing probabilities."""
        return {"fp32": "fp32", "fp64": "fp64"}.get(self.moe.router_dtype or "", self.shapes.dtype)

    def row_tensor(self, name: str, rows: int, width: int | None = None, *, dtype: str | None = None, made_in: str = "") -> Tensor:
        """[rows, width]."""
        return Tensor(
            name=name, shape=(rows, width or self.width), dtype=dtype or self.shapes.dtype, formula="T·k rows", made_in=made_in
        )

    def message(self, kind: str, group: str, shape: tuple[int, ...], dtype: str, phase: str, count: int = 1) -> Collective:
        """A message of the dispatcher."""
        return Collective(kind=kind, group=group, shape=shape, dtype=dtype, phase=phase, count=count)  # type: ignore[arg-type]


def dispatch(shapes: Shapes) -> Module:
    """Tokens [T, hx] → rows of the local experts, sorted by expert."""
    routing = Routing(shapes)
    moe = routing.moe
    row_map = (
        Tensor(name="row id map", shape=(routing.tokens, 2 * moe.num_experts + 1), dtype="int32", formula="4·T·(2E+1)")
        if moe.permute_fusion
        else Tensor(name="sorted indices", shape=(routing.sent,), dtype="int64", formula="8·T·k")
    )
    permuted = routing.row_tensor("permuted tokens", routing.sent)
    travelled = routing.row_tensor("received tokens", routing.sent)
    arrived = routing.row_tensor("rows of the local experts", routing.rows)
    several = routing.local_experts > 1
    return Module(
        name="dispatch",
        function=True,
        saved=(
            replace(row_map, lingers=True),
            Tensor(name="permuted probabilities", shape=(routing.rows,), dtype=routing.probability_dtype),
            *_selection(routing),
            *_sort_map(routing),
        ),
        forward_workspace=(
            permuted,
            *((travelled,) if routing.ep > 1 else ()),
            *((arrived,) if several else ()),
            *shared_output(routing),
        ),
        # each step of the way back reads one and writes another
        backward_workspace=_largest(
            (
                routing.row_tensor("row gradients", routing.rows),
                *((routing.row_tensor("sorted row gradients", routing.rows),) if several or routing.ep > 1 else ()),
            ),
            (routing.row_tensor("sent gradients", routing.sent), shapes.hidden("token gradient")),
        ),
        collectives=tuple(_messages(routing)),
        source="MoEAlltoAllTokenDispatcher",
    )


def _selection(routing: Routing) -> tuple[Tensor, ...]:
    """What `masked_select` keeps of the probabilities and the routing map where nothing is fused."""
    moe = routing.moe
    if moe.permute_fusion or moe.pad_to_capacity:
        return ()
    shape = (moe.num_experts, routing.tokens)
    return (
        Tensor(name="transposed probabilities", shape=shape, dtype=routing.probability_dtype, formula="E·T"),
        Tensor(name="transposed routing map", shape=shape, dtype="bool", formula="E·T"),
    )


def _sort_map(routing: Routing) -> tuple[Tensor, ...]:
    """Where each row goes when rows are sorted by expert, and when they are put back, each by a fused kernel."""
    if routing.local_experts == 1 or not routing.moe.permute_fusion or routing.moe.pad_to_capacity:
        return ()
    return (Tensor(name="sort map", shape=(routing.rows,), dtype="int32", formula="4·T·k"),)


def dispatched(routing: Routing) -> tuple[Tensor, ...]:
    """Tokens as they were sent and as they came, which the frame of the layer names to its end (`MoELayer.forward`).

    Where nothing is sent they are one, and where nothing is sorted the experts keep the last. Gathered tokens lie in a buffer
    that stays, and only their probabilities are named.
    """
    if routing.moe.dispatcher == "allgather":
        from analyzer.modules.moe.allgather import gathered_probabilities  # a millisecond that most launches need not spend

        return gathered_probabilities(routing)
    if routing.moe.dispatcher != "alltoall":
        return ()
    arrives_apart = routing.local_experts > 1 or routing.etp > 1
    sent = routing.row_tensor("permuted tokens", routing.sent)
    if routing.ep == 1:
        return (sent,) if arrives_apart else ()
    return (sent, *((routing.row_tensor("received tokens", routing.sent),) if arrives_apart else ()))


def summed_rows(routing: Routing, rows: int, *, made_in: str = "") -> tuple[Tensor, ...]:
    """Rows that are added up to tokens, which PyTorch keeps where it does so deterministically: `index_add_` names its source.

    `unpermute` in moe_utils.py, from 0.15 on.
    """
    if not routing.moe.adds_by_index or routing.moe.permute_fusion:
        return ()
    return (routing.row_tensor("rows that are summed", rows, made_in=made_in),)


def shared_output(routing: Routing) -> tuple[Tensor, ...]:
    """What the shared experts gave, until it is added to the output of the others."""
    if not routing.moe.shared_ffn_hidden_size or routing.moe.shared_overlap:
        return ()
    return (routing.shapes.hidden("output of the shared experts"),)


def _largest(*groups: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Of groups of tensors that are never alive together, the one that needs most."""
    return max(groups, key=lambda group: sum(tensor.bytes for tensor in group))


def _messages(routing: Routing) -> Iterator[Collective]:
    """Of the way to the experts, and of its mirror in backward."""
    moe, ep, etp = routing.moe, routing.ep, routing.etp
    dtype, probabilities = routing.shapes.dtype, routing.probability_dtype
    if ep * etp == 1:
        return
    if not moe.pad_to_capacity:
        yield routing.message("all_gather", "tp_ep", (moe.num_experts * ep * etp,), "int64", "forward")
    for phase in ("forward", "backward"):
        if ep > 1:
            yield routing.message("all_to_all", "ep", (routing.sent, routing.width), dtype, phase)
            yield routing.message("all_to_all", "ep", (routing.sent,), probabilities, phase)
        if etp > 1:
            kind = "all_gather" if phase == "forward" else "reduce_scatter"
            yield routing.message(kind, "etp", (routing.sent * etp, routing.width), dtype, phase)
            yield routing.message(kind, "etp", (routing.sent * etp,), probabilities, phase)


def _messages_back(routing: Routing) -> Iterator[Collective]:
    """Of the way back from the experts; sums are in the type of the probabilities (`combine_preprocess`)."""
    ep, etp = routing.ep, routing.etp
    dtype, probabilities = routing.shapes.dtype, routing.probability_dtype
    if ep * etp == 1:
        return
    for phase in ("forward", "backward"):
        if etp > 1:
            kind = "reduce_scatter" if phase == "forward" else "all_gather"
            yield routing.message(kind, "etp", (routing.sent * etp, routing.width), probabilities, phase)
        if ep > 1:
            yield routing.message("all_to_all", "ep", (routing.sent, routing.width), dtype, phase)


def _summed_over_parts(routing: Routing) -> tuple[Tensor, ...]:
    """A reduce-scatter over expert-tensor-parallel ranks, in the type of the probabilities, from a flat copy of its parts.

    `combine_preprocess`; NCCL takes a list of parts by way of a flat tensor (newLikeFlat in ProcessGroupNCCL).
    """
    if routing.etp == 1:
        return ()
    dtype = routing.probability_dtype
    cast = (routing.row_tensor("rows to be summed", routing.rows, dtype=dtype),) if dtype != routing.shapes.dtype else ()
    flat = () if routing.moe.pad_to_capacity else (routing.row_tensor("parts in a row", routing.rows, dtype=dtype),)
    return (*cast, *flat, routing.row_tensor("sums", routing.sent, dtype=dtype))


def combine(shapes: Shapes) -> Module:
    """Rows of the local experts → [T, h], summed over the experts of each token."""
    routing = Routing(shapes)
    several = routing.local_experts > 1
    unsorted = (routing.row_tensor("unsorted rows", routing.rows),) if several else ()
    kept = summed_rows(routing, routing.sent)
    last = () if kept else (routing.row_tensor("returned rows", routing.sent),)
    returned = last if routing.ep > 1 else ()
    shared = shared_output(routing)
    output = (shapes.hidden("output"), *((shapes.hidden("output with that of the shared experts"),) if shared else ()))
    if kept:  # where PyTorch is deterministic, Megatron makes the zeros twice
        output = (shapes.hidden("zeros"), *output)
    gradient = shapes.branch_gradient
    gathers = routing.etp > 1  # into a flat tensor, which is copied
    travels = (routing.row_tensor("sent gradients", routing.sent),) if routing.ep > 1 or gathers else ()
    again = (several and routing.ep == 1) or gathers
    sorts = (routing.row_tensor("sorted gradients", routing.rows),) if again else ()
    forward = _largest(
        (routing.row_tensor("expert output", routing.rows), *unsorted, *_summed_over_parts(routing)),
        (*(unsorted or (routing.row_tensor("expert output", routing.rows),)), *returned),
        (*last, *output),
    )
    return Module(
        name="combine",
        function=True,
        saved=(*_sort_map(routing), *kept),
        forward_workspace=(*dispatched(routing), *forward, *shared),
        backward_workspace=_largest(
            (gradient, routing.row_tensor("sent gradients", routing.sent)),
            (gradient, *travels, routing.row_tensor("received gradients", routing.rows), *sorts),
        ),
        collectives=tuple(_messages_back(routing)),
        source="token_combine and unpermute",
    )
