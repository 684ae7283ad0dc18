"""A machine whose efficiencies are known: times are those of the time model with these efficiencies, and with noise."""

from __future__ import annotations

import random
from dataclasses import replace

from allocator_hook.calibrate.items import Item, predicted_seconds
from analyzer.hardware.speeds import speed_of
from analyzer.time.efficiencies import efficiencies_of

GPU = "H100-80GB"
_SPEED = speed_of(GPU)
assert _SPEED is not None
SPEED = _SPEED
SHIPPED = replace(efficiencies_of(SPEED), clock=1.0)
KNOWN = {
    "kernel_gap": 3e-6,
    "memory": 0.9,
    "memory_permute": 0.7,
    "gemm_16": 0.99,
    "gemm_half_depth": 90.0,
    "gemm_traffic": 0.3,
    "gemm_8": 0.95,
    "gemm_32": 0.5,
    "gemm_half_rows": 80.0,
    "attention": 1.3,
    "attention_half_sequence": 500.0,
    "attention_backward": 0.65,
    "attention_unequal_heads": 0.7,
    "host_call": 1e-5,
    "nvlink": 0.75,
    "latency": 8e-6,
    "latency_rank": 2e-6,
    "expert_nvlink": 0.65,
    "network": 0.7,
    "expert_network": 0.5,
}
"""Unlike the shipped values, each by 10 % or more where the value matters."""
TRUE = replace(SHIPPED, **KNOWN)


class KnownRunner:
    """Measures on the known machine. Kernels of `broken` kinds fail."""

    fuses_addition = True

    def __init__(self, *, noise: float = 0.0, broken: tuple[type, ...] = ()) -> None:
        self._noise, self._broken, self._random = noise, broken, random.Random(7)
        self.ran: list[Item] = []

    def warm_up(self) -> None:
        """A machine without temperature."""

    def time(self, item: Item) -> float:
        """Seconds of the item, with noise."""
        if isinstance(item, self._broken):
            raise RuntimeError("CUDA error: no kernel image is available\nfurther lines")
        self.ran.append(item)
        return predicted_seconds(item, SPEED, TRUE) * self._random.lognormvariate(0, self._noise)
