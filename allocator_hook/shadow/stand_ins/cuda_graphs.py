"""Stand-ins for CUDA graphs of PyTorch, and for references to memory that Transformer Engine does not own.

A capture runs its operations. What it allocates is in a pool of its own: the allocator keeps the free blocks of pools apart.
A replay allocates nothing. The kernels and collectives of a capture are recorded at every replay instead.

Sources: torch/cuda/graphs.py (2.13) and transformer_engine/pytorch/utils.py `make_weak_ref` (2.11).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import count
from typing import Any, ClassVar, Protocol

import torch

from allocator_hook.shadow.gpu import Stream
from allocator_hook.shadow.kernel_calls import KernelSink
from allocator_hook.shadow.recorder import Recorder
from allocator_hook.step.patching import Patch
from allocator_hook.step.sink import CollectiveTarget
from analyzer.trace.events import KernelCall

_pools = count(1)


class Generator:
    """Stand-in for the default generator of a GPU. Its states are references, as with `graphsafe_get_state`."""

    def __init__(self) -> None:
        self._cpu = torch.Generator()

    def manual_seed(self, seed: int) -> Generator:
        self._cpu.manual_seed(seed)
        return self

    def initial_seed(self) -> int:
        return self._cpu.initial_seed()

    def get_state(self) -> torch.Tensor:
        return self._cpu.get_state()

    def set_state(self, state: torch.Tensor) -> Generator:
        self._cpu.set_state(state)
        return self

    def clone_state(self) -> Generator:
        return Generator()

    def graphsafe_get_state(self) -> Generator:
        return self

    def graphsafe_set_state(self, state: Generator) -> Generator:
        """Do nothing: there are no random numbers."""
        return self


class CudaGraph:
    """Stand-in for `torch.cuda.CUDAGraph`."""

    capturing: ClassVar[CudaGraph | None] = None

    def __init__(self, *_: Any, **__: Any) -> None:
        self.work: list[Callable[[], None]] = []
        """Records the kernels and collectives of the graph."""
        self._pool: int | None = None

    def register_generator_state(self, state: Any) -> None:
        """Do nothing: there are no random numbers."""

    def capture_begin(self, pool: int | None = None, **_: Any) -> None:
        self._pool = next(_pools) if pool is None else pool
        CudaGraph.capturing = self
        Stream.pool = self._pool

    def capture_end(self) -> None:
        CudaGraph.capturing = None
        Stream.pool = 0

    def pool(self) -> int | None:
        return self._pool

    def replay(self) -> None:
        for each in self.work:
            each()

    def reset(self) -> None:
        self.work = []


class Capture:
    """Stand-in for `torch.cuda.graph`."""

    default_capture_stream: ClassVar[Stream | None] = None

    def __init__(self, cuda_graph: CudaGraph, pool: int | None = None, stream: Stream | None = None, **_: Any) -> None:
        if Capture.default_capture_stream is None:
            Capture.default_capture_stream = Stream()
        self._graph, self._pool = cuda_graph, pool
        self._stream = stream or Capture.default_capture_stream

    def __enter__(self) -> None:
        torch.cuda.empty_cache()
        self._stream.__enter__()
        self._graph.capture_begin(self._pool)

    def __exit__(self, *error: object) -> None:
        self._graph.capture_end()
        self._stream.__exit__(*error)


class CallSink(KernelSink, CollectiveTarget, Protocol):
    """Receives kernels and collectives: the trace writer."""


class GraphedCalls:
    """Passes kernels and collectives to `sink`. Those of a capture are passed when the graph is replayed."""

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink

    def kernel(self, call: KernelCall) -> None:
        if CudaGraph.capturing is None:
            self._sink.kernel(call)
        else:
            CudaGraph.capturing.work.append(lambda: self._sink.kernel(call))

    def collective(self, kind: str, **details: Any) -> None:
        if CudaGraph.capturing is None:
            self._sink.collective(kind, **details)
        else:
            CudaGraph.capturing.work.append(lambda: self._sink.collective(kind, **details))


def patches() -> Iterator[Patch]:
    """Yield patches of PyTorch. They must be applied before Transformer Engine is imported."""
    cuda, reason = torch.cuda, "a CPU build of PyTorch has no CUDA graphs"
    yield Patch(cuda, "CUDAGraph", CudaGraph, reason)
    yield Patch(cuda, "graph", Capture, reason)
    for module, name in ((torch._C, "_graph_pool_handle"), (cuda, "graph_pool_handle")):
        yield Patch(module, name, lambda: next(_pools), reason)
    yield Patch(cuda, "is_current_stream_capturing", lambda: CudaGraph.capturing is not None, reason)
    yield Patch(cuda, "default_generators", (Generator(),) * 8, "graphs use the states of generators by reference")
    yield Patch(cuda, "set_stream", _set_stream, "graphs are captured on a stream of their own")
    statistics = {"allocated_bytes.all.current": 0, "reserved_bytes.all.current": 0}
    yield Patch(cuda, "memory_stats", lambda *_: statistics, "Megatron-LM only prints them")


def tensor_patches(recorder: Recorder) -> Iterator[Patch]:
    """Yield patches for the addresses of tensors. They are applied after all imports."""

    def weak(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return recorder.reference(value)
        if isinstance(value, (tuple, list)):
            return type(value)(weak(each) for each in value)
        return value

    reason = "the reference must not keep the memory allocated, and has its address"
    for name in ("transformer_engine.pytorch.graph", "megatron.core.transformer.cuda_graphs"):
        yield Patch(import_module(name), "make_weak_ref", weak, reason)
    yield Patch(torch.Tensor, "data_ptr", _address(recorder, torch.Tensor.data_ptr), "graphs compare the addresses of buffers")


def _address(recorder: Recorder, real: Callable[[torch.Tensor], int]) -> Callable[[torch.Tensor], int]:
    def data_ptr(tensor: torch.Tensor) -> int:
        with torch._C.DisableTorchFunction():
            if not tensor.is_cuda:
                return real(tensor)
        return recorder.pointer(tensor) or 0

    return data_ptr


def _set_stream(stream: Stream) -> None:
    Stream.selected = stream
