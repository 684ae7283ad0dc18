"""When the unsharded gradients of Megatron-FSDP are allocated in the backward of a layer.

A bucket is allocated with the first gradient of one of its parameters: by the GEMM of the weight gradient if that accumulates into
the bucket, else when autograd accumulates the gradient (`register_post_accumulate_grad_hook`).

Source: megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py (`_register_fsdp_hooks`, 0.16.1).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from analyzer.buffers.fsdp import is_segment, is_unit, layers_under_checkpoint, of_one_expert
from analyzer.buffers.fsdp_gathering import GRADIENTS, Gathering, Ids
from analyzer.modules.kinds import LINEAR, RESIDUAL_ADDS, ModuleKind
from analyzer.modules.tree import Module, Parameter, Tensor, total_bytes
from analyzer.specs import TrainingJob
from analyzer.units import DTYPE_BYTES


class _Bucket(NamedTuple):
    """A bucket whose first gradient is computed in a layer."""

    parameters: frozenset[Parameter]
    tensors: tuple[Tensor, ...]
    """Its unsharded gradients."""


def with_gradients_from_first(gathering: Gathering, tree: Module, started: Sequence[Ids]) -> Module:
    """The tree in which each layer has the gradients of the buckets that start in it (`started`, layers in order of execution).

    They are allocated from the backward of the last module with a parameter of the bucket until the backward of the block ends.
    """
    left = iter(started)
    done: dict[Hashable, Module] = {}

    def visit(module: Module) -> Module:
        if is_unit(module):
            buckets = tuple(_bucket(gathering, number) for number in sorted(next(left)))
            key = (id(module), buckets)
            if key not in done:
                done[key] = _with_buckets(gathering.job, module, buckets)
            return done[key]
        if is_segment(module) and not layers_under_checkpoint(module):
            return module
        return replace(module, children=tuple(visit(child) for child in module.children))

    return visit(tree)


def _bucket(gathering: Gathering, number: int) -> _Bucket:
    parameters = frozenset(map(of_one_expert, gathering.buckets[number].parameters))
    return _Bucket(parameters, gathering.tensors(frozenset({number}), GRADIENTS))


def _with_buckets(job: TrainingJob, layer: Module, buckets: Sequence[_Bucket]) -> Module:
    left = list(buckets)
    layer = _from_first(job, layer, left)
    throughout = tuple(tensor for bucket in left for tensor in bucket.tensors)
    return replace(layer, backward_workspace=(*layer.backward_workspace, *throughout)) if throughout else layer


def _from_first(job: TrainingJob, module: Module, left: list[_Bucket]) -> Module:
    """The module with the gradients of those buckets in `left` that start in it. Removes these."""
    found: list[Module] = []
    for index in range(len(module.children) - 1, -1, -1):
        child = module.children[index]
        if child.kind in RESIDUAL_ADDS and index:
            child = _starting(job, child, left, _added_biases(module.children[index - 1]))
        if child.kind is ModuleKind.COMBINE:
            child = _starting(job, child, left, _run_in_combine(job, module))
        found.append(_from_first(job, child, left))
    if found:
        module = replace(module, children=tuple(reversed(found)))
    return _starting(job, module, left, module.parameters)


def _added_biases(branch: Module) -> tuple[Parameter, ...]:
    """The biases of a branch that the sum after it adds: those of its row-parallel layer, except for experts."""
    modules = [module for _, module in branch.walk()]
    if any(module.kind is ModuleKind.ROUTER for module in modules):
        return ()
    rows = (module for module in modules if module.kind in (ModuleKind.ATTENTION_OUTPUT, ModuleKind.FC2))
    return tuple(parameter for module in rows for parameter in module.parameters if parameter.name == "bias")


def _run_in_combine(job: TrainingJob, branch: Module) -> tuple[Parameter, ...]:
    """The weights of the fc2 of shared experts, if the dispatcher runs it while it combines (`token_combine`)."""
    if job.model.moe is None or not job.model.moe.shared_overlap:
        return ()
    shared = (child for child in branch.children if child.kind is ModuleKind.SHARED_EXPERTS)
    return tuple(each for module in shared for part in module.children if part.kind is ModuleKind.FC2 for each in part.parameters)


def _starting(job: TrainingJob, module: Module, left: list[_Bucket], parameters: Sequence[Parameter]) -> Module:
    """The module with the gradients of the buckets in `left` of these parameters, whose gradients it computes. Removes these."""
    own = [bucket for bucket in left if not bucket.parameters.isdisjoint(map(of_one_expert, parameters))]
    tensors = tuple(tensor for bucket in own for tensor in bucket.tensors)
    if not tensors:
        return module
    left[:] = [bucket for bucket in left if bucket not in own]
    during = tensors if accumulates_in_gemm(job, module) else beyond_freed(tensors, module)
    return replace(module, backward_workspace=(*module.backward_workspace, *during), reloads=(*module.reloads, *tensors))


def accumulates_in_gemm(job: TrainingJob, module: Module) -> bool:
    """Whether the GEMM of a module's weight gradient writes to the unsharded gradient bucket, which is allocated before it."""
    return job.flags.gradient_accumulation_fusion and (module.kind in LINEAR or module.kind is ModuleKind.OUTPUT_LAYER)


def beyond_freed(gradients: tuple[Tensor, ...], module: Module) -> tuple[Tensor, ...]:
    """The part of a module's unsharded gradients that exceeds what its backward has freed when they are allocated.

    A bucket is allocated when autograd accumulates the first gradient (`register_post_accumulate_grad_hook`): after the backward of
    the module, when only the gradients of its weight and input are left of its temporary tensors. With sequence parallelism the
    input gradient is this rank's part.
    """
    scattered = any(each.name == "scattered input gradient" for each in module.backward_workspace)
    kept = ("weight gradient", "scattered input gradient" if scattered else "input gradient")
    freed = total_bytes(module.saved) + total_bytes(each for each in module.backward_workspace if each.name not in kept)
    beyond = []
    for tensor in gradients:
        extra = max(0, tensor.bytes - freed)
        freed = max(0, freed - tensor.bytes)
        if extra:
            beyond.append(replace(tensor, shape=(int(extra / DTYPE_BYTES[tensor.dtype]),)))
    return tuple(beyond)
