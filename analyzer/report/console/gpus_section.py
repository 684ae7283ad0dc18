"""The GPUs that `--info-gpu` knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from analyzer.hardware.gpus import DEFAULT_VARIANTS, GPUS, Gpu
from analyzer.report.console.elements import DIM, paragraph, table
from analyzer.units import GIB

if TYPE_CHECKING:
    from rich.console import RenderableType


def gpus() -> list[RenderableType]:
    """A table of names, memory, compute capability, multiprocessors and other names."""
    header = ("name", "memory", "compute\ncapability", "multi-\nprocessors", "other names")
    note = (
        "Memory is PyTorch's total capacity, a little less than nvidia-smi's. Case, spaces and dashes of a name do not matter. "
        "--info-gpu-memory gives the memory of another GPU."
    )
    return [table(header, [_row(gpu) for gpu in GPUS], align="lrrrl", wrapped=(4,)), "", paragraph(note, style=DIM)]


def print_gpus(stream: TextIO) -> None:
    """Writes the table to `stream`, as the console report is written."""
    from analyzer.report.console.report import write

    write(lambda _width: gpus(), stream=stream)


def _row(gpu: Gpu) -> tuple[str, ...]:
    short = [family.upper() for family, name in DEFAULT_VARIANTS.items() if name == gpu.name]
    capability = ".".join(map(str, gpu.compute_capability))
    names = ", ".join((*short, *gpu.aliases))
    return gpu.name, f"{(gpu.spec.capacity_bytes or 0) / GIB:.2f} GiB", capability, str(gpu.multiprocessors), names
