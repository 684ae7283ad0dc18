"""Efficiencies that were measured on a machine, in the file of `--info-calibration`."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from analyzer.errors import InputError
from analyzer.files import read_json_object, refuse_unknown_fields
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies, efficiencies_of

OPTION: Final = "--info-calibration"
SCHEMA: Final = "training-info-calibration/1"
FIELDS: Final = (
    "schema", "gpu", "driver", "torch", "cuda", "transformer_engine", "gpus", "date", "efficiencies", "offload", "not_measured",
    "measured",
)  # fmt: skip
"""Fields of the file."""
OFFLOAD_RATES: Final = (
    "pcie_to_gpu_gb_per_s", "pcie_from_gpu_gb_per_s", "unpinned_to_gpu_gb_per_s", "unpinned_from_gpu_gb_per_s", "staging_gb_per_s",
    "unstaging_gb_per_s", "host_memory_gb_per_s", "cpu_attention_gb_per_s", "disk_read_gb_per_s", "disk_write_gb_per_s",
)  # fmt: skip
"""Rates of offloading in the file, in 10^9 bytes per second."""
SMALLEST: Final = 1e-9
LARGEST: Final = 1e6
UNBOUNDED: Final = frozenset(
    {
        *("gemm_half_depth", "gemm_half_rows", "attention", "attention_half_sequence", "attention_half_width", "attention_waves"),
        *("cublas_4", "gemm_traffic"),
    }
)
"""Sizes and ratios. All other fields are shares or seconds, and at most 1."""
REMEDY: Final = "give a file that --info-calibrate wrote"


def read_calibration(path: Path, speed: SpeedSpec) -> Efficiencies:
    """The efficiencies for a GPU, with those in the file in place of the shipped ones.

    Raises InputError if the file cannot be read, is of another GPU, or has an unknown field or a value that is not a number from
    1e-9 to 1e6.
    """
    document = _read(path, speed.name)
    refuse_unknown_fields(document["efficiencies"], [each.name for each in fields(Efficiencies)], path, OPTION)
    measured = {}
    for name, value in document["efficiencies"].items():
        valid = isinstance(value, int | float) and not isinstance(value, bool) and SMALLEST <= value <= LARGEST
        if not valid or (name not in UNBOUNDED and value > 1):
            raise InputError(OPTION, f"'{path}' has no valid {name}", REMEDY)
        measured[name] = float(value)
    return replace(efficiencies_of(speed), **measured)


def read_offload_rates(path: Path, gpu: str) -> dict[str, float]:
    """The rates of offloading in the file of a GPU, by name, in 10^9 bytes per second.

    Raises InputError if the file cannot be read, is of another GPU, or has no rates or invalid ones.
    """
    offload = _read(path, gpu).get("offload")
    rates = offload.get("rates") if isinstance(offload, dict) else None
    if not isinstance(rates, dict) or not rates:
        remedy = "measure again with --info-calibrate, or leave the file out"
        raise InputError(OPTION, f"'{path}' has no rates of host memory, links and disk", remedy)
    refuse_unknown_fields(rates, OFFLOAD_RATES, path, OPTION)
    for name, value in rates.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not SMALLEST <= value <= LARGEST:
            raise InputError(OPTION, f"'{path}' has no valid {name}", REMEDY)
    return {name: float(value) for name, value in rates.items()}


def _read(path: Path, gpu: str) -> dict[str, Any]:
    """The content of a calibration of a GPU."""
    document = read_json_object(path, OPTION, REMEDY)
    if document.get("schema") != SCHEMA or not isinstance(document.get("efficiencies"), dict):
        raise InputError(OPTION, f"'{path}' is not a calibration", REMEDY)
    if document.get("gpu") != gpu:
        raise InputError(OPTION, f"'{path}' was measured on {document.get('gpu')}, and the target is {gpu}", REMEDY)
    refuse_unknown_fields(document, FIELDS, path, OPTION)
    return document
