"""Seconds of a collective or a message, from its bytes and the links that its group spans.

Collectives use rings over the ranks of a group. If a group spans several NVLink domains, each of its ranks in a domain sends a
part of the data through its own network adapter, so that the bandwidth is that of all of them together, at most that of NVLink.
Between pods of the network each GPU has its share of the spine. The rings of a group cross it on the ranks of one NVLink domain,
which use the shares of the group's other ranks in the pod; in an all-to-all all ranks cross it.
"""

from __future__ import annotations

from functools import lru_cache
from math import log2, prod
from typing import Final, Literal, NamedTuple

from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.links import Span

Part = Literal["tp", "cp", "ep", "pp", "dp"]
Exchange = Literal["", "plain", "flex"]


class Choices(NamedTuple):
    """How many experts a token chooses. The choices are assumed to be independent."""

    experts: int = 0
    topk: int = 0
    sharing: int = 1
    """Ranks that share the same experts (expert tensor parallelism). A token goes to all of them."""


NO_CHOICES: Final = Choices()


class LinkSeconds(NamedTuple):
    """Seconds at the efficiencies of the links."""

    transfer: float
    latency: float

    @property
    def total(self) -> float:
        """Seconds of one call."""
        return self.transfer + self.latency


def message_seconds(
    kind: str,
    payload: float,
    span: Span,
    speed: SpeedSpec,
    rates: Efficiencies,
    *,
    exchange: Exchange = "",
    choices: Choices = NO_CHOICES,
) -> LinkSeconds:
    """Seconds of one call.

    `payload`: bytes of the full tensor on one rank. `exchange`: tokens of experts, and by which dispatcher.
    """
    ranks, near, pod = span
    if ranks <= 1 or payload <= 0:
        return LinkSeconds(0.0, 0.0)
    # few ranks use few of the links of the NVLink switches
    nvlink = speed.nvlink_bytes * (1 - rates.nvlink_few / min(near, ranks)) * (rates.expert_nvlink if exchange else rates.nvlink)
    network = speed.network_bytes * (rates.expert_network if exchange else rates.network)
    spine = speed.spine_bytes * (rates.expert_network if exchange else rates.network)
    crosses = 0 < pod < ranks
    network = min(network, pod * spine / near) if crosses and kind != "all_to_all" else network
    latency = rates.latency + rates.latency_rank * log2(ranks)
    if kind in ("send", "recv", "broadcast"):
        return LinkSeconds(payload / (nvlink if near >= ranks else network), latency)
    moved = payload * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
    if near >= ranks:
        return LinkSeconds(moved / nvlink, latency)
    if kind == "all_to_all":
        far = payload * _far_share(span, choices if exchange == "flex" else NO_CHOICES)
        inside = payload * ((near - 1) / ranks if exchange != "flex" else (near - 1) / near)
        between_pods = far * (ranks - pod) / (ranks - near) / spine if crosses else 0.0
        return LinkSeconds(max(inside / nvlink, far / network, between_pods), latency)
    return LinkSeconds(moved / min(nvlink, near * network), latency)


@lru_cache(maxsize=1024)
def _far_share(span: Span, choices: Choices) -> float:
    """Share of the payload that goes to other NVLink domains.

    The libraries of the flex dispatcher send a token at most once to each domain, where NVLink distributes it to the ranks of its
    experts. Other all-to-alls send it for each rank. Sources: DeepEP and HybridEP, internode kernels; Megatron-LM,
    `MoEFlexTokenDispatcher._initialize_metadata` (0.16.1), which repeats the choices for the ranks that share experts.
    """
    ranks, near, _ = span
    if not choices.topk:
        return 1 - near / ranks
    domains = ranks / near
    of_rank = choices.experts * choices.sharing // ranks
    of_domain = max(of_rank, choices.experts * near // ranks)
    return (domains - 1) * _chosen(choices, of_domain) / (ranks * _chosen(choices, of_rank))


def _chosen(choices: Choices, local: int) -> float:
    """Probability that a token has at least one of its experts among `local` ones."""
    experts = choices.experts
    return 1 - prod(max(0, experts - max(1, local) - each) / (experts - each) for each in range(choices.topk))
