"""The GPU that is pretended, and the stand-ins for what `torch.cuda` hands out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from analyzer.specs import HardwareSpec
from analyzer.units import GIB

CUDA_VERSION: Final = "13.0"
CUDNN_VERSION: Final = 91_300
_MULTIPROCESSORS: Final = {(8, 0): 108, (9, 0): 132, (10, 0): 148}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What a device query is answered with."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int

    @classmethod
    def of(cls, hardware: HardwareSpec) -> Gpu:
        """The target of a launch; an 80 GiB Hopper where none is named, as everywhere in the analysis."""
        capability = hardware.compute_capability or (9, 0)
        return cls(
            name=f"NVIDIA {hardware.name or 'H100-80GB'}",
            capability=capability,
            multiprocessors=hardware.multiprocessors or _MULTIPROCESSORS.get(capability, 132),
            memory_bytes=hardware.capacity_bytes or 80 * GIB,
        )


class DeviceProperties:
    """What `torch.cuda.get_device_properties` returns."""

    def __init__(self, gpu: Gpu) -> None:
        self.name = gpu.name
        self.major, self.minor = gpu.capability
        self.multi_processor_count = gpu.multiprocessors
        self.total_memory = gpu.memory_bytes
        self.warp_size = 32
        self.is_integrated = False


class Stream:
    """`torch.cuda.Stream`: work is done in the order in which it is issued, so there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0
        self.stream_id = 0
        self.device_index = 0

    def wait_stream(self, stream: Any) -> None:
        """Nothing runs beside us."""

    def wait_event(self, event: Any) -> None:
        """Nothing runs beside us."""

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        """Nothing is left to do."""

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        """There is one stream; no other is to be restored."""


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_event = 0

    def record(self, stream: Any = None) -> None:
        """Events carry no time here."""

    def wait(self, stream: Any = None) -> None:
        """The event has happened."""

    def synchronize(self) -> None:
        """The event has happened."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        del end
        return 0.0
