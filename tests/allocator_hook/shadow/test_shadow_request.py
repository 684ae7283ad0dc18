"""Requests to the shadow worker, and jobs that the shadow engine does not support. These tests do not need torch."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from allocator_hook.shadow.engine import enough_microbatches
from allocator_hook.shadow.job_json import from_json, to_json
from allocator_hook.shadow.request import Request
from allocator_hook.step.iterations import default_iterations
from allocator_hook.step.supported import READ, check_supported
from analyzer import specs
from analyzer.errors import UnsupportedError
from tests.job_of import BASE, job_of

LAUNCHES = (
    "--global-batch-size 64",
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --global-batch-size 64 --swiglu",
    "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 64",
    "--num-experts 8 --expert-model-parallel-size 4 --moe-router-topk 2 --global-batch-size 64",
)


@pytest.mark.parametrize("line", LAUNCHES)
def test_jobs_and_requests_are_unchanged_after_conversion_to_json(line: str) -> None:
    job = job_of(line)
    assert from_json(to_json(job)) == job
    request = Request(job=job, traces={3: Path("x.trace")}, jobs=2, argv=("torchrun",), versions={"torch": "2.13.0"})
    assert Request.from_json(request.to_json()) == request


def test_the_smallest_number_of_microbatches_with_the_full_peak_is_used() -> None:
    assert enough_microbatches(job_of("--pipeline-model-parallel-size 4 --global-batch-size 640")) == 6
    assert enough_microbatches(job_of("--global-batch-size 8")) == 1


def test_unsupported_fields_give_a_one_line_error() -> None:
    job = job_of("--global-batch-size 8")
    legacy = replace(job, model=replace(job.model, implementation="legacy"))
    layout = specs.PipelineSpec(layout=("Et", "tm", "L"))
    early_mtp = replace(job, parallel=replace(job.parallel, pipeline_layout=layout, virtual_pipeline=3))
    for unsupported in (legacy, early_mtp):
        with pytest.raises(UnsupportedError, match="use --info-engine formula") as caught:
            check_supported(unsupported)
        assert "\n" not in str(caught.value)


def test_the_last_iteration_replays_graphs() -> None:
    """Transformer Engine's graphs are captured after `--cuda-graph-warmup-steps` iterations, 3 by default, and the second
    iteration without graphs is like the third. Graphs of Megatron are captured at the end of the first iteration."""
    assert default_iterations(job_of("--global-batch-size 8")) == 2
    for line, iterations in (("", 4), ("--cuda-graph-warmup-steps 0", 2), ("--cuda-graph-warmup-steps 1", 3)):
        assert default_iterations(job_of(f"--cuda-graph-impl transformer_engine {line}")) == iterations
    assert default_iterations(job_of("--cuda-graph-impl local")) == 3


def test_graphs_with_buffers_for_each_microbatch_run_all_microbatches() -> None:
    full = "--cuda-graph-impl local --cuda-graph-scope full_iteration --no-check-for-nan-in-loss-and-grad"
    assert enough_microbatches(job_of(f"{full} --global-batch-size 64")) == job_of("--global-batch-size 64").batch.microbatches
    assert enough_microbatches(job_of("--cuda-graph-impl transformer_engine --global-batch-size 64")) == 3


@pytest.mark.parametrize("line", LAUNCHES)
def test_supported_jobs_are_accepted(line: str) -> None:
    check_supported(job_of(line))


def test_statements_about_a_launch_do_not_prevent_a_run() -> None:
    base = BASE.replace("--tokenizer-type NullTokenizer --vocab-size 32000", "--use-sharp")
    job = replace(job_of("--global-batch-size 8", base=base), unknown=("--foo is not known.",))
    assert job.assumed_vocabulary is not None
    assert job.warnings
    check_supported(job)
    assert from_json(to_json(job)) == job


def test_every_field_listed_as_supported_exists() -> None:
    for name, read in READ.items():
        assert read <= {field.name for field in fields(getattr(specs, name))}
