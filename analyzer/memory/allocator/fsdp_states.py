"""The allocator requests of model states with FSDP, and the streams of its unsharded tensors.

Sources: megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py (0.16.1);
torch/distributed/fsdp/_fully_shard/{_fsdp_param,_fsdp_collectives}.py (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from analyzer.memory.allocator.caching_allocator import CachingAllocator
from analyzer.memory.allocator.model_states import ModelStates, allocate, allocate_permanent, copy_to_fp32, free
from analyzer.memory.allocator.script import LEFT_OUT, Streams
from analyzer.modules.tree import Parameter
from analyzer.passes.fsdp_gradients import BEYOND
from analyzer.passes.fsdp_reduction import REDUCED
from analyzer.passes.fsdp_torch import ALL_GATHER
from analyzer.specs import FsdpSpec
from analyzer.states.buffers.fsdp import (
    ShardedBucket,
    described_shard,
    fsdp_of,
    gradient_dtype,
    reduced_dtype,
    shard_ranks,
    sharded_buckets,
    stored_dtype,
)
from analyzer.states.buffers.fsdp2 import is_torch_unit, torch_shard_numel, unit_pieces
from analyzer.states.buffers.fsdp_gathering import PARAMETERS
from analyzer.states.buffers.parameter_order import creation_order
from analyzer.states.bytes_per_parameter import FP32
from analyzer.states.fsdp_megatron import owned_numel
from analyzer.units import DTYPE_BYTES, dtype_bytes

GATHER_STREAM: Final = 2
REDUCE_STREAM: Final = 3
_MEGATRON: Final[Streams] = ((PARAMETERS, GATHER_STREAM), (REDUCED, LEFT_OUT), (BEYOND, LEFT_OUT))
"""`AllGatherPipeline` and `GradReducePipeline` allocate on streams of their own. The states have the requests of the latter."""
_TORCH: Final[Streams] = ((ALL_GATHER, GATHER_STREAM), (REDUCED, LEFT_OUT), (BEYOND, LEFT_OUT))
"""`foreach_all_gather` allocates its buffer on the stream of all-gathers, and copies parameters out of it on that of the
computation; `foreach_reduce` allocates its output on the stream of reductions."""


def streams_of(fsdp: FsdpSpec) -> Streams:
    """The streams of the tensors that the passes for FSDP add."""
    return _TORCH if fsdp.implementation == "torch" else _MEGATRON


class MegatronFsdp(ModelStates):
    """The states with Megatron-FSDP (`states.fsdp_megatron`)."""

    def create(self, allocator: CachingAllocator) -> None:
        """Shards the model bucket by bucket, and creates one tensor of gradients for each type."""
        fsdp, buckets = fsdp_of(self.job), self._buckets()
        replicated = fsdp.strategy == "no_shard"
        unsharded = {} if fsdp.starts_from_meta else {id(each): self._unsharded(allocator, each) for each in buckets}
        gradients: dict[str, int] = {}
        for bucket in buckets:
            self._shard(allocator, bucket)
            if not replicated:
                free(allocator, unsharded.pop(id(bucket), ()))
            ranks = shard_ranks(self.job, bucket.group) if fsdp.strategy in ("optim_grads", "optim_grads_params") else 1
            dtype = gradient_dtype(self.job, bucket)
            gradients[dtype] = gradients.get(dtype, 0) + bucket.numel // ranks
        if replicated and fsdp.starts_from_meta:
            for bucket in buckets:
                self._unsharded(allocator, bucket)
        allocate_permanent(allocator, (dtype_bytes(dtype, numel) for dtype, numel in gradients.items()))
        if fsdp.strategy in ("optim_grads", "optim_grads_params") and not fsdp.double_buffer:
            for bucket in reversed(buckets):  # one after the other in the first backward, and in the same blocks later
                shard = dtype_bytes(reduced_dtype(self.job, bucket), bucket.numel // shard_ranks(self.job, bucket.group))
                free(allocator, allocate(allocator, [shard], stream=REDUCE_STREAM))
        if fsdp.moments_from_start:
            self._create_moments(allocator)

    def update(self, allocator: CachingAllocator, *, first: bool) -> None:
        halves = [bucket for bucket in self._buckets() if gradient_dtype(self.job, bucket) != "fp32"]
        copies = allocate(allocator, (FP32 * numel for bucket in halves for numel in described_shard(self.job, bucket)))
        if first and not fsdp_of(self.job).moments_from_start:
            self._create_moments(allocator)
        free(allocator, copies)

    def _buckets(self) -> list[ShardedBucket]:
        return [bucket for tree in self.stage.trees for bucket in sharded_buckets(self.job, tree)]

    def _create_moments(self, allocator: CachingAllocator) -> None:
        numels = (numel for bucket in self._buckets() for numel in described_shard(self.job, bucket))
        count = len(self.job.optimizer.state_dtypes)
        allocate_permanent(allocator, (FP32 * numel for numel in numels for _ in range(count)))

    def _unsharded(self, allocator: CachingAllocator, bucket: ShardedBucket) -> list[int]:
        """Allocates the parameters of a bucket as the model creates them."""
        sizes = [_bytes_of_pieces(each, stored_dtype(self.job, each)) for each in bucket.parameters]
        return allocate(allocator, (size for listed in sizes for size in listed))

    def _shard(self, allocator: CachingAllocator, bucket: ShardedBucket) -> None:
        """Allocates the parameters of a bucket, from a copy of all of them if they are sharded, and the master weights."""
        strategy = fsdp_of(self.job).strategy
        whole = dtype_bytes(bucket.dtype, bucket.numel)
        sharded = strategy == "optim_grads_params"
        ranks = shard_ranks(self.job, bucket.group) if sharded else 1
        if strategy != "no_shard":
            allocate(allocator, [dtype_bytes(bucket.dtype, bucket.numel // ranks)])
        copy = allocate(allocator, [whole] if sharded else [])
        allocate(allocator, [FP32 * owned_numel(self.job, bucket)])
        free(allocator, copy)


class TorchFsdp(ModelStates):
    """The states with PyTorch's FSDP2 (`states.fsdp_torch`)."""

    def create(self, allocator: CachingAllocator) -> None:
        """Shards the model unit by unit, then copies each shard to fp32."""
        units = self._units()
        unsharded = [allocate(allocator, (size for each in unit for size in _bytes_of_pieces(each, each.dtype))) for unit in units]
        for unit, addresses in zip(units, unsharded, strict=True):
            allocate(allocator, self._shards(unit))
            free(allocator, addresses)
        if self._half:
            for parameter in (each for unit in units for each in unit for _ in range(each.pieces)):
                copy_to_fp32(allocator, int(DTYPE_BYTES[parameter.dtype]), [torch_shard_numel(self.job, parameter)])
        # the gradients of a unit are one tensor, which its first backward creates, and adds others to later
        shards = [sum(self._shards(unit)) for unit in units]
        for size in shards:
            allocate(allocator, [size], stream=REDUCE_STREAM)
        for size in reversed(shards):
            free(allocator, allocate(allocator, [size], stream=REDUCE_STREAM))
        self._gather_each(allocator, [self.job.parallel.data_with_context * size for size in shards])

    def update(self, allocator: CachingAllocator, *, first: bool) -> None:
        sizes = [FP32 * torch_shard_numel(self.job, each) for unit in self._units() for each in unit for _ in range(each.pieces)]
        copies = allocate(allocator, sizes if self._half else ())
        if first:
            allocate_permanent(allocator, (size for size in sizes for _ in self.job.optimizer.state_dtypes))
        free(allocator, copies)

    def _gather_each(self, allocator: CachingAllocator, sizes: Sequence[int]) -> None:
        """The all-gather buffers of the units in turn. Each is freed when the next unit has been gathered."""
        previous: list[int] = []
        for size in (*sizes, *reversed(sizes)):
            gathered = allocate(allocator, [size], stream=GATHER_STREAM)
            free(allocator, previous)
            previous = gathered
        free(allocator, previous)

    @property
    def _half(self) -> bool:
        return self.job.precision.parameters != "fp32"

    def _shards(self, unit: Sequence[Parameter]) -> list[int]:
        """Bytes of the shard of each parameter."""
        return [dtype_bytes(each.dtype, torch_shard_numel(self.job, each)) for each in unit for _ in range(each.pieces)]

    def _units(self) -> list[list[Parameter]]:
        """The parameters of each unit; those outside units are the last list."""
        units: list[list[Parameter]] = []
        root: list[Parameter] = []
        for tree in self.stage.trees:
            for piece in unit_pieces(self.job, tree):
                listed = list(creation_order(piece))
                if is_torch_unit(self.job, piece):
                    units.append(listed)
                else:
                    root += listed
        return [*units, root]


def _bytes_of_pieces(parameter: Parameter, dtype: str) -> list[int]:
    return [dtype_bytes(dtype, parameter.numel // parameter.pieces)] * parameter.pieces
