"""Full sharding in memory, of Megatron or of torch: which formulas stand for a launch."""

from __future__ import annotations

from analyzer.modules.tree import Module
from analyzer.results import StageModel
from analyzer.sharded_buckets import fsdp_of
from analyzer.sharded_states import sharded_states
from analyzer.sharded_torch import torch_states, with_unsharded_units
from analyzer.specs import Launch
from analyzer.states import States
from analyzer.timeline import ChunkTimeline, timeline
from analyzer.unsharded import with_unsharded


def fsdp_states(launch: Launch, stage: StageModel) -> States:
    """States of one rank of a pipeline stage."""
    if fsdp_of(launch).implementation == "torch":
        return torch_states(launch, stage)
    return sharded_states(launch, stage)


def fsdp_timeline(launch: Launch, tree: Module) -> ChunkTimeline:
    """Both passes of a chunk, with what is unsharded as workspace."""
    if fsdp_of(launch).implementation == "torch":
        return timeline(with_unsharded_units(launch, tree))
    return timeline(with_unsharded(launch, tree), first=with_unsharded(launch, tree, first=True))
