"""Measures what offloading depends on, beside the disk: copies between GPU and host, host memory, and attention on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from allocator_hook.calibrate.clock import Clock, Run
from allocator_hook.calibrate.measure import Unmeasurable, reason_of

SIZE: Final = 512 * 2**20
"""Bytes of a copy. Larger than the caches of a processor."""
HEADS: Final = 512
"""Heads of all requests together in attention on the CPU."""
TOKENS: Final = 512
HEAD: Final = 128
"""Elements of a head."""
HALF: Final = 2
"""Bytes of an element."""
GIGA: Final = 1e9
Pin = Callable[[Any], Any]
"""Copies a tensor into page-locked memory."""


class Rate(NamedTuple):
    """A measured rate."""

    name: str
    """In the field `rates` of the file."""
    bytes: int
    """Of one run."""
    seconds: float
    """Of one run: the median of several."""

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes per second."""
        return self.bytes / self.seconds / GIGA


class Probe(NamedTuple):
    """Something to measure."""

    name: str
    """Of its rate."""
    bytes: int
    make: Callable[[], Run]
    """Allocates the tensors and returns what is timed."""


def probes(device: str = "cuda", *, pin: Pin | None = None, size: int = SIZE, heads: int = HEADS) -> list[Probe]:
    """What is measured. `size`: bytes of a tensor. `device` and `pin` have other values in tests only.

    A copy has the bytes of its tensor; a copy in host memory is read and written, and has twice as many. Staging and unstaging are
    the ways of FlexLLMGen between unpinned memory and the GPU (`general_copy` and `copy_worker_func` in
    flexllmgen/pytorch_backend.py): into new pinned memory before the GPU reads it, and from the GPU through a pinned buffer.
    """
    pinned: Pin = pin or (lambda tensor: tensor.pin_memory())
    count = size // HALF

    def host() -> Any:
        return torch.ones(count, dtype=torch.float16)  # written once, so that every page exists

    def gpu() -> Any:
        return torch.ones(count, dtype=torch.float16, device=device)

    def copy(target: Any, source: Any) -> Run:
        return lambda: target.copy_(source, non_blocking=True)

    def staging() -> Run:
        source = host()
        return lambda: pinned(source)

    def unstaging() -> Run:
        source, buffer, target = gpu(), pinned(host()), host()

        def run() -> None:
            buffer.copy_(source)
            target.copy_(buffer)

        return run

    return [
        Probe("pcie_to_gpu_gb_per_s", size, lambda: copy(gpu(), pinned(host()))),
        Probe("pcie_from_gpu_gb_per_s", size, lambda: copy(pinned(host()), gpu())),
        Probe("unpinned_to_gpu_gb_per_s", size, lambda: copy(gpu(), host())),
        Probe("unpinned_from_gpu_gb_per_s", size, lambda: copy(host(), gpu())),
        Probe("staging_gb_per_s", size, staging),
        Probe("unstaging_gb_per_s", size, unstaging),
        Probe("host_memory_gb_per_s", 2 * size, lambda: copy(host(), host())),
        Probe("cpu_attention_gb_per_s", 2 * HALF * heads * TOKENS * HEAD, lambda: cpu_attention(heads)),
    ]


def cpu_attention(heads: int) -> Run:
    """Attention of one new token to a 16-bit cache on the CPU in 32 bits, as FlexLLMGen computes it (`mha_gen`)."""
    keys = torch.randn(heads, HEAD, TOKENS).half()
    values = torch.randn(heads, TOKENS, HEAD).half()
    query = torch.randn(heads, 1, HEAD)

    def run() -> Any:
        return torch.bmm(torch.softmax(torch.bmm(query, keys.float()), dim=2), values.float())

    return run


def measure_host(items: list[Probe], clock: Clock) -> tuple[list[Rate], list[str]]:
    """The rates of probes, and a sentence for each one that failed."""
    rates, failures = [], []
    for item in items:
        try:
            seconds = clock.seconds([item.make()])
            if not seconds > 0:
                raise Unmeasurable("the clock showed no time")
            rates.append(Rate(item.name, item.bytes, seconds))
        except Exception as error:  # a machine without pinned memory or with little memory still has the other rates
            failures.append(f"{item.name}: {reason_of(error)}")
    return rates, failures
