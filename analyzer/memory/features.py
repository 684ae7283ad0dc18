"""Memory of features that most jobs do not use. Their modules are imported on demand, to keep the start-up short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from analyzer.memory.messages import MessageTensors, kept_inputs
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Tensor, total_bytes
from analyzer.passes.deferred_output_gradients import Deferral, deferral_of
from analyzer.passes.stages import frees_input
from analyzer.program.schedule.iteration import Iteration
from analyzer.program.schedule.pipeline import Pair
from analyzer.specs import TrainingJob

if TYPE_CHECKING:
    from analyzer.memory.graphs.peaks import GraphMemory
    from analyzer.memory.iteration import PeakContext
    from analyzer.memory.peak import Peak
    from analyzer.memory.point import Point
    from analyzer.memory.workspaces import Workspace
    from analyzer.modules.stage import StageModel
    from analyzer.states.record import States


def has_rare_features(job: TrainingJob) -> bool:
    """Whether a job has features for which the formulas differ from those of most jobs.

    They are FSDP, CUDA graphs, activation or optimizer offloading, overlapped microbatches, deferred weight gradients, and
    optimizers that update one parameter after another.
    """
    elsewhere = job.fsdp or job.graphs or job.activation_offload or job.optimizer.offload or job.flags.defer_embedding_wgrad
    return bool(elsewhere) or job.flags.overlap_moe_expert_parallel_comm or job.optimizer.facts.updates != "in place"


def schedule_tensors(
    job: TrainingJob, model: StageModel, *, first_iteration: bool = False
) -> tuple[MessageTensors, tuple[tuple[Tensor, ...], ...]]:
    """`MessageTensors` and `kept_inputs` of a stage, without the inputs of chunks that activation offloading frees."""
    freed = tuple(frees_input(job, tree, first_iteration=first_iteration) for tree in model.trees)
    # the last layer of the microbatch whose backward runs first is not offloaded
    stays = any(freed) and not first_iteration and sum(each.kind is ModuleKind.LAYER for _, each in model.trees[-1].walk()) == 1
    return (
        MessageTensors(job, model.pipeline_rank, freed, first_stays=stays),
        kept_inputs(job, model.chunks, pipeline_rank=model.pipeline_rank, freed=freed),
    )


def deferrals(job: TrainingJob, model: StageModel) -> tuple[Deferral | None, Deferral | None]:
    """`deferral_of` the last stage in the first and in a later iteration."""
    tree = model.trees[-1]
    freed_first, freed = (frees_input(job, tree, first_iteration=first) for first in (True, False))
    return (
        deferral_of(job, microbatches=job.batch.first_microbatches, freed=freed_first),
        deferral_of(job, microbatches=job.batch.microbatches, freed=freed),
    )


def overlapped_points(job: TrainingJob, trees: Sequence[Module], messages: Iteration, *, deferred: int = 0) -> dict[Pair, Point]:
    """The peaks of overlapped forwards and backwards. Empty without `--overlap-moe-expert-parallel-comm`.

    `deferred` as in `overlapped_peaks`.
    """
    if not job.flags.overlap_moe_expert_parallel_comm:
        return {}
    from analyzer.memory.overlapped.microbatches import GradientRules, overlapped_peaks

    return overlapped_peaks(trees, messages, GradientRules.of(job), deferred=deferred)


def offloaded_points(
    job: TrainingJob, trees: Sequence[Module], messages: Iteration
) -> tuple[Mapping[int, Point], Mapping[int, int]]:
    """`PeakContext.offloaded`, for later iterations."""
    if not job.flags.overlap_moe_expert_parallel_comm or job.activation_offload is None:
        return {}, {}
    from analyzer.memory.overlapped.microbatches import offloaded_peaks

    return offloaded_peaks(job, job.activation_offload, trees, messages)


def planned_bytes(job: TrainingJob, trees: Sequence[Module]) -> tuple[int, ...]:
    """`PeakContext.planned`."""
    if not job.flags.overlap_moe_expert_parallel_comm:
        return ()
    from analyzer.memory.overlapped.layers import batch_of

    return tuple(total_bytes(batch_of(tree)) for tree in trees)


def left_bytes(job: TrainingJob, trees: Sequence[Module], inputs: Sequence[tuple[Tensor, ...]]) -> tuple[int, ...]:
    """`PeakContext.left`. `inputs`: the tensors of each chunk that are counted as its last input."""
    if not job.flags.overlap_moe_expert_parallel_comm:
        return ()
    from analyzer.memory.overlapped.layers import units

    found = []
    for tree, counted in zip(trees, inputs, strict=True):
        _, layers, _ = units(tree)
        left = sum(total_bytes(layer.left) for layer in layers)
        found.append(max(0, left - (total_bytes(counted[:1]) if layers[:1] else 0)))
    return tuple(found)


def graph_memory_of(
    job: TrainingJob,
    stage: StageModel,
    states: States,
    workspaces: Sequence[Workspace],
    *,
    iterations: tuple[Iteration, Iteration],
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
