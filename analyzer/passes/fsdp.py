"""FSDP as a pass over the tree: tensors that are unsharded while a module runs are added to its workspace.

Sources: megatron_fsdp.py and param_and_grad_buffer.py of megatron/core/distributed/fsdp (0.16.1). `fsdp_torch` has PyTorch's FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module
from analyzer.passes.fsdp_fp8_weights import with_column_wise_weights
from analyzer.passes.fsdp_gradients import accumulates_in_gemm, beyond_freed, with_gradients_from_first
from analyzer.passes.fsdp_reduction import with_reduced_shards
from analyzer.passes.fsdp_torch import with_unsharded_units
from analyzer.passes.piece_workspaces import Workspaces, with_workspaces
from analyzer.specs import TrainingJob
from analyzer.states.buffers.fsdp import covers_units, fsdp_of, is_segment, segments, sharded_buckets
from analyzer.states.buffers.fsdp_gathering import GRADIENTS, PARAMETERS, ChunkPasses, Gathering, Ids, chunk_passes


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
    of_pieces = [
        alive & gathering.started(index) if len(piece.modules) == 1 else frozenset[int]()
        for index, (piece, alive) in enumerate(zip(gathering.all_segments, passes.gradients, strict=True))
    ]
    held = _held_in_block(gathering, of_pieces)
    for index, piece in enumerate(gathering.all_segments):
        started, alive = of_pieces[index], passes.gradients[index] - held[index]
        if len(gathering.parts[index]) > 1:
            own_of_layers = _kept_until_checkpoint_ends(gathering, passes, index)
            started_in += own_of_layers
            workspaces += _by_layer(gathering, passes, index, without=frozenset[int]().union(*own_of_layers))
            continue
        if piece.units:
            started_in += [started] * len(piece.modules)
            gradients = gathering.tensors(alive - started, GRADIENTS)
        elif not started or accumulates_in_gemm(job, piece.modules[0]):
            gradients = gathering.tensors(alive, GRADIENTS)
        else:
            own = gathering.tensors(started, GRADIENTS)
            gradients = (*gathering.tensors(alive - started, GRADIENTS), *beyond_freed(own, piece.modules[0]))
        forward = gathering.tensors(passes.forward[index], PARAMETERS)
        workspaces.append(Workspaces(forward, (*gathering.tensors(passes.backward[index], PARAMETERS), *gradients)))
    has_units = fsdp_of(job).strategy == "optim_grads_params"
    changed = with_workspaces(tree, workspaces, is_segment, lambda module: has_units and covers_units(module))
    changed = with_gradients_from_first(gathering, with_reduced_shards(gathering, changed), started_in)
    return with_column_wise_weights(job, changed)


def _held_in_block(gathering: Gathering, started: Sequence[Ids]) -> list[Ids]:
    """For each segment, the buckets that a later layer of the same block keeps allocated (`with_gradients_from_first`): MTP depths
    are one block. `started`: the buckets whose gradients start in each segment."""
    held: list[Ids] = []
    for block in reversed(list(_blocks(gathering.tree))):
        inside: Ids = frozenset()
        for _ in segments(block):
            index = len(started) - 1 - len(held)
            held.append(inside)
            if gathering.all_segments[index].units:
                inside |= started[index]
    return held[::-1]


def _blocks(module: Module) -> Iterator[Module]:
    """The blocks of a chunk (`program.chunks`): the children of the model and of the decoder."""
    if module.kind not in (ModuleKind.MODEL, ModuleKind.DECODER):
        yield module
        return
    for child in module.children:
        yield from _blocks(child)


def _kept_until_checkpoint_ends(gathering: Gathering, passes: ChunkPasses, index: int) -> tuple[Ids, ...]:
    """The buckets whose gradients start in each layer of a checkpoint, if none is freed in the backward of the checkpoint."""
    own, at_end = gathering.parts[index], passes.gradient_parts[index][0]
    return own if all(ids <= at_end for ids in own) else (frozenset(),) * len(own)


def _by_layer(gathering: Gathering, passes: ChunkPasses, index: int, *, without: Ids) -> Iterator[Workspaces]:
    """The workspaces of a checkpoint around layers: what is unsharded throughout, and what is added in each layer.

    Layers gather their parameters one after another in the recomputation and free them one after another in the backward, in which
    they allocate gradients one after another. `without`: gradients that the layers count themselves.
    """
    gathered, recomputed = passes.backward_parts[index], passes.recompute_parts[index]
    gradients = tuple(started - without for started in passes.gradient_parts[index])
    always_gathered = frozenset.intersection(*gathered, *recomputed)
    always_started = frozenset.intersection(*gradients)
    yield Workspaces(
        gathering.tensors(passes.forward[index], PARAMETERS),
        gathering.tensors(always_gathered, PARAMETERS) + gathering.tensors(always_started, GRADIENTS),
    )
    for again, of_layer, started in zip(recomputed or gathered, gathered, gradients, strict=True):
        parameters = gathering.tensors(of_layer - always_gathered, PARAMETERS)
        yield Workspaces(
            (),
            parameters + gathering.tensors(started - always_started, GRADIENTS),
            gathering.tensors(again - always_gathered, PARAMETERS),
        )
