"""Low-rank adapters (LoRA) beside the linear layers of a chunk whose other weights are frozen.

Source: megatron/bridge/peft/{base,module_matcher,recompute}.py of Megatron-Bridge: `PEFT.__call__`, `ModuleMatcher.match` and
`maybe_enable_recompute_inputs_grad`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from analyzer.modules.adapters.canonical_layer import CanonicalLayer
from analyzer.modules.adapters.engine_layer import EngineAdaptedLayer
from analyzer.modules.adapters.expert_layer import ExpertLayer
from analyzer.modules.adapters.layer import AdaptedLayer
from analyzer.modules.adapters.scaled_layer import ScaledLayer
from analyzer.modules.freezing import frozen, with_owners, without_weight_gradients
from analyzer.modules.inputs import ModuleInputs
from analyzer.modules.kinds import ADAPTER_PROJECTIONS, LINEAR, ModuleKind
from analyzer.modules.models.parts import ChunkKind, Parts, Stack
from analyzer.modules.moe.experts import with_constant_probabilities
from analyzer.modules.moe.shared_experts import gate_of_constant_score
from analyzer.modules.shapes import ExpertShapes
from analyzer.modules.tree import MODEL_PATH, Module
from analyzer.specs.adapters import AdapterMethod, AdapterSpec

_METHODS: Final[dict[AdapterMethod, type[AdaptedLayer]]] = {
    "lora": AdaptedLayer,
    "canonical": CanonicalLayer,
    "dora": ScaledLayer,
}
_OUTSIDE_LAYERS: Final = frozenset(
    {
        ModuleKind.BATCH,
        ModuleKind.LOSS,
        ModuleKind.SAMPLE_HEAD,
        ModuleKind.VALUE_HEAD,
        ModuleKind.NORMALIZED_OUTPUT,
        ModuleKind.TOKEN_SCORE,
    }
)
"""Modules that are not frozen: ms-swift trains the head of classification and reward models beside adapters."""
_OF_TOKENS: Final = ("embedding", "enorm")
"""Modules of an MTP depth that read nothing but the tokens and the embedding, which is frozen."""
EMBEDDED: Final = "embedded tokens"
_READ_BLOCK_INPUT: Final = frozenset(
    {ModuleKind.Q_PROJECTION, ModuleKind.Q_DOWN, ModuleKind.KV_DOWN, ModuleKind.SHARED_EXPERTS, ModuleKind.ROUTER}
)
"""Parts of a block that read its input, and not the output of the part that runs before."""
_BESIDE: Final = frozenset({ModuleKind.SHARED_EXPERTS})
"""Parts of a block whose output the following parts do not read."""


def with_adapters(parts: Parts, inputs: ModuleInputs, kind: ChunkKind, *, in_16_bit: Parts) -> Parts:
    """The modules of a chunk, with adapters in its layers and all other weights frozen. `in_16_bit`: the same without FP8.

    If the embedding is frozen, the input of the first layer needs no gradient unless the framework requests one.
    """
    adapters = inputs.model.adapters
    assert adapters is not None, "the model has adapters"
    shapes = ExpertShapes(inputs)
    trains_embedding = adapters.trains("word_embeddings")
    requested = adapters.request_input_gradient(checkpoints=inputs.recompute.granularity == "full")
    starts = kind.pre_process and not (trains_embedding or requested)
    first = starts
    found: list[Module | Stack] = []
    for part, plain in zip(parts, in_16_bit, strict=True):
        if isinstance(part, Stack):
            assert isinstance(plain, Stack), "both have the same modules"
            runs: list[tuple[Module, int]] = []
            for (module, times), (twin, _) in zip(part.modules, plain.modules, strict=True):
                left = times
                while first and left:
                    changed, first = _adapted(module, twin, shapes, adapters, first=True)
                    runs.append((changed, 1))
                    left -= 1
                if left:
                    runs.append((_adapted(module, twin, shapes, adapters, first=False)[0], left))
            found.append(part._replace(modules=tuple(runs)))
        elif part.kind in _OUTSIDE_LAYERS:
            found.append(part)
        elif part.kind is ModuleKind.EMBEDDING and trains_embedding:
            found.append(replace(part, children=tuple(_beside_original(each) for each in part.children)))
        elif part.kind is ModuleKind.OUTPUT_LAYER and adapters.trains_output_weight(tied=inputs.model.tied_embeddings):
            found.append(_beside_original(part))
        elif part.kind is ModuleKind.MTP:
            assert isinstance(plain, Module), "both have the same modules"
            found.append(_adapted(part, plain, shapes, adapters, first=False)[0])
        elif part.kind is ModuleKind.OUTPUT_LAYER and (inputs.model.distillation is not None or inputs.model.log_probability_loss):
            found.append(_returned(frozen(part)))
        elif part.kind is ModuleKind.EMBEDDING:
            found += [frozen(part, input_gradient=False), *((_held(shapes),) if starts else ())]
        else:
            found.append(frozen(part))
    return tuple(found)


def _beside_original(module: Module) -> Module:
    """A module that is trained as a copy of a frozen one, which stays on the GPU (`ModulesToSaveWrapper` of PEFT)."""
    originals = (replace(each, name=f"original {each.name}", frozen=True, original=True) for each in module.parameters)
    return replace(module, parameters=(*module.parameters, *originals))


def _returned(module: Module) -> Module:
    """A module of a model that returns before the loss is computed: what its forward references is freed then."""
    return replace(module, forward_held=(), forward_workspace=(*module.forward_workspace, *module.forward_held))


def _held(shapes: ExpertShapes) -> Module:
    """The output of the embedding, which no layer saves: `GPTModel.forward` references it until it returns."""
    held = (shapes.hidden("input of the decoder"),)
    return Module(name="decoder_input", kind=ModuleKind.OTHER, function=True, forward_held=held, source="GPTModel.forward")


@dataclass(frozen=True, eq=False)
class _Plain:
    """A module that is compared by identity."""

    module: Module


def _adapted(module: Module, plain: Module, shapes: ExpertShapes, adapters: AdapterSpec, *, first: bool) -> tuple[Module, bool]:
    """The frozen module with adapters, and whether its output needs no gradient.

    `plain`: the module in 16 bit, whose saved tensors are those that adapters read. `first`: its input needs no gradient.
    """
    return module.derived(_with_adapters, plain.derived(_Plain), shapes, adapters, first)


def _with_adapters(module: Module, plain: _Plain, shapes: ExpertShapes, adapters: AdapterSpec, first: bool) -> tuple[Module, bool]:
    insertion = _Insertion(shapes, adapters)
    if first and not any(insertion.adapts(each) for _, each in module.walk()):
        return frozen(module, input_gradient=False), True
    kept, first = insertion.into(module, without_weight_gradients(module), plain.module, first)
    return with_owners(kept, plain.module), first


@dataclass(frozen=True)
class _Insertion:
    """Adapters that are added to a tree."""

    shapes: ExpertShapes
    adapters: AdapterSpec

    def into(self, trained: Module, fixed: Module, plain: Module, first: bool, path: str = "") -> tuple[Module, bool]:
        """`fixed`, which is the frozen `trained`, with adapters in its children, and whether its output still needs no gradient.

        `plain`: `trained` in 16 bit.
        """
        if trained.kind is ModuleKind.EXPERTS and first:
            fixed = with_constant_probabilities(fixed)
        if trained.kind is ModuleKind.MTP_DEPTH and not any(each.recomputed for each in trained.children):
            # a local variable of the depth references the embedded tokens, which its frozen norm does not save
            fixed = replace(fixed, forward_workspace=(*fixed.forward_workspace, self.shapes.hidden(EMBEDDED)))
        children: list[Module] = []
        untouched, read = first, first
        for depth, (before, after, twin) in enumerate(zip(trained.children, fixed.children, plain.children, strict=True)):
            inside = _path(before, path, depth, in_mtp=trained.kind is ModuleKind.MTP)
            needs_none = first if before.kind in _READ_BLOCK_INPUT else read
            if before.name in _OF_TOKENS:
                children.append(frozen(before, input_gradient=False))
                continue
            if before.kind is ModuleKind.SHARED_GATE and first:
                after = gate_of_constant_score(after)
            found, needs_none = self._child(before, after, twin, needs_none, inside)
            children += found
            untouched = untouched and needs_none
            read = read if before.kind in _BESIDE else needs_none
        made = replace(fixed, children=tuple(children))
        return _without_sums(made) if trained.repeats else made, untouched

    def _child(self, before: Module, after: Module, plain: Module, first: bool, path: str) -> tuple[tuple[Module, ...], bool]:
        if self.adapts(before):
            layer = self._kind(before)(self.shapes, before, plain, self.adapters, not first, path)
            return layer.modules(frozen(before, input_gradient=False) if first else after), False
        if before.children:
            child, first = self.into(before, after, plain, first, f"{path}." if path else "")
            return (child,), first
        return (frozen(before, input_gradient=False) if first else after,), first

    def _kind(self, layer: Module) -> type[AdaptedLayer]:
        if self.adapters.layers == "transformer_engine":
            return EngineAdaptedLayer
        of_experts = any(each.sharding == "expert" for each in layer.parameters)
        return ExpertLayer if of_experts and self.adapters.grouped else _METHODS[self.adapters.method]

    def adapts(self, module: Module) -> bool:
        """Frameworks find layers by the names of their modules."""
        return module.kind in LINEAR and module.name in self.adapters.targets


def _path(child: Module, around: str, number: int, *, in_mtp: bool) -> str:
    """The path of a child by which its tensors are found (`Tensor.made_in`): relative to the layer, or to the model."""
    if child.kind is ModuleKind.LAYER:
        return ""
    if in_mtp:
        return f"{MODEL_PATH}mtp.layers.{number}"
    return around.removesuffix(".") if child.function else f"{around}{child.name}"


def _without_sums(module: Module) -> Module:
    """A module whose weights have the gradients of an earlier one too: those are summed over expert-parallel ranks once."""
    own = module.collectives
    if module.kind in ADAPTER_PROJECTIONS:
        own = tuple(each for each in own if each.group != "ep")
    return replace(module, collectives=own, children=tuple(_without_sums(each) for each in module.children))
