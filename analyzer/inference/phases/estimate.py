"""The memory of each phase of an iteration, and the highest-memory one.

A framework moves states of the training to the host in some phases, runs passes without gradients, and generates with an inference
engine. The readers of its launches say which (`analyzer.specs.fine_tuning.Phase`). Tensors are counted without fragmentation:
frameworks empty the caching allocator between phases. The range of a phase (`analyzer.inference.phases.ranges`) includes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from analyzer.inference.phases.forward import forward_bytes
from analyzer.inference.phases.in_turns import critic_phases
from analyzer.inference.phases.ranges import (
    ASLEEP,
    beyond_share,
    of_highest_rank,
    outside_range,
    pass_range,
    refit_range,
    update_range,
)
from analyzer.memory.device_overhead import CONTEXT, outside_allocator_bytes
from analyzer.memory.other_models import job_of_phase, other_weight_bytes, states_in_turns
from analyzer.memory.verdict import highest, phases_range, state_of
from analyzer.results import PhaseMemory, RankClass, RankMemory, Report, Verdict
from analyzer.specs import TrainingJob
from analyzer.specs.fine_tuning import Engine, ForwardPass, Phase
from analyzer.units import DTYPE_BYTES

UPDATE = "update"


def with_phases(report: Report) -> Report:
    """The report with its phases, and the verdict on the one that needs the most."""
    found = phases(report)
    outcome = _verdict(report, found or (_update(report, []),))
    return replace(report, phases=found, verdict=outcome if found else replace(outcome, phase=""))


def _verdict(report: Report, found: Sequence[PhaseMemory]) -> Verdict:
    """Whether every phase fits.

    A verdict that is withheld stays, and one that the update does not fit if something else is not counted. If microbatches may
    have fewer tokens than counted, a launch does not fit only if it does not without activations.
    """
    outcome, hardware, tuning = report.verdict, report.job.hardware, report.job.tuning
    capacity = hardware.capacity_bytes
    if capacity is None or outcome.withheld:
        return outcome
    peak = max(found, key=lambda each: each.device_bytes)
    headroom = capacity - peak.device_bytes
    without = max(each.states_bytes + each.engine_bytes for each in found)
    if (headroom < 0 or outcome.fits is False) and tuning.most_tokens_counted and without <= capacity:
        reason = f"microbatches are counted with the most tokens, with which the {peak.name} phase would not fit; fewer need less"
        return _withheld(outcome, reason)
    if report.job.not_counted:
        return outcome
    if report.job.images is not None:
        return _withheld(outcome, "the phases below are counted without images")
    apart = dict.fromkeys(each.name for each in tuning.phases if not each.on_same_gpus and each.name != "refit")
    return replace(
        outcome,
        fits=headroom >= 0,
        state=state_of(peak.device_bytes, phases_range(found), hardware),
        tightest_rank=peak.rank,
        headroom_bytes=headroom,
        phase=peak.name,
        note=f"The GPUs of the {' and the '.join(apart)} are not checked." if apart else outcome.note,
    )


def _withheld(outcome: Verdict, reason: str) -> Verdict:
    return replace(outcome, fits=None, state=None, headroom_bytes=None, margin_bytes=None, withheld=reason)


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
    job, capacity = report.job, report.job.hardware.capacity_bytes or 0
    staying = next((each.work for each in listed if isinstance(each.work, Engine) and each.work.stays), None)
    engine = int(staying.gpu_share * capacity) if staying is not None else 0
    most = engine + beyond_share(staying, capacity) if staying is not None else _asleep(job)
    rank = highest(report.ranks)
    memory = rank.memory
    states = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes + memory.runtime_bytes
    return PhaseMemory(
        name=UPDATE,
        rank=rank.ranks[0][0],
        device_bytes=memory.device_bytes + engine,
        device_range_bytes=update_range(job, report.ranks, engine=engine, most_engine=most),
        states_bytes=states,
        forward_bytes=memory.peak_allocated_bytes - states,
        engine_bytes=engine,
        host_bytes=_other_weights_on_host(report, rank),
    )


def _phase(report: Report, phase: Phase) -> Iterator[PhaseMemory]:
    """The phase on the rank that needs the most."""
    job, work = report.job, phase.work
    if phase.training is not None:
        yield from critic_phases(report, phase, _asleep(job), [(rank, _beside(report, phase, rank)) for rank in report.ranks])
        return
    engine, engine_range = 0, (0, _asleep(job))
    if isinstance(work, Engine):
        capacity = job.hardware.capacity_bytes
        if capacity is None:
            return
        share = int(work.gpu_share * capacity)
        if phase.name == "rollout":
            engine, engine_range = share, (share, share + beyond_share(work, capacity))
        else:
            width = DTYPE_BYTES[job.precision.parameters]
            weights = min(int(report.parameters * width) // work.tensor, share)
            engine, engine_range = weights + work.buffer_bytes, refit_range(job, work, weights=weights)
    outside = outside_range(job, groups=phase.groups_stay)
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
                device_range_bytes=pass_range(states, forward, outside=outside, engine=engine_range),
                states_bytes=states,
                forward_bytes=forward,
                engine_bytes=engine,
                host_bytes=_on_host(phase, memory) + _other_weights_on_host(report, rank) - other,
            )
        )
    yield of_highest_rank(found)


def _asleep(job: TrainingJob) -> int:
    """Most bytes of an engine that sleeps while the training works; 0 without one on the same GPUs."""
    return ASLEEP if any(each.name == "rollout" and each.on_same_gpus for each in job.tuning.phases) else 0


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
