"""Optimizer states on the host: what stays on the GPU, and what the host has to hold.

Read in megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py (`HybridDeviceOptimizer`) and distrib_optimizer.py
(`_build_model_and_main_param_groups`, `DistributedOptimizer.__init__`), 0.12.3 to 0.16.1 alike. Parameters of a rank's
shard go to the host whole, in the order of the optimizer's groups, until the fraction is reached. On either side there
are fp32 weights, two fp32 moments, whatever types the precision-aware optimizer was told, and fp32 gradients: on the GPU a
copy of 16-bit ones that is kept for the next step to overwrite, on the host a pinned copy of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from analyzer.buffers.gradient_buffers import Buffer, parameters_by_buffer
from analyzer.buffers.parameter_order import creation_order, numel_of
from analyzer.layout.data_parallel import ReductionGroup, reduction_size
from analyzer.layout.groups import RankRanges
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module, Parameter
from analyzer.specs import OffloadSpec, TrainingJob
from analyzer.states.record import StartPeak, States
from analyzer.states.replicas import alike_ranks
from analyzer.units import BLOCK, round_up

StageBuffers = Sequence[Sequence[Buffer]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter's part in a rank's shard."""

    numel: int
    dtype: str
    decays: bool
    """Biases and vectors, which do not, are in a group of their own, after the others."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Pieces of one optimizer on one rank."""

    gpu: tuple[Piece, ...]
    host: tuple[Piece, ...]

    @property
    def kept(self) -> int:
        """Elements that stay on the GPU."""
        return sum(piece.numel for piece in self.gpu)

    @property
    def gone(self) -> int:
        """Elements on the host."""
        return sum(piece.numel for piece in self.host)


def offload_of(job: TrainingJob) -> OffloadSpec:
    """Its settings. The launch has some."""
    assert job.optimizer.offload is not None
    return job.optimizer.offload


def place(pieces: Sequence[Piece], fraction: float) -> Placed:
    """Pieces in the order of the optimizer go to the host until their elements reach the fraction."""
    ordered = sorted(pieces, key=lambda piece: (not piece.decays, piece.dtype != "fp32"))
    threshold = fraction * sum(piece.numel for piece in ordered)
    gone = count = 0
    while count < len(ordered) and gone < threshold:
        gone += ordered[count].numel
        count += 1
    return Placed(gpu=tuple(ordered[count:]), host=tuple(ordered[:count]))


def offloaded_states(job: TrainingJob, stage: StageModel, buffers: StageBuffers, *, parameters: int, gradients: int) -> States:
    """States of the rank that keeps most on its GPU."""
    unplaced = States(parameters=parameters, gradients=gradients, masters=0, moments=0, gradient_copies=0)
    dense, experts = (max(placed, key=lambda each: each.kept) for placed in _placements(job, stage, buffers))
    return _with_kept(job, unplaced, (*dense.gpu, *experts.gpu), whole=whole_model_bytes(job, stage.trees))


def states_of_ranks(
    job: TrainingJob, stage: StageModel, held: States, buffers: StageBuffers
) -> tuple[tuple[RankRanges, States], ...]:
    """Ranks of a stage that keep equal states on their GPUs, with those states."""
    dense, experts = _placements(job, stage, buffers)
    whole = whole_model_bytes(job, stage.trees)
    return alike_ranks(
        job.parallel,
        stage.pipeline_rank,
        dense=dense,
        experts=experts,
        made_of=lambda own, own_experts: _with_kept(job, held, (*own.gpu, *own_experts.gpu), whole=whole),
    )


def _with_kept(job: TrainingJob, states: States, kept: Sequence[Piece], *, whole: int) -> States:
    """The states of a rank that keeps those of `kept` on its GPU."""
    sizes = [(round_up(4 * piece.numel, BLOCK), piece.dtype != "fp32") for piece in kept]
    masters = sum(size for size, half in sizes if half)
    return replace(
        states,
        masters=masters,
        moments=sum(2 * size for size, _ in sizes),
        kept_copies=masters if job.precision.gradients != "fp32" else 0,
        at_start=states.parameters + states.gradients + whole + masters,
        start_peak=StartPeak.OPTIMIZER,
    )


def whole_model_bytes(job: TrainingJob, trees: Sequence[Module]) -> int:
    """fp32 copies on the GPU that the optimizer makes of whole parameters, before it is made anew of shards.

    The first one stands in a circle of references with its hooks, so that its copies stay until garbage is collected.
    """
    return sum(round_up(4 * piece.numel, BLOCK) for piece in _kept_whole(job, trees))


