"""Records the allocation and the free of every meta tensor storage, as the GPU's allocator would see them.

A storage is allocated when the operation that creates it returns. It is freed when its last reference is released, which
PyTorch's reference counting decides as on a GPU. CPU tensors are not recorded, and filling large CPU tensors is skipped.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from allocator_hook.shadow.balance import means
from allocator_hook.shadow.gpu import STREAMS, Gpu, Stream
from allocator_hook.shadow.kernel_calls import calls, element_bytes
from allocator_hook.shadow.placement import kernels, to_meta
from allocator_hook.shadow.reductions import reduction_buffer
from allocator_hook.shadow.te_kernels.allocate import OUTSIDE, outside_allocator
from allocator_hook.shadow.unmaterialized import unmaterialized
from allocator_hook.step.marks import in_backward, tensors_of
from allocator_hook.step.patching import Patch
from analyzer.errors import AnalyzerError
from analyzer.units import BLOCK, MIB, round_up

aten = torch.ops.aten

_GEMMS: Final = frozenset(
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addmv.default, aten.mv.default}
)
_FILLS: Final = frozenset({aten.normal_.default, aten.uniform_.default, aten.fill_.Scalar, aten.zero_.default})
_READS: Final = frozenset({aten._local_scalar_dense.default})
_IN_PLACE: Final = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.masked_scatter.default: aten.masked_scatter_.default,
}
"""What the backward of indexing, `index_select`, `gather`, `topk` and `masked_select` calls under a dispatch mode, and without one.

