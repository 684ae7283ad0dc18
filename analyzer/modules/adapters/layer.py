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

from analyzer.modules.kinds import ModuleKind, Parallel
from analyzer.modules.linear import weight_gradient
from analyzer.modules.moe.experts import expert_weight_gradients
from analyzer.modules.moe.routing import Routing, dispatched_rows
from analyzer.modules.shapes import ExpertShapes
from analyzer.modules.tree import Collective, Module, Parameter, Phase, Sharding, Tensor, largest
from analyzer.specs.adapters import AdapterSpec

_REGATHERED: Final = frozenset({"linear_qkv", "linear_fc1"})
"""Layers whose adapters can gather their inputs again."""


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer with an adapter."""

    shapes: ExpertShapes
    base: Module
    """The layer, if it were trained."""
    plain: Module
    """The same in 16 bit, which adapters compute in."""
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
    def _rank(self) -> int:
        return self.adapters.rank_of(experts=self._of_experts)

    @property
    def _splits_output(self) -> bool:
        """Whether tensor-parallel ranks have parts of its output."""
        return self.base.kind.facts.parallel in (Parallel.COLUMN, Parallel.GATHERED)

    @property
    def _splits_input(self) -> bool:
        return self.base.kind.facts.parallel is Parallel.ROW

    @property
    def _width(self) -> int:
        """Elements of its input on this rank."""
        return self._weight.shape[-1]

    @property
    def _tensor_size(self) -> int:
        return 1 if self._of_experts else self.shapes.t

    def _wide(self, name: str, width: int, symbol: str, *, made_in: str = "") -> Tensor:
        """[s, b, width], or [rows, width] of the local experts."""
        if not self._of_experts:
            return self.shapes.wide(name, width, symbol, made_in=made_in)
        return Routing(self.shapes).row_tensor(name, Routing(self.shapes).multiplied_rows, width, made_in=made_in)

    def _local(self, name: str, width: int, symbol: str, *, made_in: str = "") -> Tensor:
        """The same for the tokens that the layer reads: a part of the sequence, if each rank has the whole layer."""
        wide = self._wide(name, width, symbol, made_in=made_in)
        return wide if self._splits_output or self._splits_input or self._of_experts else self._shard(wide)

    def _shard(self, wide: Tensor) -> Tensor:
        """The part of the sequence on this rank."""
        return replace(wide, shape=(self.shapes.s_split, *wide.shape[1:]))

    def _calls(self, kind: str, phase: Phase, *, width: int) -> tuple[Collective, ...]:
        if self._of_experts:
            return ()
        shape = self._local("", width, "").shape
        return tuple(replace(call, shape=shape) for call in self.shapes.tp(kind, phase))

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
    def _exchanged_outside(self) -> bool:
        """Whether a dispatcher exchanges the input and the output of the layer (`--moe-shared-expert-overlap`)."""
        moe = self.shapes.model.moe
        return moe is not None and moe.shared_overlap and ".shared_experts." in self.path

    @property
    def _exchanges(self) -> bool:
        """Whether the adapter knows of sequence parallelism."""
        return self.shapes.sp and not self._of_experts and not self._exchanged_outside

    @property
    def _reads_shard(self) -> bool:
        """Whether it gets a part of the sequence, although the layer has the whole one.

        With `LoRA.sequence_parallel_input_regather` layers with a norm return the part of its output on their rank.
        """
        return self._splits_output and self._exchanges and (self.adapters.regathers or not self._fused)

    @property
    def _gathers(self) -> bool:
        """Whether the adapter gathers its input before the first projection, which saves it."""
        return self._reads_shard and not self._regathers

    @property
    def _regathers(self) -> bool:
        """Whether the first projection saves its part of the sequence, and gathers it again in the backward.

        Source: `ParallelLinearAdapter._sequence_parallel_input_regather_eligibility`.
        """
        if not (self.adapters.regathers and self._reads_shard and self.base.name in _REGATHERED):
            return False
        recompute = self.shapes.inputs.recompute
        in_checkpoint = ".shared_experts." in self.path and {"moe", "shared_experts"} & set(recompute.modules)
        covered = self.base.name == "linear_fc1" and "mlp" in recompute.modules
        return recompute.granularity != "full" and not in_checkpoint and not covered

    @property
    def _output(self) -> Tensor:
        if self._splits_input and not self._of_experts:
            return self.shapes.hidden("output", gathered=self._exchanged_outside)
        return self._local("output", self._rows, "n/t")

    def modules(self, base: Module) -> tuple[Module, ...]:
        """The frozen layer and its adapter. Gradients of both inputs are added after the backward of the layer."""
        shared = self._splits_input and not self._of_experts and not (self._exchanged_outside and self.shapes.sp)
        gradient = self.shapes.branch_gradient if shared else replace(self._output, name="output gradient")
        # the adapter alone references the restored input, and its backward runs before
        restored = self._recomputed[:1] if self.shapes.inputs.core.copies_recomputed else ()
        adapter = Module(
            name=f"{self.base.name}.adapter",
            kind=ModuleKind.ADAPTER,
            forward_workspace=(replace(self._output, name="output of the frozen layer"), *self._normed(), *self._referenced()),
            backward_workspace=(gradient, *(each for each in self._recomputed if not (self._copies_input and each in restored))),
            children=self._children(),
            source="LoRALinear",
        )
        if self._weight.quantized and self._fused and self.shapes.sp and not self._reads_shard:
            base = replace(base, collectives=self._gathers_in_16_bit(base))
        base = replace(base, backward_workspace=tuple(each for each in base.backward_workspace if each not in restored))
        if not self.input_gradient:
            return base, adapter
        own = replace(self._read(), name="input gradient of the adapter", shares="")
        gathered = self.shapes.sp and not self._reads_shard
        summed = (replace(own, name="sum of input gradients"),) if self._fused and not gathered else ()
        # the adapter saves another tensor
        other = gathered or self._gathers or self.adapters.dropout or self._weight.quantized
        kept = tuple(each for each in self.base.saved if each.for_weight) if self._fused and other else ()
        # without a weight gradient, no GEMM frees the quantized copy before the backward of the norm (`fused_norm_backward`)
        copies = tuple(replace(each, name=f"{each.name}, not freed") for each in kept if self._weight.quantized)
        workspace = (*base.backward_workspace, own, *summed, *copies)
        return replace(base, saved=(*base.saved, *kept), backward_workspace=workspace), adapter

    def _normed(self) -> tuple[Tensor, ...]:
        """The output of the norm in the layer, to which that of the adapter is added. The norm saves that of the frozen layer."""
        normed = self.shapes.model.norms_in_projections and self._splits_input and not self._of_experts
        return (replace(self._output, name="normalized output"),) if normed else ()

    @property
    def _copies_input(self) -> bool:
        """Whether the first projection saves another tensor than the input of the layer."""
        return self.adapters.dropout

    @property
    def _recomputed(self) -> tuple[Tensor, ...]:
        """The restored input and the output of the recomputation, in the backward; none if the input is saved.

        With dropout nothing references the restored input. From core 0.17 on both are one tensor (`copies_recomputed`), which the
        checkpoint references.
        """
        if not self._of_experts or not self.shapes.recomputes("moe_act") or not self._splits_input:
            return ()
        return tuple(each for each in self.base.backward_workspace if each.name.endswith("activation output"))

    def _children(self) -> tuple[Module, ...]:
        return (*self._dropout(), self._into(), self._out_of(), self._sum())

    @property
    def _inside(self) -> str:
        """The path of the adapter, relative to the layer."""
        return f"{self.path}.adapter"

    @property
    def _rows(self) -> int:
        """Elements of its output on this rank."""
        return self._weight.shape[-2]

    @property
    def _all_rows(self) -> int:
        """Elements of its output on all ranks."""
        return (self._weight.full_shape or self._weight.shape)[-2]

    def _gathers_in_16_bit(self, base: Module) -> tuple[Collective, ...]:
        """The collectives of a layer that returns the gathered output of its norm: this is gathered before it is quantized.

        With one scale for all ranks, the part that is saved and the gathered one are quantized.
        """
        scales = tuple(each for each in base.collectives if each.phase == "forward" and each.kind == "all_reduce")
        gathers = (each for each in self.plain.collectives if each.phase == "forward")
        return (*scales, *gathers, *scales, *(each for each in base.collectives if each.phase != "forward"))

    def _referenced(self) -> tuple[Tensor, ...]:
        """What local variables reference: of `LoRALinear.forward` the input of the adapter, of the experts the rows they received.

        With dropout, no module saves the input of fc2 or a gathered input.
        """
        rows = dispatched_rows(Routing(self.shapes)) if self._of_experts else ()
        unsaved = self.base.kind is ModuleKind.FC2 or (self._fused and self.shapes.sp and not self._reads_shard)
        rows = (*rows, *(() if self._copies_input else self._recomputed[:1]))
        return (*rows, *((self._read(),) if self._copies_input and unsaved else ()))

    def _read(self) -> Tensor:
        """The input of the adapter, [s, b, k] or [s, b, k/t], or the part of the sequence on this rank."""
        return self._shard(self._whole_read()) if self._reads_shard else self._whole_read()

    def _whole_read(self) -> Tensor:
        """The input of the first projection, after it was gathered."""
        made_in = self.path if self._splits_output and not self._of_experts else ""
        return self._local("input", self._width, "k/t" if self._splits_input else "k", made_in=made_in)

    def _saved(self) -> tuple[Tensor, ...]:
        """What the first projection saves: the tensor that the trained layer would save, complete, or the output of the dropout."""
        if self.adapters.dropout:
            dropped = replace(self._read(), name="input after dropout", made_in=f"{self._inside}.dropout")
            return (replace(self._whole_read(), made_in=self._inside) if self._gathers else dropped,)
        if self._recomputed:
            return ()
        read = next((each for each in self.plain.saved if each.for_weight), None)
        if read is None:  # a norm that is computed again keeps it
            read = next(each for each in self.plain.saved if each.name == "input")
        whole = self._whole_read() if self._gathers else self._read()
        if not self.input_gradient and self._splits_input:  # the module before it saves nothing
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
        shapes, rank, k = self.shapes, self._rank, self._width
        width = rank if self._splits_input else rank // self._tensor_size
        output, part = self._local("output", rank, "r"), self._local("part of the output", width, "r/t")
        gathered = not self._splits_input and self._tensor_size > 1
        calls: list[Collective] = []
        if self._splits_input:
            calls += self._calls("all_reduce", "forward", width=rank)
        else:
            calls += self._calls("all_gather", "forward", width=k) if self._gathers or self._regathers else ()
            calls += self._calls("all_gather", "forward", width=rank)
            if not shapes.sp:
                calls += self._calls("all_reduce", "backward", width=k)
            elif self._regathers or (self.input_gradient and self._gathers):
                again = self._calls("all_gather", "backward", width=k) if self._regathers else ()
                calls += [replace(call, for_weight=True) for call in again]
                calls += self._calls("reduce_scatter", "backward", width=k)
        own = self._parameter((width, k), (rank, (self._weight.full_shape or self._weight.shape)[-1]))
        calls += self._sum_over_experts((width, k))
        return Module(
            name="linear_in",
            kind=ModuleKind.ADAPTER_REGATHERED_IN if self._regathers else ModuleKind.ADAPTER_IN,
            parameters=(own,),
            saved=self._saved(),
            forward_workspace=(part, output) if gathered else (output,),
            backward_workspace=(
                replace(output, name="output gradient"),
                *((replace(part, name="part of the output gradient"),) if gathered else ()),
                replace(self._whole_read(), name="input gradient", shares=""),  # also if nothing needs it
                *((replace(self._read(), name="scattered input gradient", shares=""),) if self._regathers else ()),
                *self._weight_gradient((width, k)),
            ),
            collectives=tuple(calls),
            source="RowParallelLinear" if self._splits_input else "ColumnParallelLinear",
        )

    def _out_of(self) -> Module:
        """The projection from the rank. Beside a layer with a complete output its output is gathered."""
        shapes, rank = self.shapes, self._rank
        n = self._rows if self._splits_output else self._rows // self._tensor_size
        own = self._parameter((n, rank), (self._all_rows, rank))
        part = self._local("part of the output", n, "n/t")
        gathers = not self._splits_output and self._tensor_size > 1
        scatters = gathers and self._splits_input and self._exchanges
        whole = self._local("gathered output", self._rows, "n")
        calls = [*(self._calls("all_gather", "forward", width=self._rows) if gathers else ())]
        if scatters:
            calls += self._calls("all_gather", "backward", width=self._rows)
        calls += self._calls("all_reduce", "backward", width=rank)
        calls += self._sum_over_experts((n, rank))
        return Module(
            name="linear_out",
            kind=ModuleKind.ADAPTER_OUT,
            parameters=(own,),
            saved=(self._local("input", rank, "r", made_in=f"{self._inside}.linear_in"),),
            forward_workspace=largest(
                (part, *((replace(whole, name="outputs of all ranks"), whole) if gathers else ())),
                (whole, *((shapes.hidden("scattered output"),) if scatters else ())) if gathers else (),
            ),
            backward_workspace=(
                *((replace(whole, name="gathered output gradient"),) if scatters else ()),
                replace(part, name="part of the output gradient"),
                self._local("input gradient", rank, "r"),
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
