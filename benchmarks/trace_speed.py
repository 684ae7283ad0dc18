"""Speed of writing and reading traces: `python benchmarks/trace_speed.py [EVENTS]` (default: ten million events).

The CUDA recorder is called from C with the fake CUDA runtime of the tests. The reader runs in its own process, so that its memory
can be measured. Times are compared with baselines that are measured in alternation. The exit status is 1 if a bound is exceeded:
- allocations and frees that are recorded against the same calls while no trace is open;
- reading events as objects, and as columns, against unpacking the same bytes with `struct` alone;
- memory of the reader, per byte of the file.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from allocator_hook.cuda.build import build  # noqa: E402
from allocator_hook.cuda.library import CudaRecorder  # noqa: E402
from analyzer.trace.reader import Header  # noqa: E402
from benchmarks.paired import Paired, paired, report  # noqa: E402

WRITE_BOUND: Final = 6.0
READ_BOUND: Final = 16.0
COLUMNS_BOUND: Final = 3.0
MEMORY_BOUND: Final = 4.0
"""Bytes of memory for each byte of the file, the mapped file included, beside 50 MB of Python."""

READ: Final = """
import resource, sys
from analyzer.trace.format import ALLOCATION, WHOLE_RECORD
from analyzer.trace.reader import read_trace
from benchmarks.paired import paired
from pathlib import Path

path = Path(sys.argv[1])

def objects():
    return sum(1 for _ in read_trace(path))

def columns():
    columns = read_trace(path).columns
    return sum(size for kind, size in zip(columns.kind, columns.bytes) if kind == ALLOCATION)

def unpacked():
    return sum(1 for _ in WHOLE_RECORD.iter_unpack(path.read_bytes()))

read_trace(path).columns
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
for work in (objects, columns):
    result = paired("", work, unpacked, bound=1, runs=3)
    print(result.seconds, result.baseline_seconds)
print(objects(), peak)
"""


def write(path: Path, events: int, folder: Path) -> Paired:
    """Records about `events` events to `path`, in alternation with the same calls while no trace is open."""
    runtime_path = folder / "libcudart-fake.so"
    source = REPOSITORY / "tests" / "fake_cudart.c"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-pthread", str(source), "-o", str(runtime_path)], check=True)
    os.environ["ALLOCATOR_HOOK_CUDART"] = str(runtime_path)
    runtime, recorder = ctypes.CDLL(str(runtime_path)), CudaRecorder(build())

    def hammer() -> None:
        runtime.fake_hammer(recorder.library.hook_malloc, recorder.library.hook_free, 1, events // 2)

    def recorded() -> None:
        path.unlink(missing_ok=True)
        recorder.open(path, Header(recorder="cuda"))
        hammer()
        recorder.close()

    return paired("allocations and frees, recorded / not recorded", recorded, hammer, bound=WRITE_BOUND, runs=3)


def main() -> int:
    """Measures, prints and compares with the bounds."""
    events = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        written = write(path, events, Path(folder))
        size = path.stat().st_size
        reader = [sys.executable, "-c", READ, str(path)]
        done = subprocess.run(reader, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    objects, unpacked, columns, unpacked_again, count, peak = (float(word) for word in done.stdout.split())
    results = [
        written,
        Paired("events as objects / struct alone", objects, unpacked, READ_BOUND),
        Paired("events as columns / struct alone", columns, unpacked_again, COLUMNS_BOUND),
    ]
    status = report(results)
    memory = max(0.0, peak - 50e6) / size
    print(f"{count:,.0f} events, {size / 2**20:.0f} MiB; written at {count / written.seconds / 1e6:.1f} million events a second")
    print(f"memory of the reader: {peak / 1e6:.0f} MB, {memory:.2f} bytes per byte of the file, bound {MEMORY_BOUND:g}")
    return 1 if status or memory > MEMORY_BOUND else 0


if __name__ == "__main__":
    sys.exit(main())