Without a mode PyTorch writes into zeros that it allocates (`areAnyTensorSubclassLike` in FunctionsManual.cpp).
"""
_NOT_HANDLED: Final = object()
_LARGE: Final = 1 * MIB
_FIRST_ADDRESS: Final = 0x7F00_0000_0000


class AllocationSink(Protocol):
    """Receives events: the trace writer, or a counter in a test."""

    def allocation(self, pointer: int, bytes: int, *, stream: int = 0) -> None: ...

    def free(self, pointer: int) -> None: ...

    def label(self, pointer: int, role: Any, name: str, *, shape: Sequence[int], dtype: str, bytes: int) -> None: ...


class _Fused:
    """The storages created and the inputs written inside one fused kernel."""

    def __init__(self, inputs: set[int]) -> None:
        self.inputs = inputs
        self.made: list[Any] = []
        self.rewritten: dict[int, int] = {}
        self.read: dict[int, int] = {}
        """Bytes that are read of each storage that exists before the kernel."""

    def write(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.inputs:
            self.rewritten[storage._cdata] = storage.nbytes()


class Recorder(TorchDispatchMode):
    """Dispatch mode that records while it is active.

    `cublas_workspace_bytes` is the workspace that a cuBLAS handle allocates at its first GEMM, or at its first GEMM on each stream
    (`each_stream`). Sums have the buffers of `gpu`, and none without it.
    """

    def __init__(
        self, sink: AllocationSink, *, cublas_workspace_bytes: int, each_stream: bool = False, gpu: Gpu | None = None
    ) -> None:
        super().__init__()
        self._sink = sink
        self._live: dict[int, tuple[int, int, Any]] = {}
        self._next = _FIRST_ADDRESS
        self._fused: list[_Fused] = []
        self._workspace_bytes = cublas_workspace_bytes
        self._each_stream = each_stream
        self._gpu = gpu
        _unshared()  # measured before a mode is active
        self._handles: set[tuple[bool, int]] = set()
        self._references: dict[int, int] = {}
        self._resize = torch.UntypedStorage.resize_
        self._shared: dict[int, tuple[torch.UntypedStorage, Any]] = {}
        """By storage, another one whose memory it uses."""
        self.means = means
        self.current_bytes = 0
        """Live bytes, each allocation rounded up to 512 bytes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FakeTensor in types:  # DTensor computes the layout of a result with tensors that nothing allocates
            return _unrecorded(func, args, kwargs)
        if not all(_is_plain(kind) for kind in types):
            return NotImplemented  # a quantized tensor splits the operation into plain ones, which are dispatched here again
        if func in _IN_PLACE and in_backward() and not torch.is_grad_enabled():  # gradients are enabled in a recomputation
            func = _IN_PLACE[func]
        if _adds_in_place(func, args):
            func = aten.add_.Tensor
        if kwargs and isinstance(kwargs.get("device"), torch.device):
            kwargs = {**kwargs, "device": to_meta(kwargs["device"])}
        with torch._C.DisableTorchFunction():
            answer = self._copy_to_host(func, args, kwargs)
            if answer is not _NOT_HANDLED:
                return answer
            if func in _FILLS and not args[0].is_meta and args[0].numel() > _LARGE:
                return args[0]
            if func in _GEMMS and args[-1].is_meta:
                self._allocate_workspace()
                calls.product(args[-2], args[-1])
            if func is aten._grouped_mm.default and args[0].is_meta:
                calls.grouped_product(args[0], args[1], groups=args[2].shape[0])
        kernels.running = True
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            kernels.running = False
        with torch._C.DisableTorchFunction():
            if self._fused and func._schema.is_mutable and isinstance(result, torch.Tensor):
                self._fused[-1].write(result.untyped_storage())
            self._count(func, args, kwargs, result)
            self._track_all(result)
            if func is aten._softmax_backward_data.default and result.is_meta and not self._fused:
                self._temporary(result.untyped_storage().nbytes())
            if self._gpu is not None and not self._fused and (size := reduction_buffer(func, args, self._gpu)):
                self._temporary(size)
            self.means.propagate(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Pass a memory-bound operation to the trace, or what it reads to the fused kernel that it is part of."""
        if not self._fused:
            calls.operation(func, args, kwargs, result)
            return
        read = self._fused[-1].read
        for each in tensors_of(args):
            storage = each.untyped_storage()._cdata
            if storage in self._live:
                read[storage] = max(read.get(storage, 0), element_bytes(each))

    def _copy_to_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Handle operations that copy values from the GPU to the CPU, or whose result size depends on values."""
        if func in _READS and args[0].is_meta:
            return self.means.to_host(args[0]).sum().item()
        if func in (aten.equal.default, aten.is_nonzero.default) and args[0].is_meta:
            return False
        if func is aten._to_copy.default and args[0].is_meta and _is_host(kwargs.get("device")):
            return self.means.to_host(args[0], kwargs.get("dtype"))
        if func is aten.copy_.default and (args[0].is_meta or args[1].is_meta):
            self.means.copy(args[0], args[1])
            return args[0] if args[0].is_meta else args[0].copy_(self.means.to_host(args[1]))
        if func is aten.masked_select.default and args[0].is_meta:
            return self._masked_select(*args)
        if func is aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype is torch.bool and args[0].is_meta:
            return self._masked_select(args[0], args[1][0])
        if func is aten.nonzero.default and args[0].is_meta:
            return self._nonzero(args[0])
        if func is aten.repeat_interleave.Tensor and args[0].is_meta:
            return self._repeated(args[0])
        return _NOT_HANDLED

    def _masked_select(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        count = _known(self.means.selected(mask))
        indices = torch.empty((count, mask.dim()), dtype=torch.int64, device="meta")  # the temporary result of torch.nonzero
        self._track_all(indices)
        result = torch.empty((count, *tensor.shape[mask.dim() :]), dtype=tensor.dtype, device="meta")
        self._track_all(result)
        del indices
        return result

    def _nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        """The indices of the elements that a mask selects. On a GPU they are in the order of the dimensions, transposed."""
        result = torch.empty((mask.dim(), _known(self.means.selected(mask))), dtype=torch.int64, device="meta")
        self._track_all(result)
        return result.t()

    def _repeated(self, repeats: torch.Tensor) -> torch.Tensor:
        """The indices that `torch.repeat_interleave` selects. It first allocates the sums of `repeats`."""
        sums = torch.empty(repeats.shape, dtype=torch.int64, device="meta")
        self._track_all(sums)
        result = torch.empty((_known(self.means.selected(repeats)),), dtype=repeats.dtype, device="meta")
        self._track_all(result)
        del sums
        return result

    def pointer(self, tensor: torch.Tensor) -> int | None:
        """Return the address of the tensor's first element; None if its storage is not recorded."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()._cdata
            entry = self._live.get(storage)
            start = self._references.get(storage) if entry is None else entry[0]
            return None if start is None else start + int(tensor.storage_offset()) * tensor.element_size()

    def reference(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the address of `tensor` that does not keep its memory allocated."""
        with torch._C.DisableTorchFunction():
            made = outside_allocator(tensor.shape, tensor.dtype)
        self._references[made.untyped_storage()._cdata] = self.pointer(tensor) or 0
        self.means.copy(made, tensor)
        return made

    def share(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Let the storage of `target`, which is empty, use the memory of that of `source`, until it is freed or resized."""
        with torch._C.DisableTorchFunction():
            storage, used = target.untyped_storage(), source.untyped_storage()
            key = storage._cdata
            self._shared[key] = (used, weakref.ref(storage, lambda _: self._shared.pop(key, None)))
            self._resize(storage, used.nbytes())

    @contextmanager
    def fused_kernel(self, inputs: Iterable[torch.Tensor] = (), *, name: str = "") -> Iterator[None]:
        """Run code as one fused kernel. Storages that are created inside and freed before the end are not recorded.

        torch.compile makes in-place operations functional: an `inputs` tensor that is written in place is written to a new
        buffer and copied back at the end. These buffers are live together with the outputs. A kernel without a `name` is a trial,
        which is not counted.
        """
        with torch._C.DisableTorchFunction():
            frame = _Fused({tensor.untyped_storage()._cdata for tensor in inputs})
        self._fused.append(frame)
        try:
            yield
        finally:
            self._fused.pop()
            with torch._C.DisableTorchFunction():
                rewritten = [self._address(size) for size in frame.rewritten.values()]
                for pointer, size in zip(rewritten, frame.rewritten.values(), strict=True):
                    self._allocated(pointer, size)
                made = [storage for storage in (reference() for reference in frame.made) if storage is not None]
                for storage in made:
                    self._track_storage(storage)
                for pointer, size in zip(rewritten, frame.rewritten.values(), strict=True):
                    self._freed(pointer, size)
                if self._fused:
                    self._fused[-1].read.update(frame.read)
                elif name:
                    calls.memory(name, sum((*frame.read.values(), *frame.rewritten.values(), *(each.nbytes() for each in made))))

    def patches(self) -> list[Patch]:
        """Return patches for functions that a dispatch mode does not intercept."""
        resize = torch.UntypedStorage.resize_

        def resize_and_record(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._resized(storage)
            return result

        return [Patch(torch.UntypedStorage, "resize_", resize_and_record, "resizing a storage frees or allocates GPU memory")]

    def _track_all(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.is_meta and _is_plain(type(value)):
                self._track_storage(value.untyped_storage())
        elif isinstance(value, (tuple, list)):
            for item in value:
                self._track_all(item)

    def _track_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live or key in self._shared or key in OUTSIDE or key in unmaterialized:
            return
        if unmaterialized.creating:
            unmaterialized.add(storage)
            return
        if self._fused:
            self._fused[-1].made.append(weakref.ref(storage))
            return
        size = storage.nbytes()
        if not size:
            return
        pointer = self._address(size)
        self._live[key] = (pointer, size, weakref.ref(storage, partial(self._died, key)))
        self._allocated(pointer, size)

    def _address(self, size: int) -> int:
        pointer = self._next
        self._next += round_up(size, BLOCK)
        return pointer

    def _allocated(self, pointer: int, size: int) -> None:
        self.current_bytes += round_up(size, BLOCK)
        self._sink.allocation(pointer, size, stream=Stream.current_id())

    def _temporary(self, size: int) -> None:
        """Record a tensor inside an operation: the buffer of a sum, or the product of gradient and output that the backward of
        softmax allocates (`softmax_backward_cuda_out`).
        """
        pointer = self._address(size)
        self._allocated(pointer, size)
        self._freed(pointer, size)

    def _died(self, key: int, _: Any) -> None:
        entry = self._live.pop(key, None)
        self.means.forget(key)
        if entry is not None:
            self._freed(entry[0], entry[1])

    def _freed(self, pointer: int, size: int) -> None:
        self.current_bytes -= round_up(size, BLOCK)
        self._sink.free(pointer)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "meta":
            self._shared.pop(storage._cdata, None)
            self._died(storage._cdata, None)
            self._track_storage(storage)

    def _allocate_workspace(self) -> None:
        """Allocate the cuBLAS workspace of this thread at its first GEMM. Autograd runs backward in its own thread."""
        autograd = in_backward()
        handle = (autograd, Stream.current_id() % STREAMS if self._each_stream else 0)
        if handle in self._handles or not self._workspace_bytes:
            return
        self._handles.add(handle)
        pointer = self._address(self._workspace_bytes)
        self._allocated(pointer, self._workspace_bytes)
        name = f"cuBLAS workspace of the {'autograd' if autograd else 'main'} thread"
        self._sink.label(pointer, "workspace", name, shape=(self._workspace_bytes,), dtype="uint8", bytes=self._workspace_bytes)


def _unrecorded(func: Any, args: Any, kwargs: Any) -> Any:
    kernels.running = True
    try:
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))
    finally:
        kernels.running = False


def _known(count: int | None) -> int:
    if count is None:
        raise AnalyzerError(
            "--info-engine shadow: megatron-core selects elements by values that are unknown; use --info-engine formula"
        )
    return count


def _is_plain(kind: type) -> bool:
    """Return whether `kind` is a plain tensor type. The storage of a wrapper type is never allocated."""
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def _is_host(device: torch.device | None) -> bool:
    return device is not None and device.type == "cpu"


class _References(NamedTuple):
    """Numbers of references to a tensor and its storage."""

    tensor: int
    python: int
    storage: int


class _Measuring(TorchDispatchMode):
    """Measures the references to a gradient that only autograd holds."""

    found: _References | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.add.Tensor and in_backward():
            self.found = _references(args)
        return func(*args, **(kwargs or {}))


def _adds_in_place(func: Any, args: Any) -> bool:
    """Return whether `func` is a sum of two gradients that a GPU run adds in place: only autograd references the first.

    Under a dispatch mode autograd adds in a new tensor (`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp).
    """
    return func is aten.add.Tensor and in_backward() and not torch.is_grad_enabled() and _references(args) == _unshared()


def _references(args: Any) -> _References:
    first = args[0]
    storage = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    return _References(first._use_count(), sys.getrefcount(first), storage)


@cache
def _unshared() -> _References | None:
    """References to the first of two gradients that only autograd holds, inside a dispatch mode."""
    weight = torch.zeros((2, 1), device="cpu", requires_grad=True)
    row = torch.zeros((1,), dtype=torch.int64, device="cpu")
    with torch.enable_grad(), _Measuring() as measured:
        both = [torch.nn.functional.embedding(row, weight) for _ in range(2)]
        torch.autograd.backward(both, [torch.zeros_like(each) for each in both])
    return measured.found
