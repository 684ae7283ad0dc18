"""Column-wise copies of weights that Megatron-FSDP stores in FP8 and shards.

The forward of a linear layer creates the copies of its weights. They are freed when its transformer layer returns. Before the
backward of the transformer layer, the copies of all its weights are created, and they are freed after it.

Source: `_register_fsdp_hooks` and `all_gather_and_wait_parameters_ready` (megatron/core/distributed/fsdp/src/megatron_fsdp/
megatron_fsdp.py, 0.16.1).
"""

from __future__ import annotations

from dataclasses import replace

from analyzer.modules.quantized import reads_one_copy
from analyzer.modules.tree import Module, Tensor
from analyzer.specs import TrainingJob
from analyzer.specs.precision import ONE_SCALE
from analyzer.states.buffers.fsdp import fsdp_of, is_unit


def with_column_wise_weights(job: TrainingJob, tree: Module) -> Module:
    """The tree whose transformer layers have the column-wise copies of their sharded weights in FP8."""
    fp8 = job.precision.fp8
    if fp8 is None or not fp8.stored_parameters or fsdp_of(job).strategy != "optim_grads_params":
        return tree
    if fp8.recipe not in (*ONE_SCALE, "blockwise") or reads_one_copy(fp8.recipe, job.hardware.compute_capability):
        return tree
    done: dict[tuple[int, bool], Module] = {}

    def visit(module: Module, recomputed: bool) -> Module:
        recomputed = recomputed or module.recomputed
        if is_unit(module):
            key = (id(module), recomputed)
            if key not in done:
                done[key] = _layer(module, recomputed=recomputed)
            return done[key]
        return replace(module, children=tuple(visit(child, recomputed) for child in module.children)) if module.children else module

    return visit(tree, False)


def _layer(layer: Module, *, recomputed: bool) -> Module:
    """A transformer layer. If it is recomputed, its forward runs without gradients and creates no copies."""
    changed, copies = (layer, _copies(layer)) if recomputed else _forward(layer, ())
    return replace(changed, backward_workspace=(*changed.backward_workspace, *copies)) if copies else layer


def _copies(module: Module) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(name="weight in fp8, column-wise", shape=(parameter.numel,), dtype="fp8")
        for _, each in module.walk()
        for parameter in each.parameters
        if parameter.quantized
    )


def _forward(module: Module, before: tuple[Tensor, ...]) -> tuple[Module, tuple[Tensor, ...]]:
    """The module beside the copies that exist during its forward, and the copies that exist after it. `before`: those before it."""
    if module.recomputed:
        workspace = module.forward_workspace
        again = workspace if module.recompute_workspace is None else module.recompute_workspace
        return replace(module, forward_workspace=(*workspace, *before), recompute_workspace=again), (*before, *_copies(module))
    if not module.children:
        copies = (*before, *_copies(module))
        return (replace(module, forward_workspace=(*module.forward_workspace, *copies)) if copies else module), copies
    children: list[Module] = []
    for child in module.children:
        changed, before = _forward(child, before)
        children.append(changed)
    return replace(module, children=tuple(children)), before
