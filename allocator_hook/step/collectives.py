"""Intercepts the calls of `torch.distributed` and reports each one: the function, the process group and the tensors.

The patches must be applied before megatron-core is imported, because it imports some of the functions by name. Each call is
recorded. If `perform` is set, it is also executed; otherwise it returns immediately and leaves its output tensors unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

DTYPES: Mapping[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.bool: "bool",
}


class CollectiveSink(Protocol):
    """Receives each call. `tensor` is its payload; `peer` is the other global rank of a point-to-point call."""

    def __call__(self, kind: str, group: Any, tensor: torch.Tensor, *, peer: int | None) -> None: ...


class FinishedWork:
    """Return value of an asynchronous call. Like NCCL's work object, it keeps its tensors alive until `wait`."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors: tuple[torch.Tensor, ...] = tensors

    def wait(self, timeout: Any = None) -> bool:
        del timeout
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._tensors = ()


class CollectiveHooks:
    """Replacements for the functions of `torch.distributed`."""

    def __init__(
        self, sink: CollectiveSink, *, perform: bool, on_receive: Callable[[torch.Tensor, torch.Tensor], None] = lambda *_: None
    ) -> None:
        """`on_receive(output, input)` is called for all-gathers and all-to-alls before they are executed or skipped.

        The caller can then transfer known properties of the values of `input` to `output`.
        """
        self._sink = sink
        self._perform = perform
        self._on_receive = on_receive
        self._real = {name: getattr(dist, name) for name in self.functions() if hasattr(dist, name)}

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the replacement functions by their names in `torch.distributed`."""
        return {
            "all_reduce": self._all_reduce,
            "reduce": self._reduce,
            "broadcast": self._broadcast,
            "all_gather_into_tensor": self._all_gather_into_tensor,
            "all_gather_single": self._all_gather_into_tensor,  # the name in newer releases of PyTorch
            "_all_gather_base": self._all_gather_into_tensor,
            "reduce_scatter_tensor": self._reduce_scatter_tensor,
            "reduce_scatter_single": self._reduce_scatter_tensor,
            "_reduce_scatter_base": self._reduce_scatter_tensor,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "all_to_all_single": self._all_to_all_single,
            "all_to_all": self._all_to_all,
            "isend": self._p2p("isend"),
            "irecv": self._p2p("irecv"),
            "send": self._p2p("send"),
            "recv": self._p2p("recv"),
            "batch_isend_irecv": self._batch,
            **({} if self._perform else _WITHOUT_PEERS),
        }

    def patches(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """Return (module, name, function) for both modules that megatron-core and Transformer Engine import from."""
        return [(module, name, function) for name, function in self.functions().items() for module in (dist, c10d)]

    def _call(self, name: str, async_op: bool, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """Call the real function if `perform` is set. Otherwise return a finished work object, or None if synchronous."""
        if self._perform:
            return self._real[name](*args, async_op=async_op, **kwargs)
        return FinishedWork(*tensors) if async_op else None

    def _all_reduce(self, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        self._sink("all_reduce", group, tensor, peer=None)
        return self._call("all_reduce", async_op, [tensor], tensor, op, group)

    def _reduce(self, tensor: Any, dst: Any = None, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        self._sink("reduce", group, tensor, peer=None)
        return self._call("reduce", async_op, [tensor], tensor, dst, op, group)

    def _broadcast(self, tensor: Any, src: Any = None, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
        self._sink("broadcast", group, tensor, peer=None)
        return self._call("broadcast", async_op, [tensor], tensor, src, group, **kwargs)

    def _all_gather_into_tensor(self, output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        self._sink("all_gather", group, output_tensor, peer=None)
        self._on_receive(output_tensor, input_tensor)
        return self._call("all_gather_into_tensor", async_op, [output_tensor, input_tensor], output_tensor, input_tensor, group)

    def _reduce_scatter_tensor(
        self, output: Any, input: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        self._sink("reduce_scatter", group, input, peer=None)
        return self._call("reduce_scatter_tensor", async_op, [output, input], output, input, op, group)

    def _all_gather(self, tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        # NCCL gathers into a flat tensor and copies from it (newLikeFlat in ProcessGroupNCCL). Uneven tensors are broadcast.
        flat = None
        if any(output.shape != tensor.shape for output in tensor_list):
            flat = _with_total_length(tensor_list)
        elif not self._perform:
            flat = torch.empty((len(tensor_list), *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        for output in tensor_list:
            self._on_receive(output, tensor)
        self._sink("all_gather", group, tensor if flat is None else flat, peer=None)
        return self._call("all_gather", async_op, [tensor, *tensor_list], tensor_list, tensor, group)

    def _reduce_scatter(
        self, output: Any, input_list: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        flat = None if self._perform else torch.empty((len(input_list), *output.shape), dtype=output.dtype, device=output.device)
        self._sink("reduce_scatter", group, output if flat is None else flat, peer=None)
        return self._call("reduce_scatter", async_op, [output, *input_list], output, input_list, op, group)

    def _all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        self._sink("all_to_all", group, input, peer=None)
        self._on_receive(output, input)
        return self._call(
            "all_to_all_single", async_op, [output, input], output, input, output_split_sizes, input_split_sizes, group
        )

    def _all_to_all(self, output_tensor_list: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False) -> Any:
        for tensor in input_tensor_list:
            self._sink("all_to_all", group, tensor, peer=None)
        tensors = [*output_tensor_list, *input_tensor_list]
        return self._call("all_to_all", async_op, tensors, output_tensor_list, input_tensor_list, group)

    def _p2p(self, name: str) -> Callable[..., Any]:
        kind = "send" if "send" in name else "recv"

        def call(tensor: torch.Tensor, peer: int | None = None, group: Any = None, tag: int = 0, **kwargs: Any) -> Any:
            peer = kwargs.get("dst", kwargs.get("src", peer))
            self._sink(kind, group, tensor, peer=peer)
            if self._perform:
                return self._real[name](tensor, peer, group, tag)
            return FinishedWork(tensor) if name.startswith("i") else None

        call.kind = kind  # type: ignore[attr-defined]
        return call

    def _batch(self, operations: Sequence[Any]) -> Any:
        for operation in operations:
            self._sink(operation.op.kind, operation.group, operation.tensor, peer=operation.peer)
        if self._perform:
            return [
                self._real[f"i{operation.op.kind}"](operation.tensor, operation.peer, operation.group) for operation in operations
            ]
        return [FinishedWork(*(operation.tensor for operation in operations))]


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Return the object of this rank for every rank. Megatron uses the call to compare parameter groups across ranks."""
    del group
    object_list[:] = [obj] * len(object_list)


def _with_total_length(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a 1D view with as many elements as all `tensors` together. It allocates no storage."""
    longest = max(tensors, key=torch.Tensor.numel)
    return longest.flatten()[:1].expand(sum(tensor.numel() for tensor in tensors))


class _Coalesced(FinishedWork):
    """The work object that a coalescing manager returns."""

    def append(self, work: FinishedWork) -> None:
        del work


@contextmanager
def _coalescing_manager(group: Any = None, device: Any = None, async_ops: bool | None = False) -> Iterator[_Coalesced]:
    """Replacement for `_coalescing_manager`. The calls inside it are recorded individually."""
    del group, device, async_ops
    yield _Coalesced()


_WITHOUT_PEERS: dict[str, Callable[..., Any]] = {
    "barrier": lambda *_, **__: None,
    "all_gather_object": _all_gather_object,
    "broadcast_object_list": lambda *_, **__: None,
    "_coalescing_manager": _coalescing_manager,
}
"""Replacements for calls that would wait for other ranks. They are not recorded."""
