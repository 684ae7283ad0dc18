"""Replacement for torch.compile and torch.jit.script. A fused function is one kernel, so its temporaries are not allocated.

The tensors saved for backward are those that the compiled function would save. Megatron's fused autograd functions choose them
themselves, because they call compiled functions without autograd. For a function that autograd traces: if eager autograd saves
only inputs, outputs or dropout masks, these are saved. Otherwise only inputs are saved, those that the saved tensors are computed
from, and the rest is recomputed in backward, as the partitioner of torch.compile does for pointwise functions
(torch/_functorch/partitioners.py, `min_cut_rematerialization_partition`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from allocator_hook.shadow.recorder import Recorder
from allocator_hook.step.marks import tensors_of


class FakeCompiler:
    """Replaces `torch.compile` and `torch.jit.script`, as a function or as a decorator with or without options."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        """Set when the recording starts. Functions are decorated earlier, when their modules are imported."""

    def __call__(self, function: Any = None, **options: Any) -> Any:
        del options
        if function is None:
            return self
        if isinstance(function, torch.nn.Module) or not callable(function) or isinstance(function, type):
            return function
        saved_inputs: list[frozenset[int]] = []
        name = _name(function)

        @functools.wraps(function)
        def fused(*args: Any, **kwargs: Any) -> Any:
            if self.recorder is None:
                return function(*args, **kwargs)
            tensors = list(tensors_of((*args, *kwargs.values())))
            if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
                with self.recorder.fused_kernel(tensors, name=name):
                    return function(*args, **kwargs)
            if not saved_inputs:
                saved_inputs.append(_inputs_of_intermediates(self.recorder, function, args, kwargs))
            if saved_inputs[0]:
                called = functools.partial(function, **kwargs)
                functools.update_wrapper(called, function)
                structure: list[TreeSpec] = []
                made = _SavesInputs.apply(self.recorder, called, saved_inputs[0], structure, len(args), *args, *_parameters(args))  # type: ignore[no-untyped-call]
                return tree_unflatten(made, structure[0])
            expanded = _expanded(args, largest=max(tensors, key=torch.Tensor.numel), recorder=self.recorder)
            with self.recorder.fused_kernel(name=name):
                return function(*expanded, **kwargs)

        return fused


class _Expanded(torch.autograd.Function):
    """A bias with the shape of the tensor that it is added to. The compiled backward sums its gradient.

    Autograd would sum it with PyTorch's own kernel, which needs a buffer (`shadow.reductions`).
    """

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, bias: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        ctx.recorder = recorder
        return bias.expand(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (gradient,) = grads
        with ctx.recorder.fused_kernel(name="sum"):
            return None, gradient.sum(dim=tuple(range(gradient.dim() - 1))), None


def _expanded(value: Any, *, largest: torch.Tensor, recorder: Recorder) -> Any:
    """The arguments of a function, with trained vectors expanded to the shape of its largest one."""
    if isinstance(value, tuple):
        return tuple(_expanded(each, largest=largest, recorder=recorder) for each in value)
    if not isinstance(value, torch.Tensor) or not value.requires_grad or value.dim() != 1 or largest.dim() < 2:
        return value
    return _Expanded.apply(recorder, value, largest.shape) if value.shape == largest.shape[-1:] else value  # type: ignore[no-untyped-call]


class _Origins(TorchDispatchMode):
    """Finds the arguments that each tensor is computed from."""

    def __init__(self, args: Sequence[Any]) -> None:
        super().__init__()
        self.of = {_storage(arg): frozenset({place}) for place, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        """Places of arguments by storage."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [_storage(tensor) for tensor in tensors_of((*args, *(kwargs or {}).values()))]
        places = frozenset().union(*(self.of.get(each, frozenset()) for each in read))
        made = func(*args, **(kwargs or {}))
        for tensor in tensors_of((made,)):
            self.of[_storage(tensor)] = places
        return made


