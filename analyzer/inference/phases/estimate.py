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
    ENGINES,
    beyond_share,
    engine_beside,
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
    outcome = _verdict(report, found or (_update(report),))
    return replace(report, phases=found, verdict=outcome if found else replace(outcome, phase=""))


def _verdict(report: Report, found: Sequence[PhaseMemory]) -> Verdict:
    """Whether every phase fits.

    A verdict that is withheld stays. If microbatches may have fewer tokens than counted, a launch does not fit only if it does not
    without activations. What is not counted only adds memory.
    """
    outcome, hardware, tuning = report.verdict, report.job.hardware, report.job.tuning
    capacity = hardware.capacity_bytes
    if capacity is None or outcome.withheld:
        return outcome
    peak = max(found, key=lambda each: each.device_bytes)
    fits = peak.device_bytes <= capacity and outcome.fits is not False
    not_counted = list(report.job.not_counted)
    if not fits and tuning.most_tokens_counted:
        reason = f"microbatches are counted with the most tokens, with which the {peak.name} phase would not fit; fewer need less"
        if max(map(_without_activations, found)) <= capacity:
            return _withheld(outcome, reason, *not_counted)
        peak = max(found, key=_without_activations)
    elif fits:
        peak = max(found, key=lambda each: (each.device_range_bytes[1] > capacity, each.device_bytes))
    state = state_of(peak.device_bytes, phases_range(found), hardware)
    if not_counted and state != "does not fit":
        return outcome
    if report.job.images is not None and state != "does not fit":
        return _withheld(outcome, "the phases below are counted without images")
    headroom = capacity - peak.device_bytes
    apart = dict.fromkeys(each.name for each in tuning.phases if not each.on_same_gpus and each.name != "refit")
    notes = [outcome.note, f"The GPUs of the {' and the '.join(apart)} are not checked." if apart else ""]
    return replace(
        outcome,
        fits=headroom >= 0,
        state=state,
        tightest_rank=peak.rank,
        headroom_bytes=headroom,
        margin_bytes=hardware.margin_bytes,
        phase=peak.name,
        note=" ".join(filter(None, notes)),
        images_bytes=0,
    )


def _without_activations(phase: PhaseMemory) -> int:
    """The least that a phase needs with microbatches of few tokens. The weights of a refit may be quantized."""
    return phase.states_bytes + (phase.engine_bytes // 4 if phase.name == "refit" else phase.engine_bytes)


def _withheld(outcome: Verdict, *reasons: str) -> Verdict:
    withheld = "; ".join(reasons)
    return replace(outcome, fits=None, state=None, headroom_bytes=None, margin_bytes=None, images_bytes=0, withheld=withheld)


def phases(report: Report) -> tuple[PhaseMemory, ...]:
    """The update and the phases of the launch whose memory is counted; none if there are no such phases.

    Those with an inference engine are left out if the memory of the GPU is not known. In each phase the figures are those of the
    rank that needs the most.
    """
    listed = [each for each in report.job.tuning.phases if each.on_same_gpus and each.work is not None]
    if not listed:
        return ()
    return (_update(report), *(found for each in listed for found in _phase(report, each)))


def _update(report: Report) -> PhaseMemory:
    job = report.job
    engine, most = engine_beside(job)
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
    engine_range = engine_beside(job)
    engine = engine_range[0]
    if phase.training is not None:
        yield from critic_phases(report, phase, engine_range, [(rank, _beside(report, phase, rank)) for rank in report.ranks])
        return
    if isinstance(work, Engine):
        capacity = job.hardware.capacity_bytes
        if capacity is None:
            return
        share = int(work.gpu_share * capacity)
        if phase.name in ENGINES:
            engine, engine_range = share, (share, share + beyond_share(work, capacity))
        else:
            width = DTYPE_BYTES[job.precision.parameters]
            weights = min(int(report.parameters * width) // work.tensor, share)
            weights = share if work.stays else weights
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
