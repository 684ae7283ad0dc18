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

NODE: Final = 8
"""Most GPUs of a node."""
FILE: Final = Path(__file__).with_name("efficiencies.json")


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """Efficiencies for one GPU. Shares are of the peak in `SpeedSpec`."""

    gemm_32: float
    """Share of the peak that a large GEMM reaches, by the bits of its factors."""
    gemm_16: float
    gemm_8: float
    gemm_4: float
    gemm_half_depth: float
    """Depth k at which a GEMM has half of its efficiency: k / (k + half_depth)."""
    gemm_half_rows: float
    """Tokens of an expert at which a grouped GEMM has half of its efficiency."""
    gemm_traffic: float
    """Share of the smaller of computation and memory traffic of a GEMM that is not hidden behind the larger."""
    kernel_gap: float
    """Seconds between two kernels on the GPU."""
    attention: float
    """Share of the 16-bit peak that the forward of fused attention reaches, for long sequences."""
    attention_backward: float
    """Efficiency of the backward, relative to the forward."""
    attention_half_sequence: float
    """Keys at which attention has half of its efficiency."""
    attention_unequal_heads: float
    """Efficiency of the backward relative to other kernels if query and value heads differ in size (latent attention)."""
    memory: float
    """Share of the memory bandwidth that element-wise kernels reach, and the traffic of GEMMs."""
    memory_permute: float
    """The same for routing and permutation."""
    nvlink: float
    """Share of the NVLink bandwidth that collectives reach."""
    network: float
    """The same of the network."""
    expert_nvlink: float
    """The same of NVLink for the exchange of tokens by all-to-all or all-gather."""
    expert_nvlink_flex: float
    """The same with the flex dispatcher."""
    expert_network: float
    """The same of the network for the exchange of tokens."""
    latency: float
    """Seconds to start a collective."""
    latency_rank: float
    """Further seconds for each doubling of the group."""
    tp_overlap_exposed: float
    """Share of tensor-parallel communication that is not hidden with `--tp-comm-overlap`."""
    tp_backward_exposed: float
    """The same of the backward of column-parallel layers without that option: it overlaps with the weight gradient."""
    cp_exposed: float
    """Share of the exchange of keys and values that is not hidden behind attention."""
    ep_overlap_exposed: float
    """Share of the exchange of tokens that is not hidden with `--overlap-moe-expert-parallel-comm`."""
    slowdown: float
    """Seconds by which each second of hidden communication slows the kernels that run at the same time."""
    window: float
    """Share of a backward (forward) behind which the gradient reduction (parameter gather) can be hidden."""
    p2p_exposed: float
    """Share of a message between pipeline stages that delays its receiver, if messages overlap (interleaved schedules)."""
    host_call: float
    """Seconds of the host for one operation of a module."""
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


def system_of(speed: SpeedSpec) -> str:
    """The kind of machine: `rack` if NVLink connects several nodes (with Grace processors), else `node`."""
    return "rack" if speed.nvlink_domain > NODE else "node"


def from_document(document: dict[str, Any], speed: SpeedSpec) -> Efficiencies:
    """The efficiencies of a document with the fields `shared`, `architectures`, `systems` and `gpus`.

    Later ones take precedence.
    """
    values = {
        **document["shared"],
        **document["architectures"].get(speed.architecture, {}),
        **document["systems"].get(system_of(speed), {}),
        **document["gpus"].get(speed.name, {}),
    }
    return Efficiencies(**{each.name: float(values[each.name]) for each in fields(Efficiencies)})
