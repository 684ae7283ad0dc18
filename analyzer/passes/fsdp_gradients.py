"""When the unsharded gradients of Megatron-FSDP are allocated in the backward of a layer.

A bucket is allocated with the first gradient of one of its parameters: by the GEMM of the weight gradient if that accumulates into
the bucket, else when autograd accumulates the gradient (`register_post_accumulate_grad_hook`).

Source: megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py (`_register_fsdp_hooks`, 0.16.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from analyzer.modules.kinds import LINEAR, RESIDUAL_ADDS, ModuleKind
from analyzer.modules.moe.experts import WEIGHT_GRADIENTS_OF_EXPERTS
from analyzer.modules.tree import Module, Parameter, Tensor, total_bytes
from analyzer.specs import TrainingJob
from analyzer.states.buffers.fsdp import ShardedBucket, is_segment, is_unit, layers_under_checkpoint, of_one_expert
from analyzer.states.buffers.fsdp_gathering import GRADIENTS, Gathering, Ids
from analyzer.units import DTYPE_BYTES

BEYOND: Final = "beyond what is freed before"
"""`Tensor.formula` of the part of a tensor that adds to the peak of a module (`beyond_freed`)."""


class _Bucket(NamedTuple):
    """A bucket whose first gradient is computed in a layer."""

    parameters: frozenset[tuple[Parameter, int]]
    """Its parameters in the layer, each with the number of equal ones in later buckets, whose gradients are computed before."""
    tensors: tuple[Tensor, ...]
    """Its unsharded gradients."""


class _Backward:
    """The backward of a layer up to a module."""

    def __init__(self, buckets: Sequence[_Bucket]) -> None:
        self.left = list(buckets)
        """Buckets without a gradient so far."""
        self._computed: Counter[Parameter] = Counter()
        """Numbers of equal parameters with a gradient."""
        self._seen: set[int] = set()
        """Identities of the parameters with a gradient."""

    def started(self, parameters: Sequence[Parameter]) -> list[_Bucket]:
        """Removes and returns the buckets whose first gradients are those of these parameters."""
        found: list[_Bucket] = []
        for parameter in parameters:
            if id(parameter) in self._seen:
                continue
            self._seen.add(id(parameter))
            one = of_one_expert(parameter)
            before = self._computed[one]
            self._computed[one] += parameter.pieces
            computed = {(one, before + piece) for piece in range(parameter.pieces)}
            found += [bucket for bucket in self.left if not bucket.parameters.isdisjoint(computed)]
            self.left = [bucket for bucket in self.left if bucket not in found]
        return found


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
    bucket = gathering.buckets[number]
    place = max(bucket.places)
    later = (each for each in gathering.buckets[number + 1 :] if each.unit == bucket.unit)
    equal = Counter(one for each in later for one in in_segment(each, place))
    parameters = frozenset((one, equal[one]) for one in in_segment(bucket, place))
    return _Bucket(parameters, gathering.tensors(frozenset({number}), GRADIENTS))


def in_segment(bucket: ShardedBucket, place: int) -> Iterator[Parameter]:
    """The parameters of a bucket that one segment uses. Those of several experts are those of one."""
    return (of_one_expert(each) for each, index in zip(bucket.parameters, bucket.places, strict=True) if index == place)


def _with_buckets(job: TrainingJob, layer: Module, buckets: Sequence[_Bucket]) -> Module:
    backward = _Backward(buckets)
    layer = _from_first(job, layer, backward)
    throughout = tuple(tensor for bucket in backward.left for tensor in bucket.tensors)
    return replace(layer, backward_workspace=(*layer.backward_workspace, *throughout)) if throughout else layer


def _from_first(job: TrainingJob, module: Module, backward: _Backward) -> Module:
    """The module with the gradients of those buckets that start in it."""
    found: list[Module] = []
    for index in range(len(module.children) - 1, -1, -1):
        child = module.children[index]
        if child.kind in RESIDUAL_ADDS and index:
            child = _starting(job, child, backward, _added_biases(module.children[index - 1]))
        if child.kind is ModuleKind.COMBINE:
            child = _starting(job, child, backward, _run_in_combine(job, module))
        found.append(_from_first(job, child, backward))
    if found:
        module = replace(module, children=tuple(reversed(found)))
    return _starting(job, module, backward, module.parameters)


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


def _starting(job: TrainingJob, module: Module, backward: _Backward, parameters: Sequence[Parameter]) -> Module:
    """The module with the gradients of the buckets that start with these parameters, whose gradients it computes."""
    tensors = tuple(tensor for bucket in backward.started(parameters) for tensor in bucket.tensors)
    if not tensors:
        return module
    during = tensors if accumulates_in_gemm(job, module) else beyond_freed(tensors, module)
    return replace(module, backward_workspace=(*module.backward_workspace, *during), reloads=(*module.reloads, *tensors))


def accumulates_in_gemm(job: TrainingJob, module: Module) -> bool:
    """Whether the GEMM of a module's weight gradient writes to the unsharded gradient bucket, which is allocated before it."""
    return job.flags.gradient_accumulation_fusion and (module.kind in LINEAR or module.kind is ModuleKind.OUTPUT_LAYER)


def beyond_freed(gradients: tuple[Tensor, ...], module: Module, *, last: bool = False) -> tuple[Tensor, ...]:
    """The part of a module's unsharded gradients that exceeds what its backward has freed when they are allocated.

    A bucket is allocated when autograd accumulates the first gradient (`register_post_accumulate_grad_hook`): after the backward of
    the module, when only the gradients of its weights and input are left of its temporary tensors. With sequence parallelism the
    input gradient is this rank's part. `last`: they are allocated after the last gradient, when those of other weights are freed.
    """
    scattered = any(each.name == "scattered input gradient" for each in module.backward_workspace)
    of_weights = ("weight gradient",) if last else ("weight gradient", WEIGHT_GRADIENTS_OF_EXPERTS)
    kept = (*of_weights, "scattered input gradient" if scattered else "input gradient")
    freed = total_bytes(module.saved) + total_bytes(each for each in module.backward_workspace if each.name not in kept)
    beyond = []
    for tensor in gradients:
        extra = max(0, tensor.bytes - freed)
        freed = max(0, freed - tensor.bytes)
        if extra:
            beyond.append(replace(tensor, shape=(int(extra / DTYPE_BYTES[tensor.dtype]),), formula=BEYOND))
    return tuple(beyond)
