"""Optimizer CPU offload: optimizer states that stay on the GPU, and the host memory for the others.

Source: megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py (`HybridDeviceOptimizer`) and distrib_optimizer.py
(`_build_model_and_main_param_groups`, `DistributedOptimizer.__init__`), 0.12.3 to 0.16.1. Parameters of a rank's shard are
offloaded in the order of the optimizer's groups until the fraction is reached; the part of a parameter in the shard is not
split further. GPU and host each have fp32 weights, two fp32 moments (the dtype options of the precision-aware optimizer are
ignored) and fp32 gradients: on the GPU a copy of 16-bit gradients, which is never freed, on the host a pinned copy of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from analyzer.layout.data_parallel import ReductionGroup, reduction_size
from analyzer.layout.groups import RankRanges
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module, Parameter
from analyzer.specs import OffloadSpec, TrainingJob
from analyzer.states.buffers.gradient_buffers import Buffer, parameters_by_buffer
from analyzer.states.buffers.parameter_order import creation_order, has_weight_decay, trained_numel
from analyzer.states.record import StartPeak, States
from analyzer.states.replicas import group_by_states
from analyzer.units import BLOCK, power_of_two, round_up

StageBuffers = Sequence[Sequence[Buffer]]


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a parameter in a rank's shard."""

    numel: int
    dtype: str
    decays: bool
    """Has weight decay. Biases and vectors have none and are in a separate group after the others."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Pieces of one optimizer on one rank."""

    gpu: tuple[Piece, ...]
    host: tuple[Piece, ...]

    @property
    def gpu_numel(self) -> int:
        """Elements that stay on the GPU."""
        return sum(piece.numel for piece in self.gpu)

    @property
    def host_numel(self) -> int:
        """Elements on the host."""
        return sum(piece.numel for piece in self.host)


def offload_of(job: TrainingJob) -> OffloadSpec:
    """The offload settings of a job that uses it."""
    assert job.optimizer.offload is not None
    return job.optimizer.offload


def place(pieces: Sequence[Piece], fraction: float) -> Placed:
    """Offload pieces in the order of the optimizer until their elements reach the fraction."""
    ordered = sorted(pieces, key=lambda piece: (not piece.decays, piece.dtype != "fp32"))
    threshold = fraction * sum(piece.numel for piece in ordered)
    offloaded = count = 0
    while count < len(ordered) and offloaded < threshold:
        offloaded += ordered[count].numel
        count += 1
    return Placed(gpu=tuple(ordered[count:]), host=tuple(ordered[:count]))


def offloaded_states(job: TrainingJob, stage: StageModel, buffers: StageBuffers, *, parameters: int, gradients: int) -> States:
    """Model states of the rank with the most elements on its GPU."""
    unplaced = States(parameters=parameters, gradients=gradients, master_weights=0, moments=0, gradient_copies=0)
    dense, experts = (max(placed, key=lambda each: each.gpu_numel) for placed in _placements(job, stage, buffers))
    return _with_pieces(job, unplaced, (*dense.gpu, *experts.gpu), unsharded=tuple(_unsharded_on_gpu(job, stage.trees)))


def states_of_ranks(
    job: TrainingJob, stage: StageModel, states: States, buffers: StageBuffers
) -> tuple[tuple[RankRanges, States], ...]:
    """Groups of ranks of a stage with equal model states on their GPUs, with these states."""
    dense, experts = _placements(job, stage, buffers)
    unsharded = tuple(_unsharded_on_gpu(job, stage.trees))
    return group_by_states(
        job.parallel,
        stage.pipeline_rank,
        dense=dense,
        experts=experts,
        states_of=lambda own, own_experts: _with_pieces(job, states, (*own.gpu, *own_experts.gpu), unsharded=unsharded),
    )


def _with_pieces(job: TrainingJob, states: States, pieces: Sequence[Piece], *, unsharded: Sequence[Piece]) -> States:
    """`states` of a rank with the optimizer states of `pieces` on its GPU. `unsharded`: `_unsharded_on_gpu`."""
    sizes = [(round_up(4 * piece.numel, BLOCK), piece.dtype != "fp32") for piece in pieces]
    master_weights = sum(size for size, half in sizes if half)
    unsharded_bytes, copied_first = _copies(unsharded)
    _, copied = _copies([piece for piece in pieces if piece.dtype != "fp32"])
    return replace(
        states,
        master_weights=master_weights,
        moments=sum(len(job.optimizer.state_dtypes) * size for size, _ in sizes),
        permanent_gradient_copies=master_weights if job.precision.gradients != "fp32" else 0,
        at_start=states.parameters + states.gradients + max(copied_first, unsharded_bytes + copied),
        start_peak=StartPeak.OPTIMIZER,
        moved_at_start=0,
    )


def _copies(pieces: Sequence[Piece]) -> tuple[int, int]:
    """Bytes of fp32 copies of 16-bit pieces, and the peak of their creation: a piece is copied, and the copy converted."""
    total = peak = 0
    for piece in pieces:
        total += round_up(4 * piece.numel, BLOCK)
        peak = max(peak, total + round_up(2 * piece.numel, BLOCK))
    return total, peak


