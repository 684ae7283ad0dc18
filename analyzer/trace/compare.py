"""Compares the formulas with a trace: by module, by tensor, by kernel, and in total.

Predicted and recorded tensors are matched by size within the module that allocates them. Unmatched tensors are listed. Needs only
the trace, not torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from typing import Final, NamedTuple

from analyzer.layout.stages import Chunk
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import LAYER, MODEL_PATH, STREAM, Module, Tensor
from analyzer.program.chunks import chunk_program
from analyzer.program.operations import Operation, OperationKind
from analyzer.results import CommunicationRow, RankClass
from analyzer.trace.kernels import KernelComparison, PredictedKernels, compare_kernels
from analyzer.trace.summary import CollectiveKey, Recorded
from analyzer.units import dtype_bytes

MODEL = "(the model itself)"
"""Module of the tensors of the loss, which the model computes outside any module."""
PACKING = "batch.cu_seqlens"
"""Lengths of packed sequences, which a recorded step does not broadcast."""
NEGLIGIBLE = 1e-3
"""If the difference of a module is below this share of all saved bytes, it is listed but does not fail the check."""


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """Predicted and recorded saved tensors of one module, in bytes."""

    module: str
    predicted: int
    recorded: int
    only_predicted: tuple[Tensor, ...]
    """Predicted tensors without a recorded one."""
    only_recorded: tuple[int, ...]
    """Bytes of each recorded tensor without a predicted one."""

    @property
    def difference(self) -> int:
        """Predicted minus recorded bytes."""
        return self.predicted - self.recorded


@dataclass(frozen=True, kw_only=True)
class TotalRow:
    """A predicted and a recorded total of the rank, in bytes."""

    name: str
    predicted: int
    recorded: int

    @property
    def error(self) -> float:
        """(predicted - recorded) / recorded; 0 if both are 0."""
        if self.recorded == self.predicted:
            return 0.0
        return (self.predicted - self.recorded) / self.recorded if self.recorded else float("inf")


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """A collective whose number of calls per iteration differs."""

    key: CollectiveKey
    predicted: int
    recorded: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a check."""

    modules: tuple[ModuleRow, ...]
    totals: tuple[TotalRow, ...]
    collectives: tuple[CollectiveRow, ...]
    """Only collectives with differing counts."""
    explained: float
    """Share of the recorded saved bytes that match a predicted tensor of the same module and size."""
    tolerance: float
    kernels: KernelComparison | None = None
    """GEMMs and attention kernels; None if they were not predicted or not recorded."""

    @property
    def failures(self) -> tuple[str, ...]:
        """One phrase for each difference above the tolerance."""
        found = [f"{row.name}: {row.error:+.2%}" for row in self.totals if abs(row.error) > self.tolerance]
        total = sum(row.recorded for row in self.modules)
        for row in self.modules:
            differs = abs(row.difference) > self.tolerance * max(row.predicted, row.recorded)
            if differs and abs(row.difference) > NEGLIGIBLE * total:
                found.append(f"saved in {row.module}: {row.difference:+,} bytes")
        if self.kernels is not None and abs(self.kernels.error) > self.tolerance:
            found.append(f"FLOPs of GEMMs and attention: {self.kernels.error:+.2%}")
        return tuple(found)


def compare(
    rank: RankClass,
    recorded: Recorded,
    *,
    communication: Sequence[CommunicationRow] = (),
    kernels: PredictedKernels | None = None,
    tolerance: float = 0.01,
    unlisted: Callable[[str, Tensor], bool] = lambda module, tensor: False,  # noqa: ARG005
) -> Comparison:
    """Compare the prediction for a rank with a recording. The last iteration of the trace is taken as the steady state.

    `unlisted`: whether a saved tensor of a module may be freed in a forward, so that the recording need not list it.

    Raises ValueError if the trace has no iteration.
    """
    if not recorded.iterations:
        raise ValueError("the trace has no iteration: it ends before the first training step")
    last = recorded.iterations[-1]
    rows = _module_rows(rank, last.saved, unlisted)
    matched = sum(row.recorded - sum(row.only_recorded) for row in rows)
    total = sum(row.recorded for row in rows)
    return Comparison(
        modules=rows,
        totals=tuple(_totals(rank, recorded)),
        collectives=_collective_rows(communication, last.collectives),
        explained=matched / total if total else 1.0,
        tolerance=tolerance,
        kernels=None if kernels is None else compare_kernels(kernels, last.kernels, tolerance=tolerance),
    )


