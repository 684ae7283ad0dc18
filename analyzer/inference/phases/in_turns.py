"""The phases of a critic, which is trained on the GPUs of the actor: its values, a pass without gradients, and its update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analyzer.inference.phases.forward import forward_bytes
from analyzer.inference.phases.ranges import of_highest_rank, outside_range, pass_range
from analyzer.memory.device_overhead import outside_allocator_bytes
from analyzer.memory.ranks import rank_classes
from analyzer.results import PhaseMemory, RankClass, Report
from analyzer.specs.fine_tuning import ForwardPass, Phase

VALUES, UPDATE = "critic values", "critic update"


def critic_phases(
    report: Report, phase: Phase, engine: tuple[int, int], beside: Sequence[tuple[RankClass, tuple[int, int]]]
) -> Iterator[PhaseMemory]:
    """Both phases, each on the rank that needs the most.

    `beside`: for each rank class of the actor, the bytes that its states and other models have on the GPU in these phases, and in
    host memory, with what of the critic is there outside its phases. Of another pipeline the highest combination is counted.
    `engine`: bytes of an inference engine beside it, and the most that they may be.
    """
    training = phase.training
    assert training is not None, "the phase has another training"
    assert training.job is not None, "its words were read"
    job, moved = training.job, training.moved
    passes = forward_bytes(job, phase.work) if isinstance(phase.work, ForwardPass) else (0,) * job.parallel.pipeline
    same = job.parallel.pipeline == report.job.parallel.pipeline
    values, updates = [], []
    for own in rank_classes(job):
        memory = own.memory
        every = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes
        in_pass = memory.parameters_bytes
        in_pass += 0 if "gradients" in moved else memory.gradients_bytes
        in_pass += 0 if "optimizer" in moved else memory.optimizer_bytes
        from_host = sum(
            size for part, size in (("parameters", memory.parameters_bytes), ("optimizer", memory.optimizer_bytes)) if part in moved
        )
        loaded = memory.parameters_bytes if "parameters" in moved else 0
        for rank, (staying, host) in beside:
            if same and rank.pipeline_rank != own.pipeline_rank:
                continue
            states, forward = staying + memory.runtime_bytes, passes[own.pipeline_rank]
            values.append(
                PhaseMemory(
                    name=VALUES,
                    rank=rank.ranks[0][0],
                    device_bytes=outside_allocator_bytes(job) + states + in_pass + forward + engine[0],
                    device_range_bytes=pass_range(
                        states + in_pass, forward, outside=outside_range(job, groups=True), engine=engine
                    ),
                    states_bytes=states + in_pass,
                    forward_bytes=forward,
                    engine_bytes=engine[0],
                    host_bytes=host - loaded,
                )
            )
            least, most = memory.device_range_bytes
            updates.append(
                PhaseMemory(
                    name=UPDATE,
                    rank=rank.ranks[0][0],
                    device_bytes=memory.device_bytes + staying + engine[0],
                    device_range_bytes=(least + staying + engine[0], most + staying + engine[1]),
                    states_bytes=states + every,
                    forward_bytes=memory.peak_allocated_bytes - every - memory.runtime_bytes,
                    engine_bytes=engine[0],
                    host_bytes=host - from_host,
                )
            )
    for listed in (values, updates):
        yield of_highest_rank(listed)
