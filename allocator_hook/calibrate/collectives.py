"""Measures collectives and messages between the ranks that torchrun started.

Groups are those in which trainings communicate: the ranks of one NVLink domain, all ranks, and ranks of different domains. All
groups of a kind work at the same time, as in a training, and the slowest rank counts. After each collective, ranks agree over a
group of CPU processes (gloo) whether it failed on one of them.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from allocator_hook.calibrate.items import Measured, Transfer, kind_of
from allocator_hook.calibrate.measure import Measurements, Show, reason_of

VARIABLES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Set by torchrun."""
KINDS: Final = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
PAYLOADS: Final = (64 * 2**10, 4 * 2**20, 64 * 2**20, 512 * 2**20)
SHARE: Final = 0.2
"""Share of the free memory that a payload may take. A collective has two tensors of its size."""
SAMPLES: Final = 5
SMALL: Final = 16 * 2**20
"""Bytes. More runs of smaller payloads are timed together."""
PAUSE: Final = 10_000_000
"""Cycles for which the GPU waits while the host issues the calls of a sample: about 5 ms."""
WAIT: Final = timedelta(hours=1)
"""The other ranks wait while rank 0 measures kernels."""


class Layout(NamedTuple):
    """The ranks of the run, in nodes or racks that NVLink connects."""

    world: int
    domain: int
    """Ranks of one NVLink domain."""
    nodes: int = 1


class Ring(NamedTuple):
    """The groups of one kind, of which each rank is in one."""

    ranks: int
    near: int
    members: tuple[tuple[int, ...], ...]


def started_by_torchrun(environ: Mapping[str, str]) -> bool:
    """Whether torchrun started several processes, of which this is one."""
    return all(environ.get(name) for name in VARIABLES) and environ["WORLD_SIZE"].isdecimal() and int(environ["WORLD_SIZE"]) > 1


