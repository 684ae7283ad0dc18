"""The forward of one microbatch overlapped with the backward of another (`--overlap-moe-expert-parallel-comm`).

Layers are paired: the first layer of the forward with the last layer of the backward, and so on. The expert communication of one
runs while the other computes. The saved bytes of the forward grow while those of the backward shrink.

Source: core/models/common/model_chunk_schedule_plan.py `TransformerModelChunkSchedulePlan.run` (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from analyzer.memory.overlapped.layers import Node, Placed, Unit, units
from analyzer.memory.overlapped.offload import OffloadedGroups, StepGroups, group_members
from analyzer.memory.point import Point
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.moe.routing import LOCAL_ROWS
from analyzer.modules.tree import OUTPUT_GRADIENT, Module, Tensor, total_bytes
from analyzer.passes.deferred_output_gradients import output_layers
from analyzer.program.schedule.iteration import Iteration
from analyzer.program.schedule.pipeline import Pair
from analyzer.specs import ActivationOffloadSpec, TrainingJob

_LOOKUPS: Final = (ModuleKind.WORD_EMBEDDINGS, ModuleKind.POSITION_EMBEDDINGS)


class GradientRules(NamedTuple):
    """When an overlapped step computes and frees gradients."""

    early_attention: bool
    """The backward of attention runs before the experts of the other microbatch, not after them."""
    keeps_dispatched: bool
    """With delayed weight gradients, the dispatch keeps the gradients that it has read."""

    @classmethod
    def of(cls, job: TrainingJob) -> GradientRules:
        """Those of the options and of the release."""
        return cls(job.flags.early_attention_backward, job.core.keeps_dispatched_gradients)


class _Chunk(NamedTuple):
    """The units of a chunk: all blocks before the layers, the layers, and all blocks after them."""

    first: Unit
    layers: tuple[Unit, ...]
    last: Unit


def overlapped_peaks(trees: Sequence[Module], messages: Iteration, rules: GradientRules, *, deferred: int = 0) -> dict[Pair, Point]:
    """The peaks of the overlapped steps of an iteration. `trees`: one for each chunk.

    `deferred`: bytes that the backward of each output layer keeps for its deferred weight gradient.
    """
    kept = [deferred * output_layers(tree) if deferred else 0 for tree in trees]
    found: dict[Pair, Point] = {}
    for moment in messages.moments(warm=True):
        pair = moment.pair
        if pair is not None and pair not in found:
            chunks = _Chunk(*units(trees[pair.forward])), _Chunk(*units(trees[pair.backward]))
            step = _OverlappedStep(*chunks, pair, rules, deferred=kept[pair.backward])
            found[pair] = _peak(step)
    return found


def offloaded_peaks(
    job: TrainingJob, offload: ActivationOffloadSpec, trees: Sequence[Module], messages: Iteration
) -> tuple[dict[int, Point], dict[int, int]]:
    """The peak of each overlapped step of a later iteration, and bytes that are on the GPU before each other step, by index.

    The latter are offloaded tensors on the GPU for a later backward. The peaks include them.
    """
    chunks = [_Chunk(*units(tree)) for tree in trees]
    groups = OffloadedGroups([group_members(offload, tree) for tree in trees], messages.order)
    peaks: dict[int, Point] = {}
    before: dict[int, int] = {}
    for index, moment in enumerate(messages.moments(warm=True)):
        step, pair = moment.step, moment.pair
        if pair is not None:
            other = messages.order[index + 1]
            both = StepGroups(groups, (step.microbatch, step.chunk), (other.microbatch, other.chunk))
            of_both = chunks[pair.forward], chunks[pair.backward]
            peaks[index] = _peak(_OverlappedStep(*of_both, pair, GradientRules.of(job), groups=both))
        elif not moment.overlapped:
            before[index] = groups.bytes
            groups.run(step)
    return peaks, before


def overlapped_peak(forward: Module, backward: Module, rules: GradientRules) -> Point:
    """The peak of the forward of one microbatch overlapped with the backward of another one.

    `forward` and `backward` are the trees of their chunks. The bytes of the result include both microbatches.
    """
    pair = Pair(0, 0 if forward is backward else 1, newest=True, ahead=0)
    chunks = _Chunk(*units(forward)), _Chunk(*units(backward))
    return _peak(_OverlappedStep(*chunks, pair, rules))


def overlapped_instants(trees: Sequence[Module], pair: Pair, rules: GradientRules) -> Iterator[Point]:
    """The instants of an overlapped step in order. The arguments are those of `overlapped_peaks`."""
    chunks = _Chunk(*units(trees[pair.forward])), _Chunk(*units(trees[pair.backward]))
    return _OverlappedStep(*chunks, pair, rules).instants()


def _peak(step: _OverlappedStep) -> Point:
    return max(step.instants(), key=lambda point: point.bytes)


def _copies_gradient(embedding: Module, gradient: Sequence[Tensor]) -> bool:
    """Whether the lookups do not count the gradient [s, b, h]: they read a copy, after dropout or a gather, or in another type."""
    lookups = [child for child in embedding.children if child.kind in _LOOKUPS]
    counted = {(each.shape, each.dtype) for child in lookups for each in child.backward_workspace if each.name == OUTPUT_GRADIENT}
    return len(lookups) < len(embedding.children) or any((each.shape, each.dtype) not in counted for each in gradient)


class _OverlappedStep:
    """One overlapped step. All sizes are in bytes."""

    def __init__(
        self,
        forward: _Chunk,
        backward: _Chunk,
        pair: Pair,
        rules: GradientRules,
        *,
        groups: StepGroups | None = None,
        deferred: int = 0,
    ) -> None:
        self._forward = forward
        self._backward = backward
        self._rules = rules
        self._same = pair.forward == pair.backward
        self._newest = pair.newest
        self._ahead = pair.ahead
        self._sent = pair.sent
        self._groups = groups
        self._to_defer = deferred
        self._deferred = 0
        """Bytes of operands of the output layer's weight gradient, after the backward of the output layer."""
        self._freed = 0
        """Bytes that are counted elsewhere, or that the pipeline schedule has freed: the gradient that the step before has sent,
        after this step has sent its own (`send_prev_wait_handle`)."""
        self._forward_saved = 0
        """Bytes that the microbatch of the forward has saved so far."""
        self._backward_saved = backward.last.after
        """Bytes that the other microbatch has not freed yet."""
        self._output: tuple[Tensor, ...] = ()
        """The output of a layer of the forward, until the next layer saves it."""
        self._frame: list[Tensor] = []
        """Tensors that local variables of the forward reference."""
        self._of_idle = {layer.number: layer.left[1 if pair.unused else 0 :] for layer in forward.layers} if pair.idle else {}
        """For each layer of a chunk that was idle, what its dispatcher references until the forward of this layer."""
        self._left: dict[int, tuple[Tensor, ...]] = {}
        """For each layer whose backward is over, what its dispatcher references until the forward of this layer."""
        self._batch = backward.first.frame
        self._gradient: tuple[Tensor, ...] = ()
        """The gradient that the loop over layers references. A received gradient belongs to the pipeline schedule."""
        self._kept: tuple[Tensor, ...] = ()
        """What the schedule and the embedding reference of layers whose backward has begun: the schedule references the output of a
        chunk, whose autograd graph references what the last node of the last layer has read, and the gradients of that."""

    def instants(self) -> Iterator[Point]:
        """All instants in order."""
        f_layers, b_layers = self._forward.layers, self._backward.layers
        yield from self._run_forward(self._forward.first.forward(self._frame))
        yield from self._run_backward(self._backward.last.backward(), self._backward.last.before)
        self._deferred = self._to_defer
        for index in range(max(len(f_layers), len(b_layers))):
            both = index < min(len(f_layers), len(b_layers))
            one = f_layers[index] if both else None
            other = b_layers[len(b_layers) - 1 - index] if index < len(b_layers) else None
            if other is not None:
                yield from self._layers(index if both else None, one, other)
        for index in range(len(b_layers), len(f_layers)):
            yield from self._layers(index, f_layers[index], None)
        message = (*b_layers, *f_layers)[0].input_gradient if f_layers or b_layers else ()
        self._kept += message * self._ahead
        self._freed = total_bytes(message) * self._sent
        frame = tuple(self._frame)
        yield from self._run_forward(self._forward.last.forward(self._frame))
        gradient, self._gradient = self._gradient, ()
        yield from self._embedding_backward(gradient, frame)

    def _embedding_backward(self, gradient: tuple[Tensor, ...], frame: tuple[Tensor, ...]) -> Iterator[Point]:
        """The last node of the backward. Its argument is the gradient of its output, which lookups count if they read it."""
        embeddings = [module for module, _ in self._backward.first.modules if module.kind is ModuleKind.EMBEDDING]
        held = gradient if any(_copies_gradient(module, gradient) for module in embeddings) else ()
        for each in self._backward.first.backward():
            looked_up = each.instant.kind in _LOOKUPS
            yield from self._run_backward((each,), None, held if looked_up else (), frame)
        self._backward_saved = 0

    def _layers(self, index: int | None, one: Unit | None, other: Unit | None) -> Iterator[Point]:
        """The forward of one layer and the backward of another one (`TransformerLayerSchedulePlan.run`).

        A node of a layer frees the rows that it has read. Gradients that it has read are referenced until the next node has run.
        """
        if other is not None and not self._gradient and self._backward.last.modules:
            self._gradient = other.gradient
        forward = {} if one is None else one.forward_nodes(self._frame)
        backward = {} if other is None else other.backward_nodes()
        residual, exchanged = ((), ()) if other is None else (other.residual_gradient, other.received)
        # what the attention node of the backward references and reads
        read = () if other is None else (*other.sent_gradient, *other.attention_output)
        shared = () if other is None else other.uncounted_gradients
        pending = () if other is None else (*residual, *other.recomputed)
        if self._groups is not None and other is not None:
            self._groups.combine_backward(other.number)
        yield from self._run_backward(backward.get(Node.COMBINE, ()), None, shared)
        held = () if other is None else self._dense_output(other)
        attention = self._run_forward(forward.get(Node.ATTENTION, ()), (*pending, *exchanged, *held))
        yield from self._without_gradient(attention, freed=bool(backward.get(Node.COMBINE)))
        if one is not None:
            self._of_idle.pop(one.number, None)
        if index is not None and self._same:
            self._left.pop(index, None)
        permuted = () if one is None else (*one.sent, *one.latent, *one.not_copied, *one.attention_output)
        delayed = () if other is None else other.delayed
        # gradients of rows that the experts have read without a permutation are operands
        operands = tuple(tensor for tensor in exchanged if delayed and tensor.name == LOCAL_ROWS)
        rows = () if operands else exchanged
        of_experts = backward.get(Node.EXPERTS, ())
        unpermuted = [tensor.shape for tensor in rows if tensor.name == LOCAL_ROWS]
        reading = [each for each in of_experts if each.gradient in unpermuted]  # the gradient without a permutation, counted there
        yield from self._run_backward(reading, None, (*permuted, *shared, *held))
        feed_forward = self._run_backward(of_experts[len(reading) :], None, (*rows, *permuted, *shared, *held))
        yield from self._of_dense_layer(feed_forward, other)
        self._free_before((Node.DISPATCH, Node.ATTENTION), backward)
        yield from self._run_forward(forward.get(Node.DISPATCH, ()), (*pending, *exchanged, *delayed))
        if other is not None and self._is_output(other):
            self._kept += rows
        received = () if one is None else (*one.received, *one.not_copied, *one.attention_output)
        yield from self._run_backward(backward.get(Node.WEIGHT_GRADIENTS, ()), None, (*received, *residual, *exchanged))
        if other is not None and self._is_output(other):
            self._kept += operands
        yield from self._run_backward(backward.get(Node.DISPATCH, ()), None, (*received, *shared))
        self._free_before((Node.ATTENTION,), backward)
        rows = exchanged if delayed and self._rules.keeps_dispatched else ()
        if self._rules.early_attention and other is not None:
            yield from self._attention_backward(other, backward, (*received, *rows))
            self._backward_saved = other.before
            pending = read = rows = ()
        for node in (Node.EXPERTS, Node.COMBINE):
            ends_layer = node is Node.COMBINE
            yield from self._run_forward(forward.get(node, ()), (*pending, *read, *rows), ends_layer=ends_layer)
        if one is not None:
            self._forward_saved = one.after
            self._output = one.input_gradient  # of the same size
        if not self._rules.early_attention and other is not None:
            yield from self._attention_backward(other, backward, rows)
        if other is not None:
            self._end_backward(other)

    def _of_dense_layer(self, points: Iterator[Point], layer: Unit | None) -> Iterator[Point]:
        """Instants of the backward of an FFN. The pipeline schedule counts the gradient that it has received for the last layer."""
        dense = layer is not None and bool(layer.attention_output)
        if layer is not None and dense and self._is_output(layer):
            self._freed = total_bytes(layer.input_gradient)
        yield from self._without_gradient(points, freed=dense)
        self._freed = 0

    def _without_gradient(self, points: Iterator[Point], *, freed: bool) -> Iterator[Point]:
        """Instants, without the gradient that the loop over layers references if it is `freed`, or is one that they count.

        The backward of the combine replaces the gradient that it has read. The FFN of a dense layer counts it as residual gradient.
        """
        gradient = self._gradient
        if freed:
            self._gradient = ()
        yield from points
        self._gradient = gradient

    def _free_before(self, nodes: Sequence[Node], backward: dict[Node, list[Placed]]) -> None:
        """The backward of a node has ended: its last module has freed what it saved."""
        following = [each for node in nodes for each in backward.get(node, ())]
        if following:
            self._backward_saved = following[0].saved

    def _attention_backward(self, other: Unit, nodes: dict[Node, list[Placed]], held: tuple[Tensor, ...]) -> Iterator[Point]:
        """The gradients of all outputs of the attention node, and the residual, stay until the node ends.

        So does what the flex dispatcher has read. With the other dispatchers the dispatch has freed these rows.
        """
        placed = nodes.get(Node.ATTENTION, ())
        for each in placed if self._groups is None else self._groups.backward(placed):
            output = other.attention_output or other.residual
            before_norm = (*other.residual_gradient, *output, *other.shared_output, *other.dispatched, *other.dispatched)
            kept = before_norm if each.before_norm else other.residual_gradient[1:]
            if each.after_router:  # which adds its gradient to a copy of the gradient of the tokens
                kept += other.dispatched
            self._backward_saved = each.saved
            yield self._point(each, (*self._frame, *other.sent, *kept, *other.handle, *held, *self._gradient))

    def _end_backward(self, other: Unit) -> None:
        number = other.number
        self._backward_saved = other.before
        if self._is_output(other):
            self._kept += (*other.read_gradients, *other.residual, *other.shared_output)
        self._gradient = other.input_gradient
        if number == 0:  # the received input or the output of the embedding
            self._kept += other.input_gradient
        if self._newest and (not self._same or number not in self._passed()):
            self._left[number] = other.left

    def _dense_output(self, layer: Unit) -> tuple[Tensor, ...]:
        """The output of a dense layer, which its FFN node references until its backward. The schedule frees what a chunk sends."""
        if not layer.attention_output or self._is_output(layer):
            return ()
        return tuple(replace(tensor, name="output of the layer") for tensor in layer.input_gradient)

    def _is_output(self, layer: Unit) -> bool:
        """Whether the output of a layer is that of its chunk, which is sent to the next stage."""
        return layer.number == len(self._backward.layers) - 1 and not self._backward.last.modules

    def _passed(self) -> range:
        """Layers through which the microbatch of the forward has run."""
        done = sum(layer.after <= self._forward_saved for layer in self._forward.layers)
        return range(done)

    def _run_forward(self, placed: Sequence[Placed], held: tuple[Tensor, ...] = (), *, ends_layer: bool = False) -> Iterator[Point]:
        self._output = () if placed else self._output
        for each in placed if self._groups is None else self._groups.forward(placed, ends_layer=ends_layer):
            self._forward_saved = each.saved
            yield self._point(each, (*each.frame, *held, *self._gradient))

    def _run_backward(
        self,
        placed: Sequence[Placed],
        after: int | None = None,
        held: tuple[Tensor, ...] = (),
        frame: tuple[Tensor, ...] | None = None,
    ) -> Iterator[Point]:
        for each in placed if self._groups is None else self._groups.backward(placed):
            self._backward_saved = each.saved
            yield self._point(each, (*(self._frame if frame is None else frame), *held, *self._gradient))
        if after is not None:
            self._backward_saved = after

    def _point(self, each: Placed, held: tuple[Tensor, ...]) -> Point:
        left = tuple(tensor for tensors in (*self._of_idle.values(), *self._left.values()) for tensor in tensors)
        outside = (*held, *left, *self._kept, *self._batch, *self._output)
        on_gpu = 0 if self._groups is None else self._groups.bytes
        saved = self._forward_saved + self._backward_saved + self._deferred + on_gpu
        return Point(
            block=each.block,
            parent=each.parent,
            instant=each.instant,
            saved=saved,
            bytes=saved + each.instant.temporary + total_bytes(outside) - self._freed,
            outside=outside,
        )
