"""Measured efficiencies: which share of its peak a GPU reaches, and how much communication is hidden.

`efficiencies.json` has the values, each with its source. `tools/fit_time.py` derives those that are fitted. No value depends on a
model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final

from analyzer.specs.speed import SpeedSpec
from analyzer.time.kernels.tables import table_of

FILE: Final = Path(__file__).with_name("efficiencies.json")


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """Efficiencies for one GPU. Shares are of the peak in `SpeedSpec`."""

    gemm_32: float
    """Share of the peak that a large GEMM reaches alone, by the bits of its factors."""
    gemm_16: float
    gemm_8: float
    gemm_4: float
    cublas_4: float
    """Speed of the 4-bit GEMMs of cuBLAS, relative to those of the tables, which are of inference kernels."""
    gemm_shapes: float
    """Share of the residuals of the measured GEMMs that is applied: 1, or 0 for a GPU without shapes."""
    clock: float
    """Speed of GEMMs and attention in a training, relative to kernels that are measured alone: the clock falls under load."""
    gemm_half_depth: float
    """Depth k at which a GEMM has half of its efficiency: k / (k + half_depth)."""
    gemm_half_rows: float
    """Tokens of an expert at which a grouped GEMM has half of its efficiency."""
    gemm_traffic: float
    """Share of the smaller of computation and memory traffic of a GEMM that is not hidden behind the larger."""
    accumulation: float
    """Share of the traffic of an output that is added to a gradient buffer which no computation hides."""
    kernel_gap: float
    """Seconds between two kernels on the GPU."""
    attention: float
    """Share of the 16-bit peak that the forward of fused attention reaches alone, for long sequences and wide heads."""
    attention_backward: float
    """Efficiency of the backward, relative to the forward."""
    attention_half_sequence: float
    """Keys at which attention has half of its efficiency."""
    attention_half_width: float
    """Elements of a head at which attention has half of its efficiency."""
    attention_waves: float
    """Tiles of queries for each multiprocessor from which on attention is fully efficient."""
    attention_unequal_heads: float
    """Efficiency of the backward relative to other kernels if query and value heads differ in size (latent attention)."""
    memory: float
    """Share of the memory bandwidth that element-wise kernels reach, and the traffic of GEMMs."""
    memory_permute: float
    """The same for routing and permutation."""
    memory_scan: float
    """The same for the chunks of a scan or of linear attention alone: multiprocessors limit these kernels, and not the memory."""
    memory_convolution: float
    """The same for convolutions of each channel."""
    nvlink: float
    """Share of the NVLink bandwidth that collectives of many ranks reach."""
    nvlink_few: float
    """Share of that which two ranks lose, times two: the share of n ranks is 1 - nvlink_few / n."""
    network: float
    """The same of the network."""
    expert_nvlink: float
    """The same of NVLink for the exchange of the tokens of experts."""
    expert_network: float
    """The same of the network for the exchange of tokens."""
    latency: float
    """Seconds to start a collective."""
    latency_rank: float
    """Further seconds for each doubling of the group."""
    tp_backward_exposed: float
    """Least share of a tensor-parallel message that shows although a GEMM of its layer runs beside it."""
    ep_overlap_exposed: float
    """Least share of the exchange of tokens that shows with `--overlap-moe-expert-parallel-comm`."""
    slowdown: float
    """Seconds by which each second of hidden communication slows the kernels that run at the same time."""
    window: float
    """Share of the time of kernels behind which a message that runs at the same time can be hidden."""
    p2p_exposed: float
    """Share of a message between pipeline stages that delays its receiver, if messages overlap (interleaved schedules)."""
    host_call: float
    """Seconds of the host for one operation of a module."""
    host_operation: float
    """The same for a small operation of PyTorch in a loop over the samples of a packed sequence."""
    host_read: float
    """Seconds until the host has read a value from a GPU that has no other work."""
    host_sync: float
    """Seconds for which the GPU idles when the host waits for it."""
    graph_call: float
    """Host time of an operation in a CUDA graph, relative to one outside."""
    iteration: float
    """Seconds of an iteration outside microbatches and optimizer."""


@cache
def shipped() -> dict[str, Any]:
    """The document of `efficiencies.json`, read once."""
    document: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return document


def efficiencies_of(speed: SpeedSpec) -> Efficiencies:
    """The shipped efficiencies for a GPU: those of its own entry, else of its architecture, else the shared ones."""
    return from_document(shipped(), speed)


def from_document(document: dict[str, Any], speed: SpeedSpec) -> Efficiencies:
    """The efficiencies of a document with the fields `shared`, `architectures` and `gpus`.

    Later ones take precedence.
    """
    values = {
        **document["shared"],
        **table_of(speed.name, speed.architecture).values,
        **document["architectures"].get(speed.architecture, {}),
        **document["gpus"].get(speed.name, {}),
    }
    return Efficiencies(**{each.name: float(values[each.name]) for each in fields(Efficiencies)})
