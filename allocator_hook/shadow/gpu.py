"""The simulated GPU, and replacements for the objects of `torch.cuda`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from analyzer.memory.workspaces import STREAM_POOL
from analyzer.specs import HardwareSpec
from analyzer.units import GIB

CUDA_VERSION: Final = "13.0"
CUDNN_VERSION: Final = 92_200
STREAMS: Final = 1 << 16
"""More than the number of streams. Memory pools of CUDA graphs have identifiers of streams that are multiples of it or larger."""
_MULTIPROCESSORS: Final = {(8, 0): 108, (9, 0): 132, (10, 0): 148}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The properties of the simulated GPU."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int

    @classmethod
    def of(cls, hardware: HardwareSpec) -> Gpu:
        """Return the target GPU of a job. The default is an H100 with 80 GiB, as in the formulas."""
        capability = hardware.compute_capability or (9, 0)
        return cls(
            name=f"NVIDIA {hardware.name or 'H100-80GB'}",
            capability=capability,
            multiprocessors=hardware.multiprocessors or _MULTIPROCESSORS.get(capability, 132),
            memory_bytes=hardware.capacity_bytes or 80 * GIB,
        )


class DeviceProperties:
    """Return value of `torch.cuda.get_device_properties`."""

    def __init__(self, gpu: Gpu) -> None:
        self.name = gpu.name
        self.major, self.minor = gpu.capability
        self.multi_processor_count = gpu.multiprocessors
        self.total_memory = gpu.memory_bytes
        self.warp_size = 32
        self.is_integrated = False


class Stream:
    """Replacement for `torch.cuda.Stream`. Operations run in the order in which they are issued, so nothing has to wait.

    The streams differ in what they allocate: PyTorch's allocator keeps the free blocks of each stream apart.
    """

    _created: ClassVar[Counter[int]] = Counter()
    """How many streams of each priority have been requested."""
    current: ClassVar[list[Stream]] = []
    """The streams that `with` statements have selected; the last one is the current stream."""
    selected: ClassVar[Stream | None] = None
    """The stream that `torch.cuda.set_stream` has selected; none is the default stream."""
    pool: ClassVar[int] = 0
    """The memory pool of the CUDA graph that is captured; 0 if none is."""

    def __init__(self, _: Any = None, priority: int = 0, *, default: bool = False, **__: Any) -> None:
        """PyTorch hands out the streams of a pool for each priority in turn (`getStreamFromPool`, c10/cuda/CUDAStream.cpp)."""
        self.stream_id = 0
        if not default:
            self.stream_id = 1 + Stream._created[priority] % STREAM_POOL + STREAM_POOL * -min(priority, 0)
            Stream._created[priority] += 1
        self.cuda_stream = self.stream_id
        self.device_index = 0

    @staticmethod
    def of_allocations() -> Stream | None:
        """The current stream; None is the default stream."""
        return Stream.current[-1] if Stream.current else Stream.selected

    @staticmethod
    def current_id() -> int:
        """The identifier of the current stream, and of the pool of a capture; 0 for the default stream."""
        stream = Stream.of_allocations()
        return (0 if stream is None else stream.stream_id) + Stream.pool * STREAMS

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: all issued work is finished."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: the event has occurred."""

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        """Do nothing: all issued work is finished."""

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        Stream.current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        Stream.current.pop()


class Event:
    """Replacement for `torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_event = 0

    def record(self, stream: Any = None) -> None:
        """Do nothing: events have no time."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing: the event has occurred."""

    def synchronize(self) -> None:
        """Do nothing: the event has occurred."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        del end
        return 0.0
