"""PyTorch's FSDP2 as a pass over the tree: what is unsharded while a module runs is added to its workspaces.

Sources: torch/distributed/fsdp/_fully_shard/{_fsdp_state,_fsdp_param_group,_fsdp_collectives}.py (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Parameter, Tensor, total_bytes
from analyzer.passes.fsdp_gradients import BEYOND, beyond_freed
from analyzer.passes.piece_workspaces import Workspaces, with_workspaces
from analyzer.specs import TrainingJob
from analyzer.states.buffers.fsdp import fsdp_of
from analyzer.states.buffers.fsdp2 import TorchUnit, is_piece, is_torch_unit, torch_unit, unit_pieces
from analyzer.states.buffers.fsdp_gathering import GRADIENTS, PARAMETERS
from analyzer.states.buffers.parameter_order import creation_order

ALL_GATHER: Final = "all-gather buffer"
REDUCE_SCATTER: Final = "reduce-scatter buffer"


def with_unsharded_units(job: TrainingJob, tree: Module) -> Module:
    """The tree with the unsharded tensors of FSDP2 in the workspaces of its units.

    In forward the all-gather buffer and the parameters copied out of it stay allocated until the next unit is gathered. In
    backward the preceding unit is prefetched, and the reduce-scatter buffer of the following unit is still allocated. Parameters
    outside units belong to the root: they are gathered before the forward, and reduced after the backward.

    The forward that a checkpoint runs again does not free the parameters of its units (`FSDPParamGroup.post_forward`, `is_bw`),
    and frees their all-gather buffers (`FSDPState._post_forward`: each unit is the root of that forward). The backward of the unit
    after the checkpoint has prefetched its last unit.

    After the backward of a unit its unsharded parameters are freed before the reduce-scatter buffer of the same size is allocated
    (`FSDPParamGroup.post_backward`), and its temporary tensors are already free.
    """
    chunk = _Chunk(job, tree)
    changed = with_workspaces(tree, list(chunk.workspaces()), lambda module: is_piece(job, module))
    beginning = with_workspaces(changed, list(_beginnings(chunk)), lambda module: not module.children)
    return _keeping_gradients(job, beginning, inside=False)


@dataclass(frozen=True)
class _Chunk:
    """The units of a chunk, and parameters outside them."""

    job: TrainingJob
    tree: Module

    @cached_property
    def pieces(self) -> tuple[Module, ...]:
        """Units, and modules outside them."""
        return tuple(unit_pieces(self.job, self.tree))

    @cached_property
    def outside(self) -> tuple[tuple[Parameter, ...], ...]:
        """For each piece, its parameters that belong to the root."""
        return tuple(() if is_torch_unit(self.job, piece) else tuple(creation_order(piece)) for piece in self.pieces)

    @cached_property
    def units(self) -> tuple[TorchUnit, ...]:
        """The units in the order of execution. The embedding and the output layer are listed again where MTP uses them again."""
        made = [replace(torch_unit(self.job, each.name, list(creation_order(each))), kind=each.kind) for each in self.unit_pieces]
        with_parameters = {unit.kind: unit for unit in made if unit.numel}
        return tuple(unit if unit.numel else with_parameters.get(unit.kind, unit) for unit in made)

    @cached_property
    def unit_pieces(self) -> tuple[Module, ...]:
        """The modules of the units."""
        return tuple(piece for piece in self.pieces if is_torch_unit(self.job, piece))

    @cached_property
    def last_embedding(self) -> int:
        """The number of the unit of the last embedding."""
        return max((number for number, unit in enumerate(self.units) if unit.kind == ModuleKind.EMBEDDING), default=0)

    def gathered_last(self, passed: int) -> tuple[TorchUnit, ...]:
        """The unit of the last all-gather in the forward of the first `passed` units; a unit that is unsharded needs none."""
        return (_once(self.units[:passed]) if self.unsharded else self.units[:passed])[-1:]

    def prefetched_by(self, number: int) -> tuple[TorchUnit, ...]:
        """The unit that is gathered when the backward of a unit begins: by default the one that ran before it.

        With recomputation Megatron names it: the FSDP module before this one. A rotary embedding is such a module, without
        parameters; with multi-latent attention each layer has one (`TorchFullyShardedDataParallel.__init__`).
        """
        previous = self.units[max(0, number - 1) : number]
        if self.job.recompute.granularity is None or number == self.last_embedding:
            return previous
        if self.job.model.mla is not None:
            return ()
        layers = [unit for unit in self.units[:number] if unit.kind != ModuleKind.EMBEDDING]
        rotates = self.job.model.position_embedding == "rope"
        return tuple(layers[-1:]) if layers or rotates else previous

    def left_by_embedding(self, passed: int) -> tuple[Tensor, ...]:
        """What the embedding of MTP leaves unsharded in the backward of the first `passed` units, except its gradients.

        Its input needs no gradient, so no hook frees its parameters before the backward has ended
        (`FSDPParamGroup._register_post_backward_hook`).
        """
        if self.unsharded or not self.last_embedding or passed > self.last_embedding:
            return ()
        return _copied_out(self.units[self.last_embedding : self.last_embedding + 1])

    @cached_property
    def unsharded(self) -> bool:
        """Whether units stay unsharded from forward to backward."""
        return not fsdp_of(self.job).reshard_after_forward

    def workspaces(self) -> Iterator[Workspaces]:
        """The workspaces of each piece."""
        root = _each_parameter(PARAMETERS, (parameter for listed in self.outside for parameter in listed))
        checkpoints = _checkpoints_of_pieces(self.job, self.tree)
        passed = 0
        for index, piece in enumerate(self.pieces):
            of_root = _each_parameter(GRADIENTS, (each for listed in self.outside[index + 1 :] for each in listed))
            left = self.left_by_embedding(passed + is_torch_unit(self.job, piece))
            earlier = (*root, *_copied_out(_once(self.units[:passed]))) if self.unsharded else root
            if is_torch_unit(self.job, piece):
                yield self._of_unit(piece, passed, checkpoints[index], root, (*of_root, *left))
                passed += 1
            else:
                buffer = _each(ALL_GATHER, self.gathered_last(passed))
                again = self._of_recomputation(passed, checkpoints[index], root, (*of_root, *left))
                yield Workspaces((*earlier, *buffer), (*earlier, *self.between(passed), *of_root, *left), again)

    def between(self, passed: int) -> tuple[Tensor, ...]:
        """Buffers in the backward of a piece of the root after the first `passed` units: those of the unit that ran before it."""
        if passed == len(self.units):
            return ()
        prefetched = () if self.unsharded else self.prefetched_by(passed)
        return (*_each(ALL_GATHER, prefetched), *self.reducing(passed))

    def reducing(self, passed: int) -> tuple[Tensor, ...]:
        """The reduce-scatter buffer of the unit whose backward is the last one before that of the first `passed` units."""
        return _each(REDUCE_SCATTER, [unit for unit in self.units[passed:] if unit.kind != ModuleKind.EMBEDDING][:1])

    def _of_unit(
        self, piece: Module, number: int, checkpoint: range | None, root: tuple[Tensor, ...], kept: tuple[Tensor, ...]
    ) -> Workspaces:
        """The workspaces of a unit.

        `checkpoint`: the units under the same checkpoint. `kept`: what the root and the embedding of MTP keep in backward.
        """
        together = checkpoint or range(number, number + 1)
        own = self.units[number : number + 1]
        in_forward = _once(self.units[: number + 1]) if self.unsharded else own
        gathered = _once(self.units[0 if self.unsharded else together.start : number + 1])
        prefetched = self.prefetched_by(number) if number == together.start and not self.unsharded else ()
        reducing = self.reducing(number + 1)
        if not piece.children:
            reducing = (*beyond_freed((_reduced(self.job, own[0]),), piece), *reducing)
        again = self._of_recomputation(number + 1, checkpoint, root, kept)
        if again is not None and not self.unsharded:
            again = (*again, *_each(ALL_GATHER, own))
        return Workspaces(
            forward=(*root, *_copied_out(in_forward), *_each(ALL_GATHER, self.gathered_last(number + 1))),
            backward=(*root, *_copied_out(gathered), *_each(ALL_GATHER, prefetched), *reducing, *kept),
            recompute=again,
        )

    def _of_recomputation(
        self, passed: int, checkpoint: range | None, root: tuple[Tensor, ...], kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        """What is unsharded when a checkpoint runs the forward again, after the gathering of the first `passed` units."""
        if checkpoint is None:
            return None
        gathered = _once(self.units[: checkpoint.stop] if self.unsharded else self.units[checkpoint.start : passed])
        prefetches = not self.unsharded and self.prefetched_by(checkpoint.stop)
        last = self.units[max(passed, checkpoint.stop - 1) : checkpoint.stop] if prefetches else ()
        after = self.units[checkpoint.stop : checkpoint.stop + 1]
        return (*root, *_copied_out(gathered), *_each(ALL_GATHER, last), *_each(REDUCE_SCATTER, after), *kept)


def _beginnings(chunk: _Chunk) -> Iterator[Workspaces]:
    """For each module without children, what is allocated when its layer copies its parameters out of the all-gather buffer.

    The buffer of the preceding unit is freed after that. It is larger than what the first module of a layer allocates if there are
    few tokens.
    """
    number = 0
    for piece in chunk.pieces:
        first, *others = (module for _, module in piece.walk() if not module.children)
        before = chunk.gathered_last(number) if is_torch_unit(chunk.job, piece) else ()
        number += is_torch_unit(chunk.job, piece)
        yield Workspaces(_beyond_first(first, _each(ALL_GATHER, before)), (), recompute=())
        yield from (Workspaces((), ()) for _ in others)


def _beyond_first(module: Module, buffers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The bytes of `buffers` beyond what the forward of a module allocates. Earlier modules have allocated its inputs."""
    saved = tuple(tensor for tensor in module.saved if not tensor.made_in)
    extra = total_bytes(buffers) - total_bytes((*saved, *module.forward_workspace, *module.forward_held))
    name = "all-gather buffer of the preceding unit, beyond later tensors"
    return (Tensor(name=name, shape=(extra,), dtype="uint8", formula=BEYOND),) if extra > 0 else ()


