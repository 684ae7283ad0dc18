"""The links that a process group spans: how many of its ranks share an NVLink domain, and how many a pod of the network."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

from analyzer.layout.groups import GROUP_KINDS, groups
from analyzer.layout.job_groups import domain_size, ranks_in_group
from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec

_LISTED: Final = 4096
"""Ranks of a group that are looked at."""


class Span(NamedTuple):
    """The ranks of a group."""

    ranks: int
    near: int
    """Fewest ranks of the group in one of the NVLink domains that it spans."""
    pod: int = 0
    """The same of the pods of the network; 0 if it has one pod."""


def span_of(job: TrainingJob, group: str, speed: SpeedSpec) -> Span:
    """The span of a group, from the ranks of the first group of its kind. Cached for each job."""
    cache: dict[tuple[str, str, int, int], Span] = job.__dict__.setdefault("_spans", {})
    key = (group, speed.name, speed.nvlink_domain, speed.pod)
    if key not in cache:
        found = _span(job, group, domain_size(job.parallel, speed.nvlink_domain))
        cache[key] = found._replace(pod=_span(job, group, speed.pod).near) if speed.pod else found
    return cache[key]


def _span(job: TrainingJob, group: str, domain: int) -> Span:
    ranks = ranks_in_group(job, group)
    if ranks <= 1:
        return Span(ranks, ranks)
    known = group.removeprefix("intra_")
    if group == "inter_dist_opt":
        return Span(ranks, 1)
    if group == "world":
        return Span(ranks, min(ranks, domain))
    if group in ("cp_a2a", "cp_p2p"):
        whole = _span(job, "cp", domain)
        inner = job.parallel.cp_inner_size
        return Span(ranks, min(ranks, whole.near)) if group == "cp_a2a" else Span(ranks, max(1, whole.near // inner))
    if known not in GROUP_KINDS:
        return Span(ranks, min(ranks, domain))
    first = next(iter(groups(job.parallel, known, tied=job.model.tied_embeddings, limit=1)))
    near = min(Counter(rank // domain for rank in first[:_LISTED]).values(), default=1)
    return Span(ranks, min(near, ranks))
