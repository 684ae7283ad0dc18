"""Functions that a compiler fuses on a GPU: one kernel, whose temporaries are never in memory.

Saved for backward is what the compiled function would save. Megatron's fused autograd functions say so themselves, since
they call compiled functions without a graph. Where autograd sees the function, the eager function's own choice stands if
it is inputs, outputs or a dropout mask; else the inputs are kept and the rest is computed again, as the partitioner of
torch.compile does with pointwise functions (torch/_functorch/partitioners.py, `min_cut_rematerialization_partition`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from allocator_hook.shadow.recorder import Recorder


class OneKernel:
    """Stands in for `torch.compile` and `torch.jit.script`, as a function or a decorator with or without options."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        """Set once the recording begins: functions are decorated when their modules are imported."""

    def __call__(self, function: Any = None, **options: Any) -> Any:
        del options
        if function is None:
            return self
        if isinstance(function, torch.nn.Module) or not callable(function) or isinstance(function, type):
            return function
        keeps_inputs: list[bool] = []

        @functools.wraps(function)
        def fused(*args: Any, **kwargs: Any) -> Any:
            if self.recorder is None:
                return function(*args, **kwargs)
            tensors = _tensors((*args, *kwargs.values()))
            if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
                with self.recorder.one_kernel(tensors):
                    return function(*args, **kwargs)
            if not keeps_inputs:
                keeps_inputs.append(_saves_intermediates(self.recorder, function, args, kwargs))
            if keeps_inputs[0]:
                return _KeepingInputs.apply(self.recorder, functools.partial(function, **kwargs), *args)  # type: ignore[no-untyped-call]
            with self.recorder.one_kernel():
                return function(*args, **kwargs)

        return fused


def _saves_intermediates(recorder: Recorder, function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether eager autograd would keep something that is neither input nor output nor a mask."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor.detach()  # an output that its own node kept would never be let go

    with recorder.one_kernel(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function(*args, **kwargs)
        outside = {_storage(tensor) for tensor in (*_tensors((*args, *kwargs.values())), *_tensors((output,)))}
        found = any(tensor.dtype is not torch.bool and tensor.dim() > 0 and _storage(tensor) not in outside for tensor in saved)
        saved.clear()
        del output
    return found


class _KeepingInputs(torch.autograd.Function):
    """Keeps the inputs; backward computes the function again and takes its gradients, all in one kernel."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, function: Callable[..., Any], *args: Any) -> Any:
        ctx.recorder, ctx.function = recorder, function
        ctx.places = [index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        ctx.others = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        ctx.save_for_backward(*(args[index] for index in ctx.places))
        with recorder.one_kernel():
            return function(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        result: list[Any] = [None] * len(ctx.others)
        with ctx.recorder.one_kernel(), torch.enable_grad():
            args = list(ctx.others)
            for index, saved in zip(ctx.places, ctx.saved_tensors, strict=True):
                args[index] = saved.detach().requires_grad_(saved.requires_grad)
            outputs = _tensors((ctx.function(*args),))
            wanted = [index for index in ctx.places if args[index].requires_grad]
            found = torch.autograd.grad(outputs, [args[index] for index in wanted], grads[: len(outputs)])
            for index, gradient in zip(wanted, found, strict=True):
                result[index] = gradient
            del args, outputs, found
        return (None, None, *result)


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found.extend(_tensors(value))
    return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
