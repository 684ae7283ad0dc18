"""Figures folded from a trace that is known by construction; the request that reaches the worker. No torch is needed."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from allocator_hook.shadow.engine import enough_microbatches
from allocator_hook.shadow.fold import Usage, fold, timeline
from allocator_hook.shadow.launch_json import from_json, to_json
from allocator_hook.shadow.request import Request
from allocator_hook.step.supported import READ, check_supported
from allocator_hook.trace_writer import TraceWriter
from analyzer import specs
from analyzer.errors import UnsupportedError
from analyzer.trace.events import Header
from analyzer.units import MIB
from tests.launch_of import launch_of

LAUNCHES = (
    "--global-batch-size 64",
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --global-batch-size 64 --swiglu",
    "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 64",
    "--num-experts 8 --expert-model-parallel-size 4 --moe-router-topk 2 --global-batch-size 64",
)


def write_step(path: Path) -> None:
    """Two iterations: 40 MiB of parameters stay, 30 MiB of activations come and go, 12 MiB of states come with the first step."""
    with TraceWriter(path, Header(recorder="shadow")) as trace:
        trace.enter("", "build")
        trace.allocation(1, 40 * MIB)
        trace.label(1, "parameter", "weight", shape=(40 * MIB,), dtype="uint8", bytes=40 * MIB)
        trace.leave("", "build")
        for iteration in range(2):
            trace.enter("decoder", "forward", 0, iteration)
            trace.allocation(2, 30 * MIB)
            trace.free(2)
            trace.leave("decoder", "forward", 0, iteration)
            trace.enter("", "optimizer", -1, iteration)
            if iteration == 0:
                trace.allocation(3, 12 * MIB)
                trace.label(3, "optimizer", "exp_avg", shape=(12 * MIB,), dtype="uint8", bytes=12 * MIB)
            trace.leave("", "optimizer", -1, iteration)


def test_figures_of_a_known_step(tmp_path: Path) -> None:
    write_step(tmp_path / "step.trace")
    assert fold(tmp_path / "step.trace") == Usage(
        allocated_bytes=52 * MIB,
        peak_allocated_first_iteration_bytes=70 * MIB,
        peak_allocated_bytes=82 * MIB,
        peak_at="forward of microbatch 0, decoder",
        peak_reserved_bytes=100 * MIB,  # the states take a piece of the 30 MiB, which then are needed again
        after_step={"parameter": 40 * MIB, "optimizer": 12 * MIB},
        at_peak={"parameter": 40 * MIB, "optimizer": 12 * MIB, None: 30 * MIB},
    )


def test_bytes_over_time(tmp_path: Path) -> None:
    write_step(tmp_path / "step.trace")
    used = [bytes_ // MIB for _, bytes_ in timeline(tmp_path / "step.trace")]
    assert used == [40, 70, 40, 52, 82, 52]


@pytest.mark.parametrize("line", LAUNCHES)
def test_a_launch_survives_its_journey_to_the_worker(line: str) -> None:
    launch = launch_of(line)
    assert from_json(to_json(launch)) == launch
    request = Request(launch=launch, traces={3: Path("x.trace")}, jobs=2, argv=("torchrun",), versions={"torch": "2.13.0"})
    assert Request.from_json(request.to_json()) == request


def test_as_few_microbatches_as_show_the_peak() -> None:
    assert enough_microbatches(launch_of("--pipeline-model-parallel-size 4 --global-batch-size 640")) == 6
    assert enough_microbatches(launch_of("--global-batch-size 8")) == 1


def test_what_the_step_would_ignore_is_refused_in_one_line() -> None:
    launch = launch_of("--global-batch-size 8")
    overlapped = replace(launch, runtime=replace(launch.runtime, tp_comm_overlap=True))
    sharded = replace(launch, fsdp=specs.FsdpSpec(implementation="torch"))
    old = replace(launch, model=replace(launch.model, implementation="legacy"))
    apart = specs.PipelineSpec(layout=("Et", "tm", "L"))
    spread = replace(launch, parallel=replace(launch.parallel, pipeline_layout=apart))
    for refused in (overlapped, sharded, old, spread):
        with pytest.raises(UnsupportedError, match="use --info-engine formula") as caught:
            check_supported(refused)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", LAUNCHES)
def test_what_the_step_reads_is_taken(line: str) -> None:
    check_supported(launch_of(line))


def test_every_field_of_a_spec_that_the_step_reads_exists() -> None:
    for name, read in READ.items():
        assert read <= {field.name for field in fields(getattr(specs, name))}
