"""GPUs by name: capacity, compute capability and multiprocessors, and the local GPU through NVML.

Capacity is the total of CUDA's `cudaMemGetInfo` (HIP's on AMD), which PyTorch reports as `total_memory` and, in out-of-memory
errors, as "total capacity". It is a little less than the total of nvidia-smi, which includes memory reserved by the driver. It
differs between drivers by some tens of MiB; the table has the smallest known value.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Final, NamedTuple

from analyzer.errors import InputError
from analyzer.specs import HardwareSpec
from analyzer.units import GIB, MIB

TORCH: Final = "PyTorch's total capacity"
TORCH_OF_SIBLING: Final = "PyTorch's total capacity on a GPU with the same memory"
SMI: Final = "nvidia-smi's total, which includes memory reserved by the driver"


class Gpu(NamedTuple):
    """A row of the table. AMD's MI250 and MI250X have two devices each; a row is one device, which is used by one rank."""

    name: str
    capacity_gib: float
    source: str
    """Source of capacity_gib, and the total of nvidia-smi if known."""
    compute_capability: tuple[int, int]
    multiprocessors: int
    """Streaming multiprocessors, or AMD's compute units, from the vendor's data sheet."""
    aliases: tuple[str, ...] = ()

    @property
    def spec(self) -> HardwareSpec:
        """The row as a `HardwareSpec`, with the capacity rounded down to MiB."""
        return HardwareSpec(
            name=self.name,
            capacity_bytes=int(self.capacity_gib * GIB) // MIB * MIB,
            compute_capability=self.compute_capability,
            multiprocessors=self.multiprocessors,
            nvlink_domain=NVLINK_DOMAINS.get(self.name, HardwareSpec.nvlink_domain),
            nvlinks=NVLINKS.get(self.name, 0),
        )


def _gpu(
    name: str, gib: float, source: str, capability: tuple[int, int], multiprocessors: int, smi_mib: int | None = None, *aliases: str
) -> Gpu:
    seen = f"{source}; nvidia-smi {smi_mib} MiB" if smi_mib else source
    return Gpu(
        name=name,
        capacity_gib=gib,
        source=seen,
        compute_capability=capability,
        multiprocessors=multiprocessors,
        aliases=aliases,
    )


