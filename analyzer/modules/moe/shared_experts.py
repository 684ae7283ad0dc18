"""Shared experts of a MoE layer.

Source: core/transformer/moe/{shared_experts,moe_layer}.py (0.16.1). fs is the total width of the shared experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple

from analyzer.modules.checkpoints import holding_gradient
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import at_weight_gradient, column_collectives, row_collectives, split_weight, weight_gradient
from analyzer.modules.mlp import saved_by_gate, saves_half
from analyzer.modules.moe.routing import Routing
from analyzer.modules.quantized import forward_input, output_gradient, saved_input, saves_original_input
from analyzer.modules.shapes import ExpertShapes
from analyzer.modules.tree import LAYER_STREAM, Collective, Module, Parameter, Tensor, for_weight, largest, total_bytes
from analyzer.specs import MoeSpec


def shared_experts(shapes: ExpertShapes) -> Module:
    """A dense block in addition to the routed experts, on the same input, split over tensor-parallel ranks like an MLP."""
    parts, routing = _Parts.of(shapes), Routing(shapes)
    inside: tuple[Module, ...] = (_fc1(parts), _activation(parts), _fc2(parts))
    gate: tuple[Parameter, ...] = ()
    if parts.moe.shared_gate:
        inside = inside if parts.overlapped else (*inside, _gate(parts))
        shape = (1, shapes.model.hidden_size)
        gate = (Parameter(name="gate_weight", shape=shape, dtype=shapes.dtype, sequence_parallel=shapes.sp),)
    recomputed = shapes.recomputes("shared_experts")
    held: tuple[Tensor, ...] = ()
    if recomputed:
        gradient, inside = holding_gradient(shapes, inside)
        held = (*gradient, *shapes.recomputed_output)
    routed = shapes.hidden("input gradient of the routed experts")
    if parts.overlapped:  # the backward of the dispatch has not summed the gradients of the rows of each token yet
        routed = routing.row_tensor("row gradients", routing.sent)
    return Module(
        name="shared_experts",
        kind=ModuleKind.SHARED_EXPERTS,
        parameters=gate,
        saved=(shapes.hidden(_INPUT, made_in="pre_mlp_layernorm", shares=shapes.owner_of_moe_input),),
        backward_workspace=(routed, *held),
        children=inside,
        inner_stream=LAYER_STREAM if parts.overlapped else 0,
        recomputed=recomputed,
        source="SharedExpertMLP",
    )


_INPUT: Final = "input of the shared experts"


class _Parts(NamedTuple):
    """Sizes that the linear layers of the shared experts have in common."""

    shapes: ExpertShapes
    moe: MoeSpec
    full: int
    """Width of all shared experts."""
    width: int
    """The same on one tensor-parallel rank."""
    gates: int
    """Ratio of fc1's output width to fc2's input width: 2 for gated activations, else 1."""
    overlapped: bool
    """The dispatcher calls the layers and issues their collectives (`--moe-shared-expert-overlap`)."""
    caller: str
    """Path of the module that calls the layers."""

    @classmethod
    def of(cls, shapes: ExpertShapes) -> _Parts:
        """The sizes for a model with shared experts."""
        moe = Routing(shapes).moe
        assert moe.shared_ffn_hidden_size is not None
        return cls(
            shapes=shapes,
            moe=moe,
            full=moe.shared_ffn_hidden_size,
            width=moe.shared_ffn_hidden_size // shapes.t,
            gates=2 if shapes.model.gated else 1,
            overlapped=moe.shared_overlap,
            caller="mlp" if moe.shared_overlap else "mlp.shared_experts",
        )

    @property
    def fc1_output(self) -> Tensor:
        """[s, b, fs/t], twice as wide for gated activations."""
        formula = "2·fs/t" if self.gates == 2 else "fs/t"
        return self.shapes.wide("fc1 output", self.gates * self.width, formula, made_in="mlp.shared_experts.linear_fc1")

    def collectives(self, *, first: bool) -> tuple[Collective, ...]:
        """Collectives of fc1 (`first`) or fc2."""
        if not (self.overlapped and self.shapes.sp):
            if not first:
                return row_collectives(self.shapes)
            original = saves_original_input(self.shapes) and not self.shapes.recomputes("shared_experts")
            return column_collectives(self.shapes, forward_dtype=self.shapes.exchanged_dtype, original=original)
        forward, backward = ("all_gather", "reduce_scatter") if first else ("reduce_scatter", "all_gather")
        return (*self.shapes.tp(forward, "forward"), *self.shapes.tp(backward, "backward"))


def _fc1(parts: _Parts) -> Module:
    shapes, width, h = parts.shapes, parts.gates * parts.width, parts.shapes.model.hidden_size
    read = shapes.hidden("input", shares=_INPUT)
    gathered = (shapes.hidden("gathered input", gathered=True),) if shapes.sp else ()
    if parts.overlapped and shapes.sp:  # the full input is saved, and not gathered again
        read, gathered = shapes.hidden("input", gathered=True, made_in=parts.caller), ()
    original = saves_original_input(shapes)
    return Module(
        name="linear_fc1",
        kind=ModuleKind.FC1,
        parameters=(split_weight(shapes, (width, h), full=(parts.gates * parts.full, h)),),
        saved=for_weight((read,) if original else saved_input(shapes, read, gathered=shapes.sp and not parts.overlapped)),
        forward_workspace=(  # `Linear` uses userbuffers in forward only
            *forward_input(shapes, read, gathered=gathered, original=original, in_buffers=shapes.userbuffers),
            parts.fc1_output,
        ),
        backward_workspace=(
            *output_gradient(shapes, shapes.wide("output gradient", width, "fs/t")),
            shapes.hidden("input gradient", gathered=True),
            *((shapes.hidden("scattered input gradient"),) if shapes.sp and not parts.overlapped else ()),
            *at_weight_gradient(shapes, read, weight_gradient(shapes, (width, h)), gathered=gathered, original=original),
        ),
        collectives=parts.collectives(first=True),
        overlaps_collectives=shapes.userbuffers,
        source="TEColumnParallelLinear",
    )


def _activation(parts: _Parts) -> Module:
    shapes, width = parts.shapes, parts.width
    model, maker = shapes.model, ""
    if parts.overlapped:  # `linear_fc1_forward_and_act` neither clamps nor adds an offset
        model, maker = replace(model, activation_clamped=False, glu_offset=False), parts.caller
    activated = saved_by_gate(model, lambda name, elements: shapes.wide(name, elements, "fs/t", made_in=maker), width)
    return Module(
        name="activation_func",
        kind=ModuleKind.ACTIVATION,
        function=True,
        saved=(replace(parts.fc1_output, strided=saves_half(model)), *activated),
        forward_workspace=(shapes.wide("output", width, "fs/t"),),
        backward_workspace=(
            shapes.wide("output gradient", width, "fs/t"),
            shapes.wide("fc1 output gradient", parts.gates * width, "fs/t"),
        ),
    )


def _fc2(parts: _Parts) -> Module:
    shapes, width, h = parts.shapes, parts.width, parts.shapes.model.hidden_size
    read = shapes.wide("input", width, "fs/t", made_in=parts.caller)
    forward, backward = _fc2_workspaces(parts, read)
    return Module(
        name="linear_fc2",
        kind=ModuleKind.FC2,
        parameters=(split_weight(shapes, (h, width), full=(h, parts.full)),),
        saved=for_weight(saved_input(shapes, read)),
        forward_workspace=(*forward, *((shapes.hidden("scattered output"),) if shapes.sp and not parts.overlapped else ())),
        backward_workspace=backward,
        collectives=parts.collectives(first=False),
        overlaps_collectives=shapes.userbuffers,
        source="TERowParallelLinear",
    )


def _fc2_workspaces(parts: _Parts, read: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Tensors of fc2 in its forward and its backward, in addition to what it saves of its input `read`."""
    shapes = parts.shapes
    gradients = weight_gradient(shapes, (shapes.model.hidden_size, parts.width))
    return (
        (*forward_input(shapes, read), shapes.hidden("output", gathered=True)),
        (*_shared_output_gradient(shapes), shapes.wide("input gradient", parts.width, "fs/t"), *gradients),
    )


