"""The allocator requests of model states: parameters, gradients, optimizer states, and the temporary tensors of optimizer steps.

Sources: core/distributed/param_and_grad_buffer.py and core/optimizer (0.16.1). `states` has the same bytes, with the sources of
each optimizer. Here they are requested one after the other. Requests of at most `SMALL_SIZE` are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from analyzer.layout.data_parallel import reduction_size
from analyzer.memory.allocator.caching_allocator import SMALL_SIZE, CachingAllocator
from analyzer.memory.allocator.replicas import Member
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module, Tensor
from analyzer.specs import TrainingJob
from analyzer.states.buffers.gradient_buffers import Buffer, created_parameters, shard_numel, shard_pieces
from analyzer.states.buffers.parameter_order import parameter_runs
from analyzer.states.bytes_per_parameter import FP32, adam_stores_master_weights, bytes_per_parameter
from analyzer.units import DTYPE_BYTES, dtype_bytes

if TYPE_CHECKING:
    from analyzer.states.buffers.matrices import OptimizerParameter
    from analyzer.states.cpu_offload import Piece

StageBuffers = Sequence[Sequence[Buffer]]


class ModelStates:
    """The states of a rank whose optimizer updates all parameters in place: Adam or SGD on the GPU."""

    def __init__(self, job: TrainingJob, stage: StageModel, buffers: StageBuffers, member: Member) -> None:
        self.job = job
        self.stage = stage
        self.buffers = buffers
        self.member = member

    def create(self, allocator: CachingAllocator) -> None:
        """Allocates weights, gradient buffers and fp32 master weights.

        The distributed optimizer moves the weights of all chunks into buffers, one after the other.
        """
        element = int(DTYPE_BYTES[self.job.precision.parameters])
        distributed = self.job.optimizer.distributed
        if not distributed:
            parameters = _separate_parameters(self.stage)
            allocate_permanent(allocator, [numel * (4 if in_fp32 else element) for numel, in_fp32 in parameters])
        separate = [self._separate(allocator, chunk) if distributed else {} for chunk in range(len(self.buffers))]
        for buffers, of_chunk in zip(self.buffers, separate, strict=True):
            for index, buffer in enumerate(buffers):
                if distributed:
                    allocate_permanent(allocator, [buffer.parameter_bytes])
                allocate_permanent(allocator, [dtype_bytes(buffer.gradient_dtype, buffer.numel)])
                free(allocator, of_chunk.pop(index, ()))
            free(allocator, (address for addresses in of_chunk.values() for address in addresses))
        self._create_master_weights(allocator)

    def _separate(self, allocator: CachingAllocator, chunk: int) -> dict[int, list[int]]:
        """Allocates the weights of a chunk. By the index of the buffer that they move into, the addresses of the large ones."""
        found: dict[int, list[int]] = {}
        dtypes = {index: "fp4" if each.in_4_bit else each.parameter_dtype for index, each in enumerate(self.buffers[chunk])}
        for index, numel, count in created_parameters(self.job, self.stage.trees[chunk]):
            size = dtype_bytes(dtypes.get(index, self.job.precision.parameters), numel)
            found.setdefault(index, []).extend(allocate(allocator, [size] * count))
        return found

    def update(self, allocator: CachingAllocator, *, first: bool) -> None:
        """The optimizer step. The first one creates the moments."""
        if first:
            moments = bytes_per_parameter(self.job).moments
            allocate_permanent(allocator, (int(each * numel) for numel in self._owned() for each in moments))

    def _create_master_weights(self, allocator: CachingAllocator) -> None:
        element = int(DTYPE_BYTES[self.job.precision.parameters])
        if self.job.precision.parameters == "fp32" or adam_stores_master_weights(self.job):
            return
        copy_to_fp32(allocator, element, self._owned(copied=True))

    def _owned(self, *, copied: bool = False) -> list[int]:
        """Number of elements of each parameter, or part of one, whose optimizer states are on the rank.

        `copied`: without those that stay in fp32, which are their own master weights.
        """
        if not self.job.optimizer.distributed:
            return [numel for numel, in_fp32 in _separate_parameters(self.stage) if not (copied and in_fp32)]
        index = dict(zip(("dp_cp", "edp"), self.member, strict=True))
        return [
            numel
            for chunk in self.buffers
            for buffer in chunk
            if not (copied and buffer.parameter_dtype == "fp32")
            for numel in shard_pieces(buffer, reduction_size(self.job.parallel, buffer.group), member=index[buffer.group])
        ]


class Temporary:
    """Temporary tensors that replace each other."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self._held: list[tuple[Tensor, list[int]]] = []

    def become(self, tensors: Iterable[Tensor]) -> None:
        """Frees the tensors that are not among these, and allocates those of these that do not exist."""
        left = list(tensors)
        kept = []
        for tensor, addresses in self._held:
            if tensor in left:
                left.remove(tensor)
                kept.append((tensor, addresses))
            else:
                for address in addresses:
                    self._allocator.free(address)
        self._held = kept
        for tensor in left:
            size = tensor.bytes // tensor.pieces
            count = tensor.pieces if size > SMALL_SIZE else 0
            self._held.append((tensor, [self._allocator.malloc(size) for _ in range(count)]))


