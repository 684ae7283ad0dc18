"""Numbers of parameters of a model, without sharding."""

from __future__ import annotations

from typing import NamedTuple

from analyzer.modules.kinds import ADAPTER_PROJECTIONS, ModuleKind
from analyzer.modules.tree import Module, Parameter, parameters
from analyzer.specs import ModelSpec


class ParameterCounts(NamedTuple):
    """Numbers of elements of all parameters of a model. Those of adapters are not in the others."""

    total: int
    unpadded: int
    """Without the rows that pad the vocabulary."""
    adapters: int
    active: int
    """Of those that a token uses: without the experts that the router does not choose for it."""
    routed_experts: int


def parameter_counts(model: ModelSpec, tree: Module) -> ParameterCounts:
    """The numbers of parameters of `tree`, the complete model."""
    adapters = _of_adapters(tree) if model.adapters is not None else ()
    every = tuple(each for each in parameters(tree) if not each.original)
    of_adapters = sum(each.full_numel for each in adapters) + sum(each.numel for each in model.vision_weights if each.adapter)
    total = sum(each.full_numel for each in every) - of_adapters
    routed = sum(each.full_numel for each in every if each.sharding == "expert")
    routed -= sum(each.full_numel for each in adapters if each.sharding == "expert")
    padding = (model.padded_vocab_size - model.vocab_size) * model.hidden_size * (1 if model.tied_embeddings else 2)
    padding //= 1 if model.head_outputs is None else 2  # the output layer has no rows of the vocabulary
    return ParameterCounts(
        total=total,
        unpadded=total - padding,
        adapters=of_adapters,
        active=total - (routed - routed * model.moe.topk // model.moe.num_experts if model.moe else 0),
        routed_experts=routed,
    )


def _of_adapters(tree: Module) -> tuple[Parameter, ...]:
    """The parameters of adapters of the language model, which are not those of the model."""
    kinds = ADAPTER_PROJECTIONS | {ModuleKind.ADAPTER}
    return tuple(each for _, module in tree.walk() if module.kind in kinds for each in module.parameters)
