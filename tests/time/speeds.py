"""Round speeds, and efficiencies of 1, for expectations that are computed by hand."""

from __future__ import annotations

from dataclasses import fields, replace

from analyzer.hardware.speeds import speed_of
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies, efficiencies_of

ROUND = SpeedSpec(
    name="round",
    architecture="hopper",
    peak_flops={"32": 500e12, "16": 1000e12, "8": 2000e12, "4": 4000e12},
    hbm_bytes=4000e9,
    nvlink_bytes=400e9,
    nvlink_domain=8,
    network_bytes=50e9,
    multiprocessors=100,
)


def ideal(**changes: float) -> Efficiencies:
    """Every share is 1, and nothing costs a fixed time. `changes` replace values."""
    zero = {"latency", "latency_rank", "kernel_gap", "gemm_half_depth", "gemm_half_rows", "gemm_traffic", "gemm_shapes"}
    zero |= {
        "attention_half_sequence",
        "attention_half_width",
        "nvlink_few",
        "host_call",
        "host_operation",
        "host_read",
        "host_sync",
        "graph_call",
        "iteration",
        "slowdown",
    }
    values = {each.name: 0.0 if each.name in zero else 1.0 for each in fields(Efficiencies)}
    return replace(efficiencies_of(known("H100-80GB")), **{**values, **changes})


def known(gpu: str) -> SpeedSpec:
    """The speeds of a GPU of the table."""
    speed = speed_of(gpu)
    assert speed is not None
    return speed
