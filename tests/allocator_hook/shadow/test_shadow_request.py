"""The request that reaches the shadow worker, and the jobs that the shadow refuses. No torch is needed."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from allocator_hook.shadow.engine import enough_microbatches
from allocator_hook.shadow.job_json import from_json, to_json
from allocator_hook.shadow.request import Request
from allocator_hook.step.supported import READ, check_supported
from analyzer import specs
from analyzer.errors import UnsupportedError
from tests.job_of import job_of

LAUNCHES = (
    "--global-batch-size 64",
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --global-batch-size 64 --swiglu",
    "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 64",
    "--num-experts 8 --expert-model-parallel-size 4 --moe-router-topk 2 --global-batch-size 64",
)


@pytest.mark.parametrize("line", LAUNCHES)
def test_a_launch_survives_its_journey_to_the_worker(line: str) -> None:
    job = job_of(line)
    assert from_json(to_json(job)) == job
    request = Request(job=job, traces={3: Path("x.trace")}, jobs=2, argv=("torchrun",), versions={"torch": "2.13.0"})
    assert Request.from_json(request.to_json()) == request


def test_as_few_microbatches_as_show_the_peak() -> None:
    assert enough_microbatches(job_of("--pipeline-model-parallel-size 4 --global-batch-size 640")) == 6
    assert enough_microbatches(job_of("--global-batch-size 8")) == 1


def test_what_the_step_would_ignore_is_refused_in_one_line() -> None:
    job = job_of("--global-batch-size 8")
    overlapped = replace(job, flags=replace(job.flags, tp_comm_overlap=True))
    sharded = replace(job, fsdp=specs.FsdpSpec(implementation="torch"))
    old = replace(job, model=replace(job.model, implementation="legacy"))
    apart = specs.PipelineSpec(layout=("Et", "tm", "L"))
    spread = replace(job, parallel=replace(job.parallel, pipeline_layout=apart))
    for refused in (overlapped, sharded, old, spread):
        with pytest.raises(UnsupportedError, match="use --info-engine formula") as caught:
            check_supported(refused)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", LAUNCHES)
def test_what_the_step_reads_is_taken(line: str) -> None:
    check_supported(job_of(line))


def test_every_field_of_a_spec_that_the_step_reads_exists() -> None:
    for name, read in READ.items():
        assert read <= {field.name for field in fields(getattr(specs, name))}
