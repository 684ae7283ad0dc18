"""Process groups: coordinates of ranks, members of groups, and ranks of pipeline stages.

A port of `RankGenerator` and `initialize_model_parallel` (megatron/core/parallel_state.py, 0.16.1) that computes a single rank or
group without listing all ranks. The ranks of the world form two grids. In both of them the fastest dimension comes first, in the
order of `ParallelSpec.order`. The dense grid has the dimensions tp, cp, dp and pp. The expert grid has the dimensions tp (expert
tensor parallelism), ep, dp (replicas of the experts) and pp. Sizes are assumed to satisfy `analyzer.specs.rules`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Final

from analyzer.specs import ParallelSpec

Group = Sequence[int]
"""The global ranks of a process group: a tuple, or a range for some large groups."""
RANGE_FROM: Final = 4096
"""Groups with more ranks than this are ranges if the distance between consecutive ranks is constant."""
RankRanges = tuple[tuple[int, int], ...]
"""Inclusive [first, last] ranges of global ranks."""

DENSE_GROUPS: Final[dict[str, frozenset[str]]] = {
    "dp_cp": frozenset({"dp", "cp"}),
    "dp": frozenset({"dp"}),
    "cp": frozenset({"cp"}),
    "mp": frozenset({"tp", "pp"}),
    "tp": frozenset({"tp"}),
    "pp": frozenset({"pp"}),
    "tp_dp_cp": frozenset({"tp", "dp", "cp"}),
    "tp_dp": frozenset({"tp", "dp"}),
    "tp_cp": frozenset({"tp", "cp"}),
}
"""For each kind of group in the dense grid, the dimensions along which its ranks differ."""

EXPERT_GROUPS: Final[dict[str, frozenset[str]]] = {
    "ep": frozenset({"ep"}),
    "etp": frozenset({"tp"}),
    "tp_ep": frozenset({"tp", "ep"}),
    "tp_ep_pp": frozenset({"tp", "ep", "pp"}),
    "edp": frozenset({"dp"}),
}
"""The same in the expert grid, where tp is expert tensor parallelism and dp are the replicas of an expert."""

GROUP_KINDS: Final = (*DENSE_GROUPS, "embd", "pos_embd", *EXPERT_GROUPS, "intra_dist_opt")
"""Every kind of process group that Megatron creates."""


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Index of a rank in its group of each dimension."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A dimension of a grid. Neighbours along it differ by `stride` ranks."""

    name: str
    size: int
    stride: int

    def index(self, rank: int) -> int:
        return rank // self.stride % self.size


def coordinates(parallel: ParallelSpec, rank: int) -> Coordinates:
    """Coordinates of a global rank in both grids."""
    dense = {axis.name: axis.index(rank) for axis in _grid(parallel, expert=False)}
    experts = {axis.name: axis.index(rank) for axis in _grid(parallel, expert=True)}
    return Coordinates(
        tensor=dense["tp"],
        context=dense["cp"],
        data=dense["dp"],
        pipeline=dense["pp"],
        expert_tensor=experts["tp"],
        expert=experts["ep"],
        expert_data=experts["dp"],
    )


