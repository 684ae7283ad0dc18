"""Where a rank stands and whom it talks to: coordinates, process groups, ranks of a pipeline stage.

A port of `RankGenerator` and `initialize_model_parallel` (megatron/core/parallel_state.py, 0.16.1) that answers
for one rank or one group without listing the world. Ranks count through two grids of the same world, fastest
dimension first in the order of `ParallelSpec.order`: the dense one (tp, cp, dp, pp) and the one of the experts,
in which tp is the expert tensor size, cp is 1 and dp is what is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Final

from analyzer.errors import InputError
from analyzer.specs import ParallelSpec

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
"""Dimensions along which the ranks of a group differ, in the dense grid."""

EXPERT_GROUPS: Final[dict[str, frozenset[str]]] = {
    "ep": frozenset({"ep"}),
    "etp": frozenset({"tp"}),
    "tp_ep": frozenset({"tp", "ep"}),
    "tp_ep_pp": frozenset({"tp", "ep", "pp"}),
    "edp": frozenset({"dp"}),
}
"""The same in the grid of the experts, where tp is the expert tensor size and dp the replicas of an expert."""

GROUP_KINDS: Final = (*DENSE_GROUPS, "embd", "pos_embd", *EXPERT_GROUPS, "intra_dist_opt")
"""Every kind of process group that Megatron makes."""


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Index of a rank inside its group of each dimension."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """A dimension of a grid: neighbours along it are `stride` ranks apart."""

    name: str
    size: int
    stride: int

    def index(self, rank: int) -> int:
        return rank // self.stride % self.size


def check_layout(parallel: ParallelSpec) -> None:
    """Refuse what Megatron refuses: `validate_args` for sizes and interleaving, `initialize_model_parallel` for groups.

    Raises InputError.
    """
    _check_sizes(parallel)
    if parallel.virtual_pipeline is not None:
        _check_interleaving(parallel)
    if not parallel.order.endswith("pp") and parallel.pipeline > 1 and parallel.expert_data != parallel.data:
        raise InputError(
            "--use-tp-pp-dp-mapping",
            f"experts have {parallel.expert_data} data-parallel replicas and the other layers {parallel.data}, "
            "which this order of ranks does not allow",
            "leave it out, or make expert tensor × expert parallel size equal to tensor × context parallel size",
        )
    instances = parallel.distributed_optimizer_instances
    for name, size in (("ranks", parallel.data_with_context), ("expert replicas", parallel.expert_data)):
        if size % instances:
            raise InputError(
                "--num-distributed-optimizer-instances",
                f"{size} data-parallel {name} cannot be split into {instances} instances",
                f"use a divisor of {size}",
            )


def coordinates(parallel: ParallelSpec, rank: int) -> Coordinates:
    """Where global `rank` stands in both grids."""
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


def group_of(parallel: ParallelSpec, kind: str, rank: int, *, tied: bool = True, mtp_rank: int | None = None) -> tuple[int, ...]:
    """Ranks of the group of `kind` (one of GROUP_KINDS) that `rank` belongs to; O(size of the group).

    Empty where it belongs to none: `embd` and `pos_embd` leave out pipeline ranks without that embedding.
    `tied` and `mtp_rank` bear on `embd` alone, see `groups`.
    """
    if kind in ("embd", "pos_embd"):
        members = _embedding_ranks(group_of(parallel, "pp", rank), kind, tied=tied, mtp_rank=mtp_rank)
        return members if rank in members else ()
    if kind == "intra_dist_opt":
        return _optimizer_instance(parallel, coordinates(parallel, rank).expert_data // _replicas_of_instance(parallel))
    inside, _ = _split(parallel, kind)
    return _spread(rank - sum(axis.index(rank) * axis.stride for axis in inside), inside)


def groups(
    parallel: ParallelSpec, kind: str, *, tied: bool = True, mtp_rank: int | None = None, limit: int | None = None
) -> Iterator[tuple[int, ...]]:
    """Groups of `kind` (one of GROUP_KINDS) in the order in which Megatron makes them, one at a time.

    `limit` stops after so many groups. `tied` bears on `embd` alone: with tied embeddings the group holds the first
    and the last pipeline rank, without only the first (`get_embedding_ranks` in pretrain_gpt.py, 0.16), and in either
    case `mtp_rank`, the pipeline rank of multi-token prediction layers where there are some. Releases before that, and
    megatron-core by default, make the tied group in any case.
    """
    yield from islice(_all_groups(parallel, kind, tied=tied, mtp_rank=mtp_rank), limit)


def group_size(parallel: ParallelSpec, kind: str, *, tied: bool = True, mtp_rank: int | None = None) -> int:
    """Ranks in each group of `kind`; `tied` and `mtp_rank` as in `groups`."""
    if kind == "embd":
        return len(_embedding_ranks(tuple(range(parallel.pipeline)), kind, tied=tied, mtp_rank=mtp_rank))
    if kind == "pos_embd":
        return 1
    if kind == "intra_dist_opt":
        return parallel.world_size // parallel.distributed_optimizer_instances
    return prod(axis.size for axis in _split(parallel, kind)[0])


def group_count(parallel: ParallelSpec, kind: str) -> int:
    """Groups of `kind` in the world."""
    counted = "pp" if kind in ("embd", "pos_embd") else kind
    return parallel.world_size // group_size(parallel, counted)


def pipeline_rank_ranges(parallel: ParallelSpec, pipeline_rank: int) -> RankRanges:
    """Inclusive ranges of the global ranks that hold stage `pipeline_rank`; O(number of ranges)."""
    pp = next(axis for axis in _grid(parallel, expert=False) if axis.name == "pp")
    if pp.size == 1:
        return ((0, parallel.world_size - 1),)
    starts = range(pipeline_rank * pp.stride, parallel.world_size, pp.stride * pp.size)
    return tuple((start, start + pp.stride - 1) for start in starts)


def replicas(parallel: ParallelSpec, pipeline_rank: int) -> Iterator[tuple[int, int, int]]:
    """Ranks that hold stage `pipeline_rank`, each with its place in its dp_cp group and in its edp group."""
    axes = {axis.name: axis for axis in _grid(parallel, expert=False)}
    (expert_data,) = (axis for axis in _grid(parallel, expert=True) if axis.name == "dp")
    data, context = axes["dp"], axes["cp"]
    for first, last in pipeline_rank_ranges(parallel, pipeline_rank):
        for rank in range(first, last + 1):
            # context changes faster than data in every order of ranks
            yield rank, data.index(rank) * context.size + context.index(rank), expert_data.index(rank)


def node_name(rank: int, gpus_per_node: int) -> str:
    """Where a rank runs when torchrun numbers nodes in order: 'n0_g0' is the first GPU of the first node."""
    node, gpu = divmod(rank, gpus_per_node)
    return f"n{node}_g{gpu}"


def _check_sizes(parallel: ParallelSpec) -> None:
    sizes = {
        "--tensor-model-parallel-size": parallel.tensor,
        "--pipeline-model-parallel-size": parallel.pipeline,
        "--context-parallel-size": parallel.context,
        "--expert-model-parallel-size": parallel.expert,
        "--expert-tensor-parallel-size": parallel.expert_tensor,
        "--num-distributed-optimizer-instances": parallel.distributed_optimizer_instances,
    }
    for option, size in sizes.items():
        if size < 1:
            raise InputError(option, f"{size} is not a size", "use 1 or more")
    dense = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
    experts = ("--expert-tensor-parallel-size", "--expert-model-parallel-size", "--pipeline-model-parallel-size")
    for options, holds in ((dense, "the model"), (experts, "all experts")):
        ranks = prod(sizes[option] for option in options)
        if parallel.world_size % ranks:
            factors = {option: sizes[option] for option in options if sizes[option] > 1}
            product = f"{' × '.join(map(str, factors.values()))} = {ranks}" if len(factors) > 1 else str(ranks)
            raise InputError(
                " × ".join(factors),
                f"{product} ranks hold {holds} once, and the world of {parallel.world_size} ranks is not a multiple of that",
                f"start a multiple of {ranks} ranks (--nnodes × --nproc-per-node) or change the sizes",
            )


def _check_interleaving(parallel: ParallelSpec) -> None:
    least = 2 if parallel.overlap_p2p else 3
    if parallel.pipeline < least:
        off = "" if parallel.overlap_p2p else " with --no-overlap-p2p-communication"
        raise InputError(
            "--pipeline-model-parallel-size",
            f"{parallel.pipeline} pipeline ranks are too few for {parallel.virtual_pipeline} virtual stages on each{off}",
            f"use {least} or more, or no virtual stages",
        )


def _grid(parallel: ParallelSpec, *, expert: bool) -> tuple[_Axis, ...]:
    """Dimensions of the dense grid or of the experts' one, fastest first."""
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
        axes.append(_Axis(name=name, size=sizes[name], stride=stride))
        stride *= sizes[name]
    return tuple(axes)


