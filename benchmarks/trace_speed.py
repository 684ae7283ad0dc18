"""Speed of writing and reading traces: `python benchmarks/trace_speed.py [EVENTS]` (default: ten million events).

The CUDA recorder is called from C with the fake CUDA runtime of the tests. The reader runs in its own process, so that its memory
can be measured. The exit status is 1 if a bound is missed: a million events written per second, 10 million read in 30 s and 2 GB.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from allocator_hook.cuda.build import build  # noqa: E402
from allocator_hook.cuda.library import CudaRecorder  # noqa: E402
from analyzer.trace.reader import Header  # noqa: E402

READ = """
import resource, sys, time
from analyzer.trace.reader import read_trace
from analyzer.trace.format import ALLOCATION
start = time.perf_counter()
trace = read_trace(sys.argv[1])
checked = time.perf_counter()
count = sum(1 for _ in trace)
iterated = time.perf_counter()
columns = trace.columns
total = sum(size for kind, size in zip(columns.kind, columns.bytes) if kind == ALLOCATION)
summed = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(count, checked - start, iterated - checked, summed - iterated, peak)
"""


def write(path: Path, events: int, folder: Path) -> float:
    """Record about `events` events to `path`. Returns the time in seconds."""
    runtime_path = folder / "libcudart-fake.so"
    source = REPOSITORY / "tests" / "fake_cudart.c"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-pthread", str(source), "-o", str(runtime_path)], check=True)
    os.environ["ALLOCATOR_HOOK_CUDART"] = str(runtime_path)
    runtime, recorder = ctypes.CDLL(str(runtime_path)), CudaRecorder(build())
    start = time.perf_counter()
    with recorder:
        recorder.open(path, Header(recorder="cuda"))
        runtime.fake_hammer(recorder.library.hook_malloc, recorder.library.hook_free, 1, events // 2)
    return time.perf_counter() - start


def main() -> int:
    """Measure and print the speed. Returns the exit status."""
    events = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        seconds = write(path, events, Path(folder))
        rate = events / seconds
        size = path.stat().st_size / 2**20
        print(f"written: {events:,} events in {seconds:.1f} s, {rate / 1e6:.1f} million per second, {size:.0f} MiB")
        reader = [sys.executable, "-c", READ, str(path)]
        done = subprocess.run(reader, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    count, checked, iterated, summed, peak = (float(word) for word in done.stdout.split())
    print(f"read: {count:,.0f} events; checked in {checked:.1f} s, as objects in {iterated:.1f} s, as columns in {summed:.1f} s")
    print(f"memory of the reader: {peak / 1e9:.2f} GB, the mapped file included")
    fast_enough = rate >= 1e6 and (checked + iterated) * 1e7 <= 30 * count and peak * 1e7 <= 2e9 * max(count, 1e7)
    print("all bounds are met" if fast_enough else "a bound is missed")
    return 0 if fast_enough else 1


if __name__ == "__main__":
    sys.exit(main())
