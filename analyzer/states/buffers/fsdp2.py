"""Units of PyTorch FSDP2: parameters that one collective gathers or reduces.

A unit is the embedding, a transformer layer or the output layer. The final norm and Mamba layers belong to the root. Each parameter
is split along its first dimension, padded to a multiple of the number of ranks.

Source: megatron/core/distributed/torch_fully_sharded_data_parallel.py (0.16.1),
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Parameter
from analyzer.specs import TrainingJob
from analyzer.states.buffers.parameter_order import creation_order
from analyzer.units import ceil_div


@dataclass(frozen=True, kw_only=True)
class TorchUnit:
    """Parameters that are gathered and reduced by one collective."""

    name: str
    numel: int
    """Elements including the padding of each parameter."""
    parameters: tuple[int, ...]
    """The same of each parameter."""
    reduced: int
    """Elements of the parameters that get a gradient."""
    dtype: str
    kind: ModuleKind | None = None
    """The kind of the module; None for the root."""


def torch_units(job: TrainingJob, tree: Module) -> Iterator[TorchUnit]:
    """Units of a chunk in the order of execution; the root's own parameters last."""
    root: list[Parameter] = []
    for module in unit_pieces(job, tree):
        listed = list(creation_order(module))
        if is_torch_unit(job, module) and listed:
            yield replace(torch_unit(job, module.name, listed), kind=module.kind)
        else:
            root += listed
    if root:
        yield torch_unit(job, "root", root)


def unit_pieces(job: TrainingJob, tree: Module) -> Iterator[Module]:
    """Units, and layers and modules without children outside them."""
    if is_piece(job, tree):
        yield tree
        return
    for child in tree.children:
        yield from unit_pieces(job, child)


def is_torch_unit(job: TrainingJob, module: Module) -> bool:
    """Whether Megatron wraps this module as a separate unit. With its own layers the output layer belongs to the root."""
    if module.kind is ModuleKind.OUTPUT_LAYER:
        return job.model.implementation != "local"
    if module.kind is ModuleKind.LAYER:
        return not any(child.kind is ModuleKind.MIXER for child in module.children)
    return module.kind is ModuleKind.EMBEDDING


def is_piece(job: TrainingJob, module: Module) -> bool:
    """Whether the module is one of `unit_pieces`."""
    return module.kind is ModuleKind.LAYER or is_torch_unit(job, module) or not module.children


def torch_unit(job: TrainingJob, name: str, listed: list[Parameter]) -> TorchUnit:
    """The unit with the given parameters."""
    ranks = job.parallel.data_with_context
    numels = tuple(ranks * torch_shard_numel(job, each) for each in listed for _ in range(each.pieces))
    without_gradient = sum(ranks * torch_shard_numel(job, each) for each in listed if each.read_by_reference)
    total = sum(numels)
    return TorchUnit(name=name, numel=total, parameters=numels, reduced=total - without_gradient, dtype=job.precision.parameters)


def split_by_expert(parameter: Parameter) -> bool:
    """Whether the first dimension counts experts, each of which is a parameter of its own."""
    return parameter.sharding == "expert" and parameter.pieces == parameter.shape[0]


def torch_shard_numel(job: TrainingJob, parameter: Parameter) -> int:
    """Elements of a parameter on one rank; of each of its `Parameter.pieces`."""
    rows = parameter.shape[1 if split_by_expert(parameter) else 0]
    return ceil_div(rows, job.parallel.data_with_context) * (parameter.numel // parameter.pieces // rows)
