"""`--info-log` and logs in `--info-calibration` on the command line.

The seconds in the logs are predictions with other options, so that what explains them is known.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from analyzer.api import analyze
from analyzer.cli.script import _numbered
from analyzer.errors import InputError
from analyzer.time.efficiencies import efficiencies_of
from analyzer.time.run_log.factors import FIELDS
from tests.command import assert_refused, report, run
from tests.report.printed import section, titles
from tests.time.run_log.logs import line, memory, steady, timers
from tests.time.speeds import known

MODEL = (
    "--nnodes 2 --nproc-per-node 8 pretrain_gpt.py --num-layers 16 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --bf16 --tokenizer-type NullTokenizer "
    "--vocab-size 32000 --pipeline-model-parallel-size 2 --info-gpu H100-80GB"
).split()


@cache
def seconds(*options: str) -> float:
    found: float = report(*MODEL, *options)["time"]["iteration_seconds"]
    return found


def slower_kernels(folder: Path, factor: float) -> str:
    """A calibration in which GEMMs and attention have `factor` of their shipped speed."""
    shipped = efficiencies_of(known("H100-80GB"))
    path = folder / "slower.json"
    values = {field: factor * getattr(shipped, field) for field in FIELDS["clock"]}
    path.write_text(json.dumps({"schema": "training-info-calibration/1", "gpu": "H100-80GB", "efficiencies": values}))
    return str(path)


def written(folder: Path, *lines: str, name: str = "run.log") -> str:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def compared(path: str, *options: str) -> dict[str, Any]:
    found: dict[str, Any] = report(*MODEL, *options, "--info-log", path)["log"]
    return found


def causes(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in found["causes"]}


def test_measured_beside_predicted(tmp_path: Path) -> None:
    predicted = report(*MODEL)
    first = predicted["ranks"][0]
    allocated, peak = first["memory"]["allocated_bytes"], first["memory"]["peak_allocated_bytes"]
    path = written(
        tmp_path,
        f" > number of parameters on (tensor, pipeline) model parallel rank (0, 0): {first['parameters']}",
        *steady(1.1 * predicted["time"]["iteration_seconds"]),
        memory(0, 10, allocated / 2**20, 1.02 * peak / 2**20, 50_000, 50_000),
    )
    found = compared(path)
    assert found["file"] == path
    assert found["iterations"] == {"first": 11, "last": 40, "values": 30, "left_out": 10}
    rows = {(each["field"], each["ranks"]): each for each in found["figures"]}
    iteration = rows["iteration_seconds", None]
    assert iteration["predicted"] == predicted["time"]["iteration_seconds"]
    assert iteration["percent"] == pytest.approx(10, abs=0.05)
    assert rows["tokens_per_second_per_gpu", None]["percent"] == pytest.approx(100 / 1.1 - 100, abs=0.05)
    assert rows["rank.parameters", "tensor rank 0, pipeline rank 0"]["percent"] == 0
    assert rows["rank.memory.allocated_bytes", "rank 0"]["percent"] == pytest.approx(0, abs=0.01)
    assert rows["rank.memory.peak_allocated_bytes", "rank 0"]["percent"] == pytest.approx(2, abs=0.01)
    assert "launch" not in causes(found)


def test_a_slower_network_is_found(tmp_path: Path) -> None:
    found = causes(compared(written(tmp_path, *steady(seconds("--info-network", "10")))))
    assert found["network"]["factor"] == pytest.approx(10 / 50, rel=0.01)
    assert "--info-network 10)" in found["network"]["text"]


def test_slower_kernels_are_found_and_come_first(tmp_path: Path) -> None:
    measured = seconds("--info-calibration", slower_kernels(tmp_path, 0.85))
    found = compared(written(tmp_path, *steady(measured)))
    assert found["causes"][0]["kind"] == "clock"
    assert found["causes"][0]["factor"] == pytest.approx(0.85, rel=0.01)


def test_an_equal_time_needs_no_explanation(tmp_path: Path) -> None:
    found = causes(compared(written(tmp_path, *steady(1.02 * seconds()))))
    assert found.keys() == {"agreement"}


def test_a_time_that_no_factor_explains(tmp_path: Path) -> None:
    assert causes(compared(written(tmp_path, *steady(50 * seconds())))).keys() == {"unexplained"}


def test_a_log_of_another_launch_is_named_and_its_time_not_explained(tmp_path: Path) -> None:
    sizes = "using world size: 32, data-parallel size: 16, tensor-model-parallel size: 1, pipeline-model-parallel size: 2 "
    found = compared(written(tmp_path, sizes, *steady(2 * seconds(), batch=128)))
    texts = [each["text"] for each in found["causes"]]
    assert {each["kind"] for each in found["causes"]} == {"launch"}
    assert texts == [
        "world_size is 32 in the log and 16 in the launch.",
        "global_batch_size is 128 in the log and 64 in the launch.",
    ]


def test_another_model_has_other_parameters_and_operations(tmp_path: Path) -> None:
    time = report(*MODEL)["time"]
    parameters = " > number of parameters on (tensor, pipeline) model parallel rank (0, 1): 1234567890"
    iterations = [line(number, time["iteration_seconds"], tflops=None) for number in range(1, 31)]
    assert "1,234,567,890 parameters in the log" in causes(compared(written(tmp_path, parameters, *iterations)))["launch"]["text"]
    for rate, differs in ((1.0, False), (1.3, True)):
        tflops = rate * time["model_tflops_per_gpu"]
        lines = [line(number, time["iteration_seconds"], tflops=tflops) for number in range(1, 31)]
        assert ("flops" in causes(compared(written(tmp_path, *lines)))) is differs


def test_iterations_that_differ_and_first_iterations(tmp_path: Path) -> None:
    usual = seconds()
    lines = [line(number, usual * (1.0 if number % 3 == 0 else 1.4), tflops=None) for number in range(1, 61)]
    assert "fast iterations agree with the prediction" in causes(compared(written(tmp_path, *lines)))["spread"]["text"]
    assert "warm_up" in causes(compared(written(tmp_path, *steady(usual, iterations=range(1, 5)))))


def test_timers_say_where_the_difference_is(tmp_path: Path) -> None:
    usual = seconds()
    lines = []
    for number in range(1, 31):
        lines += [line(number, 1.5 * usual, tflops=None), *timers(forward_backward=0.95 * usual, optimizer=0.05 * usual)]
    found = compared(written(tmp_path, *lines))
    rows = {each["field"]: each for each in found["figures"]}
    forward, step = rows["timers.forward-backward"]["predicted"], rows["timers.optimizer"]["predicted"]
    assert 0.9 * usual < forward + step <= usual
    equal = [*steady(1.5 * usual), *timers(forward_backward=1.45 * usual, optimizer=0.05 * usual)]
    assert "outside" not in causes(compared(written(tmp_path, *equal)))
    assert "neither forward and backward nor the optimizer step" in causes(found)["outside"]["text"]
    slow = [line(number, 1.5 * usual, tflops=None) for number in range(1, 31)]
    path = written(tmp_path, *slow, *timers(forward_backward=1.4 * usual, optimizer=0.1 * usual))
    assert causes(compared(path))["timers"]["text"].startswith("The timer forward-backward has the largest part")


def test_passes_that_are_slower_by_one_factor(tmp_path: Path) -> None:
    lines = [line(number, 1.3 * seconds(), tflops=None) for number in range(1, 31)]
    found = compared(written(tmp_path, *lines, *timers(forward_compute=1, backward_compute=1)))
    forward, backward = (each["predicted"] for each in found["figures"] if each["field"].startswith("timers."))
    assert 1.5 * forward < backward < 3 * forward
    for factor, text in ((1.3, "take 1.30 and 1.30 times as long"), (2.0, "The timer forward-compute has the largest part")):
        path = written(tmp_path, *lines, *timers(forward_compute=factor * forward, backward_compute=1.3 * backward))
        assert text in causes(compared(path))["timers"]["text"]


def test_causes_of_another_memory(tmp_path: Path) -> None:
    predicted = report(*MODEL)["ranks"][0]["memory"]
    sizes = [predicted[name] / 2**20 for name in ("allocated_bytes", "peak_allocated_bytes", "peak_reserved_bytes")]

    def texts(allocated: float, peak: float, reserved: float) -> str:
        values = (allocated * sizes[0], peak * sizes[1], reserved * sizes[2], reserved * sizes[2])
        found = compared(written(tmp_path, *steady(seconds()), memory(0, 10, *values)))
        return " ".join(each["text"] for each in found["causes"] if each["kind"] == "memory")

    assert texts(1, 1, 1) == ""
    assert "dtypes of gradients or optimizer states" in texts(1.3, 1.3, 1.3)
    assert "recomputation" in texts(1, 1.3, 1.3)
    assert "expandable_segments" in texts(1, 1, 1.3)


def test_memory_of_the_first_iteration(tmp_path: Path) -> None:
    """Optimizer states do not exist at its peak, and reserved memory is not predicted for it."""
    predicted = report(*MODEL)["ranks"][0]["memory"]
    peak = predicted["peak_allocated_first_iteration_bytes"] / 2**20
    found = compared(written(tmp_path, *steady(seconds()), memory(0, 1, 1.0, peak, 2 * peak, 2 * peak)))
    rows = {each["field"]: each for each in found["figures"]}
    assert rows["rank.memory.peak_allocated_first_iteration_bytes"]["percent"] == pytest.approx(0, abs=0.01)
    assert rows["rank.memory.peak_reserved_bytes"]["predicted"] is None
    assert causes(found).keys() == {"agreement"}


def test_memory_that_pytorch_frees_and_allocates_again(tmp_path: Path) -> None:
    bridge = (
        "[Rank 1] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 63.66 | mem-reserved-gigabytes: 70.2 | "
        "mem-max-allocated-gigabytes: 65.4 | mem-max-reserved-gigabytes: 70.2 | mem-alloc-retires: 1234"
    )
    texts = [each["text"] for each in compared(written(tmp_path, *steady(seconds()), bridge))["causes"]]
    assert any(text.startswith("PyTorch freed cached memory 1,234 times") for text in texts)
    usual = memory(0, 10, *(each * 1024 for each in (20, 70, 78.5, 78.5)))
    texts = [each["text"] for each in compared(written(tmp_path, *steady(seconds()), usual))["causes"]]
    assert any(text.startswith("Reserved memory reaches that of the GPU") for text in texts)


def test_a_log_without_a_gpu_and_what_is_printed(tmp_path: Path) -> None:
    path = written(tmp_path, *steady(2.0), *timers(optimizer=0.1))
    found = report(*MODEL[:-2], "--info-log", path)["log"]
    assert found["figures"][0] == {
        "field": "iteration_seconds",
        "ranks": None,
        "measured": 2.0,
        "predicted": None,
        "percent": None,
    }
    outcome = run(*MODEL, "--info-log", path)
    assert (outcome.status, outcome.err) == (0, "")
    assert titles(outcome.out)[-1].startswith("Measured in ")
    text = " ".join(" ".join(section(outcome.out, "Measured in ")).split())
    assert "11 to 40: 30 values, of which the median is used" in text
    assert "iteration 2.00 s" in text
    assert "would explain it" in text


def test_errors_of_files(tmp_path: Path) -> None:
    other = written(tmp_path, "no log", name="other")
    for path in (other, str(tmp_path / "missing"), str(tmp_path), "/dev/zero"):
        new = tmp_path / "new.json"
        assert_refused(run(*MODEL, "--info-log", path, "--info-json", str(new)), "--info-log")
        assert not new.exists()
        assert_refused(run(*MODEL, "--info-calibration", path), "--info-calibration")
    assert_refused(run(*MODEL, "--info-log", other, "--info-html", other), "--info-html")
    assert_refused(run(*MODEL, "--info-log", other, "--info-search"), "--info-log")


def test_a_log_calibrates_the_speed_of_kernels(tmp_path: Path) -> None:
    measured = seconds("--info-calibration", slower_kernels(tmp_path, 0.85))
    path = written(tmp_path, *steady(measured))
    time = report(*MODEL, "--info-calibration", path)["time"]
    assert time["calibration"].startswith(f"fitted to {path}: speed of GEMMs and attention × 0.8")
    assert "not told by the log: bandwidth of the network, time of the host for an operation" in time["calibration"]
    assert time["range_seconds"] is None
    assert seconds() < 0.95 * measured
    assert time["iteration_seconds"] == pytest.approx(measured, rel=0.03)
    assert "fitted to" in run(*MODEL, "--info-calibration", path).out


def test_a_file_of_this_machine_and_a_log(tmp_path: Path) -> None:
    """With the efficiencies that the log was made with, its factor is 1."""
    calibration = slower_kernels(tmp_path, 0.85)
    path = written(tmp_path, *steady(seconds("--info-calibration", calibration)))
    found = report(*MODEL, "--info-calibration", path, "--info-calibration", calibration)["time"]["calibration"]
    assert found.startswith(f"measured: {calibration}; fitted to {path}: speed of GEMMs and attention × 1.000")


def test_the_python_interface_leaves_logs_to_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--info-log: belongs to the command line"):
        analyze([*MODEL, "--info-log", written(tmp_path, *steady(1.0))])


def test_of_several_launches_each_has_its_own_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with older reports: the log of the second one is run-2.log, and without one it is not compared."""
    monkeypatch.chdir(tmp_path)
    words = ["--info-log", "run.log"]
    assert _numbered(words, 1, tmp_path) == words
    assert _numbered(words, 2, tmp_path) == []
    written(tmp_path, "", name="run-2.log")
    assert _numbered(words, 2, tmp_path) == ["--info-log", "run-2.log"]


def test_logs_that_do_not_calibrate(tmp_path: Path) -> None:
    other = written(tmp_path, *steady(1.0, batch=128))
    refused = run(*MODEL, "--info-calibration", other)
    assert_refused(refused, "--info-calibration")
    assert "global_batch_size is 128 in the log and 64 in the launch" in refused.err
    inference = run(*MODEL, "--info-inference", "batch=1,prompt=128,generate=8", "--info-calibration", other)
    assert_refused(inference, "--info-calibration")
    assert "is the log of a training" in inference.err
    first = slower_kernels(tmp_path, 0.9)
    second = written(tmp_path, Path(first).read_text(), name="second.json")
    assert_refused(run(*MODEL, "--info-calibration", first, "--info-calibration", second), "--info-calibration")