def overlapped_fc2(shapes: ExpertShapes) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Tensors of fc2, and of its adapter, in forward and backward, if both run in the combine (`linear_fc2_forward`)."""
    if not Routing(shapes).moe.shared_overlap:
        return (), ()
    parts = _Parts.of(shapes)
    forward, backward = _fc2_workspaces(parts, shapes.wide("input", parts.width, "fs/t"))
    scaled = overlapped_adapter(shapes)
    added = (*scaled, *(replace(each, name="output with that of the adapter") for each in scaled))
    if scaled and shapes.t > 1 and _of_megatron(shapes):  # the outputs of all ranks are gathered and concatenated
        added = (*added, shapes.wide("part of the output of the adapter", shapes.model.hidden_size // shapes.t, "h/t"))
    named = (replace(each, name=f"{each.name} of the shared experts") for each in (*forward, *added))
    return _on_stream_of_layer(named), _on_stream_of_layer((*backward, *scaled))


def overlapped_output(shapes: ExpertShapes) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The output of overlapped shared experts: at its GEMM or its reduce-scatter, and after them until it is added.

    Dispatchers compute it after tokens were sent back (`token_combine` and `combine_postprocess`).
    """
    moe = Routing(shapes).moe
    if not moe.shared_overlap:
        return (), ()
    output = (shapes.hidden("output of the shared experts"),)
    full = (shapes.hidden("output of the shared experts before the reduce-scatter", gathered=True),) if shapes.sp else ()
    weighted = (shapes.hidden("weighted output"),) if moe.shared_gate else ()
    return largest((*full, *output), overlapped_fc2(shapes)[0]), (*output, *weighted)