def _checkpoints_of_pieces(job: TrainingJob, tree: Module) -> tuple[range | None, ...]:
    """For each piece, the numbers of the units under the same checkpoint; None without one."""
    found: list[range | None] = []
    units = 0

    def visit(module: Module) -> None:
        nonlocal units
        if is_piece(job, module):
            found.append(None)
            units += is_torch_unit(job, module)
            return
        first, before = len(found), units
        for child in module.children:
            visit(child)
        if module.recomputed:
            found[first:] = [range(before, units)] * (len(found) - first)

    visit(tree)
    return tuple(found)


def _once(units: Sequence[TorchUnit]) -> tuple[TorchUnit, ...]:
    """The units without those that are listed again."""
    return tuple(unit for number, unit in enumerate(units) if unit.kind == ModuleKind.LAYER or unit not in units[:number])


def _each_parameter(name: str, listed: Iterable[Parameter]) -> tuple[Tensor, ...]:
    """One unsharded tensor for each parameter."""
    return tuple(Tensor(name=name, shape=parameter.shape, dtype=parameter.dtype) for parameter in listed)


def _copied_out(units: Sequence[TorchUnit]) -> tuple[Tensor, ...]:
    """The unsharded parameters of units, one tensor each."""
    return tuple(
        Tensor(name=PARAMETERS, shape=(numel,), dtype=unit.dtype, formula=f"parameter of {unit.name}")
        for unit in units
        for numel in unit.parameters
    )


