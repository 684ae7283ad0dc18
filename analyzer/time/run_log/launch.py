"""Whether a log is of another launch: sizes and parameters that it states, and samples and operations of an iteration."""

from __future__ import annotations

from typing import Final

from analyzer.results import Report
from analyzer.specs import TrainingJob
from analyzer.time.run_log.record import Measured, RunLog
from analyzer.time.work.model_flops import model_flops
from analyzer.units import format_count

EXACT: Final = 1e-3
"""Relative difference of the parameters of a rank that is ignored."""
ESTIMATED: Final = 0.03
"""The same of the parameters of the model, which Megatron estimates by formula and prints with two decimals of 10^9."""
COUNTED: Final = 0.02
"""The same of the operations of an iteration, from rounded TFLOP/s and milliseconds."""


def sizes_of(job: TrainingJob) -> dict[str, int | None]:
    """The sizes of a launch by the names of Megatron's arguments."""
    parallel, batch, model = job.parallel, job.batch, job.model
    return {
        "world_size": parallel.world_size,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "seq_length": batch.seq_length,
        "micro_batch_size": batch.micro_batch_size,
        "global_batch_size": batch.global_batch_size,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
    }


def other_sizes(log: RunLog, found: Measured, job: TrainingJob) -> list[str]:
    """Which sizes in the log are not those of a launch, one sentence each."""
    facts = dict(log.facts) | ({} if found.batch is None else {"global_batch_size": found.batch})
    return [
        f"{name} is {format_count(facts[name])} in the log and {format_count(size)} in the launch."
        for name, size in sizes_of(job).items()
        if size is not None and facts.get(name, size) != size
    ]


def other_launch(log: RunLog, found: Measured, report: Report) -> list[str]:
    """How the log contradicts the launch, one sentence each; empty if it is of this launch as far as it says."""
    texts = other_sizes(log, found, report.job)
    stages = {rank.pipeline_rank: rank for rank in reversed(report.ranks)}
    for (tensor, stage), count in sorted(log.parameters.items()):
        predicted = stages[stage].parameters if stage in stages else 0
        if abs(count - predicted) > EXACT * predicted:
            texts.append(
                f"Tensor rank {tensor} of pipeline rank {stage} has {format_count(count)} parameters in the log and "
                f"{format_count(predicted)} in the launch: another model or another layout."
            )
            break
    total = log.total_parameters
    if total is not None and not log.parameters and abs(total - report.parameters) > ESTIMATED * report.parameters:
        texts.append(
            f"The log states {total / 1e9:,.2f} billion parameters, and the model of the launch has {report.parameters / 1e9:,.2f}."
        )
    return texts


def other_count(found: Measured, report: Report) -> str:
    """How the operations of an iteration in the log differ from those that are counted; empty if they do not."""
    if found.tflops is None:
        return ""
    world = report.job.parallel.world_size
    logged, counted = found.tflops * 1e12 * found.seconds * world, float(model_flops(report.job))
    if abs(logged / counted - 1) <= COUNTED:
        return ""
    return (
        f"TFLOP/s times seconds are {logged:.3g} operations of the model for an iteration on {format_count(world)} GPUs, and "
        f"{counted:.3g} are counted here: another model, sequence length or number of GPUs, or a release that counts differently."
    )