def _split(parallel: ParallelSpec, kind: str) -> tuple[tuple[_Axis, ...], tuple[_Axis, ...]]:
    """Dimensions along which ranks of a group differ, and those along which groups differ."""
    expert = kind in EXPERT_GROUPS
    names = EXPERT_GROUPS[kind] if expert else DENSE_GROUPS[kind]
    grid = _grid(parallel, expert=expert)
    return tuple(axis for axis in grid if axis.name in names), tuple(axis for axis in grid if axis.name not in names)


def _spread(base: int, axes: tuple[_Axis, ...]) -> tuple[int, ...]:
    """Ranks reached from `base` along `axes`, the first axis changing fastest."""
    ranks = [base]
    for axis in axes:
        ranks = [rank + step * axis.stride for step in range(axis.size) for rank in ranks]
    return tuple(ranks)


def _all_groups(parallel: ParallelSpec, kind: str, *, tied: bool, mtp_rank: int | None) -> Iterator[tuple[int, ...]]:
    if kind in ("embd", "pos_embd"):
        for stages in _all_groups(parallel, "pp", tied=tied, mtp_rank=mtp_rank):
            yield _embedding_ranks(stages, kind, tied=tied, mtp_rank=mtp_rank)
    elif kind == "intra_dist_opt":
        for instance in range(parallel.distributed_optimizer_instances):
            yield _optimizer_instance(parallel, instance)
    else:
        inside, outside = _split(parallel, kind)
        offsets = _spread(0, inside)
        for index in range(group_count(parallel, kind)):
            base, rest = 0, index
            for axis in outside:
                rest, step = divmod(rest, axis.size)
                base += step * axis.stride
            yield tuple(base + offset for offset in offsets)


def _embedding_ranks(stages: tuple[int, ...], kind: str, *, tied: bool, mtp_rank: int | None) -> tuple[int, ...]:
    """Those ranks of a pipeline group that hold the word embedding (`embd`) or the position embedding."""
    holders = {0}
    if kind == "embd" and tied:
        holders.add(len(stages) - 1)
    if kind == "embd" and mtp_rank is not None:
        holders.add(mtp_rank)
    return tuple(stages[holder] for holder in sorted(holders))


def _replicas_of_instance(parallel: ParallelSpec) -> int:
    """Consecutive replicas of the experts that share one instance of the distributed optimizer."""
    return parallel.expert_data // parallel.distributed_optimizer_instances


def _optimizer_instance(parallel: ParallelSpec, instance: int) -> tuple[int, ...]:
    """Ranks over which one instance of the distributed optimizer takes its gradient norm, ascending as torch keeps them."""
    replicas = _replicas_of_instance(parallel)
    inside, outside = _split(parallel, "tp_ep_pp")
    (data,) = (axis for axis in outside if axis.name == "dp")
    first = instance * replicas * data.stride
    return tuple(sorted(_spread(first, (*inside, _Axis(name="dp", size=replicas, stride=data.stride)))))
