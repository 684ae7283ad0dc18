"""Dropout masks that Megatron-FSDP keeps with full recompute, in a model with biases.

A transformer layer adds bias, dropout and residual with gradients enabled (`bias_dropout_add_exec_handler`), also in the first
forward of a checkpoint. The bias requires a gradient, so the sum has a graph, which references the masks. The checkpoint replaces
the graph of its output. Megatron-FSDP returns a view of the output of each unit (`create_custom_backward_hook`): then the graph
belongs to the base of the view, and stays as long as the output of the checkpoint does.

Sources: core/transformer/transformer_layer.py, core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py (0.16.1).
"""

from __future__ import annotations

from dataclasses import replace

from analyzer.modules.kinds import RESIDUAL_ADDS, ModuleKind
from analyzer.modules.tree import STREAM, Module, Tensor
from analyzer.specs import TrainingJob
from analyzer.states.buffers.fsdp import layers_under_checkpoint


def keeps_masks(job: TrainingJob) -> bool:
    """Whether layers are FSDP units under checkpoints, and their sums have biases."""
    fsdp = job.fsdp
    units = fsdp is not None and fsdp.implementation == "megatron" and fsdp.strategy == "optim_grads_params"
    return units and job.recompute.granularity == "full" and job.model.bias_linear


def with_kept_masks(tree: Module) -> Module:
    """The tree in which the module after a checkpoint also saves the masks of the checkpoint's last layer."""
    return _visited(tree, ())[0]


def _visited(module: Module, kept: tuple[Tensor, ...]) -> tuple[Module, tuple[Tensor, ...]]:
    """The module, and the masks that its output references. `kept`: those that its input references."""
    if kept and any(tensor.made_in == STREAM for tensor in module.saved):
        module, kept = replace(module, saved=(*module.saved, *kept)), ()
    if module.children and layers_under_checkpoint(module):
        return module, _masks(module.children[-1])
    if not module.children or module.recomputed:
        return module, kept
    children = []
    for child in module.children:
        changed, kept = _visited(child, kept)
        children.append(changed)
    return replace(module, children=tuple(children)), kept


def _masks(layer: Module) -> tuple[Tensor, ...]:
    """The masks of the sums in a layer to which a bias is added: not after experts or a linear layer in place of a branch."""
    found: list[Tensor] = []
    biased = False
    for child in layer.children:
        if child.kind in RESIDUAL_ADDS:
            named = (replace(tensor, name=f"{tensor.name} of {child.name}", made_in=STREAM) for tensor in child.saved)
            found += named if biased else ()
        elif child.kind in (ModuleKind.ATTENTION, ModuleKind.FEED_FORWARD):
            biased = all(inside.kind is not ModuleKind.ROUTER for _, inside in child.walk())
        else:
            biased = biased and child.kind is not ModuleKind.REPLACED_BRANCH
    return tuple(found)
