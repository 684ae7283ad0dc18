"""The memory of each phase of an iteration, and the highest-memory one.

A framework moves states of the training to the host in some phases, runs passes without gradients, and generates with an inference
engine. The readers of its launches say which (`analyzer.specs.fine_tuning.Phase`). Tensors are counted without fragmentation:
frameworks empty the caching allocator between phases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from analyzer.inference.phases.forward import forward_bytes
from analyzer.inference.phases.in_turns import critic_phases
from analyzer.memory.device_overhead import CONTEXT, outside_allocator_bytes
from analyzer.memory.other_models import job_of_phase, other_weight_bytes, states_in_turns
from analyzer.memory.verdict import highest
from analyzer.results import PhaseMemory, RankClass, RankMemory, Report
from analyzer.specs import TrainingJob
from analyzer.specs.fine_tuning import Engine, ForwardPass, Phase
from analyzer.units import DTYPE_BYTES

UPDATE = "update"


def with_phases(report: Report) -> Report:
    """The report with its phases. It has no verdict if a phase, which is an estimate, needs more than the update."""
    found, outcome = phases(report), report.verdict
    higher = [each.name for each in found[1:] if each.device_bytes > found[0].device_bytes]
    if higher and not outcome.withheld:
        reason = f"the {higher[0]} phase, which is an estimate, needs more than the update"
        outcome = replace(outcome, fits=None, state=None, headroom_bytes=None, margin_bytes=None, withheld=reason)
    return replace(report, phases=found, verdict=outcome)


def phases(report: Report) -> tuple[PhaseMemory, ...]:
    """The update and the phases of the launch whose memory is counted; none if there are no such phases.

    Those with an inference engine are left out if the memory of the GPU is not known. In each phase the figures are those of the
    rank that needs the most.
    """
    listed = [each for each in report.job.tuning.phases if each.on_same_gpus and each.work is not None]
    if not listed:
        return ()
    return (_update(report, listed), *(found for each in listed for found in _phase(report, each)))


def _update(report: Report, listed: list[Phase]) -> PhaseMemory:
    capacity = report.job.hardware.capacity_bytes or 0
    staying = next((each.work for each in listed if isinstance(each.work, Engine) and each.work.stays), None)
    engine = int(staying.gpu_share * capacity) if staying is not None else 0
    rank = highest(report.ranks)
    memory = rank.memory
    states = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes + memory.runtime_bytes
    return PhaseMemory(
        name=UPDATE,
        rank=rank.ranks[0][0],
        device_bytes=memory.device_bytes + engine,
        states_bytes=states,
        forward_bytes=memory.peak_allocated_bytes - states,
        engine_bytes=engine,
        host_bytes=_other_weights_on_host(report, rank),
    )


def _phase(report: Report, phase: Phase) -> Iterator[PhaseMemory]:
    """The phase on the rank that needs the most."""
    job, work = report.job, phase.work
    if phase.training is not None:
        yield from critic_phases(report, phase, [(rank, _beside(report, phase, rank)) for rank in report.ranks])
        return
    engine = 0
    if isinstance(work, Engine):
        capacity = job.hardware.capacity_bytes
        if capacity is None:
            return
        width = DTYPE_BYTES[job.precision.parameters]
        weights = int(report.parameters * width) // work.tensor
        engine = int(work.gpu_share * capacity) if phase.name == "rollout" else weights + work.buffer_bytes
    passes = (0,) * job.parallel.pipeline
    if isinstance(work, ForwardPass):
        passes = forward_bytes(job_of_phase(job, phase), work)
    found = []
    for rank in report.ranks:
        memory = rank.memory
        other = _other_weights(job, phase, rank) if phase.weights == "host" else 0
        states = memory.runtime_bytes + _states(phase, memory) + other
        forward = passes[rank.pipeline_rank] if phase.parallel is None else max(passes)
        found.append(
            PhaseMemory(
                name=phase.name,
                rank=rank.ranks[0][0],
                device_bytes=(outside_allocator_bytes(job) if phase.groups_stay else CONTEXT) + states + forward + engine,
                states_bytes=states,
                forward_bytes=forward,
                engine_bytes=engine,
                host_bytes=_on_host(phase, memory) + _other_weights_on_host(report, rank) - other,
            )
        )
    yield max(found, key=lambda each: (each.device_bytes, -each.rank))


def _states(phase: Phase, memory: RankMemory) -> int:
    """Bytes of the states of the training on the GPU."""
    sizes = {"parameters": memory.parameters_bytes, "gradients": memory.gradients_bytes, "optimizer": memory.optimizer_bytes}
    return sum(size for name, size in sizes.items() if name not in phase.on_host)


def _on_host(phase: Phase, memory: RankMemory) -> int:
    """Bytes of the states of the training in host memory. Gradients are freed, and not copied."""
    parameters = memory.parameters_bytes if "parameters" in phase.on_host else 0
    return parameters + (memory.optimizer_bytes if "optimizer" in phase.on_host else 0)


def _beside(report: Report, phase: Phase, rank: RankClass) -> tuple[int, int]:
    """Bytes that the models beside a critic have on the GPU of a rank in its phases, and in host memory."""
    weights = sum(_other_weights(report.job, each, rank) for each in report.job.tuning.beside)
    return _states(phase, rank.memory) + weights, _on_host(phase, rank.memory) + _other_weights_on_host(report, rank)


def _other_weights(job: TrainingJob, phase: Phase, rank: RankClass) -> int:
    """Bytes of the weights of another model."""
    if phase.model is None:
        return rank.memory.parameters_bytes
    return other_weight_bytes(job, phase, stage=rank.pipeline_rank)


def _other_weights_on_host(report: Report, rank: RankClass) -> int:
    """Bytes of other models that stay in host memory; those of the reference model are there once."""
    there = {each.name: each for each in report.job.tuning.phases if each.on_same_gpus and each.weights in ("host", "swapped")}
    moved = sum(
        states_in_turns(report.job, other, training.moved - {"gradients"}, stage=rank.pipeline_rank)
        for _, training, other in report.job.tuning.in_turns
    )
    return moved + sum(_other_weights(report.job, each, rank) for each in there.values())
