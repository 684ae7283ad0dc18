"""How tokens reach their experts and come back: rows on this rank, buffers on the way, messages.

Legend: T tokens of this rank (s·b, or s·b/t under sequence parallelism), k experts of a token, E experts, P ranks of
the tp_ep group (expert-tensor size times expert size), hx width of a row (h, or the latent size).

Source: core/transformer/moe/token_dispatcher.py and moe_utils.py permute, unpermute, sort_chunks_by_idxs (0.16.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Collective, Module, Tensor
from analyzer.specs import MoeSpec
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

    @cached_property
    def ep(self) -> int:
        """Expert-parallel size."""
        return self.shapes.launch.parallel.expert

    @cached_property
    def etp(self) -> int:
        """Expert-tensor-parallel size."""
        return self.shapes.launch.parallel.expert_tensor

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
        """Rows that this rank's experts work on."""
        return int(self.sent * self.etp * self.moe.imbalance)

    def _padding(self, groups: int) -> int:
        """Rows that bring each of so many groups to the multiple that FP8 products need: half a multiple each, on average.

        Source: core/fp8_utils.py get_fp8_align_size (0.16.1).
        """
        fp8 = self.shapes.fp8
        if fp8 is None:
            return 0
        return groups * (32 if fp8.recipe == "mxfp8" else 16) // 2

    @cached_property
    def pads(self) -> bool:
        """Whether the experts copy their rows to pad them for FP8: not where each already gets a multiple."""
        if self.shapes.fp8 is None or self.moe.pad_for_quantization:
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
        saved=(row_map, Tensor(name="permuted probabilities", shape=(routing.rows,), dtype=routing.probability_dtype)),
        forward_workspace=(permuted, *((travelled,) if routing.ep > 1 else ()), *((arrived,) if several else ())),
        backward_workspace=(
            routing.row_tensor("row gradients", routing.rows),
            *((routing.row_tensor("sorted row gradients", routing.rows),) if several else ()),
            *((routing.row_tensor("sent gradients", routing.sent),) if routing.ep > 1 else ()),
            shapes.hidden("token gradient"),
        ),
        collectives=tuple(_messages(routing)),
        source=f"{moe.dispatcher} token dispatcher",
    )


def _messages(routing: Routing) -> list[Collective]:
    """Forward and its mirror in backward; the combine is counted here too."""
    moe, ep, etp = routing.moe, routing.ep, routing.etp
    dtype, probabilities = routing.shapes.dtype, routing.probability_dtype
    if ep * etp == 1:
        return []
    rows = (routing.sent, routing.width)
    if moe.dispatcher == "allgather":
        world = routing.tokens * ep * etp
        hidden, chances, chosen = (world, routing.width), (world, moe.num_experts), (world, moe.num_experts)
        return [
            routing.message("all_gather", "tp_ep", chosen, "bool", "forward"),
            routing.message("all_gather", "tp_ep", chances, probabilities, "forward"),
            routing.message("all_gather", "tp_ep", hidden, dtype, "forward"),
            routing.message("reduce_scatter", "tp_ep", hidden, probabilities, "forward"),
            routing.message("all_gather", "tp_ep", hidden, probabilities, "backward"),
            routing.message("reduce_scatter", "tp_ep", hidden, dtype, "backward"),
            routing.message("reduce_scatter", "tp_ep", chances, probabilities, "backward"),
        ]
    found = []
    if not moe.pad_to_capacity:
        found.append(routing.message("all_gather", "tp_ep", (moe.num_experts * ep * etp,), "int64", "forward"))
    for phase in ("forward", "backward"):
        if ep > 1:
            found.append(routing.message("all_to_all", "ep", rows, dtype, phase, 2))
            found.append(routing.message("all_to_all", "ep", (routing.sent,), probabilities, phase))
        if etp > 1:
            gathered = (routing.sent * etp, routing.width)
            found.append(routing.message("all_gather", "etp", gathered, dtype, phase))
            found.append(routing.message("reduce_scatter", "etp", gathered, dtype, phase))
            kind = "all_gather" if phase == "forward" else "reduce_scatter"
            found.append(routing.message(kind, "etp", (routing.sent * etp,), probabilities, phase))
    return found


def combine(shapes: Shapes) -> Module:
    """Rows of the local experts → [T, h], summed over the experts of each token."""
    routing = Routing(shapes)
    several = routing.local_experts > 1
    returned = routing.row_tensor("returned rows", routing.sent)
    return Module(
        name="combine",
        function=True,
        forward_workspace=(
            routing.row_tensor("expert output", routing.rows),
            *((routing.row_tensor("unsorted rows", routing.rows),) if several else ()),
            *((returned,) if routing.ep > 1 else ()),
            shapes.hidden("output"),
        ),
        backward_workspace=(
            shapes.hidden("output gradient"),
            routing.row_tensor("sent gradients", routing.sent),
            *((routing.row_tensor("received gradients", routing.sent),) if routing.ep > 1 else ()),
            *((routing.row_tensor("sorted gradients", routing.rows),) if several else ()),
        ),
        source="token_combine and unpermute",
    )
