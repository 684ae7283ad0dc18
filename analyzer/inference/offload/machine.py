"""Speeds of a GPU, its host and its disks for offloading, from `machine.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from analyzer.errors import InputError
from analyzer.hardware.gpus import find
from analyzer.hardware.speeds import speed_of
from analyzer.specs.speed import SpeedSpec

FILE: Final = Path(__file__).with_name("machine.json")
GIGA: Final = 1e9
MEASURED: Final = {
    "pcie": ("pcie_to_gpu_gb_per_s", "pcie_gb_per_s"),
    "pcie_from": ("pcie_from_gpu_gb_per_s", "pcie_gb_per_s"),
    "staged": ("staging_gb_per_s", ""),
    "unstaged": ("unstaging_gb_per_s", ""),
    "cpu_attention": ("cpu_attention_gb_per_s", ""),
    "disk_read": ("disk_read_gb_per_s", "disk_read_gb_per_s"),
    "disk_write": ("disk_write_gb_per_s", "disk_write_gb_per_s"),
}
"""Rates of the machine by field: their names in a calibration, and in what `--info-offload` gives, which comes first."""
NONE: Final[Mapping[str, float]] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Bytes, operations and seconds, as offloading reaches them. Rates are per second."""

    gpu_memory: float
    host_memory: float
    disk_size: float
    gemm: float
    """Operations of large GEMMs."""
    batched_gemm: float
    """Operations of the attention products of the prefill."""
    hbm: float
    """Bytes of GPU memory."""
    cache_read: float
    """Bytes of the 16-bit cache for which the GPU computes attention in the decode."""
    decompressed: float
    """Bytes of the 16-bit tensor that the GPU decompresses."""
    compressed: float
    """Bytes of the 16-bit tensor that the GPU compresses."""
    pcie: float
    """Bytes from pinned host memory to the GPU."""
    pcie_from: float
    """Bytes from the GPU to pinned host memory."""
    staged: float
    """Bytes of unpinned host memory copied into pinned memory on the way to the GPU. The program waits for it."""
    unstaged: float
    """Bytes of the GPU stored to unpinned host memory, by a thread."""
    cpu_attention: float
    """Bytes of the 16-bit cache for which the CPU computes attention."""
    disk_read: float
    disk_write: float
    step: float
    """Seconds of launches and synchronization in a step of the schedule."""


def machine_of(
    gpu: str,
    *,
    gpu_memory: float | None = None,
    given: Mapping[str, float] = NONE,
    measured: Mapping[str, float] = NONE,
    data: dict[str, Any] | None = None,
) -> Machine:
    """The machine with a GPU of the table.

    `given`: values that replace those of the file, in its units: memory_gb, disk_gb, disk_read_gb_per_s, disk_write_gb_per_s,
    pcie_gb_per_s. `measured`: rates of `--info-calibrate` in GB/s, which replace those of the file unless they are given. `data`:
    the content of another file.

    Raises InputError if the GPU or its link to the host is not known.
    """
    row, _ = find(gpu)
    data = data or json.loads(FILE.read_text(encoding="utf-8"))
    entry = {**data["gpus"].get(row.name, {}), **given}
    speed = speed_of(gpu)
    if "pcie_to_gpu_gb_per_s" in measured:  # for a GPU that is not in the file
        entry.setdefault("pcie_gb_per_s", measured["pcie_to_gpu_gb_per_s"])
    if speed is None or "pcie_gb_per_s" not in entry:
        known = ", ".join(sorted(data["gpus"]))
        raise InputError("--info-offload", f"the link of {row.name} to its host is not known", f"use a GPU of these: {known}")
    memory = gpu_memory if gpu_memory is not None else float(row.spec.capacity_bytes or 0)
    machine = _machine(data, speed, pcie=entry["pcie_gb_per_s"], gpu_memory=memory, host={**data["host"], **given})
    used = {name: GIGA * measured[rate] for name, (rate, option) in MEASURED.items() if rate in measured and option not in given}
    return replace(machine, **used)


def _machine(data: dict[str, Any], speed: SpeedSpec, *, pcie: float, gpu_memory: float, host: dict[str, Any]) -> Machine:
    rate = {name: row["value"] for name, row in data["rates"].items()}
    bandwidth, flops = speed.hbm_bytes * rate["memory"], speed.peak_flops["16"]
    return Machine(
        gpu_memory=gpu_memory,
        host_memory=GIGA * host["memory_gb"],
        disk_size=GIGA * host["disk_gb"],
        gemm=flops * rate["gemm"],
        batched_gemm=flops * rate["batched_gemm"],
        hbm=bandwidth,
        cache_read=bandwidth / rate["cache_passes"],
        decompressed=bandwidth / rate["decompress_passes"],
        compressed=bandwidth / rate["compress_passes"],
        pcie=GIGA * pcie * rate["pcie"],
        pcie_from=GIGA * pcie * rate["pcie"],
        staged=GIGA * rate["staging_gb_per_s"],
        unstaged=GIGA * rate["unstaging_gb_per_s"],
        cpu_attention=GIGA * rate["cpu_attention_gb_per_s"],
        disk_read=GIGA * host["disk_read_gb_per_s"],
        disk_write=GIGA * host["disk_write_gb_per_s"],
        step=rate["step_ms"] / 1000,
    )
