"""The value of `--info-offload`: a policy, or `search`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from analyzer.errors import InputError
from analyzer.units import natural

OFFLOAD: Final = "--info-offload"
EXAMPLE: Final = "weights=20/80/0,cache=0/100/0,activations=0/100/0,batches=3,attention=cpu"
SEARCH: Final = "search"
TENSORS: Final = ("weights", "cache", "activations")
MACHINE: Final = {
    "host-memory": "memory_gb",
    "disk": "disk_gb",
    "disk-read": "disk_read_gb_per_s",
    "disk-write": "disk_write_gb_per_s",
    "pcie": "pcie_gb_per_s",
}
"""Properties of the machine in GB or GB/s, and their names in machine.json."""
_CHOICES: Final = {
    "attention": ("attention_on_cpu", {"cpu": True, "gpu": False}),
    "overlap": ("overlapped", {"yes": True, "no": False}),
    "pin": ("pinned_weights", {"yes": True, "no": False}),
}
_SMALLEST: Final = 1e-3
_LARGEST: Final = 1e6


@dataclass(frozen=True, kw_only=True)
class Offload:
    """What `--info-offload` gives. Percentages are on the GPU, in host memory and on disk."""

    search: bool = False
    weights: tuple[float, float, float] = (100.0, 0.0, 0.0)
    cache: tuple[float, float, float] = (100.0, 0.0, 0.0)
    activations: tuple[float, float, float] = (100.0, 0.0, 0.0)
    batches: int = 1
    """Batches of a block."""
    compress: tuple[str, ...] = ()
    """weights and cache; with a search, what it may compress."""
    attention_on_cpu: bool = False
    overlapped: bool = True
    pinned_weights: bool = True
    machine: Mapping[str, float] = field(default_factory=dict)
    """Values that replace those of machine.json."""


def offload(option: str, text: str | None) -> Offload:
    """Reads the value of the option. Raises InputError for an unknown or invalid part."""
    found, given = Offload(), set()
    for part in (text or "").split(","):
        key, equals, value = (each.strip() for each in part.partition("="))
        if key in given:
            raise InputError(option, f"{key} is given twice", f"write it once, as in {EXAMPLE}")
        given.add(key)
        if key == SEARCH and not equals:
            found = replace(found, search=True)
        elif key in MACHINE:
            found = replace(found, machine={**found.machine, MACHINE[key]: _amount(option, part, value)})
        else:
            found = replace(found, **_field(option, part, key, value))
    fixed = given & {*TENSORS, "batches", "attention"}
    if found.search and fixed:
        raise InputError(option, f"a search finds {', '.join(sorted(fixed))}", f"write {OFFLOAD} search without them")
    if not found.search and "weights" not in given:
        raise InputError(option, "it does not tell where the weights are", f"write {EXAMPLE}, or {OFFLOAD} search")
    if "cache" in found.compress and not found.search and 100.0 not in found.cache:
        raise InputError(option, "FlexLLMGen compresses a cache on one tier only", "write cache=0/100/0 or another single tier")
    if found.attention_on_cpu and found.cache[0] == 100:
        raise InputError(option, "attention=cpu needs a cache outside the GPU", "write cache=0/100/0, or leave attention=cpu out")
    if not found.search and 100.0 not in found.activations:
        raise InputError(option, "FlexLLMGen has activations on one tier only", "write activations=0/100/0 or 100/0/0")
    return found


def _field(option: str, part: str, key: str, value: str) -> dict[str, Any]:
    """A field of Offload and its value."""
    if key in TENSORS:
        return {key: _percentages(option, part, value)}
    if key == "batches" and (number := natural(value)):
        return {key: number}
    if key == "compress" and value in ("weights", "cache", "weights+cache", "cache+weights"):
        return {key: tuple(value.split("+"))}
    if key in _CHOICES:
        name, choices = _CHOICES[key]
        if value in choices:
            return {name: choices[value]}
    raise InputError(option, f"{part!r} is not a part of a policy", f"write parts such as {EXAMPLE},compress=weights+cache")


def _percentages(option: str, part: str, value: str) -> tuple[float, float, float]:
    try:
        gpu, host, disk = (float(each) for each in value.split("/"))
    except ValueError:
        gpu = host = disk = -1.0
    if not all(0 <= each <= 100 for each in (gpu, host, disk)) or abs(gpu + host + disk - 100) > 1e-6:
        raise InputError(option, f"{part!r} has no three percentages that add up to 100", f"write GPU/HOST/DISK as in {EXAMPLE}")
    return (gpu, host, disk)


def _amount(option: str, part: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not _SMALLEST <= number <= _LARGEST:
        raise InputError(option, f"{part!r} is not a number from {_SMALLEST:g} to {_LARGEST:,.0f}", "write GB, or GB/s of a speed")
    return number
