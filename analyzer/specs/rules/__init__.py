"""Layout rules: which sizes, splits and features Megatron accepts together.

The command line turns a violation into an error, advice and search skip a layout with a violation, and `predict` checks its job.
Rules that do not depend on the sizes of the layout are checked when the options are read, in `launch.derive`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from analyzer.errors import InputError
from analyzer.specs.job import TrainingJob
from analyzer.specs.option_names import flag_of
from analyzer.specs.rules.failures import failure_violations
from analyzer.specs.rules.families import family_violations
from analyzer.specs.rules.features import feature_violations, schedule_violations
from analyzer.specs.rules.hybrid import hybrid_violations
from analyzer.specs.rules.linear_attention import linear_attention_violations
from analyzer.specs.rules.model import model_violations, sequence_violations
from analyzer.specs.rules.quantized import quantized_violations
from analyzer.specs.rules.sizes import parallel_violations
from analyzer.specs.rules.sparse_attention import sparse_attention_violations
from analyzer.specs.rules.stages import stage_violations
from analyzer.specs.rules.violation import Violation

__all__ = ["Violation", "check_job", "first_violation", "violations"]


def check_job(job: TrainingJob) -> None:
    """Raises InputError for the first rule of Megatron-LM that a job breaks, with Megatron's names of the options."""
    found = first_violation(job)
    if found is not None:
        raise InputError(" × ".join(map(flag_of, found.options)), found.fault, found.remedy)


def first_violation(job: TrainingJob) -> Violation | None:
    """The first rule of Megatron-LM that a job breaks, or None."""
    return next((each for each in violations(job) if not each.library), None)


def violations(job: TrainingJob) -> Iterator[Violation]:
    """The rules that a job breaks, in an order in which later rules may rely on earlier ones."""
    parallel, model = job.parallel, job.model
    return chain(
        parallel_violations(parallel, megatron=job.megatron),
        stage_violations(model.num_layers, parallel, mtp_layers=model.mtp_num_layers),
        model_violations(model, parallel, megatron=job.megatron),
        hybrid_violations(job),
        sequence_violations(job.batch.seq_length, parallel),
        schedule_violations(job.batch, parallel),
        feature_violations(job),
        failure_violations(job),
        quantized_violations(job),
        linear_attention_violations(job),
        sparse_attention_violations(job),
        family_violations(job),
    )
