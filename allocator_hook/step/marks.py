"""Records module and phase marks with hooks that add no tensor and no autograd node.

Forward marks come from module hooks. Backward marks come from a hook on each output of a module: it fires when the gradient
of the output is computed, which is when the module's backward begins. A module's backward ends when the backward of a module
outside it begins. Modules have the names of Megatron's `named_modules`, with layer numbers of the full model, from 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

_LAYER = re.compile(r"^(.*\blayers)\.(\d+)(?=\.|$)")


class MarkSink(Protocol):
    """Receives marks: a trace writer, or a list in a test."""

    def enter(self, name: str, phase: Any, microbatch: int = -1, iteration: int = -1) -> None: ...

    def leave(self, name: str, phase: Any, microbatch: int = -1, iteration: int = -1) -> None: ...


def in_backward() -> bool:
    """Return whether autograd is running a backward pass in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class Marks:
    """The stack of running modules. The marks passed to the sink are always properly nested."""

    def __init__(self, sink: MarkSink) -> None:
        self._sink = sink
        self._stack: list[tuple[str, str, int]] = []
        self.iteration = -1
        self.microbatch = -1
        self._phases: list[str] = []
        self._microbatches: dict[int, int] = {}
        """Number of microbatches started in this iteration, by chunk id."""
        self.names: dict[int, str] = {}
        """Names of the watched modules, by module id."""
        self._hooks: dict[int, list[Any]] = {}

    @property
    def phase(self) -> str:
        """The current phase."""
        if self._stack and self._stack[-1][1] != "forward" and not in_backward():
            self._close(0)  # the backward pass is over
        if self._stack:
            return self._stack[-1][1]
        if in_backward():
            return "backward"
        return self._phases[-1] if self._phases else "build"

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Mark a phase. Its marks have an empty name."""
        self._close(0)
        self._sink.enter("", phase, -1, self.iteration)
        self._phases.append(phase)
        try:
            yield
        finally:
            self._close(0)
            self._phases.pop()
            self._sink.leave("", phase, -1, self.iteration)

    @contextmanager
    def in_part(self, name: str, phase: str, microbatch: int) -> Iterator[None]:
        """Mark a part of the step that is not the forward of a module. Marks that are still open are closed."""
        self._close(0)
        self._enter(name, phase, microbatch)
        try:
            yield
        finally:
            self._close(0)

    @contextmanager
    def in_method(self, name: str) -> Iterator[None]:
        """Mark a method of the module `name` that its forward would call."""
        outer = len(self._stack)
        self._enter(name, "recompute" if in_backward() else "forward", self.microbatch)
        try:
            yield
        finally:
            self._close(outer)

    def of_phase(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with marks of a phase around its calls."""

        def marked(*args: Any, **kwargs: Any) -> Any:
            with self.in_phase(phase):
                return function(*args, **kwargs)

        return marked

    def start_iteration(self, iteration: int) -> None:
        """Set the iteration, and count the microbatches of each chunk from 0."""
        self.iteration = iteration
        self._microbatches = {}

    def start_microbatch(self, model: Any) -> None:
        """Begin the forward pass of the next microbatch of the chunk `model`."""
        self._close(0)
        self.microbatch = self._microbatches.get(id(model), 0)
        self._microbatches[id(model)] = self.microbatch + 1

    def finish(self) -> None:
        """Leave all modules that are still open."""
        self._close(0)

    def watch(self, model: torch.nn.Module) -> None:
        """Register hooks on every module of the chunk `model`, which may be wrapped."""
        inner = unwrap(model)
        for name, module in inner.named_modules():
            if name:
                full_name = self.names[id(module)] = global_name(inner, name)
                self._hooks[id(module)] = [
                    module.register_forward_pre_hook(self._before(full_name), with_kwargs=True),
                    module.register_forward_hook(self._after(full_name), always_call=True),
                ]
        inner.register_forward_hook(self._after_model)

    def unwatch(self, module: torch.nn.Module) -> None:
        """Remove the hooks of a module."""
        for hook in self._hooks.pop(id(module), ()):
            hook.remove()

    def unwatch_all(self, module: torch.nn.Module) -> None:
        """Remove the hooks of a module and of all modules in it."""
        for each in module.modules():
            self.unwatch(each)

    def watched(self, module: torch.nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, which replaces the forward of `module`, with the marks of the module."""
        before, after = (mark(self.names[id(module)]) for mark in (self._before, self._after))

        def marked(*args: Any, **kwargs: Any) -> Any:
            before()
            output = function(*args, **kwargs)
            after(module, args, output)
            return output

        return marked

    def _before(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._enter(name, "recompute" if in_backward() else "forward", self.microbatch)

        return enter

    def _after(self, name: str) -> Callable[..., None]:
        def leave(module: Any, args: Any, output: Any) -> None:
            del module, args
            while self._stack:
                entry = self._stack.pop()
                self._leave(entry)
                if entry[0] == name:
                    break
            microbatch = self.microbatch
            for tensor in tensors_of(output):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: self._backward(name, microbatch))

        return leave

    def _after_model(self, module: Any, args: Any, output: Any) -> None:
        """Hook the outputs of the model. The model itself computes the loss, so its backward mark has an empty name."""
        del module, args
        microbatch = self.microbatch
        for tensor in tensors_of(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._backward("", microbatch))

    def _backward(self, name: str, microbatch: int) -> None:
        keep = 0
        for outer, phase, number in self._stack:
            if phase != "backward" or number != microbatch or not (name + ".").startswith(outer + "."):
                break
            keep += 1
        self._close(keep)
        if not self._stack or self._stack[-1][0] != name:
            self._enter(name, "backward", microbatch)

    def _enter(self, name: str, phase: str, microbatch: int) -> None:
        self._stack.append((name, phase, microbatch))
        self._sink.enter(name, phase, microbatch, self.iteration)

    def _leave(self, entry: tuple[str, str, int]) -> None:
        self._sink.leave(*entry, self.iteration)

    def _close(self, keep: int) -> None:
        while len(self._stack) > keep:
            self._leave(self._stack.pop())


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the GPTModel inside DistributedDataParallel and Float16Module."""
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module  # type: ignore[assignment]
    return model


def global_name(model: torch.nn.Module, name: str) -> str:
    """Return `name` with the layer number in the full model instead of that in the chunk."""
    found = _LAYER.match(name)
    if not found:
        return name
    layer = model.get_submodule(f"{found[1]}.{found[2]}")
    number = getattr(layer, "layer_number", int(found[2]) + 1) - 1
    return f"{found[1]}.{number}{name[found.end() :]}"


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested sequences, and in the values of dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of(tuple(value.values()))
