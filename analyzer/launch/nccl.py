"""Reads the settings of NCCL in the environment of a launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from analyzer.specs.software import NcclSpec
from analyzer.units import natural

_SIZES: Final = {
    "buffer_bytes": ("NCCL_BUFFSIZE",),
    "nvlink_chunk": ("NCCL_P2P_NVL_CHUNKSIZE",),
    "network_chunk": ("NCCL_P2P_NET_CHUNKSIZE",),
    "fewest_channels": ("NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS"),
    "most_channels": ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"),
}


def nccl_spec(environ: Mapping[str, str]) -> NcclSpec:
    """The settings of NCCL. What is not a number has no effect, as in NCCL (`ncclLoadParam`, src/misc/param.cc)."""
    found: dict[str, int] = {}
    for field, names in _SIZES.items():
        values = [value for name in names if (value := natural(environ.get(name, "").strip()))]
        if values:
            found[field] = min(values) if field == "most_channels" else max(values)
    return NcclSpec(
        **found,
        trees=_allowed(environ, "tree"),
        sharp=environ.get("NCCL_NVLS_ENABLE", "").strip() != "0" and _allowed(environ, "nvls"),
        forwards=environ.get("NCCL_PXN_DISABLE", "").strip() != "1",
    )


def _allowed(environ: Mapping[str, str], algorithm: str) -> bool:
    """Whether NCCL_ALGO allows an algorithm: a list of names, after ^ those that are not used. Lists of functions allow it."""
    value = environ.get("NCCL_ALGO", "").strip().lower()
    if not value or ":" in value or ";" in value:
        return True
    excluded = value.startswith("^")
    return (algorithm in value.removeprefix("^").split(",")) != excluded
