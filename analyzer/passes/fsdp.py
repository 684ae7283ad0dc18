"""FSDP as a pass over the tree: tensors that are unsharded while a module runs are added to its workspace.

Sources: megatron_fsdp.py and param_and_grad_buffer.py of megatron/core/distributed/fsdp (0.16.1);
torch/distributed/fsdp/_fully_shard/{_fsdp_param_group,_fsdp_collectives}.py (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Final

from analyzer.buffers.fsdp import covers_units, fsdp_of, is_segment, sharded_buckets
from analyzer.buffers.fsdp2 import TorchUnit, is_torch_unit, torch_unit, unit_pieces
from analyzer.buffers.fsdp_gathering import GRADIENTS, PARAMETERS, ChunkPasses, Gathering, Ids, chunk_passes
from analyzer.buffers.parameter_order import creation_order
from analyzer.modules.tree import Module, Parameter, Tensor
from analyzer.passes.fsdp_gradients import accumulates_in_gemm, beyond_freed, with_gradients_from_first
from analyzer.specs import TrainingJob

ALL_GATHER: Final = "all-gather buffer"
REDUCE_SCATTER: Final = "reduce-scatter buffer"

Workspaces = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Forward and backward workspace of one module."""


def fsdp_trees(job: TrainingJob, tree: Module) -> tuple[Module, Module | None]:
    """The tree with its unsharded parameters and gradients, and the tree of the first forward of the job if it differs."""
    if fsdp_of(job).implementation == "torch":
        return with_unsharded_units(job, tree), None
    return with_unsharded_buckets(job, tree), with_unsharded_buckets(job, tree, first=True)


def with_unsharded_buckets(job: TrainingJob, tree: Module, *, first: bool = False) -> Module:
    """Megatron-FSDP: the unsharded buckets of each segment. `first`: no backward has run yet."""
    gathering = Gathering(job, tree, sharded_buckets(job, tree))
    passes = chunk_passes(job, tree, gathering.buckets, first=first)
    workspaces: list[Workspaces] = []
    started_in: list[Ids] = []
    for index, (piece, alive) in enumerate(zip(gathering.all_segments, passes.gradients, strict=True)):
        forward = gathering.tensors(passes.forward[index], PARAMETERS)
        if len(gathering.parts[index]) > 1:
            own_of_layers = _kept_until_checkpoint_ends(gathering, passes, index)
            started_in += own_of_layers
            whole, *parts = _by_layer(gathering, passes, index, without=frozenset[int]().union(*own_of_layers))
            workspaces += [(forward, whole), *(((), part) for part in parts)]
            continue
        started = alive & gathering.started(index) if len(piece.modules) == 1 else frozenset[int]()
        if piece.units:
            started_in += [started] * len(piece.modules)
            gradients = gathering.tensors(alive - started, GRADIENTS)
        elif not started or accumulates_in_gemm(job, piece.modules[0]):
            gradients = gathering.tensors(alive, GRADIENTS)
        else:
            own = gathering.tensors(started, GRADIENTS)
            gradients = (*gathering.tensors(alive - started, GRADIENTS), *beyond_freed(own, piece.modules[0]))
        workspaces.append((forward, (*gathering.tensors(passes.backward[index], PARAMETERS), *gradients)))
    has_units = fsdp_of(job).strategy == "optim_grads_params"
    changed = _with_workspaces(tree, workspaces, is_segment, lambda module: has_units and covers_units(module))
    return with_gradients_from_first(gathering, changed, started_in)


def _kept_until_checkpoint_ends(gathering: Gathering, passes: ChunkPasses, index: int) -> tuple[Ids, ...]:
    """The buckets whose gradients start in each layer of a checkpoint, if none is freed in the backward of the checkpoint."""
    own, at_end = gathering.parts[index], passes.gradient_parts[index][0]
    return own if all(ids <= at_end for ids in own) else (frozenset(),) * len(own)


def _by_layer(gathering: Gathering, passes: ChunkPasses, index: int, *, without: Ids) -> Iterator[tuple[Tensor, ...]]:
    """Backward workspaces of a checkpoint around layers: what is unsharded throughout, and what is added in each layer.

    Layers free their parameters one after another, and allocate gradients one after another. `without`: gradients that the layers
    count themselves.
    """
    gathered = passes.backward_parts[index]
    gradients = tuple(started - without for started in passes.gradient_parts[index])
    parameters_throughout, gradients_throughout = frozenset.intersection(*gathered), frozenset.intersection(*gradients)
    yield gathering.tensors(parameters_throughout, PARAMETERS) + gathering.tensors(gradients_throughout, GRADIENTS)
    for of_layer, started in zip(gathered, gradients, strict=True):
        parameters = gathering.tensors(of_layer - parameters_throughout, PARAMETERS)
        yield parameters + gathering.tensors(started - gradients_throughout, GRADIENTS)


