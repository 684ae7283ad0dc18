"""Patches of Megatron-FSDP for tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from typing import Any, Protocol

from torch.distributed.tensor import DTensor

from allocator_hook.shadow.recorder import AllocationSink, Recorder
from allocator_hook.step.patching import Patch
from analyzer.specs import TrainingJob

_REASON = "unsharded parameters and gradients are not activations of the module that runs"
_PACKAGE = "megatron.core.distributed.fsdp.src.megatron_fsdp"


class _Bucket(Protocol):
    data: Any


def patches(job: TrainingJob, recorder: Recorder, sink: AllocationSink) -> Iterator[Patch]:
    """Yield the patches of a job with FSDP."""
    if job.fsdp is None:
        return
    yield from _optimizer_states()
    if job.fsdp.implementation != "megatron":
        parameter = import_module("torch.distributed.fsdp._fully_shard._fsdp_param").FSDPParam
        yield Patch(parameter, "alloc_all_gather_outputs", _labelled_outputs(parameter, recorder, sink), _REASON)
        return
    buffers = import_module(f"{_PACKAGE}.param_and_grad_buffer")
    yield Patch(buffers, "validate_uneven_dtensor", lambda _: None, "it compares offsets of all ranks, which have no values")
    for name in ("TemporaryBucketAllocator", "StorageResizeBasedBucketAllocator"):
        allocator = getattr(buffers, name)
        labelled = _labelled(allocator.allocate, recorder, sink)
        yield Patch(allocator, "allocate", labelled, _REASON)


def _labelled(real: Callable[..., _Bucket], recorder: Recorder, sink: AllocationSink) -> Callable[..., _Bucket]:
    @wraps(real)
    def allocate(*args: Any, **kwargs: Any) -> _Bucket:
        bucket = real(*args, **kwargs)
        _label(bucket.data, recorder, sink)
        return bucket

    return allocate


def _labelled_outputs(parameter: Any, recorder: Recorder, sink: AllocationSink) -> Callable[[Any], None]:
    real = parameter.alloc_all_gather_outputs

    @wraps(real)
    def allocate(sharded: Any) -> None:
        real(sharded)
        for output in sharded.all_gather_outputs:
            _label(output, recorder, sink)

    return allocate


def _label(tensor: Any, recorder: Recorder, sink: AllocationSink) -> None:
    pointer = recorder.pointer(tensor)
    if pointer is not None:
        size = tensor.numel() * tensor.element_size()
        sink.label(pointer, "workspace", "unsharded parameters or gradients", shape=tuple(tensor.shape), dtype="uint8", bytes=size)


class _Local:
    """A parameter with the shape of its part on this rank. It is equal to the parameter as a key."""

    def __init__(self, parameter: DTensor) -> None:
        self._parameter = parameter
        self.shape = parameter._local_tensor.shape
        self.device = parameter.device

    def __hash__(self) -> int:
        return hash(self._parameter)

    def __eq__(self, other: object) -> bool:
        return other is self._parameter


def _optimizer_states() -> Iterator[Patch]:
    """`FusedAdam._initialize_state` of Transformer Engine 2.11 has no case for sharded parameters."""
    try:
        adam = import_module("transformer_engine.pytorch.optimizers.fused_adam").FusedAdam
    except ImportError:
        return
    real = adam._initialize_state

    @wraps(real)
    def initialize(optimizer: Any, parameter: Any, *args: Any, **kwargs: Any) -> None:
        real(optimizer, _Local(parameter) if isinstance(parameter, DTensor) else parameter, *args, **kwargs)

    yield Patch(adam, "_initialize_state", initialize, "the update kernel needs states of the size of the local parameter")
