"""Formulas held against a trace: module by module, tensor by tensor, and in total.

Tensors of the two sides are matched by their size within the module that makes them. What is left over on either side is
listed; nothing is tolerated silently. Works from the trace alone, without torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from analyzer.layout.stages import Chunk
from analyzer.modules.tree import LAYER, MODEL_PATH, STREAM, Module, Tensor
from analyzer.results import Message, RankClass
from analyzer.trace.summary import CollectiveKey, Recorded

MODEL = "(the model itself)"
"""Where the loss is computed: in the frame of the model, in no module of its own."""
PACKING = "batch.cu_seqlens"
"""Lengths of packed sequences, which the batch of a recorded step has none of."""
NEGLIGIBLE = 1e-3
"""A module whose difference is less than this share of all saved bytes is listed, and fails no check."""


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """Saved tensors of one module on both sides."""

    module: str
    predicted: int
    recorded: int
    only_predicted: tuple[Tensor, ...]
    """Tensors that the formulas have and the trace has not."""
    only_recorded: tuple[int, ...]
    """Bytes of tensors that the trace has and the formulas have not."""

    @property
    def difference(self) -> int:
        """Predicted less recorded."""
        return self.predicted - self.recorded


@dataclass(frozen=True, kw_only=True)
class TotalRow:
    """A figure of the whole rank on both sides."""

    name: str
    predicted: int
    recorded: int

    @property
    def error(self) -> float:
        """(predicted - recorded) / recorded; 0 where both are nothing."""
        if self.recorded == self.predicted:
            return 0.0
        return (self.predicted - self.recorded) / self.recorded if self.recorded else float("inf")


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """One kind of call whose number differs."""

    key: CollectiveKey
    predicted: int
    recorded: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that a check has to say."""

    modules: tuple[ModuleRow, ...]
    totals: tuple[TotalRow, ...]
    collectives: tuple[CollectiveRow, ...]
    """Only those that differ."""
    explained: float
    """Share of the recorded saved bytes that a predicted tensor of the same module and size accounts for."""
    tolerance: float

    @property
    def failures(self) -> tuple[str, ...]:
        """What differs by more than the tolerance, one phrase each."""
        found = [f"{row.name}: {row.error:+.2%}" for row in self.totals if abs(row.error) > self.tolerance]
        whole = sum(row.recorded for row in self.modules)
        for row in self.modules:
            off = abs(row.difference) > self.tolerance * max(row.predicted, row.recorded)
            if off and abs(row.difference) > NEGLIGIBLE * whole:
                found.append(f"saved in {row.module}: {row.difference:+,} bytes")
        return tuple(found)


def compare(rank: RankClass, recorded: Recorded, *, messages: Sequence[Message] = (), tolerance: float = 0.01) -> Comparison:
    """Hold the prediction for a rank against the recording of one. The last iteration of the trace is the steady one.

    Raises ValueError where the trace has no iteration.
    """
    if not recorded.iterations:
        raise ValueError("the trace has no iteration: it broke off before the first step")
    last = recorded.iterations[-1]
    rows = _module_rows(rank, last.saved)
    matched = sum(row.recorded - sum(row.only_recorded) for row in rows)
    whole = sum(row.recorded for row in rows)
    return Comparison(
        modules=rows,
        totals=tuple(_totals(rank, recorded)),
        collectives=_collective_rows(messages, last.collectives),
        explained=matched / whole if whole else 1.0,
        tolerance=tolerance,
    )


def made_tensors(chunks: Sequence[Chunk], trees: Sequence[Module]) -> Iterator[tuple[str, Tensor]]:
    """Every saved tensor of one microbatch with the module that makes it, named as Megatron names it.

    Layers have their numbers in the whole model, from 0, those of multi-token prediction numbers of their own.
    What a pipeline stage receives is left out: no module makes it.
    """
    for chunk, tree in zip(chunks, trees, strict=True):
        layers = iter((*(layer - 1 for layer in chunk.layers), *range(chunk.mtp_layers)))
        stream = [""]  # who made the hidden states so far; on a later stage nobody here
        for child in tree.children:
            for path, tensor in _of_node(child, path="", layer="", stream=stream, layers=layers):
                if path is not None:
                    yield path or MODEL, tensor


def _of_node(
    module: Module, *, path: str, layer: str, stream: list[str], layers: Iterator[int], checkpointed: bool = False
) -> Iterator[tuple[str | None, Tensor]]:
    """Tensors below `module`. `path` is the enclosing module, `layer` the enclosing layer, `stream` who made the hidden states.

    Of what is `checkpointed`, there is what modules themselves name: it is freed when they run again.
    """
    here = path
    if module.name == "layers":
        layer = f"{path}.layers.{next(layers)}" if path else f"layers.{next(layers)}"
        here = layer
    elif module.name == "transformer_layer":  # inside a layer of multi-token prediction
        layer = here = f"{path}.transformer_layer"
    elif module.name == "embedding":  # one, whoever calls it
        layer, here = "", "embedding"
    elif not module.function:
        here = f"{path}.{module.name}" if path else module.name
    named = (replace(tensor, lingers=True) for tensor in module.named) if checkpointed else ()
    for tensor in (*module.saved, *named):
        if tensor.bytes and (tensor.lingers or not checkpointed):
            yield _maker(tensor, here=here, layer=layer, stream=stream[0]), tensor
    within = checkpointed or module.recomputed
    for child in module.children:
        yield from _of_node(child, path=here, layer=layer, stream=stream, layers=layers, checkpointed=within)
    if module.name == "layers":
        stream[0] = layer if module.children else stream[0]
    elif module.name == "eh_proj":  # whose output is gathered where it is in parts
        stream[0] = layer if module.collectives else here
    elif module.name == "embedding" and any(child.saved for child in module.children):  # not where it lends its weight alone
        stream[0] = f"embedding.{module.output_of}" if module.output_of else "embedding"


