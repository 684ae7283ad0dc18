"""What is assumed where an optimizer is offloaded to the host, or is Muon: sentences with their figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analyzer.results import StageModel
from analyzer.specs import Launch
from analyzer.units import format_bytes


def optimizer_notes(launch: Launch, stages: Sequence[StageModel]) -> Iterator[str]:
    """One sentence each."""
    if launch.optimizer.offload is not None:
        yield from _offload_notes(launch, stages)
    muon = launch.optimizer.muon
    if muon is None:
        return
    yield "temporaries of Muon are those of emerging_optimizers in the releases that Megatron 0.16 asks for"
    if muon.layer_wise and muon.tensor_parallel != "blockwise" and launch.parallel.data_with_context > 1:
        yield (
            "what Muon sends among tensor-parallel ranks is that of the replica that sends most, so sums over the cluster are too "
            "high"
        )


def _offload_notes(launch: Launch, stages: Sequence[StageModel]) -> Iterator[str]:
    from analyzer.states_offload import host_bytes, offload_of, whole_model_numel

    needs = [host_bytes(launch, stage) for stage in stages]
    most = max(needs, key=lambda need: need.pageable + need.pinned)
    whole = most.pageable + most.pinned
    parallel = launch.parallel
    ranks = min(parallel.gpus_per_node, parallel.world_size)
    yield (
        f"--optimizer-cpu-offload: the host holds up to {format_bytes(whole)} for a GPU, {format_bytes(ranks * whole)} for a node, "
        f"of it {format_bytes(most.pinned)} for a GPU in pinned memory; while the optimizer is made, "
        f"{format_bytes(max(need.while_made for need in needs))} more for a GPU"
    )
    if offload_of(launch).fraction < 1:
        copies = max(4 * whole_model_numel(launch, stage) for stage in stages)
        yield (
            "--optimizer-offload-fraction: every rank is counted as the one that keeps most on its GPU (slightly too high); the "
            f"fp32 weights of the whole model that are made first, up to {format_bytes(copies)}, are taken to be freed before the "
            "first iteration, which Python's garbage collector decides (too low where it comes late)"
        )
