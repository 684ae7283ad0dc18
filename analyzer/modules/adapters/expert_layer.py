"""Adapters of each expert beside grouped layers, in 16 bit with the grouped GEMM of PyTorch, as in Megatron-Bridge.

The weights of all local experts are one parameter of each projection. Each forward concatenates the rows of the experts in a copy,
which the first projection saves in the place of the rows themselves, and copies the weights of the experts that have rows. In the
backward the gradient of each expert's rows is a tensor of all rows, which is added to others. A rank with one expert copies none.

Source: `GroupedExpertLinearAdapter` (peft/utils.py) of Megatron-Bridge, `_grouped_mm` and `slice_backward` of PyTorch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from analyzer.modules.adapters.layer import AdaptedLayer
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.moe.routing import Routing
from analyzer.modules.tree import Module, Parameter, Tensor


@dataclass(frozen=True)
class ExpertLayer(AdaptedLayer):
    """A grouped layer of experts with an adapter of each expert."""

    @property
    def _copies_input(self) -> bool:
        return self.adapters.dropout or self._experts > 1

    @property
    def _experts(self) -> int:
        return Routing(self.shapes).local_experts

    def _children(self) -> tuple[Module, ...]:
        rows = (self._rows_of_experts(),) if self.input_gradient or self._experts > 1 else ()
        return (*self._dropout(), *rows, self._into(), self._out_of(), self._sum())

    def _saved(self) -> tuple[Tensor, ...]:
        """The copied rows, or the rows of the only expert."""
        if self._experts == 1:
            return super()._saved()
        return (self._local("rows of all experts", self._width, "k", made_in=self._inside),)

    @property
    def _dropped(self) -> tuple[Tensor, ...]:
        """The output of the dropout, which a local variable references."""
        return (replace(self._read(), name="input after dropout"),) if self.adapters.dropout and self._experts > 1 else ()

    def _rows_of_experts(self) -> Module:
        """The gradients of the copy, those of the rows of an expert, and their sum with those of earlier ones."""
        read = replace(self._read(), shares="", made_in="")
        names = ["gradient of the copy", "gradient of the rows of an expert", "sum of these"][: 2 if self._experts == 1 else 3]
        copied = (replace(read, name="rows of all experts"),) if self._experts > 1 else ()
        return Module(
            name="rows",
            kind=ModuleKind.ADAPTER_ROWS,
            function=True,
            forward_workspace=(*self._dropped, *copied),
            backward_workspace=tuple(replace(read, name=name) for name in names) if self.input_gradient else (),
            differentiable=self.input_gradient,
            source="GroupedExpertLinearAdapter",
        )

    def _weights(self, shape: tuple[int, int], name: str) -> tuple[Parameter, Tensor]:
        """The parameter of a projection, and its copy, which the gradient of the input needs."""
        experts, everyone = self._experts, Routing(self.shapes).moe.num_experts
        parameter = Parameter(
            name="weight",
            shape=(experts, *shape),
            dtype=self.shapes.dtype,
            sharding="expert",
            full_shape=(everyone, *shape),
        )
        copy = Tensor(
            name="copied weights",
            shape=(experts, *shape),
            dtype=self.shapes.dtype,
            formula="size of the weight",
            made_in=f"{self._inside}.{name}",
        )
        return parameter, copy

    def _of_copy(self, copy: Tensor) -> Tensor:
        """The gradient of the copied weights, which that of the parameter replaces."""
        return replace(copy, name="weight gradient", made_in="", for_weight=True)

    def _into(self) -> Module:
        rank, k = self._rank, self._width
        parameter, copy = self._weights((rank, k), "linear_in")
        output = self._local("output", rank, "r")
        gradient = (replace(self._read(), name="input gradient", shares="", made_in=""),) if self.input_gradient else ()
        return Module(
            name="linear_in",
            kind=ModuleKind.ADAPTER_EXPERTS_IN,
            parameters=(parameter,),
            saved=(*self._saved(), *((copy,) if self.input_gradient else ())),
            forward_workspace=(*self._dropped, *(() if self.input_gradient else (copy,)), output),
            backward_workspace=(replace(output, name="output gradient"), *gradient, self._of_copy(copy)),
            input_gradient=self.input_gradient,
            source="_GroupedExpertAdapterWeight",
        )

    def _out_of(self) -> Module:
        rank, n = self._rank, self._rows
        parameter, copy = self._weights((n, rank), "linear_out")
        read = self._local("input", rank, "r", made_in=self._inside)
        output = self._local("output", n, "n")
        return Module(
            name="linear_out",
            kind=ModuleKind.ADAPTER_EXPERTS_OUT,
            parameters=(parameter,),
            saved=(read, copy),
            forward_workspace=(*self._dropped, output),
            backward_workspace=(
                replace(output, name="output gradient"),
                replace(read, name="input gradient", made_in=""),
                self._of_copy(copy),
            ),
            source="_GroupedExpertAdapterWeight",
        )

    def _sum(self) -> Module:
        made = super()._sum()
        return replace(made, forward_workspace=(*self._dropped, *made.forward_workspace))
