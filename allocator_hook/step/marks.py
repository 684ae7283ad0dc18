"""Marks of modules and phases, by hooks that add no tensor and no node to the graph.

Forward: the hooks of every module. Backward: a hook on each output of a module fires when its gradient is there, which
is when the backward pass of the module begins; it ends when that of a module that is not inside it begins. Modules are
called as Megatron's `named_modules` does, with the layer's number in the whole model, from 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

_LAYER = re.compile(r"^(.*\blayers)\.(\d+)(?=\.|$)")


class MarkSink(Protocol):
    """Where marks go: the trace writer, or a list in a test."""

    def enter(self, name: str, phase: Any, microbatch: int = -1, iteration: int = -1) -> None: ...

    def leave(self, name: str, phase: Any, microbatch: int = -1, iteration: int = -1) -> None: ...


def in_backward() -> bool:
    """Whether autograd is running the backward pass, in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class Marks:
    """The path of modules being run, kept so that what the sink gets always nests."""

    def __init__(self, sink: MarkSink) -> None:
        self._sink = sink
        self._stack: list[tuple[str, str, int]] = []
        self.iteration = -1
        self.microbatch = -1
        self._whole: list[str] = []
        self._seen: dict[int, int] = {}

    @property
    def phase(self) -> str:
        """The phase of what runs now."""
        if self._stack and self._stack[-1][1] != "forward" and not in_backward():
            self._close(0)  # the backward pass is over
        if self._stack:
            return self._stack[-1][1]
        if in_backward():
            return "backward"
        return self._whole[-1] if self._whole else "build"

    @contextmanager
    def whole(self, phase: str) -> Iterator[None]:
        """A phase as a whole: a mark without a name."""
        self._close(0)
        self._sink.enter("", phase, -1, self.iteration)
        self._whole.append(phase)
        try:
            yield
        finally:
            self._close(0)
            self._whole.pop()
            self._sink.leave("", phase, -1, self.iteration)

    def start_iteration(self, iteration: int) -> None:
        """Microbatches of each chunk are counted from 0 again."""
        self.iteration = iteration
        self._seen = {}

    def start_microbatch(self, model: Any) -> None:
        """The forward pass of the next microbatch of this chunk begins."""
        self._close(0)
        self.microbatch = self._seen.get(id(model), 0)
        self._seen[id(model)] = self.microbatch + 1

    def finish(self) -> None:
        """Leaves whatever is still open."""
        self._close(0)

    def watch(self, model: torch.nn.Module) -> None:
        """Hooks every module inside; `model` is a chunk, wrapped or not."""
        inner = unwrap(model)
        for name, module in inner.named_modules():
            if name:
                called = global_name(inner, name)
                module.register_forward_pre_hook(self._before(called), with_kwargs=True)
                module.register_forward_hook(self._after(called), always_call=True)
        inner.register_forward_hook(self._after_model)

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
            for tensor in _tensors(output):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: self._backward(name, microbatch))

        return leave

    def _after_model(self, module: Any, args: Any, output: Any) -> None:
        """The loss is computed in the frame of the model itself: its backward has a mark without a name."""
        del module, args
        microbatch = self.microbatch
        for tensor in _tensors(output):
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
    """The GPTModel inside DistributedDataParallel and Float16Module."""
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module  # type: ignore[assignment]
    return model


def global_name(model: torch.nn.Module, name: str) -> str:
    """`name` with the layer's number in the whole model instead of that in the chunk."""
    found = _LAYER.match(name)
    if not found:
        return name
    layer = model.get_submodule(f"{found[1]}.{found[2]}")
    number = getattr(layer, "layer_number", int(found[2]) + 1) - 1
    return f"{found[1]}.{number}{name[found.end() :]}"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
