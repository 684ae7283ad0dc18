"""Memory of features that most jobs do not use. Their modules are imported on demand, to keep the start-up short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from analyzer.modules.tree import Module
from analyzer.schedule.pipeline import Step
from analyzer.specs import TrainingJob

if TYPE_CHECKING:
    from analyzer.memory.chunk_memory import Point
    from analyzer.memory.graphs.peaks import GraphMemory
    from analyzer.memory.iteration import PeakContext
    from analyzer.memory.peak import Peak
    from analyzer.memory.pipeline_tensors import MessageOrder
    from analyzer.memory.workspaces import Workspace
    from analyzer.modules.stage import StageModel
    from analyzer.states.record import States


def overlapped_points(job: TrainingJob, trees: Sequence[Module], order: Sequence[Step]) -> dict[tuple[int, int], Point]:
    """The peaks of overlapped forwards and backwards, by (chunk of the forward, chunk of the backward).

    Empty without `--overlap-moe-expert-parallel-comm`.
    """
    if not job.flags.overlap_moe_expert_parallel_comm:
        return {}
    from analyzer.memory.overlapped_microbatches import overlapped_peaks

    return overlapped_peaks(trees, order, early=job.flags.early_attention_backward)


def graph_memory_of(
    job: TrainingJob,
    stage: StageModel,
    states: States,
    workspaces: Sequence[Workspace],
    *,
    iterations: tuple[MessageOrder, MessageOrder],
    context: PeakContext,
    eager: tuple[Peak, Peak],
) -> GraphMemory | None:
    """The memory of a stage with CUDA graphs; None if the job has none. `eager` are the peaks without graphs."""
    if job.graphs is None:
        return None
    from analyzer.memory.graphs.peaks import graph_memory

    return graph_memory(job, job.graphs, stage, states, workspaces, iterations=iterations, context=context, eager=eager)


def userbuffer_bytes_of(job: TrainingJob) -> int:
    """Bytes of Transformer Engine's userbuffers (`--tp-comm-overlap`), which PyTorch's allocator does not manage."""
    if not job.flags.tp_comm_overlap:
        return 0
    from analyzer.memory.userbuffers import userbuffer_bytes

    return userbuffer_bytes(job)
