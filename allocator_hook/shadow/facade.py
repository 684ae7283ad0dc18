"""A fake CUDA for machines without a GPU: all patches of PyTorch and of package metadata, each with its reason.

`fake_cuda` is entered once per process, before megatron-core or Transformer Engine is imported. All patches are undone on exit.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from allocator_hook.shadow import backward_streams
from allocator_hook.shadow.backward_streams import StreamContext
from allocator_hook.shadow.extensions import extension_modules
from allocator_hook.shadow.gpu import CUDA_VERSION, DeviceProperties, Event, Gpu, Stream
from allocator_hook.shadow.imports import Imports, Launchable
from allocator_hook.shadow.kernel_calls import calls
from allocator_hook.shadow.placement import GPU, META, Placement, kernels, to_meta
from allocator_hook.shadow.te_kernels import release_1
from allocator_hook.shadow.te_kernels.releases import is_before
from allocator_hook.shadow.unmaterialized import unmaterialized
from allocator_hook.step.patching import Patch, Patches

ASSUMED_VERSIONS = {
    "flash-attn": "2.6.3"
    if is_before("1.13")
    else "2.7.4.post1"
    if is_before("2.6")
    else "2.8.1"
    if is_before("2.10")
    else "2.8.3",
    "emerging-optimizers": "0.2.0",
    "mamba-ssm": "2.3.2",
    "causal-conv1d": "1.6.0",
}
"""flash-attn: the newest release that the Transformer Engine supports, up to 2.8.3, as in the containers of 2026."""

_TENSOR_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}
_IS_META = vars(torch._C.TensorBase)["is_meta"].__get__
_DEVICE = torch._C.TensorBase.device.__get__


@contextmanager
def fake_cuda(gpu: Gpu, *, compiler: Callable[..., Any], memory_allocated: Callable[[], int]) -> Iterator[None]:
    """Make Python code see CUDA on `gpu`.

    `compiler` replaces `torch.compile` and `torch.jit.script`; `memory_allocated` replaces torch.cuda.memory_allocated.
    """
    with ExitStack() as stack:
        stack.enter_context(Imports(extension_modules(gpu)))
        stack.enter_context(Patches(_patches(gpu, compiler, memory_allocated)))
        stack.enter_context(Placement())
        yield


def _patches(gpu: Gpu, compiler: Callable[..., Any], memory_allocated: Callable[[], int]) -> Iterator[Patch]:
    yield from _queries(gpu, memory_allocated)
    yield from _streams()
    yield from backward_streams.patches()
    yield from _random_numbers()
    yield from _tensors()
    yield from _compilers(compiler)
    yield from _packages()
    yield Patch(Launchable, "launched", staticmethod(calls.launched), "a Triton kernel of a stubbed package runs on the GPU")
    if is_before("2"):
        yield from _of_release_1(gpu)


def _queries(gpu: Gpu, memory_allocated: Callable[[], int]) -> Iterator[Patch]:
    cuda = torch.cuda
    properties = DeviceProperties(gpu)
    query = "a device query; the answer is that of the target GPU"
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
        yield Patch(cuda, name, _constant(answer), query)
    yield Patch(torch.version, "cuda", CUDA_VERSION, "a CUDA build of torch reports its CUDA version")
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        yield Patch(cuda, name, lambda *_: memory_allocated(), "an allocator query; the recorder answers it")
    for name in ("init", "_lazy_init", "synchronize", "set_device", "empty_cache", "reset_peak_memory_stats", "ipc_collect"):
        yield Patch(cuda, name, _constant(None), "acts on a device that does not exist")
    yield Patch(cuda, "device", _device_context, "selects a device that does not exist")
    # Megatron sets RNG states through it
    yield Patch(cuda, "_lazy_call", lambda work, **_: work(), "defers calls until CUDA is initialized, which never happens")
    for name, dtype in _TENSOR_TYPES.items():
        yield Patch(cuda, name, _TensorType(name, (), {"dtype": dtype}), "the legacy constructors fail in a CPU build")


def _streams() -> Iterator[Patch]:
    cuda, default = torch.cuda, Stream(default=True)
    serial = "operations run in the order in which they are issued"
    stand_ins: dict[str, Callable[..., Any]] = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: Stream.current[-1] if Stream.current else default,
        "default_stream": _constant(default),
        "set_stream": _constant(None),
        "stream": StreamContext,
    }
    for name, value in stand_ins.items():
        yield Patch(cuda, name, value, serial)
    yield Patch(torch.Tensor, "record_stream", lambda *_: None, serial)
    for name in ("range_push", "range_pop", "mark"):
        yield Patch(cuda.nvtx, name, _constant(None), "NVTX ranges need CUDA")


def _random_numbers() -> Iterator[Patch]:
    cuda, generator = torch.cuda, torch.Generator()
    reason = "meta tensors need no random numbers; the RNG state is that of a CPU generator"
    for module in (cuda, cuda.random):
        yield Patch(module, "get_rng_state", lambda *_, **__: generator.get_state(), reason)
        yield Patch(module, "set_rng_state", _constant(None), reason)
        yield Patch(module, "manual_seed", generator.manual_seed, reason)
        yield Patch(module, "manual_seed_all", generator.manual_seed, reason)
    yield Patch(cuda, "default_generators", (generator,) * 8, reason)


def _tensors() -> Iterator[Patch]:
    yield Patch(torch.Tensor, "is_cuda", property(_is_cuda), "assertions and the choice of kernels depend on it")
    yield Patch(torch.Tensor, "device", property(_device), "a meta tensor reports the GPU that was requested")
    yield Patch(torch.Tensor, "is_meta", property(_is_meta), "Megatron-FSDP asks whether a parameter has no memory yet")
    wrapped = "a quantized tensor wraps tensors on the GPU and is created for the same device"
    yield Patch(torch.Tensor, "_make_wrapper_subclass", staticmethod(_on_meta(torch.Tensor._make_wrapper_subclass)), wrapped)
    moved = "a CPU parameter that moves to the meta device becomes a new object, but must keep the attributes that Megatron set"
    yield Patch(torch.nn.Module, "_apply", _keeping_attributes(torch.nn.Module._apply), moved)


def _compilers(compiler: Callable[..., Any]) -> Iterator[Patch]:
    reason = "on a GPU a fused function is one kernel that allocates only its outputs"
    yield Patch(torch, "compile", compiler, reason)
    yield Patch(torch.jit, "script", compiler, reason)


def _packages() -> Iterator[Patch]:
    real = importlib.metadata.version

    def version(name: str) -> str:
        return ASSUMED_VERSIONS.get(name.replace("_", "-")) or real(name)

    yield Patch(importlib.metadata, "version", version, "these packages are assumed to be installed on the training machine")


def _of_release_1(gpu: Gpu) -> Iterator[Patch]:
    yield Patch(torch.ops, "tex_ts", release_1.operators(gpu), "the operators are in the compiled extension")
    yield Patch(torch.onnx, "_type_utils", None, "imported for the export to ONNX; PyTorch no longer has it")


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


class _TensorType(type):
    """Metaclass of `torch.cuda.FloatTensor` and similar types.

    A call creates a tensor. isinstance checks the device and the dtype of a tensor.
    """

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


def _is_meta(tensor: torch.Tensor) -> bool:
    """For Megatron: whether the training machine has the tensor on the meta device too, and not on the GPU."""
    if sys._getframe(1).f_globals.get("__name__", "").startswith("megatron."):
        with torch._C.DisableTorchFunction():
            return bool(_IS_META(tensor)) and tensor.untyped_storage()._cdata in unmaterialized
    return bool(_IS_META(tensor))


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
