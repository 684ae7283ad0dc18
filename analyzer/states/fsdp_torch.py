"""Bytes with torch's FSDP2: shards of every parameter, and what is unsharded while a unit runs.

Read in megatron/core/distributed/torch_fully_sharded_data_parallel.py (0.16.1), megatron/core/optimizer/optimizer.py
(`Float16OptimizerWithFloat16Params`) and torch/distributed/fsdp/_fully_shard/{_fsdp_param_group,_fsdp_collectives}.py
(torch 2.13). A unit is the embedding, a transformer layer or the output layer; what is left, the final norm, is the root's.
Each parameter is cut along its first dimension, padded to a multiple of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from analyzer.modules.models.gpt import parameters
from analyzer.modules.tree import Module, Parameter, Tensor
from analyzer.results import StageModel
from analyzer.specs import TrainingJob
from analyzer.states.buffers import creation_order
from analyzer.states.fsdp_buckets import fsdp_of, is_unit
from analyzer.states.of_rank import States
from analyzer.units import BLOCK, ceil_div, dtype_bytes, round_up

PARAMETERS: Final = "gathered parameters"
GATHERING: Final = "buffer of the all-gather"
GRADIENTS: Final = "unsharded gradients"
REDUCING: Final = "buffer of the reduce-scatter"

Workspaces = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Of one module: in forward, and in backward."""


@dataclass(frozen=True, kw_only=True)
class TorchUnit:
    """Parameters that are gathered and reduced by one collective."""

    name: str
    numel: int
    """With the padding of each parameter."""
    dtype: str


def torch_states(job: TrainingJob, stage: StageModel) -> States:
    """States of one rank: everything is sharded over data- and context-parallel ranks.

    Gradients have the type of the parameters. The step copies them to fp32 and drops them, and the copies live until
    the next iteration starts.
    """
    held = [parameter for tree in stage.trees for parameter in parameters(tree)]
    owned = sum(_shard_numel(job, parameter) for parameter in held)
    shards = sum(round_up(dtype_bytes(parameter.dtype, _shard_numel(job, parameter)), BLOCK) for parameter in held)
    half = job.precision.parameters != "fp32"
    whole = sum(round_up(dtype_bytes(parameter.dtype, parameter.numel), BLOCK) for parameter in held)
    moments = 8 if job.optimizer.name == "adam" else 4 if job.optimizer.sgd_momentum else 0
    return States(
        parameters=shards,
        gradients=shards,
        masters=4 * owned if half else 0,
        moments=moments * owned,
        gradient_copies=4 * owned - shards if half else 0,
        at_start=0 if fsdp_of(job).starts_from_meta else whole,
    )


def torch_units(job: TrainingJob, tree: Module) -> Iterator[TorchUnit]:
    """Units of a chunk in the order of execution; the root's own parameters last."""
    root: list[Parameter] = []
    for module in _pieces(tree):
        held = list(creation_order(module))
        if _is_torch_unit(module) and held:
            yield _unit(job, module.name, held)
        else:
            root += held
    if root:
        yield _unit(job, "root", root)


def with_unsharded_units(job: TrainingJob, tree: Module) -> Module:
    """The tree with what FSDP2 has unsharded as workspace of its units.

    In forward the buffer of the all-gather stays beside the parameters copied out of it until the next unit is there.
    In backward the unit before is gathered ahead, and the buffer of the reduction of the unit after waits.
    """
    pieces = list(_pieces(tree))
    units = [_unit(job, piece.name, list(creation_order(piece))) for piece in pieces if _is_torch_unit(piece)]
    kept = not fsdp_of(job).reshard_after_forward
    passed = 0
    workspaces: list[Workspaces] = []
    for piece in pieces:
        before = units[passed - 1] if passed else None
        still = tuple(_tensor(PARAMETERS, other) for other in units[:passed]) if kept else ()
        buffer = () if before is None else (_tensor(GATHERING, before),)
        if not _is_torch_unit(piece):
            workspaces.append(((*still, *buffer), still))
            continue
        unit, following = units[passed], units[passed + 1 : passed + 2]
        forward = (*still, _tensor(PARAMETERS, unit), _tensor(GATHERING, unit))
        ahead = still if kept else buffer
        reducing = (_tensor(GRADIENTS, unit), *(_tensor(REDUCING, other) for other in following))
        workspaces.append((forward, (*ahead, _tensor(PARAMETERS, unit), *reducing)))
        passed += 1
    return _decorated(tree, iter(workspaces))


def _decorated(module: Module, workspaces: Iterator[Workspaces]) -> Module:
    if module.children and not _is_torch_unit(module):
        return replace(module, children=tuple(_decorated(child, workspaces) for child in module.children))
    forward, backward = next(workspaces)
    return replace(
        module,
        forward_workspace=(*module.forward_workspace, *forward),
        backward_workspace=(*module.backward_workspace, *backward),
    )


def _pieces(tree: Module) -> Iterator[Module]:
    """Units, and modules outside them that have no children."""
    if _is_torch_unit(tree) or not tree.children:
        yield tree
        return
    for child in tree.children:
        yield from _pieces(child)


def _is_torch_unit(module: Module) -> bool:
    return is_unit(module) or module.name in ("embedding", "output_layer")


def _unit(job: TrainingJob, name: str, held: list[Parameter]) -> TorchUnit:
    ranks = job.parallel.data_with_context
    numel = sum(ranks * _shard_numel(job, parameter) for parameter in held)
    return TorchUnit(name=name, numel=numel, dtype=job.precision.parameters)


def _shard_numel(job: TrainingJob, parameter: Parameter) -> int:
    """Elements of a parameter on one rank."""
    rows = parameter.shape[0]
    return ceil_div(rows, job.parallel.data_with_context) * (parameter.numel // rows)


def _tensor(name: str, unit: TorchUnit) -> Tensor:
    return Tensor(name=name, shape=(unit.numel,), dtype=unit.dtype, formula=f"parameters of {unit.name}")
