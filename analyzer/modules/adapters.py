"""Low-rank adapters (LoRA) beside frozen linear layers.

Each adapter has a projection of the layer's input to the rank, one from the rank to the width of the output, and a product with
a constant, which is added to the output of the layer. It is not quantized and knows no sequence parallelism: beside a layer
whose output is split, the complete input is projected. All other weights of the model are frozen.

Sources: megatron/bridge/peft/{utils,lora_layers,adapter_wrapper}.py of Megatron-Bridge: `ParallelLinearAdapter`, `LoRALinear` and
`get_adapter_attributes_from_linear`, with its default: an adapter of a fused norm and projection reads the gathered output of the
norm. `linear_with_grad_accumulation_and_async_allreduce` of core/tensor_parallel/layers.py (0.16.1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from analyzer.modules.freezing import frozen
from analyzer.modules.inputs import ModuleInputs
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import weight_gradient
from analyzer.modules.models.parts import ChunkKind, Parts, Stack
from analyzer.modules.moe.experts import expert_weight_gradients
from analyzer.modules.moe.routing import Routing
from analyzer.modules.shapes import ExpertShapes
from analyzer.modules.tree import Collective, Module, Parameter, Phase, Sharding, Tensor
from analyzer.specs.adapters import AdapterSpec

KINDS: Final = {
    "linear_qkv": ModuleKind.QKV,
    "linear_proj": ModuleKind.ATTENTION_OUTPUT,
    "linear_fc1": ModuleKind.FC1,
    "linear_fc2": ModuleKind.FC2,
}
"""The kind of each linear layer that can have an adapter."""
_SPLIT_OUTPUT: Final = frozenset({ModuleKind.QKV, ModuleKind.FC1})
_OUTSIDE_LAYERS: Final = frozenset({ModuleKind.BATCH, ModuleKind.LOSS})


def with_adapters(parts: Parts, inputs: ModuleInputs, kind: ChunkKind) -> Parts:
    """The modules of a chunk, with adapters in its layers and all other weights frozen.

    The embedding is frozen, so that the input of the first layer needs no gradient, except under a checkpoint around layers:
    there the frameworks request one, because a checkpoint computes gradients only for inputs that need them.
    """
    adapters = inputs.model.adapters
    assert adapters is not None, "the model has adapters"
    shapes = ExpertShapes(inputs)
    starts = kind.pre_process and inputs.recompute.granularity != "full"
    found: list[Module | Stack] = []
    for part in parts:
        if isinstance(part, Stack):
            runs: list[tuple[Module, int]] = []
            for module, times in part.modules:
                if starts:
                    runs.append((_adapted(module, shapes, adapters, first=True), 1))
                    times -= 1
                    starts = False
                if times:
                    runs.append((_adapted(module, shapes, adapters, first=False), times))
            found.append(part._replace(modules=tuple(runs)))
        elif part.kind in _OUTSIDE_LAYERS:
            found.append(part)
        elif part.kind is ModuleKind.EMBEDDING and inputs.recompute.granularity != "full":
            found += [frozen(part, input_gradient=False), _held(shapes)]
        else:
            found.append(frozen(part))
    return tuple(found)


def _held(shapes: ExpertShapes) -> Module:
    """The output of the embedding, which no layer saves: `GPTModel.forward` references it until it returns."""
    held = (shapes.hidden("input of the decoder"),)
    return Module(name="decoder_input", kind=ModuleKind.OTHER, function=True, forward_held=held, source="GPTModel.forward")


def _adapted(module: Module, shapes: ExpertShapes, adapters: AdapterSpec, *, first: bool) -> Module:
    return module.derived(_with_adapters, shapes, adapters, first)


def _with_adapters(module: Module, shapes: ExpertShapes, adapters: AdapterSpec, first: bool) -> Module:
    """`first`: the input of the module needs no gradient until an adapter has been added."""
    kinds = frozenset(KINDS[each] for each in adapters.targets)
    return _inserted(module, frozen(module), shapes, adapters, kinds, first)[0]


def _inserted(
    trained: Module,
    fixed: Module,
    shapes: ExpertShapes,
    adapters: AdapterSpec,
    kinds: frozenset[ModuleKind],
    first: bool,
    path: str = "",
) -> tuple[Module, bool]:
    """`fixed`, which is the frozen `trained`, with adapters in its children, and whether its output still needs no gradient."""
    if trained.kind is ModuleKind.EXPERTS and ModuleKind.FC1 in kinds and not adapters.dropout:  # the adapter saves the rows
        fixed = replace(fixed, forward_workspace=trained.forward_workspace)
    children: list[Module] = []
    for before, after in zip(trained.children, fixed.children, strict=True):
        if before.kind in kinds:
            layer = _Layer(shapes, before, adapters, not first, f"{path}{before.name}")
            children += layer.modules(frozen(before, input_gradient=False) if first else after)
            first = False
        elif before.children:
            inside = path if before.function else f"{path}{before.name}."
            child, first = _inserted(before, after, shapes, adapters, kinds, first, inside)
            children.append(child)
        elif first:
            children.append(frozen(before, input_gradient=False))
        else:
            children.append(after)
    return replace(fixed, children=tuple(children)), first


@dataclass(frozen=True)
class _Layer:
    """A linear layer with an adapter."""

    shapes: ExpertShapes
    base: Module
    """The layer, if it were trained."""
    adapters: AdapterSpec
    input_gradient: bool
    """The input of the layer needs a gradient."""
    path: str
    """Names of the modules around the layer, in a transformer layer, and its own."""

    @property
    def _of_experts(self) -> bool:
        """Whether it is a layer of experts, whose adapter reads the tokens of all local ones."""
        return self._weight.sharding == "expert"

    @property
    def _splits_output(self) -> bool:
        return self.base.kind in _SPLIT_OUTPUT

    @property
    def _tensor_size(self) -> int:
        return 1 if self._of_experts else self.shapes.t

    def _wide(self, name: str, width: int, symbol: str, *, made_in: str = "") -> Tensor:
        """[s, b, width], or [rows, width] of the local experts."""
        if not self._of_experts:
            return self.shapes.wide(name, width, symbol, made_in=made_in)
        return Routing(self.shapes).row_tensor(name, Routing(self.shapes).multiplied_rows, width, made_in=made_in)

    def _calls(self, kind: str, phase: Phase, *, width: int | None = None) -> tuple[Collective, ...]:
        return () if self._of_experts else self.shapes.tp(kind, phase, width=width)

    def _parameter(self, shape: tuple[int, int], full: tuple[int, int]) -> Parameter:
        if self._per_expert:
            experts, all_experts = self._weight.shape[0], (self._weight.full_shape or self._weight.shape)[0]
            return replace(self._weight, shape=(experts, *shape), full_shape=(all_experts, *full), quantized=False)
        sharding: Sharding = "expert" if self._of_experts else "tensor"
        return Parameter(name="weight", shape=shape, dtype=self.shapes.dtype, sharding=sharding, full_shape=full)

    @property
    def _per_expert(self) -> bool:
        return self._of_experts and self.adapters.per_expert

    def _weight_gradient(self, shape: tuple[int, int]) -> tuple[Tensor, ...]:
        if not self._per_expert:
            return weight_gradient(self.shapes, shape)
        return expert_weight_gradients(Routing(self.shapes), shape)

    def _sum_over_experts(self, shape: tuple[int, int]) -> tuple[Collective, ...]:
        """The gradient of a shared adapter is summed over the ranks of all experts (`_allreduce_shared_expert_grad`)."""
        if not self._of_experts or self._per_expert or self.shapes.split.expert == 1:
            return ()
        return (Collective(kind="all_reduce", group="ep", shape=shape, dtype=self.shapes.dtype, phase="backward"),)

    @property
    def _weight(self) -> Parameter:
        return next(each for each in self.base.parameters if each.name == "weight")

    @property
    def _fused(self) -> bool:
        """Whether the norm before the layer is part of it."""
        return any(each.name == "layer_norm_weight" for each in self.base.parameters)

    @property
    def _gathers(self) -> bool:
        """Whether the adapter gathers its input itself."""
        return self._splits_output and self.shapes.sp and not self._fused and not self._of_experts

    @property
    def _output(self) -> Tensor:
        if self._splits_output or self._of_experts:
            return self._wide("output", self._weight.shape[-2], "n/t")
        return self.shapes.hidden("output")

    def modules(self, base: Module) -> tuple[Module, ...]:
        """The frozen layer and its adapter. Gradients of both inputs are added after the backward of the layer."""
        own_gradient = self._splits_output or self._of_experts
        gradient = replace(self._output, name="output gradient") if own_gradient else self.shapes.branch_gradient
        adapter = Module(
            name=f"{self.base.name}.adapter",
            kind=ModuleKind.ADAPTER,
            forward_workspace=(replace(self._output, name="output of the frozen layer"), *self._referenced()),
            backward_workspace=(gradient,),
            children=(*self._dropout(), self._into(), self._out_of(), self._sum()),
            source="megatron.bridge.peft.utils.ParallelLinearAdapter",
        )
        if not self.input_gradient:
            return base, adapter
        own = replace(self._read(), name="input gradient of the adapter", shares="")
        summed = (replace(own, name="sum of input gradients"),) if self._fused and not self.shapes.sp else ()
        other = self.shapes.sp or self.adapters.dropout  # the adapter saves another tensor
        kept = tuple(each for each in self.base.saved if each.for_weight) if self._fused and other else ()
        return replace(base, saved=(*base.saved, *kept), backward_workspace=(*base.backward_workspace, own, *summed)), adapter

    def _referenced(self) -> tuple[Tensor, ...]:
        """With dropout, no module saves the input of fc2 or a gathered input, which `LoRALinear.forward` references."""
        unsaved = self.base.kind is ModuleKind.FC2 or (self._fused and self.shapes.sp)
        return (self._read(),) if self.adapters.dropout and unsaved else ()

    def _read(self) -> Tensor:
        """The input of the adapter, [s, b, h] or [s, b, k/t]."""
        if self._splits_output and not self._of_experts:
            return self.shapes.hidden("input", gathered=True, made_in=self.path)
        return self._wide("input", self._weight.shape[-1], "k/t")

    def _saved(self) -> tuple[Tensor, ...]:
        """What the first projection saves: the tensor that the trained layer would save, complete, or the output of the dropout."""
        if self.adapters.dropout:
            return (replace(self._read(), name="input after dropout", made_in=f"{self.path}.adapter.dropout"),)
        read = next((each for each in self.base.saved if each.for_weight), None)
        if read is None:  # a norm that is computed again keeps it
            read = next(each for each in self.base.saved if each.name == "input")
        whole = self._read()
        if not self.input_gradient:  # the modules before it save nothing
            read = replace(read, shares="")
        return (whole if whole.shape != read.shape else replace(read, made_in=read.made_in or whole.made_in),)

    def _dropout(self) -> tuple[Module, ...]:
        if not self.adapters.dropout:
            return ()
        read = self._read()
        mask = Tensor(name="dropout mask", shape=read.shape, dtype="bool", formula="s·b·k")
        return (
            Module(
                name="dropout",
                kind=ModuleKind.ADAPTER_DROPOUT,
                saved=(mask,) if self.input_gradient else (),
                forward_workspace=(replace(read, name="input after dropout"), *(() if self.input_gradient else (mask,))),
                backward_workspace=(read,) if self.input_gradient else (),
                differentiable=self.input_gradient,
            ),
        )

    def _into(self) -> Module:
        """The projection to the rank. Its input is split like that of the layer, or its output is split and gathered."""
        shapes, rank = self.shapes, self.adapters.rank
        width, k = rank // self._tensor_size if self._splits_output else rank, self._weight.shape[-1]
        output, part = self._wide("output", rank, "r"), self._wide("part of the output", width, "r/t")
        gathered = self._splits_output and self._tensor_size > 1
        calls: list[Collective] = []
        if self._splits_output:
            calls += self._calls("all_gather", "forward") if self._gathers else ()
            calls += self._calls("all_gather", "forward", width=rank)
            if not shapes.sp:
                calls += self._calls("all_reduce", "backward")
            elif self.input_gradient and self._gathers:
                calls += self._calls("reduce_scatter", "backward")
        else:
            calls += self._calls("all_reduce", "forward", width=rank)
        own = self._parameter((width, k), (rank, (self._weight.full_shape or self._weight.shape)[-1]))
        calls += self._sum_over_experts((width, k))
        return Module(
            name="linear_in",
            kind=ModuleKind.ADAPTER_IN,
            parameters=(own,),
            saved=self._saved(),
            forward_workspace=(part, output) if gathered else (output,),
            backward_workspace=(
                replace(output, name="output gradient"),
                *((replace(part, name="part of the output gradient"),) if gathered else ()),
                replace(self._read(), name="input gradient", shares=""),  # also if nothing needs it
                *self._weight_gradient((width, k)),
            ),
            collectives=tuple(calls),
            source="ColumnParallelLinear" if self._splits_output else "RowParallelLinear",
        )

    def _out_of(self) -> Module:
        """The projection from the rank. Beside a layer with a complete output its output is gathered."""
        shapes, rank = self.shapes, self.adapters.rank
        n = self._weight.shape[-2] if self._splits_output else self._weight.shape[-2] // self._tensor_size
        own = self._parameter((n, rank), ((self._weight.full_shape or self._weight.shape)[-2], rank))
        part = self._wide("part of the output", n, "n/t")
        gathers = not self._splits_output and self._tensor_size > 1
        whole = shapes.hidden("gathered output", gathered=True)
        calls = [*(self._calls("all_gather", "forward") if gathers else ())]
        if gathers and shapes.sp:
            calls += self._calls("all_gather", "backward")
        calls += self._calls("all_reduce", "backward", width=rank)
        calls += self._sum_over_experts((n, rank))
        return Module(
            name="linear_out",
            kind=ModuleKind.ADAPTER_OUT,
            parameters=(own,),
            saved=(self._wide("input", rank, "r", made_in=f"{self.path}.adapter.linear_in"),),
            forward_workspace=(
                *((part, whole) if gathers else (part,)),
                *((shapes.hidden("scattered output"),) if gathers and shapes.sp else ()),
            ),
            backward_workspace=(
                *((replace(whole, name="gathered output gradient"),) if gathers and shapes.sp else ()),
                replace(part, name="part of the output gradient"),
                self._wide("input gradient", rank, "r"),
                *self._weight_gradient((n, rank)),
            ),
            collectives=tuple(calls),
            source="ColumnParallelLinear",
        )

    def _sum(self) -> Module:
        """The product with alpha / rank and the sum, which save nothing."""
        output = self._output
        return Module(
            name="sum",
            kind=ModuleKind.ADAPTER_SUM,
            function=True,
            forward_workspace=(replace(output, name="scaled output of the adapter"), replace(output, name="sum of both outputs")),
            backward_workspace=(replace(output, name="scaled output gradient"),),
            source="LoRALinear",
        )
