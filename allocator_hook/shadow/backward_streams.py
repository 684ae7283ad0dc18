"""Runs the backward of an operation on the stream of its forward, as PyTorch's autograd does on a GPU.

What the backward allocates then comes from the free blocks of that stream. Source: `Node::stream` and `evaluate_function`,
torch/csrc/autograd/engine.cpp (PyTorch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from allocator_hook.shadow.gpu import Stream
from allocator_hook.step.patching import Patch

_APPLY: Final = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]


class StreamContext:
    """Replacement for `torch.cuda.stream`, which can be entered again."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._modes: list[_OnStream] = []

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.__enter__()
            self._modes.append(_OnStream())
            self._modes[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._stream is not None:
            self._modes.pop().__exit__(*error)
            self._stream.__exit__(*error)


class _OnStream(TorchFunctionMode):
    """While a stream is current: the backwards of PyTorch's operations run on it."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(named or {}))
        _follow(result, arguments, named or {})
        return result


def patches() -> Iterator[Patch]:
    """The same for operations that are written in Python, which a mode does not see."""

    def apply(function: type[torch.autograd.Function], *arguments: Any, **named: Any) -> Any:
        result = _APPLY(function, *arguments, **named)
        if Stream.current_id():
            _follow(result, arguments, named)
        return result

    reason = "autograd runs the backward of an operation on the stream of its forward"
    yield Patch(torch.autograd.Function, "apply", classmethod(apply), reason)


def _follow(result: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Lets the backwards of the operations that made `result` run on the current stream."""
    stream = Stream.of_allocations()
    if stream is None or not stream.stream_id or Stream.pool:  # in a capture, forward and backward have one stream
        return
    seen = {id(node) for node in _nodes((*arguments, *named.values()))}
    remaining = list(_nodes(result))
    while remaining:  # an operation such as `linear` can have several nodes
        node = remaining.pop()
        if id(node) in seen or type(node).__name__ == "AccumulateGrad":  # a function in Python can store its own `name`
            continue
        seen.add(id(node))
        node.register_prehook(lambda _, stream=stream: Stream.current.append(stream))
        node.register_hook(lambda *_: Stream.current.pop() and None)
        remaining += [before for before, _ in node.next_functions if before is not None]


def _nodes(values: Any) -> Iterator[torch.autograd.graph.Node]:
    """The nodes of the tensors in a value or in a tuple or list."""
    for value in values if isinstance(values, tuple | list) else (values,):
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            yield value.grad_fn
        elif isinstance(value, tuple | list):
            yield from _nodes(value)
