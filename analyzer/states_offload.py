"""Optimizer states on the host: what stays on the GPU, and what the host has to hold.

Read in megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py (`HybridDeviceOptimizer`) and distrib_optimizer.py
(`_build_model_and_main_param_groups`, `DistributedOptimizer.__init__`), 0.14.0 to 0.16.1 alike. Parameters of a rank's
shard go to the host whole, in the order of the optimizer's groups, until the fraction is reached. On either side there
are fp32 weights, two fp32 moments, whatever types the precision-aware optimizer was told, and fp32 gradients: on the GPU a
copy of 16-bit ones that is kept, on the host a pinned copy of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from analyzer.buffers import PARAMETER_ALIGNMENT, Buffer, parameters_by_buffer, reduction_size, stage_buffers
from analyzer.modules.model import parameters as parameters_of
from analyzer.modules.tree import Parameter
from analyzer.results import StageModel
from analyzer.specs import Launch, OffloadSpec
from analyzer.states import States
from analyzer.units import BLOCK, round_up


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


def offload_of(launch: Launch) -> OffloadSpec:
    """Its settings. The launch has some."""
    assert launch.optimizer.offload is not None
    return launch.optimizer.offload


def place(pieces: Sequence[Piece], fraction: float) -> Placed:
    """Pieces in the order of the optimizer go to the host until their elements reach the fraction."""
    ordered = sorted(pieces, key=lambda piece: (not piece.decays, piece.dtype != "fp32"))
    threshold = fraction * sum(piece.numel for piece in ordered)
    gone = count = 0
    while count < len(ordered) and gone < threshold:
        gone += ordered[count].numel
        count += 1
    return Placed(gpu=tuple(ordered[count:]), host=tuple(ordered[:count]))


def offloaded_states(launch: Launch, stage: StageModel, *, parameters: int, gradients: int) -> States:
    """States of the rank that keeps most on its GPU."""
    fullest = [max(placed, key=lambda each: each.kept) for placed in _placements(launch, stage)]
    pieces = [piece for placed in fullest for piece in placed.gpu]
    masters = sum(round_up(4 * piece.numel, BLOCK) for piece in pieces if piece.dtype != "fp32")
    moments = sum(2 * round_up(4 * piece.numel, BLOCK) for piece in pieces)
    half_gradients = launch.precision.gradients != "fp32"
    copies = sum(round_up(4 * piece.numel, BLOCK) for piece in pieces if half_gradients and piece.dtype != "fp32")
    return States(
        parameters=parameters,
        gradients=gradients,
        masters=masters,
        moments=moments + copies,  # none is dropped: the next step overwrites them
        gradient_copies=0,
        at_start=parameters + gradients + 4 * whole_model_numel(launch, stage) + masters,
        at_start_where="making of the optimizer",
        at_start_rest="fp32 weights of the whole model before they are sharded",
    )


def whole_model_numel(launch: Launch, stage: StageModel) -> int:
    """Elements of which the optimizer makes fp32 copies on the GPU before it learns of shards, and drops them."""
    held = [parameter for tree in stage.trees for parameter in parameters_of(tree)]
    kept = 0
    for expert in (False, True):
        pieces = [
            piece
            for parameter in held
            if (parameter.sharding == "expert" and launch.parallel.expert > 1) is expert
            for piece in _whole(launch, parameter)
        ]
        kept += sum(piece.numel for piece in place(pieces, offload_of(launch).fraction).gpu if piece.dtype != "fp32")
    return kept


@dataclass(frozen=True, kw_only=True)
class HostBytes:
    """What one rank needs on the host."""

    pageable: int
    pinned: int
    while_made: int
    """Beside `pageable`, while the optimizer is made: fp32 weights of the whole model."""


def host_bytes(launch: Launch, stage: StageModel) -> HostBytes:
    """Of the rank that offloads most.

    PyTorch's allocator of pinned memory rounds to powers of two (`CachingHostAllocator`). Weights are pinned only where
    they are fp32 from the start: the fp32 copy of a pinned 16-bit one is not.
    """
    offload = offload_of(launch)
    pieces = [
        piece
        for placed in _placements(launch, stage)
        for piece in max(placed, key=lambda each: sum(piece.numel for piece in each.host)).host
    ]
    full = [4 * piece.numel for piece in pieces]
    pinned_weights = [4 * piece.numel for piece in pieces if piece.dtype == "fp32"]
    pinned = sum(map(_power_of_two, pinned_weights)) + (sum(map(_power_of_two, full)) if offload.pinned_gradients else 0)
    pageable = sum(full) - sum(pinned_weights) + 2 * sum(full) + (0 if offload.pinned_gradients else sum(full))
    numel = sum(parameter.numel for tree in stage.trees for parameter in parameters_of(tree))
    return HostBytes(pageable=pageable, pinned=pinned, while_made=4 * (numel - whole_model_numel(launch, stage)))


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


def _placements(launch: Launch, stage: StageModel) -> Iterator[tuple[Placed, ...]]:
    """For the optimizer of dense parameters, then that of experts: what each rank offloads. Alike ranks come once."""
    buffers = tuple(_buffers(launch, stage))
    groups: tuple[Literal["dp_cp", "edp"], ...] = ("dp_cp", "edp")
    for group in groups:
        ranks = reduction_size(launch, group)
        shards: list[list[Piece]] = [[] for _ in range(ranks)]
        for buffer, held in (pair for pair in buffers if pair[0].group == group):
            for rank, piece in _cut(launch, buffer, held, ranks):
                shards[rank].append(piece)
        if any(shards):
            unlike = dict.fromkeys(tuple(shard) for shard in shards)
            yield tuple(place(shard, offload_of(launch).fraction) for shard in unlike)


def _buffers(launch: Launch, stage: StageModel) -> Iterator[tuple[Buffer, Sequence[Parameter]]]:
    """The buffers of a rank with what each holds."""
    for tree, buffers in zip(stage.trees, stage_buffers(launch, stage), strict=True):
        yield from zip(buffers, parameters_by_buffer(launch, tree), strict=True)


def _cut(launch: Launch, buffer: Buffer, held: Sequence[Parameter], ranks: int) -> Iterator[tuple[int, Piece]]:
    """The part of each parameter in each rank's shard, in the order in which the buffer holds them."""
    backward = [piece for parameter in reversed(held) for piece in reversed(_whole(launch, parameter))]
    sizes = iter(parameter.numel for parameter in reversed(held))
    queue = iter(backward)
    for bucket in buffer.buckets:
        shard = bucket.numel // ranks
        end = 0
        for _ in range(bucket.parameters):
            start = round_up(end, PARAMETER_ALIGNMENT)
            end = start + next(sizes)
            while start < end:
                piece = next(queue)
                for rank in range(start // shard, -(-(start + piece.numel) // shard)):
                    numel = min(start + piece.numel, (rank + 1) * shard) - max(start, rank * shard)
                    yield rank, Piece(numel, piece.dtype, piece.decays)
                start += piece.numel


def _whole(launch: Launch, parameter: Parameter) -> tuple[Piece, ...]:
    """A parameter as the optimizer sees it: of grouped experts one for each."""
    moe = launch.model.moe
    apart = parameter.sharding == "expert" and not (moe is not None and moe.legacy_grouped_gemm)
    dimensions = len(parameter.shape) - apart
    count = parameter.shape[0] if apart else 1
    return (Piece(parameter.numel // count, parameter.dtype, dimensions > 1 and parameter.name != "bias"),) * count
