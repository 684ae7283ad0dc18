"""Layers whose parts have adapters of their own: q, k and v, or gate and up (canonical LoRA).

Each part is projected from the same input. The outputs are concatenated, those of q, k and v by query groups; the backward of each
slice of a group is a tensor of the size of the part. A layer without parts has one adapter.

Source: megatron/bridge/peft/canonical_lora.py of Megatron-Bridge: `LoRALinearSplitQKV` and `LoRALinearSplitFC1UpGate`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from analyzer.modules.adapters.layer import AdaptedLayer
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Tensor


@dataclass(frozen=True)
class _Part(AdaptedLayer):
    """The adapter of a part of a layer."""

    name: str
    rows: int
    all_rows: int
    shared: Tensor | None
    """The saved input of an earlier part, which this one reads too."""

    @property
    def _inside(self) -> str:
        return f"{self.path}.adapter.adapter_{self.name}"

    @property
    def _rows(self) -> int:
        return self.rows

    @property
    def _all_rows(self) -> int:
        return self.all_rows

    @property
    def output(self) -> Tensor:
        """[s, b, n/t] of the part."""
        return replace(self._output, name=f"output of {self.name}")

    @property
    def input_gradients(self) -> tuple[Tensor, ...]:
        """The sum of the input gradients of later parts, which waits for that of this one."""
        return (replace(self._read(), name="sum of input gradients", shares=""),) if self.input_gradient else ()

    def saved_input(self) -> Tensor | None:
        """What other parts save too: without dropout, and unless each part gathers it."""
        return None if self.adapters.dropout or self._gathers else self._saved()[0]

    def _saved(self) -> tuple[Tensor, ...]:
        (own,) = super()._saved()
        return (own if self.shared is None else replace(own, shares=self.shared.shares or self.shared.name),)

    def module(self, *, held: tuple[Tensor, ...], waiting: tuple[Tensor, ...], copied: bool) -> Module:
        """The adapter. `held`: outputs of earlier parts; `waiting`: gradients of these; `copied`: its gradient is no view."""
        output = self.output
        gradient = (replace(output, name=f"gradient of {self.name}"),) if copied else ()
        scaled = Module(
            name="scale",
            kind=ModuleKind.ADAPTER_SCALE,
            function=True,
            forward_workspace=(output, replace(output, name="scaled output")),
            backward_workspace=(*gradient, replace(output, name="scaled output gradient")),
            source="ParallelLinearAdapter",
        )
        return Module(
            name=f"adapter_{self.name}",
            kind=ModuleKind.ADAPTER,
            forward_workspace=held,
            backward_workspace=waiting,
            children=(*self._dropout(), self._into(), self._out_of(), scaled),
            source="ParallelLinearAdapter",
        )


@dataclass(frozen=True)
class CanonicalLayer(AdaptedLayer):
    """A linear layer, which has one adapter for each of its parts."""

    def _widths(self) -> dict[str, tuple[int, int]]:
        """Elements of the output of each part on this rank and on all ranks; none if the layer has one adapter."""
        model, ranks = self.shapes.model, self._tensor_size
        if self.base.name == "linear_qkv":
            query, key = (model.kv_channels * heads for heads in (model.num_attention_heads, model.num_query_groups))
            return {name: (width // ranks, width) for name, width in (("q", query), ("k", key), ("v", key))}
        if self.base.name == "linear_fc1" and not self._of_experts:
            return dict.fromkeys(("gate", "up"), (self._rows // 2, self._all_rows // 2))
        return {}

    def _children(self) -> tuple[Module, ...]:
        parts: list[_Part] = []
        for name, (rows, all_rows) in self._widths().items():
            shared = parts[0].saved_input() if parts else None
            own = (self.shapes, self.base, self.plain, self.adapters, self.input_gradient, self.path)
            parts.append(_Part(*own, name, rows, all_rows, shared))
        if not parts:
            return super()._children()
        copied = self.base.name == "linear_qkv" and self.shapes.model.num_query_groups > 1
        gradients = [replace(each.output, name=f"gradient of {each.name}") for each in parts] if copied else []
        outputs = [each.output for each in parts]
        children = [
            each.module(
                held=tuple(outputs[:index]),
                waiting=(*gradients[:index], *(each.input_gradients if each is not parts[-1] else ())),
                copied=copied,
            )
            for index, each in enumerate(parts)
        ]
        whole = replace(self._output, name="output of the adapters")
        join = Module(
            name="join",
            kind=ModuleKind.ADAPTER_JOIN,
            function=True,
            forward_workspace=(*outputs, whole),
            backward_workspace=(*gradients, *(replace(each, name="gradient of a slice") for each in gradients[:1])),
            source="LoRALinearSplitQKV" if copied else "LoRALinearSplitFC1UpGate",
        )
        added = Module(
            name="sum",
            kind=ModuleKind.ADAPTER_ADD,
            function=True,
            forward_workspace=(*outputs, whole, replace(whole, name="sum of both outputs")),
            source=join.source,
        )
        return (*children, join, added)