def _inputs_of_intermediates(recorder: Recorder, function: Callable[..., Any], args: Any, kwargs: Any) -> frozenset[int]:
    """Return the places of the arguments that backward needs, if eager autograd would save neither inputs, outputs nor masks.

    It is empty if eager autograd saves nothing else.
    """
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor.detach()  # an output saved by its own autograd node would be a reference cycle

    origins = _Origins(args)
    with recorder.fused_kernel(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), origins:
        output = function(*args, **kwargs)
        outside = {_storage(tensor) for tensor in (*tensors_of((*args, *kwargs.values())), *tensors_of((output,)))}
        values = [tensor for tensor in saved if tensor.dtype is not torch.bool and tensor.dim() > 0]
        # what a kernel with an autograd function of its own makes and saves has no origin: it is not computed again
        found = any(_storage(tensor) not in outside and origins.of.get(_storage(tensor)) for tensor in values)
        needed = frozenset().union(*(origins.of.get(_storage(tensor), frozenset()) for tensor in saved))
        saved.clear()
        del output
    return needed if found else frozenset()


class _SavesInputs(torch.autograd.Function):
    """Saves inputs for backward. Backward recomputes the function and its gradients in one fused kernel.

    Its arguments are followed by the parameters of those that are modules, for which autograd computes gradients too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        recorder: Recorder,
        function: Callable[..., Any],
        needed: frozenset[int],
        structure: list[TreeSpec],
        count: int,
        *inputs: Any,
    ) -> tuple[Any, ...]:
        """Return the tensors in what the function returns, and add to `structure` how they are nested in it.

        `count`: how many of `inputs` are arguments of the function.
        """
        args, parameters = inputs[:count], inputs[count:]
        ctx.recorder, ctx.function, ctx.parameters = recorder, function, parameters
        ctx.places = [index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        ctx.kept = [index for index in ctx.places if index in needed]
        ctx.wanted = [index for index in ctx.places if args[index].requires_grad]
        ctx.layouts = {index: (args[index].shape, args[index].dtype, args[index].device) for index in ctx.places}
        ctx.others = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        ctx.save_for_backward(*(args[index] for index in ctx.kept))
        with recorder.fused_kernel(name=_name(function)):
            leaves, nesting = tree_flatten(function(*args))
        structure.append(nesting)
        return tuple(leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        result: list[Any] = [None] * len(ctx.others)
        with ctx.recorder.fused_kernel(name=_name(ctx.function)), torch.enable_grad(), _attributes_kept(ctx.others):
            args = list(ctx.others)
            saved = dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
            for index in ctx.places:
                shape, dtype, device = ctx.layouts[index]
                arg = saved[index].detach() if index in saved else torch.empty(shape, dtype=dtype, device=device)
                args[index] = arg.requires_grad_(index in ctx.wanted)
            outputs = list(tensors_of((ctx.function(*args),)))
            read = [*(args[index] for index in ctx.wanted), *ctx.parameters]
            found = torch.autograd.grad(outputs, read, grads[: len(outputs)], allow_unused=bool(ctx.parameters))
            of_args, of_parameters = found[: len(ctx.wanted)], found[len(ctx.wanted) :]
            for index, gradient in zip(ctx.wanted, of_args, strict=True):
                result[index] = gradient
            del args, read, outputs, found, of_args, saved
        return (None, None, None, None, None, *result, *of_parameters)


def _parameters(args: Sequence[Any]) -> tuple[torch.nn.Parameter, ...]:
    """The trained parameters of the modules among the arguments: of `self`, if a method of a module is compiled."""
    modules = (arg for arg in args if isinstance(arg, torch.nn.Module))
    return tuple(each for module in modules for each in module.parameters(recurse=False) if each.requires_grad)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", "compiled function")


@contextmanager
def _attributes_kept(args: Sequence[Any]) -> Iterator[None]:
    """Restore the attributes of arguments and of the objects in these: a compiled function sets them in forward only.

    The function is a method of a dispatcher, for example, which sets attributes of its communication manager.
    """
    objects = [arg for arg in args if hasattr(arg, "__dict__") and not isinstance(arg, type)]
    objects += [each for arg in list(objects) for each in vars(arg).values() if type(each).__module__.startswith("megatron.")]
    kept = [(each, dict(vars(each))) for each in objects if hasattr(each, "__dict__")]
    try:
        yield
    finally:
        for each, attributes in kept:
            vars(each).clear()
            vars(each).update(attributes)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