def copy_to_fp32(allocator: CachingAllocator, element: int, numels: Iterable[int]) -> None:
    """Copies each parameter, converts the copy to fp32, and frees it. The fp32 tensors stay allocated."""
    for numel, equal in groupby(numels):
        count = sum(1 for _ in equal)
        if element * numel > SMALL_SIZE:
            allocator.malloc_copies(element * numel, FP32 * numel, count)
        elif FP32 * numel > SMALL_SIZE:
            allocator.malloc_permanent(FP32 * numel, count)


def allocate(allocator: CachingAllocator, sizes: Iterable[int], *, stream: int = 0) -> list[int]:
    """Allocates the large ones of these sizes and returns their addresses."""
    found: list[int] = []
    for size, equal in groupby(sizes):
        if size > SMALL_SIZE:
            found += allocator.malloc_each(size, sum(1 for _ in equal), stream=stream)
    return found


def free(allocator: CachingAllocator, addresses: Iterable[int]) -> None:
    """Frees addresses."""
    allocator.free_all(addresses)


def allocate_permanent(allocator: CachingAllocator, sizes: Iterable[int]) -> None:
    """Allocates memory that is never freed."""
    for size, equal in groupby(sizes):
        if size > SMALL_SIZE:
            allocator.malloc_permanent(size, sum(1 for _ in equal))


def _separate_parameters(stage: StageModel) -> list[tuple[int, bool]]:
    """Number of elements of each parameter of a rank, and whether it is in fp32; experts are listed separately."""
    return [each for tree in stage.trees for each in tree.derived(_parameters_of_tree)]


