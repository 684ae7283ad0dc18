"""Reserved memory with rare features: the formulas compared with the requests of Megatron-LM's own code on the shadow engine.

    python tools/score_reserved.py

Both sets of requests run in the same simulated allocator. Prints for each rank how much more than allocated the shadow engine
reserves, and the errors of the estimate without a simulation of the allocator and of the replay.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from allocator_hook.shadow import engine  # noqa: E402
from allocator_hook.shadow.gpu import STREAMS  # noqa: E402
from analyzer.layout.data_parallel import described_rank  # noqa: E402
from analyzer.memory.allocator.caching_allocator import CachingAllocator  # noqa: E402
from analyzer.memory.ranks import rank_classes, rank_classes_of_tensors  # noqa: E402
from analyzer.results import RankClass, RankMemory  # noqa: E402
from analyzer.trace.events import Allocation, Free  # noqa: E402
from analyzer.trace.reader import read_trace  # noqa: E402
from tests.allocator_hook.shadow.reserved_layouts import HELD_OUT, LAYOUTS, SHARED_EXPERTS, WITH_GRAPHS  # noqa: E402
from tests.job_of import job_of  # noqa: E402


class Compared(NamedTuple):
    """One rank of a layout, in bytes."""

    rank: int
    peak: int
    """Allocated on the shadow engine."""
    reserved: int
    """Reserved on the shadow engine."""
    memory: RankMemory
    """The prediction."""
    estimate: int
    """Reserved memory without a simulation of the allocator."""


def compared(base: str, line: str, folder: Path) -> Iterator[Compared]:
    """One rank of each pipeline stage of a layout. `folder`: where traces are written."""
    job = job_of(line, base=base)
    stages = job.parallel.pipeline
    ranks = [described_rank(job.parallel, stage * 8 // stages) for stage in range(stages)]
    replayed, tensors = rank_classes(job), rank_classes_of_tensors(job)
    for rank, path in engine.run(job, ranks, cache_dir=folder).items():
        allocator = _replayed(path)
        memory, estimate = _of_rank(replayed, rank), _of_rank(tensors, rank).peak_reserved_bytes
        yield Compared(rank, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, memory, estimate)


def _of_rank(classes: tuple[RankClass, ...], rank: int) -> RankMemory:
    return next(each.memory for each in classes if any(first <= rank <= last for first, last in each.ranks))


def _replayed(path: Path) -> CachingAllocator:
    """The allocator after a trace. Unused segments are freed before each capture (torch/cuda/graphs.py `graph.__enter__`)."""
    allocator = CachingAllocator()
    live: dict[int, int] = {}
    capturing = False
    for event in read_trace(path):
        if isinstance(event, Allocation):
            if event.stream >= STREAMS and not capturing:
                allocator.empty_cache(below=STREAMS)
            capturing = event.stream >= STREAMS
            live[event.pointer] = allocator.malloc(event.bytes, stream=event.stream)
        elif isinstance(event, Free) and event.pointer in live:
            allocator.free(live.pop(event.pointer))
    return allocator


def main() -> int:
    print(f"{'above the peak':>14} {'estimate':>9} {'replay':>9}  rank and options")
    with tempfile.TemporaryDirectory() as folder:
        for base, line in (*LAYOUTS, *WITH_GRAPHS, *SHARED_EXPERTS, *HELD_OUT):
            if (base, line) == HELD_OUT[0]:
                print("held out:")
            for each in compared(base, line, Path(folder)):
                above = each.reserved / each.peak - 1
                estimate, replay = (size / each.reserved - 1 for size in (each.estimate, each.memory.peak_reserved_bytes))
                experts = "experts: " if "--num-experts" in base else ""
                print(f"{above:14.1%} {estimate:+9.1%} {replay:+9.1%}  rank {each.rank} {experts}{line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