def layout_of(environ: Mapping[str, str], nvlink_domain: int) -> Layout:
    """The layout of the ranks of torchrun. A domain larger than 8 GPUs is a rack, which can connect several nodes."""
    world, node = int(environ["WORLD_SIZE"]), int(environ["LOCAL_WORLD_SIZE"])
    domain = min(world, nvlink_domain) if nvlink_domain > 8 else min(node, nvlink_domain)
    return Layout(world, domain, world // node)


def rings(layout: Layout) -> list[Ring]:
    """The groups to measure: pairs and all ranks of a domain, all ranks, and one rank of each domain.

    Groups of several domains are measured only over several nodes, where they use the network.
    """
    world, domain, nodes = layout
    if world % domain:
        return []
    found = []
    for size in dict.fromkeys((domain, 2)):
        if 2 <= size <= domain and domain % size == 0:
            found.append(Ring(size, size, tuple(tuple(range(first, first + size)) for first in range(0, world, size))))
    if world > domain and nodes > 1:
        found.append(Ring(world // domain, 1, tuple(tuple(range(first, world, domain)) for first in range(domain))))
        if domain > 1:
            found.append(Ring(world, domain, (tuple(range(world)),)))
    return found


class Peers:
    """The process groups of a run."""

    def __init__(self, layout: Layout, *, device: str = "cuda", backend: str = "nccl") -> None:
        self.device = device
        self.layout = layout
        dist.init_process_group(backend, timeout=timedelta(minutes=5))
        self.rank = dist.get_rank()
        self._control = dist.new_group(backend="gloo", timeout=WAIT)
        self._groups = {ring: self._own(ring) for ring in rings(layout)}

    def _own(self, ring: Ring) -> Any:
        """The group of this rank. Every rank has to create every group."""
        own = None
        for members in ring.members:
            group = dist.new_group(list(members), timeout=timedelta(minutes=5))
            own = group if self.rank in members else own
        return own

    def wait(self) -> None:
        """Waits for all ranks, without the GPU."""
        dist.barrier(group=self._control)

    def close(self) -> None:
        """Ends the communication."""
        dist.destroy_process_group()

    def worst(self, *values: float) -> tuple[float, ...]:
        """The largest value of all ranks, for each."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control)
        return tuple(tensor.tolist())

    def measure(self, *, budget: float, show: Show) -> Measurements:
        """Times all collectives in all groups, for `budget` seconds. Every rank gets the same result."""
        found = Measurements()
        limit = SHARE * -self.worst(-self._free())[0]
        payloads = [size for size in PAYLOADS if size <= limit]
        tried = [
            (ring, group, Transfer(kind, size, ring.ranks, ring.near))
            for ring, group in self._groups.items()
            for kind in KINDS
            if kind != "send" or ring.near in (1, ring.ranks)  # otherwise messages use both links
            for size in payloads
        ]
        broken: Counter[tuple[Ring, str]] = Counter()
        start = time.monotonic()
        for place, (ring, group, transfer) in enumerate(tried):
            show(place, len(tried), kind_of(transfer))
            if broken[ring, transfer.kind]:
                continue
            seconds, reason = self._attempt(group, transfer)
            seconds, failed, elapsed = self.worst(seconds, float(bool(reason)), time.monotonic() - start)
            if failed:
                broken[ring, transfer.kind] += 1
                found.failures[kind_of(transfer), reason or "it failed on another rank"] += 1
            else:
                found.done.append(Measured(transfer, seconds))
            if elapsed > budget:
                left = Counter((kind_of(each), f"the time of {budget:.0f} s was over") for _, _, each in tried[place + 1 :])
                found.failures.update(left)
                break
        show(len(tried), len(tried), "")
        return found

    def _free(self) -> float:
        return float(torch.cuda.mem_get_info()[0]) if self.device.startswith("cuda") else 2.0**30

    def _attempt(self, group: Any, transfer: Transfer) -> tuple[float, str]:
        """Seconds, and the reason of a failure."""
        try:
            return self._seconds(self._call(group, transfer), transfer.payload), ""
        except Exception as error:
            return 0.0, reason_of(error)

    def _seconds(self, call: Callable[[], Any], payload: int) -> float:
        """Median seconds of a call."""
        count = 20 if payload < SMALL else 4
        for _ in range(3):
            call()
        self._synchronize()
        return statistics.median(self._sample(call, count) for _ in range(SAMPLES))

    def _sample(self, call: Callable[[], Any], count: int) -> float:
        """Seconds of a call. On a GPU the first one, for which ranks wait that started later, is not timed."""
        dist.barrier(group=self._control)
        if not self.device.startswith("cuda"):
            start = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - start) / count
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(PAUSE)
        call()
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / count

    def _call(self, group: Any, transfer: Transfer) -> Callable[[], Any]:
        """A function that runs the collective once. The payload is rounded down to equal parts for the ranks."""
        ranks = transfer.ranks
        part = transfer.payload // 2 // ranks
        whole = torch.zeros(part * ranks, dtype=torch.bfloat16, device=self.device)
        if transfer.kind == "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        if transfer.kind == "all_to_all":
            received = torch.empty_like(whole)
            return lambda: dist.all_to_all_single(received, whole, group=group)
        if transfer.kind == "send":
            return self._message(group, whole, ranks)
        own = torch.zeros(part, dtype=torch.bfloat16, device=self.device)
        if transfer.kind == "all_gather":
            return lambda: dist.all_gather_into_tensor(whole, own, group=group)
        return lambda: dist.reduce_scatter_tensor(own, whole, group=group)

    def _message(self, group: Any, whole: Any, ranks: int) -> Callable[[], None]:
        """A message from every rank to the next one, as between pipeline stages in the steady state."""
        members = dist.get_process_group_ranks(group)
        place = members.index(self.rank)
        following, previous = members[(place + 1) % ranks], members[(place - 1) % ranks]
        received = torch.empty_like(whole)

        def run() -> None:
            operations = [dist.P2POp(dist.isend, whole, following, group), dist.P2POp(dist.irecv, received, previous, group)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return run

    def _synchronize(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