def _parameters_of_tree(tree: Module) -> tuple[tuple[int, bool], ...]:
    found: list[tuple[int, bool]] = []
    for run in parameter_runs(tree):
        trained = (each for each in run.parameters if not each.frozen)
        found += [(each.numel // each.pieces, each.dtype == "fp32") for each in trained for _ in range(each.pieces)] * run.times
    return tuple(found)


class OneByOne(ModelStates):
    """The states with an optimizer that updates one parameter after another: Lion (`states.one_by_one`)."""

    def _parameters(self) -> Sequence[OptimizerParameter]:
        """The updated parameters in the order of the update."""
        from analyzer.states.buffers.matrices import parameters_in_creation_order

        return sorted(parameters_in_creation_order(self.job, self.stage), key=lambda weight: len(weight.shape) == 1)

    def _create_master_weights(self, allocator: CachingAllocator) -> None:
        halves = (weight.numel for weight in self._parameters() if weight.dtype != "fp32")
        copy_to_fp32(allocator, int(DTYPE_BYTES[self.job.precision.parameters]), halves)

    def update(self, allocator: CachingAllocator, *, first: bool) -> None:
        copies = self._copied_gradients(allocator)
        self._update_each(allocator, self._parameters(), len(self.job.optimizer.state_dtypes) if first else 0)
        free(allocator, copies)

    def _copied_gradients(self, allocator: CachingAllocator) -> list[int]:
        """The fp32 copies of 16-bit gradients, until the next forward."""
        if self.job.precision.gradients == "fp32":
            return []
        return allocate(allocator, (4 * weight.numel for weight in self._parameters() if weight.dtype != "fp32"))

    def _update_each(self, allocator: CachingAllocator, parameters: Sequence[OptimizerParameter], states: int) -> None:
        """Creates this many states for each parameter. The variable of the update references the previous one until then."""
        allocate_permanent(allocator, (4 * weight.numel for weight in parameters for _ in range(states)))
        temporary = Temporary(allocator)
        held: tuple[Tensor, ...] = ()
        for weight in parameters:
            update = (Tensor(name="update", shape=weight.shape, dtype="fp32"),)
            temporary.become((*held, *update))
            held = update
        temporary.become(())


class Muon(OneByOne):
    """The states of a rank whose matrices are updated by Muon, and all other parameters by another optimizer (`states.muon`)."""

    def _parameters(self) -> Sequence[OptimizerParameter]:
        from analyzer.states.buffers.matrices import weights
        from analyzer.states.muon import muon_of

        if not (muon_of(self.job).layer_wise and self.job.parallel.data_with_context > 1):
            return tuple(weights(self.job, self.stage))
        return [weight for owned, index in zip(self._owners(), self.member, strict=True) for weight in owned[index % len(owned)]]

    def _create_master_weights(self, allocator: CachingAllocator) -> None:
        super()._create_master_weights(allocator)
        copy_to_fp32(allocator, int(DTYPE_BYTES[self.job.precision.parameters]), self._rest())

    def _rest(self) -> list[int]:
        """Elements of this rank's part of each buffer that a distributed Adam updates (`states.layer_wise`)."""
        from analyzer.states.muon import muon_of

        if not (muon_of(self.job).aligned and self.job.parallel.data_with_context > 1):
            return []
        from analyzer.states.buffers.layer_wise import rest_buffers

        listed = rest_buffers(self.job, self.stage)
        return [shard_numel(buffer, reduction_size(self.job.parallel, buffer.group)) for buffer in listed]

    def _owners(self) -> Sequence[Sequence[Sequence[OptimizerParameter]]]:
        """The parameters of each replica, and of each replica of the experts."""
        from analyzer.states.layer_wise import stage_owners

        return stage_owners(self.job, self.stage)

    def update(self, allocator: CachingAllocator, *, first: bool) -> None:
        from analyzer.specs import OPTIMIZERS
        from analyzer.states.muon import muon_of

        muon, parameters = muon_of(self.job), self._parameters()
        copies = self._copied_gradients(allocator)
        matrices = [weight for weight in parameters if weight.orthogonalized]
        for group in (matrices,) if muon.layer_wise else _dense_and_experts(matrices):
            self._orthogonalize(allocator, group, first=first)
        scalar = OPTIMIZERS[muon.scalar_optimizer]
        others = [weight for weight in parameters if not weight.orthogonalized]
        states = len(scalar.states(self.job.optimizer)) if first else 0
        if scalar.updates == "one by one":
            self._update_each(allocator, others, states)
        else:
            allocate_permanent(allocator, (4 * weight.numel for weight in others for _ in range(states)))
        if first:
            allocate_permanent(allocator, (4 * numel for numel in self._rest() for _ in range(2)))
        if muon.layer_wise and self.job.parallel.data_with_context > 1 and not muon.aligned:
            self._gather(allocator)
        free(allocator, copies)

    def _orthogonalize(self, allocator: CachingAllocator, matrices: Sequence[OptimizerParameter], *, first: bool) -> None:
        """Creates the momentum of all matrices, and updates one after the other."""
        from analyzer.states.muon import instants_of_update

        if first:
            allocate_permanent(allocator, (4 * weight.numel for weight in matrices))
        temporary = Temporary(allocator)
        held: tuple[Tensor, ...] = ()
        for weight in matrices:
            for tensors in instants_of_update(self.job, weight):
                temporary.become((*held, *tensors))
            held = (Tensor(name="update of the previous matrix", shape=weight.shape, dtype="fp32"),)
        temporary.become(())

    def _gather(self, allocator: CachingAllocator) -> None:
        """Receives the parameters of all replicas, beside a flat copy of those of this one (`states.layer_wise`)."""
        for owned, index in zip(self._owners(), self.member, strict=True):
            sizes = [int(DTYPE_BYTES[self.job.precision.parameters]) * sum(weight.numel for weight in each) for each in owned]
            if len(sizes) > 1 and any(sizes):
                own = index % len(sizes)
                stacked = [sum(sizes)] if len(set(sizes)) == 1 else []
                free(allocator, allocate(allocator, [*stacked, sizes[own] if len(owned[own]) > 1 else 0, *sizes]))


def _dense_and_experts(matrices: Sequence[OptimizerParameter]) -> tuple[list[OptimizerParameter], ...]:
    return tuple([weight for weight in matrices if weight.expert is expert] for expert in (False, True))


class Offloaded(ModelStates):
    """The states of a rank with optimizer states on the host (`states.cpu_offload`). Unsharded fp32 copies are a workspace."""

    def _create_master_weights(self, allocator: CachingAllocator) -> None:
        element = int(DTYPE_BYTES[self.job.precision.parameters])
        copy_to_fp32(allocator, element, (piece.numel for piece in self._pieces() if piece.dtype != "fp32"))

    def update(self, allocator: CachingAllocator, *, first: bool) -> None:
        if first:
            count = len(self.job.optimizer.state_dtypes)
            pieces = [4 * piece.numel for piece in self._pieces()]
            allocate_permanent(allocator, (size for size in pieces for _ in range(count)))
            if self.job.precision.gradients != "fp32":
                allocate_permanent(allocator, (4 * piece.numel for piece in self._pieces() if piece.dtype != "fp32"))

    def _pieces(self) -> Sequence[Piece]:
        """Parts of parameters whose optimizer states are on the GPU."""
        from analyzer.states.cpu_offload import pieces_on_gpu

        return pieces_on_gpu(self.job, self.stage, self.buffers, self.member)
