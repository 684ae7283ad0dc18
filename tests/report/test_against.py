"""What changed since an older JSON report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analyzer.errors import InputError
from analyzer.report.against import Against, compare, read_old
from analyzer.report.console.against_section import against
from analyzer.report.console.report import draw
from analyzer.report.json.against import against_json
from analyzer.report.json.document import dumps, to_json
from analyzer.results import CommunicationTotal, Report, TimeEstimate, TrainingTime
from tests.fake_report import MIB, small_report

GIB = 2**30


def _compared(tmp_path: Path, old: Report | dict[str, Any], new: Report) -> Against:
    file = tmp_path / "old.json"
    file.write_text(dumps(old if isinstance(old, dict) else to_json(old)))
    return compare(read_old(str(file)), new)


def _text(result: Against) -> str:
    return draw(against(result), width=120)


def _with_memory(report: Report, **changes: Any) -> Report:
    """The report with other memory of its highest-memory rank, which is the first."""
    first, *others = report.ranks
    return replace(report, ranks=(replace(first, memory=replace(first.memory, **changes)), *others))


def test_nothing_changed(tmp_path: Path) -> None:
    result = _compared(tmp_path, small_report(), small_report())
    assert dict(result.sections) == {}
    assert against_json(result) == {"file": str(tmp_path / "old.json"), "changed": False}
    assert "  Nothing changed." in _text(result).splitlines()


def test_the_part_of_the_memory_that_changed_most_is_first_and_totals_are_last(tmp_path: Path) -> None:
    old = small_report()
    memory = old.ranks[0].memory
    new = _with_memory(
        old,
        parameters_bytes=memory.parameters_bytes + 100 * MIB,
        activations_bytes=memory.activations_bytes - 400 * MIB,
        transient_bytes=memory.transient_bytes + 200 * MIB,
        peak_allocated_bytes=memory.peak_allocated_bytes - 100 * MIB,
        device_bytes=memory.device_bytes - 100 * MIB,
    )
    result = _compared(tmp_path, old, new)
    assert {*result.sections} == {"memory"}
    assert [(change.field, change.difference) for change in result.sections["memory"]] == [
        ("rank.memory.activations_bytes", -400 * MIB),
        ("rank.memory.transient_bytes", 200 * MIB),
        ("rank.memory.parameters_bytes", 100 * MIB),
        ("rank.memory.peak_allocated_bytes", -100 * MIB),
        ("rank.memory.device_bytes", -100 * MIB),
    ]
    change = result.sections["memory"][0]
    assert change.percent == pytest.approx(-100 * 400 * MIB / memory.activations_bytes)
    text = _text(result)
    assert "Device memory of the highest-memory rank: -100.00 MiB (-0.3%). Changed most: saved activations, -400.00 MiB." in text
    assert text.index("saved activations  ") < text.index("temporary tensors at the peak  ") < text.index("peak allocated  ")


def test_the_highest_memory_rank_of_each_report_is_compared(tmp_path: Path) -> None:
    """The second stage becomes the highest-memory rank: its memory is compared with that of the first stage before."""
    old = small_report()
    first, second = old.ranks
    assert first.memory.device_bytes > second.memory.device_bytes
    higher = replace(second.memory, device_bytes=first.memory.device_bytes + GIB)
    result = _compared(tmp_path, old, replace(old, ranks=(first, replace(second, memory=higher))))
    by_field = {change.field: change for change in result.sections["memory"]}
    assert by_field["rank.memory.device_bytes"].difference == GIB
    assert by_field["rank.memory.activations_bytes"].new == second.memory.activations_bytes


def test_groups_that_appear_or_disappear_are_compared_with_0(tmp_path: Path) -> None:
    old = small_report()
    some = CommunicationTotal(
        calls_per_iteration=2, bytes_per_iteration=2**40, cluster_calls_per_iteration=4, cluster_bytes_per_iteration=2**41
    )
    kept = next(iter(old.communication_totals))
    new = replace(old, communication_totals={kept: old.communication_totals[kept], "ep": some})
    found = _compared(tmp_path, old, new).sections["communication"]
    gone = [kind for kind in old.communication_totals if kind != kept]
    assert [change.field.split(".")[1] for change in found][:4] == ["ep"] * 4  # the largest change is first
    by_field = {change.field: (change.old, change.new, change.percent) for change in found}
    assert by_field["communication_totals.ep.calls_per_iteration"] == (0, 2, None)
    assert {change.field.split(".")[1] for change in found} == {"ep", *gone}
    assert all(change.new == 0 for change in found if change.field.split(".")[1] in gone)
    assert "expert (ep): bytes of one rank" in _text(_compared(tmp_path, old, new))


def test_the_verdict(tmp_path: Path) -> None:
    old = small_report()
    verdict = replace(old.verdict, fits=False, state="does not fit", headroom_bytes=-GIB)
    result = _compared(tmp_path, old, replace(old, verdict=verdict))
    assert {change.field for change in result.sections["verdict"]} == {"verdict.state", "verdict.headroom_bytes"}
    assert "The verdict differs: fits before, does not fit now." in _text(result)


TRAINING = TrainingTime(
    iterations=1000,
    tokens=10**9,
    days=10.0,
    gpu_hours=3840.0,
    training_days=10.0,
    evaluation_days=0.0,
    checkpoint_days=0.0,
    checkpoint_bytes=0,
    cost=7680.0,
)
TIME = TimeEstimate(
    iteration_seconds=4.0,
    range_seconds=None,
    tokens_per_second_per_gpu=1000.0,
    model_flops_per_iteration=10**15,
    model_tflops_per_gpu=400.0,
    model_flops_utilization=0.4,
    hardware_flops_utilization=0.4,
    parts_seconds={"gemm": 2.5, "exposed_dp": 0.5, "bubble": 1.0},
    pipeline_rank=0,
    peak_flops=1e15,
    training=TRAINING,
    calibration="",
    bottleneck="",
)


def test_the_part_of_the_time_that_changed_most_is_first_and_totals_are_last(tmp_path: Path) -> None:
    faster = replace(
        TIME,
        iteration_seconds=3.0,
        tokens_per_second_per_gpu=4000 / 3,
        parts_seconds={"gemm": 2.75, "exposed_dp": 0.5 * (1 + 1e-12), "bubble": 0.0},
        training=replace(TRAINING, days=7.5, gpu_hours=2880.0, cost=5760.0),
    )
    result = _compared(tmp_path, replace(small_report(), time=TIME), replace(small_report(), time=faster))
    assert {*result.sections} == {"time"}
    assert [(change.field, change.difference) for change in result.sections["time"]] == [
        ("time.parts_seconds.bubble", -1.0),
        ("time.parts_seconds.gemm", 0.25),
        ("time.iteration_seconds", -1.0),
        ("time.tokens_per_second_per_gpu", pytest.approx(1000 / 3)),
        ("time.training.days", -2.5),
        ("time.training.gpu_hours", -960.0),
        ("time.training.cost", -1920.0),
    ]
    assert against_json(result)["time"][2] == {
        "field": "time.iteration_seconds", "old": 4.0, "new": 3.0, "difference": -1.0, "percent": -25.0,
    }  # fmt: skip
    text = _text(result)
    assert "Iteration: -1.00 s (-25.0%). Changed most: pipeline bubble, -1.00 s." in text
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
    for row in (
        ["GEMMs", "2.50 s", "2.75 s", "+250 ms", "+10.0%"],
        ["tokens/s/GPU", "1,000", "1,333", "+333", "+33.3%"],
        ["days of the training", "10.00", "7.50", "-2.50", "-25.0%"],
        ["cost", "7,680", "5,760", "-1,920", "-25.0%"],
    ):
        assert row in cells


def test_times_are_compared_only_if_both_reports_have_them(tmp_path: Path) -> None:
    without, with_time = small_report(), replace(small_report(), time=TIME)
    assert dict(_compared(tmp_path, without, with_time).sections) == {}
    assert dict(_compared(tmp_path, with_time, without).sections) == {}
    unpaid = replace(small_report(), time=replace(TIME, training=replace(TRAINING, cost=None)))
    assert dict(_compared(tmp_path, unpaid, with_time).sections) == {}
    endless = replace(small_report(), time=replace(TIME, iteration_seconds=5.0, training=None))
    assert [change.field for change in _compared(tmp_path, endless, with_time).sections["time"]] == ["time.iteration_seconds"]


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("iteration_seconds",), "fast", "'time.iteration_seconds' is not a number"),
        (("iteration_seconds",), float("nan"), "'time.iteration_seconds' is not a number"),
        (("parts_seconds", "gemm"), True, "'time.parts_seconds.gemm' is not a number"),
        (("parts_seconds",), None, "'parts_seconds' is missing"),
        (("training",), 5, "'training' is missing"),
        (("training", "cost"), 10**400, "'time.training.cost' is not a number"),
    ],
)
def test_times_that_are_no_numbers_are_refused(path: tuple[str, ...], value: object, fault: str, tmp_path: Path) -> None:
    document = to_json(replace(small_report(), time=TIME))
    record = document["time"]
    for step in path[:-1]:
        record = record[step]
    record[path[-1]] = value
    with pytest.raises(InputError, match=fault):
        _compared(tmp_path, document, small_report())


def test_other_engines_and_gpus_are_named(tmp_path: Path) -> None:
    old = small_report()
    new = replace(old, engine="shadow", verdict=replace(old.verdict, gpu="A100-80GB"))
    result = _compared(tmp_path, old, new)
    assert {*result.sections} == {"source"}
    text = _text(result)
    assert "The engines differ: formula before, shadow now." in text
    assert "The GPUs differ: H100-80GB before, A100-80GB now." in text
    assert "Nothing else changed." in text


def test_layout_model_and_batch(tmp_path: Path) -> None:
    old = to_json(small_report())
    old["parallel"]["virtual_pipeline"] = 4
    old["parallel"]["sequence_parallel"] = not old["parallel"]["sequence_parallel"]
    old["batch"]["global"] = 256
    old["world"]["size"] = 8
    old["model"]["parameters"] -= 10
    result = _compared(tmp_path, old, small_report())
    assert {name: [change.field for change in changes] for name, changes in result.sections.items()} == {
        "model": ["model.parameters"],
        "layout": ["world.size", "parallel.virtual_pipeline", "parallel.sequence_parallel"],
        "batch": ["batch.global"],
    }
    lines = [line.split("  ") for line in _text(result).splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    for row in (["GPUs", "8", "16", "+8"], ["virtual pipeline stages", "4", "none"], ["global batch size", "256", "512", "+256"]):
        assert row in cells
    assert against_json(result)["batch"] == [
        {"field": "batch.global", "old": 256, "new": 512, "difference": 256, "percent": 100.0},
    ]


def test_a_report_of_an_older_version_may_lack_newer_fields(tmp_path: Path) -> None:
    old = to_json(small_report())
    for record, field in (("verdict", "margin_bytes"), ("verdict", "state"), ("batch", "sequence_length")):
        del old[record][field]
    assert dict(_compared(tmp_path, old, small_report()).sections) == {}


def _without(*path: str | int) -> str:
    """A report without one of its fields."""
    document: Any = to_json(small_report())
    record = document
    for step in path[:-1]:
        record = record[step]
    del record[path[-1]]
    return json.dumps(document)


COMPLETE = dumps(to_json(small_report()))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "is not JSON, or not complete"),
        ("It fits", "is not JSON, or not complete"),
        (COMPLETE[: len(COMPLETE) // 2], "is not JSON, or not complete"),
        (b"\xff\xfe{", "is not JSON, or not complete"),
        ("[" * 100_000, "is not JSON, or not complete"),
        ("[]", "is not a JSON report"),
        ("{}", "is not a JSON report"),
        ('{"schema": "training-info-check/1"}', "has the schema 'training-info-check/1' instead of 'training-info/1'"),
        ('{"schema": "training-info/1"}', "is not a complete report: 'ranks' is missing"),
        (_without("ranks", 0, "memory"), "is not a complete report: 'memory' is missing"),
        (_without("ranks", 0, "memory", "device_bytes"), "is not a complete report: 'device_bytes' is missing"),
        (_without("ranks", 0, "ranks"), "is not a complete report: 'ranks' is missing"),
        (_without("verdict"), "is not a complete report: 'verdict' is missing"),
        (COMPLETE.replace('"micro": 4', '"micro": [4]'), "'batch.micro' is neither an integer nor text"),
        (COMPLETE.replace('"micro": 4', '"micro": NaN'), "'batch.micro' is neither an integer nor text"),
        (COMPLETE.replace('"micro": 4', f'"micro": {10**400}'), "'batch.micro' is neither an integer nor text"),
    ],
)
def test_a_file_that_is_not_a_report_is_refused(content: str | bytes, fault: str, tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as caught:
        read_old(str(file))
    assert caught.value.option == "--info-against"
    assert fault in caught.value.fault
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_file_that_cannot_be_read_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^--info-against: cannot read .*; give a report"):
        read_old(str(tmp_path / name))