def unsharded_copy_bytes(job: TrainingJob, trees: Sequence[Module]) -> int:
    """Bytes of fp32 copies of unsharded parameters on the GPU.

    A first optimizer creates them before the optimizer is created again for the shards. It is in a reference cycle with its
    hooks, so its copies stay allocated until Python collects garbage.
    """
    return _copies(tuple(_unsharded_on_gpu(job, trees)))[0]


def pieces_on_gpu(job: TrainingJob, stage: StageModel, buffers: StageBuffers, member: tuple[int, int]) -> tuple[Piece, ...]:
    """The pieces on the GPU of the rank with these indices in its data-parallel group and in that of the experts."""
    placed = zip(_placements(job, stage, buffers), member, strict=True)
    return tuple(piece for placements, index in placed for piece in placements[index % len(placements)].gpu)


def _unsharded_on_gpu(job: TrainingJob, trees: Sequence[Module]) -> Iterator[Piece]:
    listed = [parameter for tree in trees for parameter in creation_order(tree) if not parameter.frozen]
    for expert in (False, True):
        pieces = [
            piece
            for parameter in listed
            if (parameter.sharding == "expert" and job.parallel.expert > 1) is expert
            for piece in _unsharded_pieces(job, parameter)
        ]
        yield from (piece for piece in place(pieces, offload_of(job).fraction).gpu if piece.dtype != "fp32")


@dataclass(frozen=True, kw_only=True)
class HostBytes:
    """Host memory of one rank in bytes."""

    pageable: int
    pinned: int
    during_creation: int
    """In addition to `pageable` while the optimizer is created: fp32 weights of the unsharded model."""


def host_bytes(job: TrainingJob, stage: StageModel, buffers: StageBuffers) -> HostBytes:
    """Host memory of the rank that offloads the most.

    PyTorch's allocator for pinned memory rounds up to powers of two (`CachingHostAllocator`). Weights are pinned only if the
    parameters are fp32: the fp32 copy of a pinned 16-bit weight is not pinned.
    """
    offload = offload_of(job)
    placements = (max(placed, key=lambda each: each.host_numel) for placed in _placements(job, stage, buffers))
    pieces = [piece for placed in placements for piece in placed.host]
    full = [4 * piece.numel for piece in pieces]
    pinned_weights = [4 * piece.numel for piece in pieces if piece.dtype == "fp32"]
    pinned = sum(map(_pinned, pinned_weights)) + (sum(map(_pinned, full)) if offload.pinned_gradients else 0)
    pageable = sum(full) - sum(pinned_weights) + 2 * sum(full) + (0 if offload.pinned_gradients else sum(full))
    total = sum(trained_numel(tree) for tree in stage.trees)
    on_gpu = sum(piece.numel for piece in _unsharded_on_gpu(job, stage.trees))
    return HostBytes(pageable=pageable, pinned=pinned, during_creation=4 * (total - on_gpu))


def _pinned(size: int) -> int:
    return power_of_two(size) if size else 0


def _placements(job: TrainingJob, stage: StageModel, stage_buffers: StageBuffers) -> tuple[tuple[Placed, ...], tuple[Placed, ...]]:
    """The placement on each rank of a distributed optimizer instance, for dense parameters and for experts."""
    buffers = tuple(_buffers(job, stage, stage_buffers))
    fraction = offload_of(job).fraction

    def placed(group: ReductionGroup) -> tuple[Placed, ...]:
        ranks = reduction_size(job.parallel, group)
        shards: list[list[Piece]] = [[] for _ in range(ranks)]
        for buffer, listed in (pair for pair in buffers if pair[0].group == group):
            for rank, piece in _cut(job, buffer, listed, ranks):
                shards[rank].append(piece)
        return tuple(place(shard, fraction) for shard in shards)

    return placed("dp_cp"), placed("edp")


def _buffers(job: TrainingJob, stage: StageModel, stage_buffers: StageBuffers) -> Iterator[tuple[Buffer, Sequence[Parameter]]]:
    """The buffers of a rank, each with its parameters."""
    for tree, buffers in zip(stage.trees, stage_buffers, strict=True):
        yield from zip(buffers, parameters_by_buffer(job, tree), strict=True)


def _cut(job: TrainingJob, buffer: Buffer, listed: Sequence[Parameter], ranks: int) -> Iterator[tuple[int, Piece]]:
    """(rank, piece) for each parameter and each shard that contains a part of it, in the order of the buffer."""
    pieces = iter([piece for parameter in reversed(listed) for piece in reversed(_unsharded_pieces(job, parameter))])
    for bucket in buffer.buckets:
        shard = bucket.numel // ranks
        for start, _ in bucket.placed:
            piece = next(pieces)
            for rank in range(start // shard, -(-(start + piece.numel) // shard)):
                numel = min(start + piece.numel, (rank + 1) * shard) - max(start, rank * shard)
                yield rank, Piece(numel, piece.dtype, piece.decays)


def _unsharded_pieces(job: TrainingJob, parameter: Parameter) -> tuple[Piece, ...]:
    """An unsharded parameter as the optimizer sees it: for grouped experts one piece per expert."""
    moe = job.model.moe
    separate = parameter.sharding == "expert" and not (moe is not None and moe.legacy_grouped_gemm)
    dimensions = len(parameter.shape) - separate
    count = parameter.shape[0] if separate else 1
    return (Piece(parameter.numel // count, parameter.dtype, has_weight_decay(parameter, dimensions)),) * count
