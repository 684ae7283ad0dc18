"""Converts the traces of the rank classes of a launch to a report, and compares them with the formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from allocator_hook.packages import folders, installed, warnings
from analyzer.layout.data_parallel import described_rank
from analyzer.memory.allocator.settings import AllocatorSettings
from analyzer.memory.device_overhead import device_range, outside_allocator_bytes
from analyzer.memory.verdict import verdict
from analyzer.modules.shapes import shapes_of
from analyzer.modules.tree import Tensor
from analyzer.results import PeakEvent, RankClass, RankMemory, Report
from analyzer.specs import TrainingFlags, TrainingJob
from analyzer.time.predicted_kernels import predicted_kernels
from analyzer.trace.allocator_replay import Replayed, replay
from analyzer.trace.compare import MODEL, Comparison, compare
from analyzer.trace.events import Header
from analyzer.trace.reader import read_complete_trace
from analyzer.trace.summary import summarize


def recorded_ranks(report: Report) -> tuple[int, ...]:
    """One rank of each rank class."""
    return tuple(_recorded_rank(report.job, each) for each in report.ranks)


def _recorded_rank(job: TrainingJob, of: RankClass) -> int:
    """The rank of a rank class that the formulas describe; the first if that one is not in the class."""
    rank = described_rank(job.parallel, of.ranks[0][0])
    return rank if _contains(of, rank) else of.ranks[0][0]


def _contains(of: RankClass, rank: int) -> bool:
    return any(begin <= rank <= end for begin, end in of.ranks)


def recorded_report(report: Report, traces: Mapping[int, Path], *, settings: AllocatorSettings) -> Report:
    """The report with the memory and the timeline of each rank class taken from its trace."""
    ranks = []
    timelines = []
    for each in report.ranks:
        found = replay(read_complete_trace(traces[_recorded_rank(report.job, each)]), settings)
        ranks.append(replace(each, memory=_memory(report.job, found)))
        timelines.append(found.timeline)
    packages, sources = installed(), folders()
    versions = ", ".join(
        f"{name} {version}" + (f" in {sources[name]}" if name in sources else "") for name, version in packages.items()
    )
    return replace(
        report,
        engine="shadow",
        ranks=tuple(ranks),
        timelines=tuple(timelines),
        verdict=verdict(ranks, report.job.hardware, note=report.verdict.note),
        assumptions=(
            *report.assumptions,
            f"Memory is recorded: Megatron-LM ran on tensors without data ({versions}). Sizes are those of the blocks of "
            "PyTorch's caching allocator, which can be larger than their tensors. The formulas are compared with tensor sizes.",
            "Communication is computed by formula. --info-engine both compares it with the recorded calls.",
            *warnings(packages),
            *_other_release(report.job.megatron, packages["megatron-core"]),
        ),
    )


def _memory(job: TrainingJob, found: Replayed) -> RankMemory:
    """The memory of a trace. Everything except model states, workspaces and activations counts as temporary tensors."""
    states = {kind: found.after[kind] for kind in ("parameter", "gradient", "optimizer", "workspace")}
    activations = found.at_peak["activation"]
    return RankMemory(
        parameters_bytes=states["parameter"],
        gradients_bytes=states["gradient"],
        optimizer_bytes=states["optimizer"],
        runtime_bytes=found.allocated - states["parameter"] - states["gradient"] - states["optimizer"],
        allocated_bytes=found.allocated,
        activations_bytes=activations,
        transient_bytes=found.peak - found.allocated - activations,
        peak_allocated_first_iteration_bytes=found.peak_first_iteration,
        peak_allocated_bytes=found.peak,
        peak_event=PeakEvent.RECORDED,
        peak_at=found.peak_at,
        peak_reserved_bytes=found.peak_reserved,
        device_bytes=found.peak_reserved + outside_allocator_bytes(job),
        device_range_bytes=device_range(job, peak=found.peak, reserved=found.peak_reserved, replayed=True, recorded=True),
    )


def _other_release(described: str, ran: str) -> tuple[str, ...]:
    """An assumption for the report if the formulas and the megatron-core that ran are of different releases."""
    if described.split(".")[:2] == ran.split(".")[:2]:
        return ()
    return (f"Megatron-core {ran} was run. Formulas and options are those of release {described}.",)


@dataclass(frozen=True)
class Compared:
    """The comparison of formulas and trace for one rank class."""

    rank: RankClass
    comparison: Comparison
    header: Header


def _outside_graphs(job: TrainingJob, rank: RankClass) -> RankClass:
    """The rank class with the trees of what a step runs outside CUDA graphs: a replay allocates nothing."""
    if job.graphs is None:
        return rank
    from analyzer.passes.graph_scopes import outside_tree

    hidden = shapes_of(job).hidden("input")
    trees = (
        outside_tree(job.graphs, job.model.moe, tree, hidden=hidden, received=not chunk.pre_process)
        for tree, chunk in zip(rank.trees, rank.chunks, strict=True)
    )
    return replace(rank, trees=tuple(trees))


def _may_end_in_forward(flags: TrainingFlags, module: str, tensor: Tensor) -> bool:
    """Whether a saved tensor may be freed in the forward of the next microbatch, which overlaps with the backward.

    These are tensors from outside the layers, and with delayed weight gradients the inputs of linear layers.
    """
    if not flags.overlap_moe_expert_parallel_comm:
        return False
    outside = module == MODEL or module.split(".")[0] == "embedding"
    return outside or (flags.delay_wgrad_compute and "input" in tensor.name)


def comparisons(report: Report, traces: Mapping[int, Path], *, tolerance: float) -> tuple[Compared, ...]:
    """Compares formulas and trace for each rank class with a rank that the formulas describe (`described_rank`).

    `report` must have the number of microbatches that was run.
    """
    found = []
    for each in report.ranks:
        if not _contains(each, described_rank(report.job.parallel, each.ranks[0][0])):
            continue
        trace = read_complete_trace(traces[_recorded_rank(report.job, each)])
        rows = [row for row in report.communication if row.pipeline_rank == each.pipeline_rank]
        kernels = predicted_kernels(report.job, each)
        result = compare(
            _outside_graphs(report.job, each),
            summarize(trace),
            communication=rows,
            kernels=kernels,
            tolerance=tolerance,
            unlisted=partial(_may_end_in_forward, report.job.flags),
        )
        found.append(Compared(each, result, trace.header))
    return tuple(found)
