"""Creates meta tensors for the device "cuda". CPU tensors are unchanged.

Tensors on the simulated GPU have no values. If Python code reads one (a loss, a flag), it gets 0: no overflow, no gradients to
clip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.autograd import _make_grads
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from allocator_hook.shadow.balance import means
from allocator_hook.shadow.unmaterialized import under_meta_device, unmaterialized

META = torch.device("meta")
GPU = torch.device("cuda", 0)


class Kernels:
    """`running` is set while a PyTorch operation runs: PyTorch's own Python code must see the real device of a tensor."""

    running = False


kernels = Kernels()


def to_meta(device: Any) -> Any:
    """Return the meta device if `device` is a GPU (a string, a torch.device or a number); otherwise `device`."""
    if isinstance(device, str):
        return META if device.startswith("cuda") else device
    if isinstance(device, torch.device):
        return META if device.type == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return META
    return device


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    moved = tuple(to_meta(arg) if isinstance(arg, (str, torch.device, int)) and not isinstance(arg, bool) else arg for arg in args)
    return torch.Tensor.to(tensor, *moved, **kwargs)


def _cuda(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.Tensor.to(tensor, META)


def _same(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def _tolist(tensor: torch.Tensor) -> Any:
    return torch.Tensor.tolist(tensor.to("cpu"))  # the recorder fills in the expected token counts


def _get_device(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else -1


def _type(tensor: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
    """Return the type name of a CUDA tensor, such as torch.cuda.BFloat16Tensor: the optimizer sorts parameters by it."""
    if dtype is not None:
        return torch.Tensor.type(tensor, dtype, **kwargs)
    return str(torch.Tensor.type(tensor)).replace("torch.meta.", "torch.cuda.")


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """`tensor.data = data`. On CUDA it can be an empty CPU tensor: so Transformer Engine before 2.6 frees a tensor."""
    torch.Tensor.data.__set__(tensor, data.to(META) if tensor.is_meta else data)  # type: ignore[attr-defined]


def _named_by_number(device: Any, *args: Any) -> torch.device:
    """`torch.device(0)` is a GPU. A CPU build of PyTorch has no accelerator, so it would fail."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device, *args)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """As on CUDA: one kernel with a mask of one byte per element. On other devices PyTorch creates a float mask."""
    del inplace
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _softmax(input: torch.Tensor, dim: int | None = None, *args: Any, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    """As on CUDA: a softmax from half precision to fp32 is one kernel without an fp32 copy of the input."""
    if args and isinstance(args[-1], torch.dtype):
        dtype = args[-1]
    half = input.dtype in (torch.float16, torch.bfloat16)
    if dtype is torch.float32 and half and input.is_meta and dim is not None:
        return torch._softmax(input, dim, True)
    return torch._softmax(input if dtype is None else input.to(dtype), -1 if dim is None else dim, False)


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    *_: Any,
    inputs: Any = None,
    gradient: torch.Tensor | None = None,
) -> None:
    """`torch.autograd.backward` under this mode: recomputation in backward creates tensors on "cuda".

    `gradient` is that of `torch.Tensor.backward`.
    """
    roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    grad_tensors = grad_tensors if gradient is None else gradient
    given = (grad_tensors,) if isinstance(grad_tensors, torch.Tensor) else tuple(grad_tensors or [None] * len(roots))
    gradients = _make_grads(roots, given, is_grads_batched=False)
    keep = create_graph if retain_graph is None else retain_graph
    targets = () if inputs is None else (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    _engine_run_backward(roots, gradients, keep, create_graph, targets, allow_unreachable=True, accumulate_grad=True)


def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` under this mode. CUDA graphs capture it."""
    del only_inputs
    roots = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
    targets = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    given = (grad_outputs,) if isinstance(grad_outputs, torch.Tensor) else tuple(grad_outputs or [None] * len(roots))
    gradients = _make_grads(roots, given, is_grads_batched=False)
    keep = create_graph if retain_graph is None else retain_graph
    return tuple(
        _engine_run_backward(
            roots, gradients, keep, create_graph, targets, allow_unreachable=bool(allow_unused), accumulate_grad=False
        )
    )


def _isfinite(tensor: torch.Tensor) -> torch.Tensor:
    """All values are finite. A comparison with infinity would read 0, which means no."""
    result = torch.isfinite(tensor)
    if result.is_meta:
        means.put(result, 1.0)
    return result


def _tensor(data: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.tensor` of a list of numbers on the GPU, such as the tiles of each sample."""
    result = torch.tensor(data, **kwargs)
    if result.is_meta and isinstance(data, list) and data and all(isinstance(each, torch.Tensor) for each in data):
        known = [means.of(each) for each in data]
        means.put(result, None if None in known else sum(filter(None, known)) / len(known))
    return result


def _flatten(tensors: Any) -> torch.Tensor:
    """`flatten_dense_tensors`, which restores weights in FP8 to 16 bit before it joins them."""
    restored = [each.dequantize() if hasattr(each, "_quantizer") else each for each in tensors]
    return torch.cat([each.contiguous().view(-1) for each in restored])


_BACKWARD: Final = frozenset({torch.autograd.backward, torch.Tensor.backward})
_REPLACED: Mapping[Any, Callable[..., Any]] = {
    torch.device: _named_by_number,
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.type: _type,
    torch.Tensor.pin_memory: _same,
    torch.Tensor.tolist: _tolist,
    torch.Tensor.get_device: _get_device,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.isfinite: _isfinite,
    torch.tensor: _tensor,
    torch._C._nn.flatten_dense_tensors: _flatten,
    torch.nn.functional.dropout: _dropout,
    torch.dropout: _dropout,
    torch.nn.functional.softmax: _softmax,
    torch.softmax: _softmax,
    torch.Tensor.softmax: _softmax,
}


_MAX_DEPTH: Final = 32


def _names_gpu(options: Mapping[str, Any] | None) -> bool:
    device = (options or {}).get("device")
    return isinstance(device, int) or str(device).startswith("cuda")


class Placement(TorchFunctionMode):
    """Replaces the device of every PyTorch call, and the functions that behave differently on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self._nested = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func in _BACKWARD:
            return self._run(_backward, *args, **(kwargs or {}))
        if func is torch.autograd.grad:
            return self._run(_grad, *args, **(kwargs or {}))
        replaced = _REPLACED.get(func)
        unmaterialized.creating = under_meta_device() and not _names_gpu(kwargs)
        if kwargs:
            if "device" in kwargs:
                kwargs = {**kwargs, "device": to_meta(kwargs["device"])}
            if "pin_memory" in kwargs:
                kwargs = {**kwargs, "pin_memory": False}
        return (replaced or func)(*args, **(kwargs or {}))

    def _run(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # if a checkpoint returns a parameter, the gradient of the parameter runs the checkpoint again, in infinite recursion
        if self._nested == _MAX_DEPTH:
            raise RecursionError("a checkpointed module returns one of its parameters; its backward pass would not end")
        self._nested += 1
        try:
            with self:
                return backward(*args, **kwargs)
        finally:
            self._nested -= 1
