"""Full sharding in memory, of Megatron or of torch: which formulas stand for a launch."""

from __future__ import annotations

from analyzer.memory.passes import ChunkTimeline, timeline
from analyzer.modules.tree import Module
from analyzer.passes.fsdp_gathering import with_unsharded
from analyzer.results import StageModel
from analyzer.specs import TrainingJob
from analyzer.states.fsdp_buckets import fsdp_of
from analyzer.states.fsdp_megatron import sharded_states
from analyzer.states.fsdp_torch import torch_states, with_unsharded_units
from analyzer.states.of_rank import States


def fsdp_states(job: TrainingJob, stage: StageModel) -> States:
    """States of one rank of a pipeline stage."""
    if fsdp_of(job).implementation == "torch":
        return torch_states(job, stage)
    return sharded_states(job, stage)


def fsdp_timeline(job: TrainingJob, tree: Module) -> ChunkTimeline:
    """Both passes of a chunk, with what is unsharded as workspace."""
    if fsdp_of(job).implementation == "torch":
        return timeline(with_unsharded_units(job, tree))
    return timeline(with_unsharded(job, tree), first=with_unsharded(job, tree, first=True))
