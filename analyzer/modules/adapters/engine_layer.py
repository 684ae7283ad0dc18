"""Adapters with layers of Transformer Engine, as in ms-swift.

Beside a layer whose output is split, each tensor-parallel rank has the whole first projection, which reads its part of the
sequence; only its output, of the width of the rank, is gathered. Beside a layer whose input is split, each has the whole second
projection.

Source: `LoraParallelLinear` (tuners/lora.py of mcore-bridge 1.6, which ms-swift uses).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from analyzer.modules.adapters.layer import AdaptedLayer
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import weight_gradient
from analyzer.modules.tree import Collective, Module, Parameter, Sharding, Tensor


@dataclass(frozen=True)
class EngineAdaptedLayer(AdaptedLayer):
    """A linear layer with an adapter of Transformer Engine's layers."""

    @property
    def _reads_shard(self) -> bool:
        return self._splits_output and self._exchanges

    @property
    def _gathers(self) -> bool:
        return False

    def _of_rank(self, name: str, *, gathered: bool = False, made_in: str = "") -> Tensor:
        """[s, b, r], or the part of the sequence on this rank."""
        wide = self._wide(name, self._rank, "r", made_in=made_in)
        return wide if gathered or not self._exchanges else self._shard(wide)

    def _exchange(self, forward: str, backward: tuple[str, ...]) -> tuple[Collective, ...]:
        """Collectives over [s, b, r]; none if a dispatcher exchanges the output of the layer."""
        if self._exchanged_outside:
            return ()
        found = self.shapes.tp(forward, "forward", width=self._rank) if forward else ()
        return (*found, *(call for kind in backward for call in self.shapes.tp(kind, "backward", width=self._rank)))

    def _weight_of(self, shape: tuple[int, int], full: tuple[int, int]) -> Parameter:
        """A weight that tensor-parallel ranks share, or of which each has a copy, whose gradients are summed over their tokens."""
        sharding: Sharding = "tensor" if shape != full else "replicated"
        copied = shape == full and self.shapes.sp
        return Parameter(
            name="weight", shape=shape, dtype=self.shapes.dtype, sharding=sharding, full_shape=full, sequence_parallel=copied
        )

    def _into(self) -> Module:
        if self._of_experts:
            return super()._into()
        k, rank = self._width, self._rank
        full = (rank, k * self.shapes.t) if self._splits_input else (rank, k)
        summed = self._splits_input and self._exchanges
        calls: tuple[Collective, ...] = ()
        if self._splits_input:
            calls = self._exchange("reduce_scatter", ("all_gather",)) if self.shapes.sp else self._exchange("all_reduce", ())
        gathered = (self._of_rank("gathered output gradient", gathered=True),) if summed else ()
        gradient = (replace(self._read(), name="input gradient", shares=""),) if self.input_gradient else ()
        return Module(
            name="linear_in",
            kind=ModuleKind.ADAPTER_ENGINE_IN,
            parameters=(self._weight_of((rank, k), full),),
            saved=self._saved(),
            forward_workspace=(self._of_rank("output"), *((self._of_rank("partial sums", gathered=True),) if summed else ())),
            backward_workspace=(
                self._of_rank("output gradient"), *gathered, *gradient, *weight_gradient(self.shapes, (rank, k))
            ),
            input_gradient=self.input_gradient,
            collectives=calls,
            source="TERowParallelLinear" if self._splits_input else "TELinear, duplicated",
        )  # fmt: skip

    def _out_of(self) -> Module:
        if self._of_experts:
            return super()._out_of()
        n, rank = self._weight.shape[-2], self._rank
        full = (n * self.shapes.t, rank) if self._splits_output else (n, rank)
        gathers = self._splits_output and self._exchanges
        calls: tuple[Collective, ...] = ()
        if self._splits_output:
            backward = ("all_gather", "reduce_scatter") if self.shapes.sp else ("all_reduce",)
            calls = self._exchange("all_gather" if self.shapes.sp else "", backward)
        gathered = (self._of_rank("gathered input", gathered=True),) if gathers else ()
        return Module(
            name="linear_out",
            kind=ModuleKind.ADAPTER_ENGINE_OUT,
            parameters=(self._weight_of((n, rank), full),),
            saved=(self._of_rank("input", made_in=f"{self._inside}.linear_in"),),
            forward_workspace=(*gathered, replace(self._output, name="output")),
            backward_workspace=(
                replace(self._output, name="output gradient"),
                *gathered,
                self._of_rank("input gradient", gathered=True),
                *((self._of_rank("scattered input gradient"),) if gathers else ()),
                *weight_gradient(self.shapes, (n, rank)),
            ),
            collectives=calls,
            source="TEColumnParallelLinear" if self._splits_output else "TELinear, duplicated",
        )