def _each(name: str, units: Sequence[TorchUnit]) -> tuple[Tensor, ...]:
    """One unsharded tensor for each unit."""
    return tuple(Tensor(name=name, shape=(unit.numel,), dtype=unit.dtype, formula=f"parameters of {unit.name}") for unit in units)


def _keeping_gradients(job: TrainingJob, module: Module, *, inside: bool) -> Module:
    """The module in which each part of a unit, or of a layer of the root, leaves its gradients allocated until its backward ends.

    From then on the gradients of the root are in the workspaces of the pieces that ran before.
    """
    if not module.children:
        kept = tuple(
            Tensor(name=GRADIENTS, shape=(parameter.numel,), dtype=parameter.dtype) for parameter in module.parameters if inside
        )
        return replace(module, reloads=(*module.reloads, *kept)) if kept else module
    whole = is_piece(job, module)
    children = tuple(_keeping_gradients(job, child, inside=inside or whole) for child in module.children)
    return replace(module, children=children, frees_reloads=whole)


def _reduced(job: TrainingJob, unit: TorchUnit) -> Tensor:
    """The shard of the reduced gradients of a unit (`foreach_reduce`)."""
    return Tensor(name="reduced gradients", shape=(unit.numel // job.parallel.data_with_context,), dtype=unit.dtype)