def group_of(parallel: ParallelSpec, kind: str, rank: int, *, tied: bool = True, mtp_rank: int | None = None) -> Group:
    """Global ranks of the group of `kind` (one of GROUP_KINDS) that contains `rank`; O(size of the group).

    Empty if no group contains it: `embd` and `pos_embd` contain only pipeline ranks with that embedding. `tied` and `mtp_rank`
    apply to `embd` only, see `groups`.
    """
    if kind in ("embd", "pos_embd"):
        members = _embedding_ranks(group_of(parallel, "pp", rank), kind, tied=tied, mtp_rank=mtp_rank)
        return members if rank in members else ()
    if kind == "intra_dist_opt":
        return _optimizer_instance(parallel, coordinates(parallel, rank).expert_data // _replicas_of_instance(parallel))
    inside = axes_of(parallel, kind)
    return _spread(rank - sum(axis.index(rank) * axis.stride for axis in inside), inside)


def groups(
    parallel: ParallelSpec, kind: str, *, tied: bool = True, mtp_rank: int | None = None, limit: int | None = None
) -> Iterator[Group]:
    """Groups of `kind` (one of GROUP_KINDS) in the order in which Megatron creates them, at most `limit`.

    `tied` and `mtp_rank` apply to `embd` only. With tied embeddings the group contains the first and the last pipeline rank,
    otherwise only the first (`get_embedding_ranks` in pretrain_gpt.py, 0.16). It also contains `mtp_rank`, the pipeline rank of
    the MTP layers. Earlier releases, and megatron-core by default, always create the group of tied embeddings.
    """
    yield from islice(_all_groups(parallel, kind, tied=tied, mtp_rank=mtp_rank), limit)


def group_size(parallel: ParallelSpec, kind: str, *, tied: bool = True, mtp_rank: int | None = None) -> int:
    """Number of ranks in each group of `kind`. `tied` and `mtp_rank` are as in `groups`."""
    if kind == "embd":
        return len(_embedding_ranks(tuple(range(parallel.pipeline)), kind, tied=tied, mtp_rank=mtp_rank))
    if kind == "pos_embd":
        return 1
    if kind == "intra_dist_opt":
        return parallel.world_size // parallel.distributed_optimizer_instances
    return prod(axis.size for axis in axes_of(parallel, kind))


def group_count(parallel: ParallelSpec, kind: str) -> int:
    """Number of groups of `kind` in the world."""
    counted = "pp" if kind in ("embd", "pos_embd") else kind
    return parallel.world_size // group_size(parallel, counted)


def pipeline_rank_ranges(parallel: ParallelSpec, pipeline_rank: int) -> RankRanges:
    """Inclusive ranges of the global ranks of a pipeline stage; O(number of ranges)."""
    pp = next(axis for axis in _grid(parallel, expert=False) if axis.name == "pp")
    if pp.size == 1:
        return ((0, parallel.world_size - 1),)
    starts = range(pipeline_rank * pp.stride, parallel.world_size, pp.stride * pp.size)
    return tuple((start, start + pp.stride - 1) for start in starts)


def replicas(parallel: ParallelSpec, pipeline_rank: int) -> Iterator[tuple[int, int, int]]:
    """Global ranks of a pipeline stage, each with its index in its dp_cp group and its index in its edp group."""
    axes = {axis.name: axis for axis in _grid(parallel, expert=False)}
    (expert_data,) = (axis for axis in _grid(parallel, expert=True) if axis.name == "dp")
    data, context = axes["dp"], axes["cp"]
    for first, last in pipeline_rank_ranges(parallel, pipeline_rank):
        for rank in range(first, last + 1):
            # cp changes faster than dp in every `ParallelSpec.order`
            yield rank, data.index(rank) * context.size + context.index(rank), expert_data.index(rank)


def node_name(rank: int, gpus_per_node: int) -> str:
    """Name of the GPU of a rank if ranks are numbered in node order: 'n0_g0' is the first GPU of the first node."""
    node, gpu = divmod(rank, gpus_per_node)
    return f"n{node}_g{gpu}"


def axes_of(parallel: ParallelSpec, kind: str) -> tuple[Axis, ...]:
    """Dimensions along which the ranks of a group differ, fastest first. `kind`: of `DENSE_GROUPS` or `EXPERT_GROUPS`."""
    return _split(parallel, kind)[0]


def _grid(parallel: ParallelSpec, *, expert: bool) -> tuple[Axis, ...]:
    """Dimensions of the dense grid or of the expert grid, fastest first."""
    sizes = {
        "tp": parallel.expert_tensor if expert else parallel.tensor,
        "cp": 1 if expert else parallel.context,
        "ep": parallel.expert if expert else 1,
        "dp": parallel.expert_data if expert else parallel.data,
        "pp": parallel.pipeline,
    }
    axes = []
    stride = 1
    for name in parallel.order.split("-"):
        axes.append(Axis(name=name, size=sizes[name], stride=stride))
        stride *= sizes[name]
    return tuple(axes)


def _split(parallel: ParallelSpec, kind: str) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Dimensions along which ranks of a group differ, and those along which groups differ."""
    expert = kind in EXPERT_GROUPS
    names = EXPERT_GROUPS[kind] if expert else DENSE_GROUPS[kind]
    grid = _grid(parallel, expert=expert)
    return tuple(axis for axis in grid if axis.name in names), tuple(axis for axis in grid if axis.name not in names)


def _spread(base: int, axes: tuple[Axis, ...]) -> Group:
    """Ranks reached from `base` along `axes`, the first axis changing fastest."""
    size = prod(axis.size for axis in axes)
    if size > RANGE_FROM:
        stride = _even_stride(axes)
        if stride is not None:
            return range(base, base + size * stride, stride)
    ranks = [base]
    for axis in axes:
        ranks = [rank + step * axis.stride for step in range(axis.size) for rank in ranks]
    return tuple(ranks)


def _even_stride(axes: tuple[Axis, ...]) -> int | None:
    """The distance between consecutive ranks along these axes, if it is constant; otherwise None."""
    stride = following = None
    for axis in axes:
        if axis.size == 1:
            continue
        if following not in (None, axis.stride):
            return None
        stride = stride or axis.stride
        following = axis.stride * axis.size
    return stride


def _all_groups(parallel: ParallelSpec, kind: str, *, tied: bool, mtp_rank: int | None) -> Iterator[Group]:
    if kind in ("embd", "pos_embd"):
        for stages in _all_groups(parallel, "pp", tied=tied, mtp_rank=mtp_rank):
            yield _embedding_ranks(stages, kind, tied=tied, mtp_rank=mtp_rank)
    elif kind == "intra_dist_opt":
        for instance in range(parallel.distributed_optimizer_instances):
            yield _optimizer_instance(parallel, instance)
    else:
        inside, outside = _split(parallel, kind)
        for index in range(group_count(parallel, kind)):
            base, rest = 0, index
            for axis in outside:
                rest, step = divmod(rest, axis.size)
                base += step * axis.stride
            yield _spread(base, inside)


def _embedding_ranks(stages: Group, kind: str, *, tied: bool, mtp_rank: int | None) -> tuple[int, ...]:
    """Ranks of a pipeline group with the word embedding (`embd`) or the position embedding."""
    members = {0}
    if kind == "embd" and tied:
        members.add(len(stages) - 1)
    if kind == "embd" and mtp_rank is not None:
        members.add(mtp_rank)
    return tuple(stages[member] for member in sorted(members))


def _replicas_of_instance(parallel: ParallelSpec) -> int:
    """Number of consecutive expert replicas in one instance of the distributed optimizer."""
    return parallel.expert_data // parallel.distributed_optimizer_instances


def _optimizer_instance(parallel: ParallelSpec, instance: int) -> tuple[int, ...]:
    """Ranks over which one instance of the distributed optimizer computes its gradient norm, in ascending order as in PyTorch."""
    replicas = _replicas_of_instance(parallel)
    inside, outside = _split(parallel, "tp_ep_pp")
    (data,) = (axis for axis in outside if axis.name == "dp")
    first = instance * replicas * data.stride
    return tuple(sorted(_spread(first, (*inside, Axis(name="dp", size=replicas, stride=data.stride)))))
