"""Layers whose output is scaled by a trained magnitude over the norm of the weight with its adapter (DoRA).

The output is m / ||W + B A|| * (W x + B A x). The norm of each row is computed in every forward, from a copy of the weight, and has
no gradient. The sum of both outputs is saved for the gradient of the magnitude.

Source: megatron/bridge/peft/dora_layers.py of Megatron-Bridge: `DoRALinear`, without dropout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from analyzer.modules.adapters.layer import AdaptedLayer
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.reduction import sum_buffer
from analyzer.modules.tree import Collective, Module, Parameter, Tensor


@dataclass(frozen=True)
class ScaledLayer(AdaptedLayer):
    """A linear layer with an adapter and a magnitude."""

    def modules(self, base: Module) -> tuple[Module, ...]:
        """The gradient of the sum of both outputs is a tensor of its own, which the backward of the layer reads."""
        frozen, adapter = super().modules(base)
        gradient = replace(self._output, name="gradient of the sum")
        shared = self._splits_input
        held = (gradient,) if shared else adapter.backward_workspace
        adapter = replace(adapter, parameters=(self._magnitude(),), backward_workspace=held, source="DoRALinear")
        if shared:
            frozen = replace(frozen, backward_workspace=(*frozen.backward_workspace, gradient))
        return frozen, adapter

    def _magnitude(self) -> Parameter:
        split = self._splits_output
        return Parameter(
            name="weight_magnitude",
            shape=(self._rows,),
            dtype=self.shapes.dtype,
            sharding="tensor" if split else "replicated",
            full_shape=(self._all_rows,) if split else (),
        )

    def _children(self) -> tuple[Module, ...]:
        output = self._output
        scale = Module(
            name="scale",
            kind=ModuleKind.ADAPTER_SCALE,
            function=True,
            forward_workspace=(replace(output, name="output of the adapter"), replace(output, name="scaled output of the adapter")),
            backward_workspace=(replace(output, name="scaled output gradient"),),
            source="ParallelLinearAdapter",
        )
        return (*self._dropout(), self._into(), self._out_of(), scale, self._scaled())

    def _scaled(self) -> Module:
        """The norm of the weight, and the product with the magnitude over it."""
        output = self._output
        return Module(
            name="magnitude",
            kind=ModuleKind.ADAPTER,
            forward_workspace=(replace(output, name="scaled output of the adapter"),),
            children=(self._norm(), self._product()),
            source="DoRALinear",
        )

    def _norm(self) -> Module:
        """The norm of the rows of the weight with its adapter. One projection, split otherwise than the weight, is gathered."""
        n, k, rank, dtype = self._rows, self._width, self._rank, self.shapes.dtype
        rows = Tensor(name="norm of the weight", shape=(n,), dtype=dtype, formula="2·n")
        copy = Tensor(name="weight with the adapter", shape=(n, k), dtype=dtype, formula="2·n·k")
        projection = Tensor(name="scaled weight of linear_out", shape=(n, rank), dtype=dtype, formula="2·n·r")
        gathered = (n, rank) if self._splits_input else (rank, k)
        calls = (Collective(kind="all_gather", group="tp", shape=gathered, dtype=dtype, phase="forward"),)
        return Module(
            name="norm",
            kind=ModuleKind.ADAPTER_WEIGHT_NORM,
            function=True,
            saved=(rows, replace(rows, name="magnitude over the norm")),
            forward_workspace=(projection, copy, replace(copy, name="product of the projections")),
            collectives=calls if self._tensor_size > 1 else (),
            source="DoRALinear._get_weight_norm",
        )

    def _product(self) -> Module:
        output = self._output
        product = replace(output, name="product with the magnitude")
        gradient = () if self._splits_input else (replace(output, name="gradient of the sum"),)
        rows = prod(output.shape[:-1])
        buffer = tuple(replace(each, for_weight=False) for each in sum_buffer(self.shapes, rows=rows, columns=output.shape[-1]))
        return Module(
            name="product",
            kind=ModuleKind.ADAPTER_PRODUCT,
            function=True,
            saved=(replace(output, name="sum of both outputs"),),
            forward_workspace=(product, replace(output, name="output with its correction")),
            backward_workspace=(*gradient, replace(product, name="product with the gradient"), *buffer),
            source="DoRALinear",
        )