# fmt: off
GPUS: Final[tuple[Gpu, ...]] = (
    _gpu("V100-16GB", 15.77, TORCH, (7, 0), 80, 16384),
    _gpu("V100-32GB", 31.73, TORCH, (7, 0), 80, 32768),
    _gpu("T4", 14.56, TORCH, (7, 5), 40, 15360, "T4-16GB"),
    _gpu("A100-40GB", 39.39, TORCH, (8, 0), 108, 40960),
    _gpu("A100-80GB", 79.15, TORCH, (8, 0), 108, 81920),
    _gpu("A800-80GB", 79.15, TORCH_OF_SIBLING, (8, 0), 108, 81920, "A800"),
    _gpu("A30", 24576 / 1024, SMI, (8, 0), 56, 24576, "A30-24GB"),
    _gpu("A10", 22.06, TORCH, (8, 6), 72, 23028, "A10-24GB"),
    _gpu("A10G", 22.06, TORCH_OF_SIBLING, (8, 6), 80, 23028, "A10G-24GB"),
    _gpu("A40", 44.34, TORCH, (8, 6), 84, 46068, "A40-48GB"),
    _gpu("RTX-A6000", 47.53, TORCH, (8, 6), 84, 49140, "A6000", "RTX-A6000-48GB"),
    _gpu("RTX-3090", 23.55, TORCH, (8, 6), 82, 24576, "3090", "RTX-3090-24GB"),
    _gpu("L4", 22.03, TORCH, (8, 9), 58, 23034, "L4-24GB"),
    _gpu("L40", 44.39, TORCH, (8, 9), 142, 46068, "L40-48GB"),
    _gpu("L40S", 44.39, TORCH, (8, 9), 142, 46068, "L40S-48GB"),
    _gpu("RTX-4090", 23.52, TORCH, (8, 9), 128, 24564, "4090", "RTX-4090-24GB"),
    _gpu("RTX-6000-Ada", 47.40, TORCH, (8, 9), 142, 49140, "6000-Ada", "RTX-6000-Ada-48GB"),
    _gpu("H100-80GB", 81082 / 1024, TORCH, (9, 0), 132, 81559, "H100-SXM", "H100-SXM5"),
    _gpu("H100-PCIe-80GB", 81007 / 1024, TORCH, (9, 0), 114, 81559, "H100-PCIe", "H100-80GB-PCIe"),
    _gpu("H100-NVL-94GB", 93.02, TORCH, (9, 0), 132, 95830, "H100-NVL", "H100-94GB"),
    _gpu("H100-96GB", 94.50, TORCH_OF_SIBLING, (9, 0), 132, 97871),
    _gpu("H800-80GB", 81082 / 1024, TORCH_OF_SIBLING, (9, 0), 132, 81559, "H800"),
    _gpu("H20-96GB", 95.00, TORCH, (9, 0), 78, 97871, "H20"),
    _gpu("GH200-96GB", 94.50, TORCH, (9, 0), 132, 97871, "GH200", "GH200-480GB"),
    _gpu("H200-141GB", 139.72, TORCH, (9, 0), 132, 143771, "H200", "H200-SXM", "H200-NVL"),
    _gpu("B100-180GB", 178.35, TORCH_OF_SIBLING, (10, 0), 148, None, "B100", "B100-192GB"),
    _gpu("B200-180GB", 178.35, TORCH, (10, 0), 148, 183359, "B200", "B200-192GB"),
    _gpu("GB200-186GB", 184.31, TORCH, (10, 0), 152, 189471, "GB200", "GB200-192GB", "GB200-NVL72"),
    _gpu("B300-288GB", 267.69, TORCH, (10, 3), 148, 275040, "B300", "B300-270GB"),
    _gpu("GB300-288GB", 276.50, TORCH, (10, 3), 152, None, "GB300", "GB300-279GB", "GB300-NVL72"),
    _gpu("RTX-5090", 31.36, TORCH, (12, 0), 170, 32607, "5090", "RTX-5090-32GB"),
    _gpu("RTX-PRO-6000", 94.97, TORCH, (12, 0), 188, 97887, "PRO-6000", "RTX-PRO-6000-96GB"),
    _gpu("MI250-64GB", 63.98, TORCH_OF_SIBLING, (9, 0), 104, None, "MI250"),
    _gpu("MI250X-64GB", 63.98, TORCH, (9, 0), 110, None, "MI250X"),
    _gpu("MI300X-192GB", 191.69, TORCH, (9, 4), 304, None, "MI300X"),
    _gpu("MI325X-256GB", 255.69, TORCH, (9, 4), 304, None, "MI325X"),
    _gpu("MI350X-288GB", 287.98, TORCH_OF_SIBLING, (9, 5), 256, None, "MI350X"),
    _gpu("MI355X-288GB", 287.98, TORCH, (9, 5), 256, None, "MI355X"),
)
# fmt: on

NVLINK_DOMAINS: Final = {"GB200-186GB": 72, "GB300-288GB": 72}
"""GPUs that NVLink connects, where it is more than a node. Source: as `nvlink_domain` in speeds.json."""
NVLINKS: Final = {
    **dict.fromkeys(("V100-16GB", "V100-32GB"), 6),
    **dict.fromkeys(("A100-40GB", "A100-80GB", "H100-NVL-94GB"), 12),
    **dict.fromkeys(("A800-80GB", "H800-80GB"), 8),
    "A30": 4,
    **dict.fromkeys(("H100-80GB", "H100-96GB", "H20-96GB", "GH200-96GB", "H200-141GB"), 18),
    **dict.fromkeys(("B100-180GB", "B200-180GB", "GB200-186GB", "B300-288GB", "GB300-288GB"), 18),
}
"""NVLinks of a GPU, from NVIDIA's data sheets: the bandwidth of NVLink by that of a link, 25 GB/s in a direction, or 50 GB/s in
Blackwell. GPUs without an entry are connected by PCIe, or are AMD's."""
DEFAULT_VARIANTS: Final = {"h100": "H100-80GB"}
"""Names of several rows that nearly always mean one of them. Other ambiguous names are refused."""

DRIVER_FILES: Final = ("/dev/nvidiactl", "/dev/dxg", r"C:\Windows\System32\nvml.dll")
"""Files of the NVIDIA driver on Linux, WSL and Windows. If none exists, NVML, which takes 25 ms to import, is not used."""

_COMMON_WORDS: Final = re.compile(
    r"\b(nvidia|amd|tesla|geforce|quadro|instinct|graphics|hbm\d?e?|sxm\d?|pcie|oam|ac|generation|blackwell|server|workstation|edition)\b"
)


def _key(name: str) -> str:
    """The name in lower case without dashes and spaces; '80 GiB' and '80G' at the end become '80gb'."""
    return re.sub(r"(\d\d)(?:g|gib)$", r"\1gb", re.sub(r"[^a-z0-9]", "", name.lower()))


def _model_key(name: str) -> str:
    """The key of a name without vendor, product line and form factor: 'a10080gb' for 'NVIDIA A100-SXM4-80GB'."""
    return _key(_COMMON_WORDS.sub("", re.sub(r"[^a-z0-9]+", " ", name.lower())))