def _maker(tensor: Tensor, *, here: str, layer: str, stream: str) -> str | None:
    if tensor.made_in == "":
        return here
    if tensor.made_in == STREAM:
        return stream or None
    if tensor.made_in == LAYER:
        return layer
    if tensor.made_in.startswith(MODEL_PATH):
        return tensor.made_in.removeprefix(MODEL_PATH)
    return f"{layer}.{tensor.made_in}" if layer else tensor.made_in


def _module_rows(rank: RankClass, saved: dict[str, tuple[int, ...]]) -> tuple[ModuleRow, ...]:
    predicted: dict[str, list[Tensor]] = {}
    for path, tensor in made_tensors(rank.chunks, rank.trees):
        predicted.setdefault(path, []).append(tensor)
    recorded: dict[str, list[int]] = {}
    for module, sizes in saved.items():
        recorded.setdefault(_known(module, predicted), []).extend(sizes)
    names = [*predicted, *(name for name in recorded if name not in predicted)]
    return tuple(_row(name, predicted.get(name, []), recorded.get(name, [])) for name in names)


def _known(module: str, predicted: dict[str, list[Tensor]]) -> str:
    """The nearest enclosing module that the formulas know: kernels have modules of their own inside core_attention."""
    name = module
    while name and name not in predicted:
        name = name.rpartition(".")[0]
    return name or module or MODEL


def _row(name: str, tensors: Sequence[Tensor], sizes: Sequence[int]) -> ModuleRow:
    """Tensors and recorded sizes, matched. Where one microbatch is in flight, what lingers is freed in the next forward."""
    left = Counter(sizes)
    missing = []
    seen_later = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.lingers):
        size = tensor.bytes // tensor.pieces
        if left[size] >= tensor.pieces:
            left[size] -= tensor.pieces
        elif not tensor.lingers:
            missing.append(tensor)
        else:
            seen_later += tensor.bytes
    return ModuleRow(
        module=name,
        predicted=sum(tensor.bytes for tensor in tensors) - seen_later,
        recorded=sum(sizes),
        only_predicted=tuple(missing),
        only_recorded=tuple(sorted(left.elements(), reverse=True)),
    )


def _totals(rank: RankClass, recorded: Recorded) -> Iterator[TotalRow]:
    memory = rank.memory
    # a trace has tensors; what the allocator hands out beyond them is not in it
    allocated = memory.allocated_bytes - memory.unsplit_bytes
    peak = memory.peak_allocated_bytes - memory.unsplit_at_peak_bytes
    first_peak = memory.peak_allocated_first_iteration_bytes - memory.unsplit_at_first_peak_bytes
    yield TotalRow(name="parameters", predicted=memory.parameters_bytes, recorded=recorded.parameters)
    yield TotalRow(name="gradients", predicted=memory.gradients_bytes, recorded=recorded.gradients)
    yield TotalRow(name="optimizer states", predicted=memory.optimizer_bytes, recorded=recorded.optimizer)
    rest = allocated - memory.parameters_bytes - memory.gradients_bytes - memory.optimizer_bytes
    first, last = recorded.iterations[0], recorded.iterations[-1]
    left = last.allocated_after - recorded.parameters - recorded.gradients - recorded.optimizer
    yield TotalRow(name="workspaces and what else stays", predicted=rest, recorded=left)
    yield TotalRow(name="allocated after a step", predicted=allocated, recorded=last.allocated_after)
    yield TotalRow(name="peak of the first iteration", predicted=first_peak, recorded=first.peak)
    if len(recorded.iterations) > 1:
        yield TotalRow(name="peak of later iterations", predicted=peak, recorded=last.peak)


def _collective_rows(messages: Sequence[Message], recorded: Counter[CollectiveKey]) -> tuple[CollectiveRow, ...]:
    if not messages:
        return ()
    predicted: Counter[CollectiveKey] = Counter()
    for message in messages:
        if message.module.startswith(PACKING):
            continue
        dtype = "uint8" if message.dtype == "fp8" else message.dtype  # FP8 is sent as bytes
        predicted[message.kind, message.group, prod(message.shape), dtype] += message.calls_per_iteration
    keys = sorted(predicted.keys() | recorded.keys(), key=str)
    return tuple(
        CollectiveRow(key=key, predicted=predicted[key], recorded=recorded[key]) for key in keys if predicted[key] != recorded[key]
    )
