"""Runs and times kernels on one GPU, or for tests on the CPU.

Factors are random, because the power that a GPU draws, and with it its clock rate, depends on the data. A kernel runs on several
copies of its tensors in turn, so that they are not in the cache of the GPU, unless they are larger than the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Final

import torch

from allocator_hook.calibrate.attention import AttentionLibrary
from allocator_hook.calibrate.clock import Clock, CudaClock, HostClock, Run
from allocator_hook.calibrate.gemms import adds_into_fp32, gemm_run, launches
from allocator_hook.calibrate.items import HostCalls, Item
from allocator_hook.calibrate.measure import Unmeasurable
from analyzer.time.work.kernels import Attention, Gemm, MemoryBound
from analyzer.units import GIB

CACHE: Final = 256 * 2**20
"""Bytes that together do not stay in the cache of any GPU."""
MOST_COPIES: Final = 8
SHARE: Final = 0.7
"""Share of the free GPU memory that the tensors of a kernel may take."""
ROW: Final = 4096
"""Elements of a row of memory-bound kernels."""
WARM_UP: Final = 3.0
"""Seconds of GEMMs before the first measurement: a GPU at work has a lower clock rate than a cold one."""


class TorchRunner:
    """Measures kernels with PyTorch, and attention and the host with Transformer Engine if it is installed."""

    def __init__(self, device: str = "cuda", *, clock: Clock | None = None, engine: bool | None = None) -> None:
        self.device = device
        on_gpu = device.startswith("cuda")
        self.clock = clock or (CudaClock() if on_gpu else HostClock())
        self.engine = on_gpu and find_spec("transformer_engine") is not None if engine is None else engine
        has_bf16 = not on_gpu or torch.cuda.is_bf16_supported(including_emulation=False)
        self.dtype = torch.bfloat16 if has_bf16 else torch.float16
        self.attention = AttentionLibrary(device=device, dtype=self.dtype, engine=self.engine)
        self._forwards: dict[Attention, float] = {}

    @property
    def fuses_addition(self) -> bool:
        """Whether PyTorch adds 16-bit weight gradients to an fp32 buffer in the GEMM."""
        return adds_into_fp32(self.device, self.dtype)

    def warm_up(self) -> None:
        """Keeps the GPU busy, so that it has the clock rate of a GPU at work."""
        run = gemm_run(Gemm("forward", 8192, 8192, 8192), device=self.device, dtype=self.dtype)
        end = time.monotonic() + WARM_UP
        while time.monotonic() < end:
            run()
            self._synchronize()

    def time(self, item: Item) -> float:
        """Median seconds of an item. Raises Unmeasurable, or an error of PyTorch."""
        if not isinstance(item, HostCalls):
            self._check_memory(item)
        try:
            return self._time(item)
        finally:
            if self.device.startswith("cuda"):
                torch.cuda.empty_cache()

    def _time(self, item: Item) -> float:
        if isinstance(item, Gemm):
            with _tf32():
                runs = _copies(lambda: gemm_run(item, device=self.device, dtype=self.dtype), item.bytes)
                return self.clock.seconds(runs, launches=launches(item))
        if isinstance(item, Attention):
            return self._attention(item)
        if isinstance(item, MemoryBound):
            return self.clock.seconds(_copies(lambda: self._memory_bound(item), item.bytes), launches=2)
        if isinstance(item, HostCalls):
            return self._host()
        raise Unmeasurable("needs several GPUs")

    def _attention(self, attention: Attention) -> float:
        """The backward is the difference of both passes together and the forward."""
        shape = attention._replace(name="forward")
        forward, both = self.attention.runs(shape)
        if shape not in self._forwards:
            self._forwards[shape] = self.clock.seconds([forward], launches=4)
        if attention.name == "forward":
            return self._forwards[shape]
        return self.clock.seconds([both], launches=10) - self._forwards[shape]

    def _memory_bound(self, kernel: MemoryBound) -> Run:
        """A kernel of PyTorch that moves as many bytes."""
        name = kernel.name

        def new(rows: int, **options: Any) -> Any:
            return torch.randn(max(1, rows), ROW, device=self.device, dtype=self.dtype, **options)

        if name == "norm":
            source, weight = new(int(kernel.bytes / 4 / ROW)), new(1)[0]
            return lambda: torch.nn.functional.layer_norm(source, (ROW,), weight, weight)
        if name == "quantization":
            source = new(int(kernel.bytes / 3 / ROW))
            return lambda: source.to(torch.float8_e4m3fn)
        if name == "permutation":
            source = new(int(kernel.bytes / 4 / ROW))
            order, out = torch.randperm(len(source), device=self.device), torch.empty_like(source)
            return lambda: torch.index_select(source, 0, order, out=out)
        if name == "reverse permutation":  # zeros are written, read and written again: 8 bytes for an element
            source = new(int(kernel.bytes / 8 / ROW))
            order, out = torch.randperm(len(source), device=self.device), torch.empty_like(source)
            return lambda: out.zero_().index_add_(0, order, source)
        count = max(1, int(kernel.bytes / 6))
        first, second, out = (torch.randn(count, device=self.device, dtype=self.dtype) for _ in range(3))
        return lambda: torch.add(first, second, out=out)

    def _host(self) -> float:
        """Forward and backward of a linear layer of Transformer Engine, too small to keep the GPU busy."""
        if not self.engine:
            raise Unmeasurable("Transformer Engine, whose layers are timed, is not installed")
        from transformer_engine.pytorch import Linear

        layer = Linear(64, 64, bias=False, params_dtype=self.dtype)
        source = torch.randn(16, 64, device=self.device, dtype=self.dtype, requires_grad=True)
        gradient = torch.ones(16, 64, device=self.device, dtype=self.dtype)
        clock = HostClock(synchronize=self._synchronize, sample=0.1)
        return clock.seconds([lambda: layer(source).backward(gradient)])

    def _check_memory(self, item: Item) -> None:
        if not self.device.startswith("cuda"):
            return
        free, needed = torch.cuda.mem_get_info()[0], bytes_of(item)
        if needed > SHARE * free:
            raise Unmeasurable(f"needs {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB of GPU memory are free")

    def _synchronize(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()


def bytes_of(item: Item) -> float:
    """Bytes of the tensors of an item, with the copies for casts and of gradients."""
    if isinstance(item, Gemm):
        copies = _number_of_copies(item.bytes)
        cast = 3 if item.precision == "8" else 1
        return cast * copies * (item.bytes + 4 * item.batch * item.m * item.n)
    if isinstance(item, Attention):
        width = item.head_dim + item.value_dim
        return 2 * 4 * item.batch * item.heads * item.queries * 2 * width
    return 2 * item.bytes * _number_of_copies(item.bytes) if isinstance(item, MemoryBound) else 0.0


def _number_of_copies(size: float) -> int:
    return max(1, min(MOST_COPIES, int(CACHE / max(size, 1.0))))


def _copies(make: Callable[[], Run], size: float) -> list[Run]:
    return [make() for _ in range(_number_of_copies(size))]


@contextmanager
def _tf32() -> Iterator[None]:
    """GEMMs in 32 bit use TF32, as those of Transformer Engine do."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
