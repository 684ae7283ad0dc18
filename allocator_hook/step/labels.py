"""Labels the tensors that are in memory after setup and after a step: parameters, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Protocol

import torch

from allocator_hook.step.collectives import DTYPES
from allocator_hook.step.marks import global_name, unwrap
from allocator_hook.step.train import Trained
from analyzer.trace.events import Role


class LabelSink(Protocol):
    """The label method of the trace writers."""

    def label(self, pointer: int, role: Role, name: str, *, shape: tuple[int, ...], dtype: str, bytes: int) -> None: ...


def write_labels(trained: Trained, *, sink: LabelSink, pointer: Any, optimizer: bool) -> None:
    """Label the optimizer states if `optimizer` is set, otherwise the parameters and gradients.

    `pointer(tensor)` returns the address of a tensor, or None for a tensor that is not recorded.
    """
    tensors = _optimizer_states(trained) if optimizer else _model(trained.chunks)
    for role, name, labelled in tensors:
        tensor = getattr(labelled, "_local_tensor", labelled)  # a sharded tensor has a part on this rank
        place = pointer(tensor)
        if place is not None:
            size = tensor.numel() * tensor.element_size()
            sink.label(place, role, name, shape=tuple(tensor.shape), dtype=DTYPES.get(tensor.dtype, str(tensor.dtype)), bytes=size)


def _storage(tensor: torch.Tensor) -> int:
    """The storage of a tensor, or of the part of a sharded tensor on this rank."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return int(local.untyped_storage()._cdata)


_SHARDED: Final[dict[str, Role]] = {
    "model_weight_buffer": "parameter",
    "transpose_weight_buffer": "parameter",
    "main_weight_buffer": "optimizer",
    "main_grad_buffer": "gradient",
}
"""The buffers of a parameter group of Megatron-FSDP."""


def _model(chunks: list[Any]) -> Iterator[tuple[Role, str, torch.Tensor]]:
    for chunk in chunks:
        inner = unwrap(chunk)
        for name, parameter in inner.named_parameters():
            owner, _, last = name.rpartition(".")
            label = f"{global_name(inner, owner)}.{last}" if owner else name
            for part in _parts(parameter):
                yield "parameter", label, part
            gradient = getattr(parameter, "main_grad", None)
            if gradient is not None:
                yield "gradient", label, gradient
        yield from _sharded(chunk)
        if not isinstance(getattr(chunk, "buffers", None), list):  # a method: FSDP has no such buffers
            continue
        for index, buffer in enumerate([*getattr(chunk, "buffers", []), *getattr(chunk, "expert_parallel_buffers", [])]):
            for role, data in (("parameter", buffer.param_data), ("gradient", buffer.grad_data)):
                if data is not None:
                    yield role, f"buffer {index}", data  # type: ignore[misc]


def _sharded(chunk: Any) -> Iterator[tuple[Role, str, torch.Tensor]]:
    """The buffers of Megatron-FSDP."""
    groups = getattr(getattr(chunk, "param_and_grad_buffer", None), "parameter_groups", [])
    for index, group in enumerate(groups):
        for name, role in _SHARDED.items():
            data = getattr(getattr(group, name, None), "data", None)
            if data is not None:
                yield role, f"{name} {index}", data


def _parts(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of a parameter. An FP8 parameter consists of rowwise and columnwise data and their scales."""
    if not hasattr(parameter, "get_metadata"):
        return [parameter.data]
    return [part for part in parameter.get_metadata().values() if isinstance(part, torch.Tensor)]


def _optimizer_states(trained: Trained) -> Iterator[tuple[Role, str, torch.Tensor]]:
    """The moments and the main parameters, but not main parameters that are views of fp32 model parameters."""
    model = {_storage(tensor) for role, _, tensor in _model(trained.chunks) if role == "parameter"}
    for part in getattr(trained.optimizer, "chained_optimizers", [trained.optimizer]):
        inner = getattr(part, "optimizer", None)
        if inner is None:
            continue
        for group in getattr(inner, "param_groups", []):
            for index, parameter in enumerate(group["params"]):
                own = parameter.dtype is torch.float32 and getattr(parameter, "main_grad", None) is None
                if own and _storage(parameter) not in model:
                    yield "optimizer", f"main parameter {index}", parameter.data
                for name, state in inner.state.get(parameter, {}).items():
                    if isinstance(state, torch.Tensor):
                        yield "optimizer", f"{name} {index}", state
