"""The module trees of an inference step.

A step runs the forward of the modules that a training with the same shapes has. The trees, their kernels and their collectives are
those of a training job whose micro-batch has the requests and tokens of the step.
"""

from __future__ import annotations

from dataclasses import replace

from analyzer.specs import (
    BatchSpec,
    InferenceJob,
    OptimizerSpec,
    RecomputeSpec,
    TrainingFlags,
    TrainingJob,
)


def forward_job(job: InferenceJob, *, requests: int, tokens: int) -> TrainingJob:
    """The job whose forward is a step with `tokens` tokens of each of `requests` requests.

    Dropout is off, multi-token prediction is not run, and tensor-parallel ranks have complete activations between layers: Megatron
    turns sequence parallelism off in decode (`set_model_to_sequence_parallel`, text_generation_controller.py, 0.16.1).
    """
    model = replace(job.model, hidden_dropout=0.0, attention_dropout=0.0, mtp_num_layers=0)
    parallel = replace(job.parallel, sequence_parallel=False)
    samples = requests * parallel.data
    return TrainingJob(
        model=model,
        parallel=parallel,
        batch=BatchSpec(
            micro_batch_size=requests, global_batch_size=samples, seq_length=tokens, microbatches=1, first_microbatches=1
        ),
        precision=replace(job.precision, fp8=None),
        optimizer=OptimizerSpec(),
        recompute=RecomputeSpec(),
        flags=TrainingFlags(),
        hardware=job.hardware,
        megatron=job.megatron,
        software=job.software,
    )
