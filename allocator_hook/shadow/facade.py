"""CUDA pretended on a machine without it: every patch, in one place, with its reason.

Entered once in a process of its own, before megatron-core or Transformer Engine is imported. On the way out everything
is put back, so that tests can show that nothing is left.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from allocator_hook.shadow.extensions import extension_modules
from allocator_hook.shadow.gpu import CUDA_VERSION, DeviceProperties, Event, Gpu, Stream
from allocator_hook.shadow.imports import Imports
from allocator_hook.shadow.placement import GPU, META, Placement, kernels, to_meta
from allocator_hook.step.patching import Patch, Patches

FLASH_ATTENTION_VERSION = "2.8.3"
"""The newest that Transformer Engine 2.11 takes, as in the containers of 2026."""

_TENSOR_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}
_DEVICE = torch._C.TensorBase.device.__get__


@contextmanager
def facade(gpu: Gpu, *, one_kernel: Callable[..., Any], memory_allocated: Callable[[], int]) -> Iterator[None]:
    """CUDA on `gpu`, as far as Python code can see.

    `one_kernel` stands in for `torch.compile` and `torch.jit.script`; `memory_allocated` answers the query of that name.
    """
    with ExitStack() as stack:
        stack.enter_context(Imports(extension_modules(gpu)))
        stack.enter_context(Patches(_patches(gpu, one_kernel, memory_allocated)))
        stack.enter_context(Placement())
        yield


def _patches(gpu: Gpu, one_kernel: Callable[..., Any], memory_allocated: Callable[[], int]) -> Iterator[Patch]:
    yield from _queries(gpu, memory_allocated)
    yield from _streams()
    yield from _random_numbers()
    yield from _tensors()
    yield from _compilers(one_kernel)
    yield from _packages()


def _queries(gpu: Gpu, memory_allocated: Callable[[], int]) -> Iterator[Patch]:
    cuda = torch.cuda
    properties = DeviceProperties(gpu)
    asked = "a device query, answered as the target GPU would"
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "current_device": 0,
        "device_count": 8,
        "get_device_properties": properties,
        "get_device_capability": gpu.capability,
        "get_device_name": gpu.name,
        "is_bf16_supported": gpu.capability >= (8, 0),
        "is_current_stream_capturing": False,
        "mem_get_info": (gpu.memory_bytes, gpu.memory_bytes),
    }
    for name, answer in answers.items():
        yield Patch(cuda, name, _constant(answer), asked)
    yield Patch(torch.version, "cuda", CUDA_VERSION, "a build of torch for CUDA says which")
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        yield Patch(cuda, name, lambda *_: memory_allocated(), "a query of the allocator, answered by the recorder")
    for name in ("init", "_lazy_init", "synchronize", "set_device", "empty_cache", "reset_peak_memory_stats", "ipc_collect"):
        yield Patch(cuda, name, _constant(None), "acts on a device that is not there")
    yield Patch(cuda, "device", _device_context, "selects a device that is not there")
    # Megatron queues work on the generator until CUDA is there
    yield Patch(cuda, "_lazy_call", lambda work, **_: work(), "queues calls until CUDA is initialised, which it never is")
    for name, dtype in _TENSOR_TYPES.items():
        yield Patch(cuda, name, _TensorType(name, (), {"dtype": dtype}), "the legacy constructors of a CPU build refuse to work")


def _streams() -> Iterator[Patch]:
    cuda, stream = torch.cuda, Stream()
    serial = "work is done in the order in which it is issued"
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "current_stream": _constant(stream),
        "default_stream": _constant(stream),
        "set_stream": _constant(None),
        "stream": lambda _: contextlib.nullcontext(),
    }.items():
        yield Patch(cuda, name, value, serial)
    yield Patch(torch.Tensor, "record_stream", lambda *_: None, serial)
    for name in ("range_push", "range_pop", "mark"):
        yield Patch(cuda.nvtx, name, _constant(None), "profiler marks need CUDA")


def _random_numbers() -> Iterator[Patch]:
    cuda, generator = torch.cuda, torch.Generator()
    nothing = "no random number is ever drawn on a GPU without data; the state is a host generator's"
    for module in (cuda, cuda.random):
        yield Patch(module, "get_rng_state", lambda *_, **__: generator.get_state(), nothing)
        yield Patch(module, "set_rng_state", _constant(None), nothing)
        yield Patch(module, "manual_seed", generator.manual_seed, nothing)
        yield Patch(module, "manual_seed_all", generator.manual_seed, nothing)
    yield Patch(cuda, "default_generators", (generator,) * 8, nothing)


def _tensors() -> Iterator[Patch]:
    yield Patch(torch.Tensor, "is_cuda", property(_is_cuda), "assertions and choices of kernels ask it")
    yield Patch(torch.Tensor, "device", property(_device), "a tensor says that it lies on the GPU that was asked for")
    wrapped = "a quantized tensor is a wrapper around tensors on the GPU, and is made for the same device"
    yield Patch(torch.Tensor, "_make_wrapper_subclass", staticmethod(_on_meta(torch.Tensor._make_wrapper_subclass)), wrapped)
    moved = "a host parameter that moves to a meta device is a new object, and must keep the attributes that Megatron gave it"
    yield Patch(torch.nn.Module, "_apply", _keeping_attributes(torch.nn.Module._apply), moved)


def _compilers(one_kernel: Callable[..., Any]) -> Iterator[Patch]:
    reason = "what is fused on a GPU is one kernel that allocates its outputs alone"
    yield Patch(torch, "compile", one_kernel, reason)
    yield Patch(torch.jit, "script", one_kernel, reason)


def _packages() -> Iterator[Patch]:
    real = importlib.metadata.version

    def version(name: str) -> str:
        return FLASH_ATTENTION_VERSION if name in ("flash-attn", "flash_attn") else real(name)

    yield Patch(importlib.metadata, "version", version, "flash-attn is taken to be installed, as where the training will run")


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


class _TensorType(type):
    """`torch.cuda.FloatTensor` and its kin: called, they make a tensor; asked with isinstance, they look at device and dtype."""

    dtype: torch.dtype

    def __call__(cls, *data: Any) -> torch.Tensor:
        if data and not isinstance(data[0], int):
            return torch.tensor(data[0], dtype=cls.dtype, device=META)
        return torch.empty(data, dtype=cls.dtype, device=META)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_meta and instance.dtype is cls.dtype


class _device_context(contextlib.nullcontext[None]):
    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.idx = 0


def _on_meta(real: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, device: Any = None, **options: Any) -> Any:
        return real(*args, device=to_meta(device), **options)

    return make


def _device(tensor: torch.Tensor) -> torch.device:
    with torch._C.DisableTorchFunction():
        if tensor.is_meta and not kernels.running:
            return GPU
        device: torch.device = _DEVICE(tensor)
        return device


def _is_cuda(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.is_meta


def _keeping_attributes(real: Callable[..., Any]) -> Callable[..., Any]:
    def apply(module: torch.nn.Module, fn: Any, recurse: bool = True) -> Any:
        before = dict(module._parameters)
        result = real(module, fn, recurse)
        for name, parameter in module._parameters.items():
            old = before.get(name)
            if old is not None and parameter is not None and parameter is not old:
                parameter.__dict__.update(old.__dict__)
        return result

    return apply
