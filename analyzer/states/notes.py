"""What is assumed where an optimizer is offloaded to the host, or is Muon: sentences with their figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analyzer.buffers.of_stage import stage_buffers
from analyzer.modules.stage import StageModel
from analyzer.specs import TrainingJob
from analyzer.states.cpu_offload import host_bytes, offload_of, whole_model_bytes
from analyzer.units import format_bytes


def optimizer_notes(job: TrainingJob, stages: Sequence[StageModel]) -> Iterator[str]:
    """One sentence each."""
    if job.optimizer.offload is not None:
        yield from _offload_notes(job, stages)
    muon = job.optimizer.muon
    if muon is None:
        return
    if not job.megatron.startswith("0.16"):
        yield f"Muon is modelled as in Megatron 0.16, which {job.megatron} is taken to follow"
    if muon.aligned:
        yield "buffers of matrices are laid out by owner as in Megatron's code of June 2026, between releases 0.18 and 0.19"
    yield "temporaries of Muon are those of emerging_optimizers in its releases up to 2026"
    if muon.layer_wise and muon.tensor_parallel != "blockwise" and job.parallel.data_with_context > 1:
        yield (
            "what Muon sends among tensor-parallel ranks is that of the replica that sends most, so sums over the cluster are too "
            "high"
        )


def _offload_notes(job: TrainingJob, stages: Sequence[StageModel]) -> Iterator[str]:
    needs = [host_bytes(job, stage, stage_buffers(job, stage)) for stage in stages]
    most = max(needs, key=lambda need: need.pageable + need.pinned)
    whole = most.pageable + most.pinned
    ranks = min(job.parallel.gpus_per_node, job.parallel.world_size)
    offload = offload_of(job)
    first = format_bytes(max(need.while_made for need in needs))
    yield (
        f"--optimizer-cpu-offload: the host holds up to {format_bytes(whole)} for a GPU, {format_bytes(ranks * whole)} for a node, "
        f"of it {format_bytes(most.pinned)} for a GPU in pinned memory; while the optimizer is made"
        f"{'' if offload.collected else ', and until Python collects its garbage'}, {first} more for a GPU"
    )
    copies = max(whole_model_bytes(job, stage.trees) for stage in stages)
    if copies and not offload.collected:
        yield (
            f"up to {format_bytes(copies)} of fp32 weights that it is made of first are counted as staying: "
            "too high once Python collects its garbage, which --manual-gc does before the first iteration"
        )