@cache
def _by_key() -> dict[str, Gpu]:
    """The rows by the keys of their names and aliases."""
    return {_key(name): gpu for gpu in GPUS for name in (gpu.name, *gpu.aliases)}


def find(name: str) -> tuple[Gpu, str]:
    """The row for `name`, and a note if other rows have this name too.

    Raises InputError for an ambiguous name ('A100'), with the choices, and for an unknown one, with the nearest names.
    """
    table = _by_key()
    # the full name first: 'H100 PCIe' has its own row, whereas the form factor of an A100 does not matter
    for key in (_key(name), _key(re.sub(r"(?i)\b(nvidia|amd)\b", "", name)), _model_key(name)):
        if key in table:
            return table[key], ""
    family = _model_key(name)
    members = [gpu.name for gpu in GPUS if family and re.fullmatch(rf"{re.escape(family)}-.*", gpu.name.lower())]
    if family in DEFAULT_VARIANTS:
        chosen = next(gpu for gpu in GPUS if gpu.name == DEFAULT_VARIANTS[family])
        others = ", ".join(member for member in members if member != chosen.name)
        return chosen, f"{chosen.name} is assumed for {name}; other variants are {others}."
    if members:
        raise InputError("--info-gpu", f"'{name}' is ambiguous", f"use one of {', '.join(members)}")
    raise InputError(
        "--info-gpu", f"'{name}' is not a known GPU", f"{_nearest(name)}give its memory, such as --info-gpu-memory 80GiB"
    )


def _nearest(name: str) -> str:
    from difflib import get_close_matches

    names = {key: gpu.name for key, gpu in _by_key().items()}
    close = list(dict.fromkeys(names[key] for key in get_close_matches(_key(name), names, n=3, cutoff=0.5)))
    such = f" such as {' or '.join(close)}" if close else ""
    return f"use a known name{such} (--info-gpu list), or "


def hardware(gpu: str | None, memory: int | None) -> tuple[HardwareSpec, tuple[str, ...]]:
    """The target GPU of a launch, and notes for the report.

    `gpu` is the name in `--info-gpu`. `memory` is `--info-gpu-memory` in bytes, which takes precedence over the capacity of `gpu`.
    Without both it is the local GPU as NVML reports it, or an empty spec and a note why there is no verdict. Raises InputError for
    an ambiguous or unknown name.
    """
    if gpu is None and memory is None:
        return _local()
    if gpu is None:
        return HardwareSpec(capacity_bytes=memory), ()
    row, note = find(gpu)
    notes = (note,) if note else ()
    if memory is None:
        return row.spec, notes
    own = f"The capacity is that in --info-gpu-memory; {row.name} has {row.capacity_gib:.2f} GiB."
    return replace(row.spec, capacity_bytes=memory), (*notes, own)


def _local() -> tuple[HardwareSpec, tuple[str, ...]]:
    remedy = "give the target with --info-gpu or --info-gpu-memory for a verdict."
    if not any(map(os.path.exists, DRIVER_FILES)):
        return HardwareSpec(), (f"There is no NVIDIA driver on this machine; {remedy}",)
    try:
        import pynvml
    except ImportError:
        return HardwareSpec(), (f"The package nvidia-ml-py, which detects the local GPU, is not installed; {remedy}",)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return HardwareSpec(), (f"There is no NVIDIA driver on this machine; {remedy}",)
    try:
        devices = [_read(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        return HardwareSpec(), (f"NVML cannot read the local GPU ({error}); {remedy}",)
    finally:
        pynvml.nvmlShutdown()
    if not devices:
        return HardwareSpec(), (f"There is no GPU on this machine; {remedy}",)
    least = min(devices, key=lambda device: device.capacity_bytes or 0)
    if len(set(devices)) > 1:
        return least, (f"The local GPUs differ: all are assumed to be the one with the least memory, {least.name}.",)
    return least, (f"The target is the local GPU, {least.name}; --info-gpu selects another.",)


def _read(nvml: ModuleType, index: int) -> HardwareSpec:
    """Device `index` as NVML reports it. The capacity excludes memory reserved by the driver, if NVML reports it (version 2)."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = nvml.nvmlDeviceGetName(handle)
    name = name.decode() if isinstance(name, bytes) else str(name)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        capacity = int(memory.total) - int(memory.reserved)
    except (TypeError, AttributeError, nvml.NVMLError):
        capacity = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    try:
        known = find(name)[0].spec
    except InputError:
        known = HardwareSpec()
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return replace(known, name=name, capacity_bytes=capacity, compute_capability=(int(major), int(minor)))
