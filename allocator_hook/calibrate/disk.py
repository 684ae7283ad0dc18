"""Measures a disk: sequential writes and reads of a file in a folder, past the page cache.

The file is opened with O_DIRECT, so that neither writes nor reads use the page cache of this machine. A file system that refuses
O_DIRECT or that is in memory is not measured. Caches of the disk itself and of a virtual machine's host cannot be avoided.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Final

from allocator_hook.calibrate.host import Rate
from allocator_hook.calibrate.measure import Unmeasurable
from analyzer.units import GIB

BLOCK: Final = 16 * 2**20
"""Bytes of one read or write."""
PIECE: Final = 256 * 2**20
"""Bytes of a sample."""
SAMPLES: Final = 7
"""Samples of each direction. The file has a piece for each."""
FEWEST: Final = 3
"""Samples that are taken even if the time is over."""
BUDGET: Final = 30.0
"""Seconds of each direction."""
IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
METHOD: Final = "O_DIRECT: the page cache is not used; writes end with fdatasync"
Now = Callable[[], float]


def measure_disk(folder: Path, *, piece: int = PIECE, block: int = BLOCK, now: Now = time.perf_counter) -> tuple[Rate, Rate]:
    """The rates at which a new file in `folder` is written and read: medians of samples of `piece` bytes.

    Raises Unmeasurable if the page cache would be measured or the file does not fit, and OSError if it cannot be written.
    """
    system = file_system(folder)
    if system in IN_MEMORY:
        raise Unmeasurable(f"'{folder}' is in memory ({system})")
    needed, free = SAMPLES * piece, shutil.disk_usage(folder).free
    if 2 * needed > free:
        raise Unmeasurable(
            f"a file of {needed / GIB:.2f} GiB needs twice as much free space, and '{folder}' has {free / GIB:.2f} GiB"
        )
    descriptor = _open(folder, system)
    try:
        with mmap.mmap(-1, block) as buffer:  # aligned to pages, as O_DIRECT needs
            buffer.write(os.urandom(block))
            written = _samples(lambda place: _write(descriptor, buffer, place, piece), now=now)
            read = _samples(lambda place: _read(descriptor, buffer, place, piece), now=now, most=len(written))
    finally:
        os.close(descriptor)
    return Rate("disk_read_gb_per_s", piece, median(read)), Rate("disk_write_gb_per_s", piece, median(written))


def file_system(folder: Path) -> str:
    """The type of the file system of a folder, such as ext4, from /proc/self/mountinfo; "unknown" if that does not tell."""
    device = os.stat(folder).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    found = [fields[fields.index("-") + 1] for line in lines if (fields := line.split())[2] == name and "-" in fields]
    return found[-1] if found else "unknown"


def _open(folder: Path, system: str) -> int:
    """A new file that has no name any more, so that nothing remains of it. Raises Unmeasurable without O_DIRECT."""
    path = folder / f".get-training-info-{os.getpid()}-{os.urandom(4).hex()}"
    refusal = Unmeasurable(f"the file system of '{folder}' ({system}) has no O_DIRECT, so the page cache would be measured")
    direct = getattr(os, "O_DIRECT", None)
    if direct is None:
        raise refusal
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError as error:
        raise Unmeasurable(f"'{folder}' cannot be written to ({error.strerror})") from None
    try:
        return os.open(path, os.O_RDWR | direct)
    except OSError:
        raise refusal from None
    finally:
        os.close(descriptor)
        os.unlink(path)


def _samples(run: Callable[[int], None], *, now: Now, most: int = SAMPLES) -> list[float]:
    """Seconds of `run` for one piece after the other, until the time is over."""
    found: list[float] = []
    begin = now()
    while len(found) < most and (len(found) < FEWEST or now() - begin < BUDGET):
        start = now()
        run(len(found))
        found.append(now() - start)
    return found


def _write(descriptor: int, buffer: mmap.mmap, place: int, piece: int) -> None:
    for offset in range(place * piece, (place + 1) * piece, len(buffer)):
        _check(os.pwrite(descriptor, buffer, offset), len(buffer))
    os.fdatasync(descriptor)


def _read(descriptor: int, buffer: mmap.mmap, place: int, piece: int) -> None:
    for offset in range(place * piece, (place + 1) * piece, len(buffer)):
        _check(os.preadv(descriptor, [buffer], offset), len(buffer))


def _check(done: int, expected: int) -> None:
    if done != expected:
        raise Unmeasurable(f"{done} bytes were moved instead of {expected}")
