"""Marks for overlapped microbatches (`--overlap-moe-expert-parallel-comm`).

The forward of a layer is then not called. Nodes of a schedule plan call its parts, and the forward nodes of one microbatch
alternate with the backward nodes of another.

Source: core/models/common/model_chunk_schedule_plan.py and core/pipeline_parallel/utils.py (0.16).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from allocator_hook.step.marks import Marks, unwrap
from allocator_hook.step.patching import Patch
from analyzer.specs.release_changes import MTP_LAYERS

_METHODS: Final = {
    "MoELayer": "route preprocess dispatch shared_experts_compute routed_experts_compute combine postprocess".split(),
    "MultiTokenPredictionLayer": "_get_embeddings _concat_embeddings _postprocess".split(),
}
"""Methods that nodes call instead of the forward of a module, by class name."""
_NODES: Final = ("attn", "pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine", "mtp_post_process")
"""The nodes of a layer. From 0.19 on the second one replaces the first."""


def patches(marks: Marks) -> Iterator[Patch]:
    """Yield patches that mark each node, and the release of its state, with the name of its layer."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    reason = "nodes run parts of modules, so module hooks do not run"
    yield Patch(TransformerLayerSchedulePlan, "__init__", _naming(TransformerLayerSchedulePlan.__init__, marks), reason)
    yield Patch(TransformerLayerSchedulePlan, "release_state", _released(TransformerLayerSchedulePlan.release_state, marks), reason)
    yield Patch(ScheduleNode, "_forward", _forward(ScheduleNode._forward, marks), reason)
    yield Patch(ScheduleNode, "_backward", _backward(ScheduleNode._backward, marks), reason)


def watch_methods(chunk: Any, marks: Marks) -> None:
    """Mark the methods of `_METHODS` in all modules of a chunk."""
    for module in unwrap(chunk).modules():
        for method in _METHODS.get(type(module).__name__, ()):
            if hasattr(module, method):
                setattr(module, method, partial(_marked, marks, marks.names[id(module)], getattr(module, method)))


def _marked(marks: Marks, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with marks.in_method(name):
        return method(*args, **kwargs)


def _naming(real: Callable[..., None], marks: Marks) -> Callable[..., None]:
    def init(plan: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        real(plan, layer, *args, **kwargs)
        inner = next((getattr(layer, name) for name in MTP_LAYERS if hasattr(layer, name)), layer)
        plan.marked = (marks.names[id(inner)], marks.microbatch)
        for name in _NODES:
            if hasattr(plan, name):
                getattr(plan, name).marked = plan.marked
        if inner is not layer:  # this node concatenates the outputs of all depths, as the block of MTP layers does otherwise
            plan.mtp_post_process.marked = (plan.marked[0].partition(".layers.")[0], marks.microbatch)

    return init


def _released(real: Callable[[Any], None], marks: Marks) -> Callable[[Any], None]:
    def release_state(plan: Any) -> None:
        name, microbatch = plan.marked
        with marks.in_part(name, "backward", microbatch):
            real(plan)

    return release_state


def _forward(real: Callable[..., Any], marks: Marks) -> Callable[..., Any]:
    def forward(node: Any, *args: Any) -> Any:
        node.marked = getattr(node, "marked", ("", marks.microbatch))
        name, microbatch = node.marked
        with marks.in_part(name, "forward", microbatch):
            return real(node, *args)

    return forward


def _backward(real: Callable[..., Any], marks: Marks) -> Callable[..., Any]:
    def backward(node: Any, *args: Any) -> Any:
        name, microbatch = node.marked
        with marks.in_part(name, "backward", microbatch):
            return real(node, *args)

    return backward
