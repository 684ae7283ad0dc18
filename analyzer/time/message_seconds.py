"""Seconds of a collective or a message, from its bytes and the links that its group spans.

Collectives use rings over the ranks of a group. If a group spans several NVLink domains, each of its ranks in a domain sends a part of
the data through its own network adapter, so that the bandwidth is that of all of them together, at most that of NVLink.
"""

from __future__ import annotations

from math import log2
from typing import Literal, NamedTuple

from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.links import Span

Part = Literal["tp", "cp", "ep", "pp", "dp"]
Exchange = Literal["", "plain", "flex"]


class LinkSeconds(NamedTuple):
    """Seconds at the efficiencies of the links."""

    transfer: float
    latency: float

    @property
    def total(self) -> float:
        """Seconds of one call."""
        return self.transfer + self.latency


def message_seconds(
    kind: str, payload: float, span: Span, speed: SpeedSpec, rates: Efficiencies, *, exchange: Exchange = ""
) -> LinkSeconds:
    """Seconds of one call. `payload`: bytes of the full tensor on one rank. `exchange`: tokens of experts, and by which dispatcher."""
    ranks, near = span
    if ranks <= 1 or payload <= 0:
        return LinkSeconds(0.0, 0.0)
    nvlink, network = speed.nvlink_bytes * rates.nvlink, speed.network_bytes * rates.network
    if exchange:
        nvlink = speed.nvlink_bytes * (rates.expert_nvlink if exchange == "plain" else rates.expert_nvlink_flex)
        network = speed.network_bytes * rates.expert_network
    latency = rates.latency + rates.latency_rank * log2(ranks)
    if kind in ("send", "recv", "broadcast"):
        return LinkSeconds(payload / (nvlink if near >= ranks else network), latency)
    moved = payload * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
    if near >= ranks:
        return LinkSeconds(moved / nvlink, latency)
    if kind == "all_to_all":
        return LinkSeconds(payload * (near - 1) / ranks / nvlink + payload * (1 - near / ranks) / network, latency)
    return LinkSeconds(moved / min(nvlink, near * network), latency)