def _kept_whole(job: TrainingJob, trees: Sequence[Module]) -> Iterator[Piece]:
    held = [parameter for tree in trees for parameter in creation_order(tree)]
    for expert in (False, True):
        pieces = [
            piece
            for parameter in held
            if (parameter.sharding == "expert" and job.parallel.expert > 1) is expert
            for piece in _whole(job, parameter)
        ]
        yield from (piece for piece in place(pieces, offload_of(job).fraction).gpu if piece.dtype != "fp32")


@dataclass(frozen=True, kw_only=True)
class HostBytes:
    """What one rank needs on the host."""

    pageable: int
    pinned: int
    while_made: int
    """Beside `pageable`, while the optimizer is made: fp32 weights of the whole model."""


def host_bytes(job: TrainingJob, stage: StageModel, buffers: StageBuffers) -> HostBytes:
    """Of the rank that offloads most.

    PyTorch's allocator of pinned memory rounds to powers of two (`CachingHostAllocator`). Weights are pinned only where
    they are fp32 from the start: the fp32 copy of a pinned 16-bit one is not.
    """
    offload = offload_of(job)
    placements = (max(placed, key=lambda each: each.gone) for placed in _placements(job, stage, buffers))
    pieces = [piece for placed in placements for piece in placed.host]
    full = [4 * piece.numel for piece in pieces]
    pinned_weights = [4 * piece.numel for piece in pieces if piece.dtype == "fp32"]
    pinned = sum(map(_power_of_two, pinned_weights)) + (sum(map(_power_of_two, full)) if offload.pinned_gradients else 0)
    pageable = sum(full) - sum(pinned_weights) + 2 * sum(full) + (0 if offload.pinned_gradients else sum(full))
    whole = sum(numel_of(tree) for tree in stage.trees)
    kept = sum(piece.numel for piece in _kept_whole(job, stage.trees))
    return HostBytes(pageable=pageable, pinned=pinned, while_made=4 * (whole - kept))


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


def _placements(job: TrainingJob, stage: StageModel, stage_buffers: StageBuffers) -> tuple[tuple[Placed, ...], tuple[Placed, ...]]:
    """What each rank of an instance of the distributed optimizer offloads, of dense parameters and of experts'."""
    buffers = tuple(_buffers(job, stage, stage_buffers))
    fraction = offload_of(job).fraction

    def placed(group: ReductionGroup) -> tuple[Placed, ...]:
        ranks = reduction_size(job.parallel, group)
        shards: list[list[Piece]] = [[] for _ in range(ranks)]
        for buffer, held in (pair for pair in buffers if pair[0].group == group):
            for rank, piece in _cut(job, buffer, held, ranks):
                shards[rank].append(piece)
        return tuple(place(shard, fraction) for shard in shards)

    return placed("dp_cp"), placed("edp")


def _buffers(job: TrainingJob, stage: StageModel, stage_buffers: StageBuffers) -> Iterator[tuple[Buffer, Sequence[Parameter]]]:
    """The buffers of a rank with what each holds."""
    for tree, buffers in zip(stage.trees, stage_buffers, strict=True):
        yield from zip(buffers, parameters_by_buffer(job, tree), strict=True)


def _cut(job: TrainingJob, buffer: Buffer, held: Sequence[Parameter], ranks: int) -> Iterator[tuple[int, Piece]]:
    """The part of each parameter in the shard of each rank, in the order of the buffer."""
    pieces = iter([piece for parameter in reversed(held) for piece in reversed(_whole(job, parameter))])
    for bucket in buffer.buckets:
        shard = bucket.numel // ranks
        for start, _ in bucket.placed:
            piece = next(pieces)
            for rank in range(start // shard, -(-(start + piece.numel) // shard)):
                numel = min(start + piece.numel, (rank + 1) * shard) - max(start, rank * shard)
                yield rank, Piece(numel, piece.dtype, piece.decays)


def _whole(job: TrainingJob, parameter: Parameter) -> tuple[Piece, ...]:
    """A parameter as the optimizer sees it: of grouped experts one for each."""
    moe = job.model.moe
    apart = parameter.sharding == "expert" and not (moe is not None and moe.legacy_grouped_gemm)
    dimensions = len(parameter.shape) - apart
    count = parameter.shape[0] if apart else 1
    return (Piece(parameter.numel // count, parameter.dtype, dimensions > 1 and parameter.name != "bias"),) * count
