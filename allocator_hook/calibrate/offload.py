"""What offloading depends on, measured: the field `offload` of the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from allocator_hook.calibrate.clock import HostClock
from allocator_hook.calibrate.disk import METHOD, file_system, measure_disk
from allocator_hook.calibrate.host import Rate, measure_host, probes
from allocator_hook.calibrate.measure import Show, Unmeasurable, reason_of

NO_FOLDER: Final = "the disk: --info-calibrate-disk names no folder"


def measured_offload(disk: Path | None, show: Show) -> tuple[dict[str, Any], list[str]]:
    """The field `offload` of the file, measured on this machine and in the folder `disk`, and a sentence for what was not."""
    show(0, 2, "host memory and its link to the GPU")
    with _threads():
        rates, failures = measure_host(probes(), HostClock(synchronize=torch.cuda.synchronize))
    torch.cuda.empty_cache()
    field: dict[str, Any] = {}
    if disk is None:
        failures.append(NO_FOLDER)
    else:
        show(1, 2, f"the disk of {disk}")
        try:
            rates += measure_disk(disk)
            field = {"folder": str(disk), "file_system": file_system(disk), "method": METHOD}
        except (OSError, Unmeasurable) as error:
            failures.append(f"the disk: {reason_of(error)}")
    show(2, 2, "")
    return as_json(rates, field), failures


@contextmanager
def _threads() -> Iterator[None]:
    """At least one thread for every two processors: torchrun sets one for each process."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, _processors() // 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def as_json(rates: list[Rate], disk: dict[str, Any]) -> dict[str, Any]:
    """The field `offload` of the file. Rates are in 10^9 bytes per second."""
    return {
        "rates": {rate.name: rate.gb_per_s for rate in rates},
        "measured": [{"rate": rate.name, "bytes": rate.bytes, "seconds": rate.seconds} for rate in rates],
        "disk": disk or None,
    }
