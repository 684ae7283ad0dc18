"""What the replay of a rank needs: its model states, and what it runs. Implementations of rare features are imported only here."""

from __future__ import annotations

from analyzer.memory.allocator.iterations import Phase, iterations_of
from analyzer.memory.allocator.model_states import ModelStates, Muon, Offloaded, OneByOne, StageBuffers
from analyzer.memory.allocator.replicas import Member
from analyzer.memory.stages import StageAnalysis
from analyzer.modules.stage import StageModel
from analyzer.specs import TrainingJob


def phases_of(job: TrainingJob, stage: StageAnalysis) -> tuple[Phase, ...]:
    """What a rank of a stage runs, up to a later iteration."""
    first, later = iterations_of(job, stage)
    if job.graphs is None:
        return first, None, later
    from analyzer.memory.allocator.graph_iterations import with_graphs

    return with_graphs(job, job.graphs, stage, first, later)


def states_of(job: TrainingJob, stage: StageModel, buffers: StageBuffers, member: Member) -> ModelStates:
    """The states of a rank. `member`: which part of the optimizer states it has."""
    if job.fsdp is not None:
        from analyzer.memory.allocator.fsdp_states import MegatronFsdp, TorchFsdp

        kind = TorchFsdp if job.fsdp.implementation == "torch" else MegatronFsdp
        return kind(job, stage, buffers, member)
    optimizer = job.optimizer
    if optimizer.facts.orthogonalizes:
        return Muon(job, stage, buffers, member)
    if optimizer.facts.updates == "one by one":
        return OneByOne(job, stage, buffers, member)
    if optimizer.offload is not None:
        return Offloaded(job, stage, buffers, member)
    return ModelStates(job, stage, buffers, member)