def with_unsharded_units(job: TrainingJob, tree: Module) -> Module:
    """The tree with the unsharded tensors of FSDP2 in the workspaces of its units.

    In forward the all-gather buffer and the parameters copied out of it stay allocated until the next unit is gathered. In
    backward the preceding unit is prefetched, and the reduce-scatter buffer of the following unit is still allocated. Parameters
    outside units belong to the root: they are gathered before the forward, and reduced after the backward.

    After the backward of a unit its unsharded parameters are freed before the reduce-scatter buffer of the same size is allocated
    (`FSDPParamGroup.post_backward`), and its temporary tensors are already free.
    """
    pieces = list(unit_pieces(tree))
    outside = [() if is_torch_unit(piece) else tuple(creation_order(piece)) for piece in pieces]
    root = _unsharded(parameter for listed in outside for parameter in listed)
    units = [torch_unit(job, piece.name, list(creation_order(piece))) for piece in pieces if is_torch_unit(piece)]
    unsharded = not fsdp_of(job).reshard_after_forward
    passed = 0
    workspaces: list[Workspaces] = []
    for index, piece in enumerate(pieces):
        before = units[passed - 1] if passed else None
        earlier = (*root, *(_tensor(PARAMETERS, other) for other in units[:passed])) if unsharded else root
        of_root = _unsharded((parameter for listed in outside[index + 1 :] for parameter in listed), name=GRADIENTS)
        buffer = () if before is None else (_tensor(ALL_GATHER, before),)
        if not is_torch_unit(piece):
            workspaces.append(((*earlier, *buffer), (*earlier, *of_root)))
            continue
        unit, following = units[passed], units[passed + 1 : passed + 2]
        forward = (*earlier, _tensor(PARAMETERS, unit), _tensor(ALL_GATHER, unit))
        prefetched = earlier if unsharded else (*root, *buffer)
        reducing = tuple(_tensor(REDUCE_SCATTER, other) for other in following)
        if not piece.children:
            reducing = (*beyond_freed((_reduced(job, unit),), piece), *reducing)
        workspaces.append((forward, (*prefetched, _tensor(PARAMETERS, unit), *reducing, *of_root)))
        passed += 1
    changed = _with_workspaces(tree, workspaces, lambda module: is_torch_unit(module) or not module.children)
    return _keeping_gradients(changed, inside=False)


def _unsharded(listed: Iterable[Parameter], *, name: str = PARAMETERS) -> tuple[Tensor, ...]:
    """One unsharded tensor for each parameter."""
    return tuple(Tensor(name=name, shape=parameter.shape, dtype=parameter.dtype) for parameter in listed)


def _keeping_gradients(module: Module, *, inside: bool) -> Module:
    """The module in which each part of a unit leaves its gradients allocated until the backward of the unit ends."""
    if not module.children:
        kept = tuple(
            Tensor(name=GRADIENTS, shape=(parameter.numel,), dtype=parameter.dtype) for parameter in module.parameters if inside
        )
        return replace(module, reloads=(*module.reloads, *kept)) if kept else module
    inside = inside or is_torch_unit(module)
    return replace(module, children=tuple(_keeping_gradients(child, inside=inside) for child in module.children))


def _with_workspaces(
    tree: Module,
    workspaces: Sequence[Workspaces],
    is_piece: Callable[[Module], bool],
    has_pieces: Callable[[Module], bool] = lambda _: False,
) -> Module:
    """The tree with workspaces added to its pieces, in the order of execution; `has_pieces`: pieces that contain other pieces.

    Layers that are one object and get equal workspaces stay one object, so that they are analysed once.
    """
    numbers: dict[Workspaces, int] = {}
    listed = tuple(numbers.setdefault(each, len(numbers)) for each in workspaces)
    distinct = tuple(numbers)
    pieces: dict[int, int] = {}
    done: dict[tuple[int, tuple[int, ...]], Module] = {}

    def count(module: Module) -> int:
        if id(module) not in pieces:
            inside = not is_piece(module) or has_pieces(module)
            pieces[id(module)] = int(is_piece(module)) + (sum(map(count, module.children)) if inside else 0)
        return pieces[id(module)]

    def changed(module: Module, own: tuple[int, ...]) -> Module:
        forward, backward = distinct[own[0]] if is_piece(module) else ((), ())
        children, position = module.children, int(is_piece(module))
        if position < len(own):
            ends = tuple(accumulate(map(count, children), initial=position))
            children = tuple(visit(child, own[start:end]) for child, (start, end) in zip(children, pairwise(ends), strict=True))
        return replace(
            module,
            forward_workspace=(*module.forward_workspace, *forward),
            backward_workspace=(*module.backward_workspace, *backward),
            children=children,
        )

    def visit(module: Module, own: tuple[int, ...]) -> Module:
        if not own:
            return module
        key = (id(module), own)
        if key not in done:
            done[key] = changed(module, own)
        return done[key]

    return visit(tree, listed)


def _reduced(job: TrainingJob, unit: TorchUnit) -> Tensor:
    """The shard of the reduced gradients of a unit (`foreach_reduce`)."""
    return Tensor(name="reduced gradients", shape=(unit.numel // job.parallel.data_with_context,), dtype=unit.dtype)


def _tensor(name: str, unit: TorchUnit) -> Tensor:
    return Tensor(name=name, shape=(unit.numel,), dtype=unit.dtype, formula=f"parameters of {unit.name}")