def made_tensors(chunks: Sequence[Chunk], trees: Sequence[Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield every saved tensor of one microbatch with the Megatron name of the module that allocates it.

    Layers have their numbers in the full model, from 0; MTP layers are numbered separately, from 0. Tensors that a pipeline stage
    receives are omitted, because no module allocates them.
    """
    for chunk, tree in zip(chunks, trees, strict=True):
        names = _ModuleNames(chunk)
        for path, operation in chunk_program(tree).expanded("forward"):
            for module, tensor in names.saved_tensors(path, operation):
                if module is not None:
                    yield module or MODEL, tensor


class _Frame(NamedTuple):
    """A running module."""

    module: Module
    path: str
    """Its name in Megatron; for a function, the name of its caller."""
    layer: str
    """The enclosing transformer layer."""
    checkpointed: bool
    """Whether the module runs inside a checkpoint."""


class _ModuleNames:
    """Determines the Megatron names of the modules that allocate tensors, by following the operations of a forward."""

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        self._layers: dict[str, Iterator[int]] = {}
        """The numbers of the layers that have not run, by the path of their block: a T5 has two blocks."""
        self._number = 0
        """That of the current layer. A layer that repeats another one has its number."""
        self._frames: list[_Frame] = []
        self._stream = ""
        """The module that allocated the current hidden states; empty if they were received from the previous stage."""

    def saved_tensors(self, path: str, operation: Operation) -> Iterator[tuple[str | None, Tensor]]:
        """Yield the tensors that an operation saves, each with the module that allocates it; None for received tensors."""
        if operation.kind is OperationKind.BEGIN:
            frame = self._begin(path, operation.module)
            # in the first forward of a checkpoint only tensors referenced by module attributes stay; the others are freed. What a
            # dispatcher references is freed during a backward if the next forward overlaps with it
            listed = frame.checkpointed or operation.module.kind is ModuleKind.DISPATCH
            named = tuple(replace(tensor, lingers=True) for tensor in operation.module.referenced) if listed else ()
            # offloaded tensors of the last layer stay for the microbatch whose backward runs first
            maybe = tuple(replace(tensor, lingers=True) for tensor in operation.module.offloaded)
            for tensor in (*operation.module.saved, *named, *maybe):
                if tensor.bytes and (tensor.lingers or not (frame.checkpointed or tensor.discarded)):
                    yield _allocating_module(tensor, own=frame.path, layer=frame.layer, stream=self._stream), tensor
        elif operation.kind is OperationKind.END:
            self._end(self._frames.pop())

    def _begin(self, path: str, module: Module) -> _Frame:
        if self._frames:
            outer = self._frames[-1]
            path, layer, checkpointed = outer.path, outer.layer, outer.checkpointed or outer.module.recomputed
        else:  # a block: the enclosing modules, without the root
            path, layer, checkpointed = _enclosing(path.partition(".")[2], module), "", False
        if self._is_numbered(module):
            if not module.repeats:
                self._number = next(self._layers.setdefault(path, self._numbers(module)))
            path = layer = f"{path}.layers.{self._number}" if path else f"layers.{self._number}"
        elif module.kind is ModuleKind.LAYER:
            path = layer = f"{path}.{module.name}"
        elif module.kind is ModuleKind.EMBEDDING:  # the only embedding, also if an MTP layer calls it
            path, layer = module.name, ""
        elif not module.function and module.kind is not ModuleKind.MODEL:
            path = f"{path}.{module.name}" if path else module.name
        frame = _Frame(module, path, layer, checkpointed)
        self._frames.append(frame)
        return frame

    def _numbers(self, module: Module) -> Iterator[int]:
        """The numbers of the layers of a block whose first layer is `module`. A vision encoder has all its layers."""
        if module.part == "vision":
            return count()
        if module.kind is ModuleKind.MTP_DEPTH:
            return iter(range(self._chunk.mtp_layers))
        return (layer - 1 for layer in self._chunk.layers)

    def _is_numbered(self, module: Module) -> bool:
        """Return whether the module is a numbered layer of the decoder or of MTP, not the transformer layer in an MTP layer."""
        inside_mtp = any(frame.module.kind is ModuleKind.MTP_DEPTH for frame in self._frames)
        return module.kind is ModuleKind.MTP_DEPTH or (module.kind is ModuleKind.LAYER and not inside_mtp)

    def _end(self, frame: _Frame) -> None:
        """Update the module of the hidden states after a layer, an MTP projection or the embedding."""
        module = frame.module
        if self._is_numbered(module) or module.kind is ModuleKind.LAYER:
            self._stream = frame.layer if module.children else self._stream
        elif module.kind is ModuleKind.MTP_PROJECTION:  # a split output is gathered into a tensor of the MTP layer
            self._stream = frame.layer if module.collectives else frame.path
        elif module.kind is ModuleKind.EMBEDDING and any(child.saved or child.forward_workspace for child in module.children):
            # an embedding without tensors only holds a shared weight and computes no hidden states
            self._stream = f"{module.name}.{module.output_of}" if module.output_of else module.name
            if module.forward_held:
                self._stream = _CONVERTED
        elif module.kind is ModuleKind.VISION_INPUT:
            self._stream = frame.path
        elif module.kind is ModuleKind.STREAM_COPIES and not frame.layer:
            self._stream = DECODER


def _enclosing(path: str, module: Module) -> str:
    """The path of the module in which a block runs. Names of blocks can have dots; functions run in the module that they name."""
    return path.rpartition(".")[0] if module.function else path.removesuffix(module.name).rstrip(".")


DECODER: Final = "decoder"
"""The block of layers, in which hyper-connections make several parts of the residual stream."""
_CONVERTED: Final = "fp32"
"""Instead of the path of the module that allocates the hidden states: the module that saves them converts them to 16 bit."""


def _allocating_module(tensor: Tensor, *, own: str, layer: str, stream: str) -> str | None:
    if tensor.made_in == "":
        return own
    if tensor.made_in == STREAM:
        return own if stream == _CONVERTED else stream or None
    if tensor.made_in == LAYER:
        return layer
    if tensor.made_in.startswith(MODEL_PATH):
        return tensor.made_in.removeprefix(MODEL_PATH)
    return f"{layer}.{tensor.made_in}" if layer else tensor.made_in


def _module_rows(
    rank: RankClass, saved: dict[str, tuple[int, ...]], unlisted: Callable[[str, Tensor], bool]
) -> tuple[ModuleRow, ...]:
    predicted: dict[str, list[Tensor]] = {}
    for path, tensor in made_tensors(rank.chunks, rank.trees):
        predicted.setdefault(path, []).append(replace(tensor, lingers=True) if unlisted(path, tensor) else tensor)
    recorded: dict[str, list[int]] = {}
    for module, sizes in saved.items():
        recorded.setdefault(_predicted_module(module, predicted), []).extend(sizes)
    names = [*predicted, *(name for name in recorded if name not in predicted)]
    return tuple(_row(name, predicted.get(name, []), recorded.get(name, [])) for name in names)


def _predicted_module(module: str, predicted: dict[str, list[Tensor]]) -> str:
    """Return the nearest enclosing module that has a prediction: recordings have further modules inside core_attention.

    Sequential experts are predicted together.
    """
    name = re.sub(r"\.local_experts\.\d+", "", module)
    while name and name not in predicted:
        name = name.rpartition(".")[0]
    return name or module or MODEL


def _row(name: str, tensors: Sequence[Tensor], sizes: Sequence[int]) -> ModuleRow:
    """Match predicted tensors with recorded sizes.

    A lingering tensor without a match is not counted: with one microbatch in flight it is freed in the next forward.
    """
    left = Counter(sizes)
    missing = []
    freed_later = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.lingers):
        found = _pieces(tensor, left)
        if found:
            left -= found
        elif not tensor.lingers:
            missing.append(tensor)
        else:
            freed_later += tensor.bytes
    return ModuleRow(
        module=name,
        predicted=sum(tensor.bytes for tensor in tensors) - freed_later,
        recorded=sum(sizes),
        only_predicted=tuple(missing),
        only_recorded=tuple(sorted(left.elements(), reverse=True)),
    )


def _pieces(tensor: Tensor, left: Counter[int]) -> Counter[int]:
    """Return the recorded sizes that belong to a predicted tensor; none if there are too few.

    Padded rows of experts differ in pairs: one expert has as much more than the mean as the other has less
    (`allocator_hook.shadow.balance`).
    """
    size = tensor.bytes // tensor.pieces
    if left[size] >= tensor.pieces:
        return Counter({size: tensor.pieces})
    half, odd = divmod(tensor.pieces, 2)
    for larger in sorted(left) if half and not odd else ():
        if larger > size and min(left[larger], left[2 * size - larger]) >= half:
            return Counter({larger: half, 2 * size - larger: half})
    return Counter()


def _totals(rank: RankClass, recorded: Recorded) -> Iterator[TotalRow]:
    memory = rank.memory
    # a trace has the requested sizes, so it has no fragmentation
    allocated = memory.allocated_bytes - memory.unsplit_bytes
    peak = memory.peak_allocated_bytes - memory.unsplit_at_peak_bytes
    first_peak = memory.peak_allocated_first_iteration_bytes - memory.unsplit_at_first_peak_bytes
    yield TotalRow(name="parameters", predicted=memory.parameters_bytes, recorded=recorded.parameters)
    # torch FSDP2 frees its gradients in the optimizer step, which stores copies of them
    gradients = memory.gradients_bytes if recorded.gradients else 0
    yield TotalRow(name="gradients", predicted=gradients, recorded=recorded.gradients)
    yield TotalRow(name="optimizer states", predicted=memory.optimizer_bytes, recorded=recorded.optimizer)
    rest = allocated - memory.parameters_bytes - gradients - memory.optimizer_bytes
    first, last = recorded.iterations[0], recorded.iterations[-1]
    left = last.allocated_after - recorded.parameters - recorded.gradients - recorded.optimizer
    yield TotalRow(name="workspaces and other kept tensors", predicted=rest, recorded=left)
    yield TotalRow(name="allocated after a step", predicted=allocated, recorded=last.allocated_after)
    yield TotalRow(name="peak of the first iteration", predicted=first_peak, recorded=first.peak)
    if len(recorded.iterations) > 1:
        # CUDA graphs may be captured in the first iteration, which then has the highest peak
        later = recorded.iterations if memory.peak_in_first_iteration else recorded.iterations[1:]
        yield TotalRow(name="peak of later iterations", predicted=peak, recorded=max(each.peak for each in later))


def _collective_rows(rows: Sequence[CommunicationRow], recorded: Counter[CollectiveKey]) -> tuple[CollectiveRow, ...]:
    if not rows:
        return ()
    predicted: Counter[CollectiveKey] = Counter()
    for row in rows:
        if row.module.startswith(PACKING):
            continue
        elements, dtype = prod(row.shape), row.dtype
        if dtype in ("fp8", "fp4"):  # sent as bytes
            elements, dtype = dtype_bytes(dtype, elements), "uint8"
        predicted[CollectiveKey(row.kind, row.group, elements, dtype)] += row.calls_per_iteration
    keys = sorted(predicted.keys() | recorded.keys(), key=str)
    return tuple(
        CollectiveRow(key=key, predicted=predicted[key], recorded=recorded[key]) for key in keys if predicted[key] != recorded[key]
    )