def _on_stream_of_layer(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(replace(each, stream=LAYER_STREAM) for each in tensors)


def _of_megatron(shapes: ExpertShapes) -> bool:
    return shapes.model.adapters is not None and shapes.model.adapters.layers == "megatron"


def overlapped_adapter(shapes: ExpertShapes) -> tuple[Tensor, ...]:
    """The scaled output of an adapter beside an overlapped fc2, or its gradient, which is computed before rows are exchanged."""
    moe, adapters = shapes.model.moe, shapes.model.adapters
    if moe is None or not moe.shared_overlap or adapters is None or "linear_fc2" not in adapters.targets:
        return ()
    return _on_stream_of_layer([shapes.hidden("scaled output of the adapter", gathered=True)])


def unsaved_activation(shapes: ExpertShapes) -> tuple[Tensor, ...]:
    """The 16-bit input of an overlapped fc2, or its gradient, beyond what fc2 or its adapter save of the input.

    fc2 saves quantized copies when the tokens are combined, and nothing if it is frozen. `linear_fc1_forward_and_act` keeps the
    input in an attribute until then. In the backward of the combine fc2 frees what it saved, and the activation reads the gradient
    after the backward of the routed experts.
    """
    moe, adapters = shapes.model.moe, shapes.model.adapters
    if moe is None or not moe.shared_overlap:
        return ()
    parts = _Parts.of(shapes)
    read = shapes.wide("input", parts.width, "fs/t")
    if adapters is not None or "language_model" in shapes.model.frozen:
        saved = read.bytes if adapters is not None and "linear_fc2" in adapters.targets else 0
    else:
        saved = total_bytes(saved_input(shapes, read))
    extra = read.bytes - saved
    found = [Tensor(name="16-bit activation of the shared experts", shape=(extra,), dtype="fp8")] if extra > 0 else []
    return _on_stream_of_layer(found)


def overlapped_gate(shapes: ExpertShapes, *, beside: tuple[Tensor, ...]) -> Module:
    """The gate with `--moe-shared-expert-overlap`: `combine_postprocess` of the dispatcher calls it (`get_output`).

    `beside`: gradients that the dispatcher has got when the backward of the gate runs.
    """
    gate = _gate(_Parts.of(shapes))
    return replace(
        gate,
        saved=_on_stream_of_layer(gate.saved),
        forward_workspace=_on_stream_of_layer(gate.forward_workspace),
        backward_workspace=(gate.backward_workspace[0], *_on_stream_of_layer(gate.backward_workspace[1:]), *beside),
    )


def gate_of_constant_score(gate: Module) -> Module:
    """A gate whose score needs no gradient: its weight is frozen, and nothing before the layer is trained."""
    return replace(
        gate,
        saved=tuple(each for each in gate.saved if each.name == "gate score"),
        backward_workspace=(*gate.backward_workspace[:2], *gate.backward_workspace[3:]),
        input_gradient=False,
    )


def _gate(parts: _Parts) -> Module:
    """The output times a score for each token, [s, b, 1]; both are saved."""
    shapes, caller = parts.shapes, parts.caller
    score = Tensor(name="gate score", shape=(shapes.s, shapes.b, 1), dtype=shapes.dtype, formula="2·s·b", made_in=caller)
    scattered = parts.overlapped and shapes.t > 1
    output = shapes.hidden("output", made_in=caller if scattered else "mlp.shared_experts.linear_fc2")
    return Module(
        name="gate",
        kind=ModuleKind.SHARED_GATE,
        function=True,
        saved=(output, score),
        forward_workspace=(shapes.hidden("weighted output"),),
        backward_workspace=(
            shapes.branch_gradient,
            shapes.hidden("input gradient"),
            shapes.hidden("gradient of the score before its sum"),
        ),
        source="SharedExpertMLP with use_shared_expert_gate",
    )


def _shared_output_gradient(shapes: ExpertShapes) -> tuple[Tensor, ...]:
    """The full gradient of the shared experts' output. Its shard is the gradient of the layer's output."""
    if not shapes.sp:
        return output_gradient(shapes, shapes.hidden("output gradient"))
    full = shapes.hidden("gathered output gradient", gathered=True)
    if Routing(shapes).moe.shared_overlap:  # Megatron gathers it in 16 bit (`post_forward_comm`)
        return output_gradient(shapes, full)
    in_buffers = shapes.userbuffers
    read = shapes.hidden("output gradient") if in_buffers else replace(full, name="output gradient")
    return output_gradient(shapes, replace(read, shares="residual gradient"), gathered=(full,), in_buffers=in_buffers)
