"""Options about time on the command line: values in the JSON report, and one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analyzer.hardware.speeds import SPEEDS as SPEEDS_FILE
from tests.command import Outcome, assert_refused, report, run

MODEL = (
    "--nnodes 2 --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --bf16 --tokenizer-type NullTokenizer "
    "--vocab-size 32000 --pipeline-model-parallel-size 2"
)
GPU = "--info-gpu H100-80GB"
SPEEDS: dict[str, Any] = {
    "name": "imagined",
    "architecture": "hopper",
    "peak_tflops": {"32": 100, "16": 200, "8": 400, "4": 800},
    "hbm_gb_per_s": 2000,
    "nvlink_gb_per_s": 300,
    "nvlink_domain": 8,
    "network_gb_per_s": 25,
}


def time(line: str = "", *, gpu: str = GPU) -> dict[str, Any]:
    found: dict[str, Any] = report(*f"{MODEL} {gpu} {line}".split())["time"]
    return found


def refused(line: str, named: str, part: str, *, gpu: str = GPU) -> None:
    outcome: Outcome = run(*f"{MODEL} {gpu} {line}".split(), "--info-json", "-")
    assert_refused(outcome, named)
    assert part in outcome.err


def written(folder: Path, content: object) -> Path:
    path = folder / "file.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_fields_of_the_report() -> None:
    found = time("--train-iters 1000")
    numbers = {"iteration_seconds", "tokens_per_second_per_gpu", "model_tflops_per_gpu", "model_flops_utilization", "peak_flops"}
    assert all(isinstance(found[name], float) and found[name] > 0 for name in numbers | {"hardware_flops_utilization"})
    assert isinstance(found["model_flops_per_iteration"], int)
    assert set(found["parts_seconds"]) == {
        *("gemm", "attention", "memory_bound", "exposed_tp", "exposed_cp", "exposed_ep", "exposed_pp", "exposed_dp", "bubble"),
        *("optimizer", "host"),
    }
    assert {"iterations", "tokens", "days", "gpu_hours", "cost"} <= set(found["training"])
    assert found["training"]["cost"] is None
    assert found["calibration"] == "built in, for H100-80GB"
    assert found["flops_definition"]
    assert len(found["range_seconds"]) == 2
    seconds = found["iteration_seconds"]
    assert found["tokens_per_second_per_gpu"] == pytest.approx(64 * 2048 / seconds / 16)
    assert found["model_tflops_per_gpu"] == pytest.approx(found["model_flops_per_iteration"] / seconds / 16 / 1e12)
    assert found["model_flops_utilization"] == pytest.approx(found["model_tflops_per_gpu"] / 989)


def test_without_a_gpu_there_is_no_time() -> None:
    assert "time" not in report(*MODEL.split())


def test_the_length_and_the_price_of_a_training() -> None:
    """15e12 tokens are 7,324,218,750 samples and 114,440,917 batches of 64; each takes the seconds of an iteration on 16 GPUs."""
    found = time("--info-tokens 15T --info-price 2.5 --train-iters 7 --eval-iters 0")
    training = found["training"]
    assert training["iterations"] == 114_440_917
    assert training["tokens"] == 15 * 10**12
    seconds = 114_440_917 * found["iteration_seconds"]
    assert training["days"] == pytest.approx(seconds / 86_400)
    assert training["gpu_hours"] == pytest.approx(16 * seconds / 3600)
    assert training["cost"] == pytest.approx(2.5 * training["gpu_hours"])


def test_the_options_of_megatron_give_the_length() -> None:
    assert time()["training"] is None
    assert time("--train-iters 500")["training"]["iterations"] == 500
    assert time("--train-samples 6500")["training"]["iterations"] == 6500 // 64


def test_checkpoints_of_a_training() -> None:
    """14 bytes for each parameter, at 2 GB/s on each of two nodes; asynchronous ones take no time."""
    words = "--train-iters 1000 --save ckpt --save-interval 100 --eval-iters 0"
    document = report(*f"{MODEL} {GPU} {words}".split())
    training, parameters = document["time"]["training"], document["model"]["parameters"]
    assert training["checkpoint_bytes"] == 14 * parameters
    assert training["checkpoint_days"] == pytest.approx(10 * 14 * parameters / 4e9 / 86_400)
    assert training["days"] == pytest.approx(training["training_days"] + training["checkpoint_days"])
    assert time(f"{words} --no-save-optim")["training"]["checkpoint_bytes"] == 2 * parameters
    assert time(f"{words} --async-save --use-dist-ckpt")["training"]["checkpoint_days"] == 0


def test_a_faster_network() -> None:
    usual, slow, fast = time(), time("--info-network 5"), time("--info-network 400")
    assert fast["iteration_seconds"] < usual["iteration_seconds"] < slow["iteration_seconds"]
    assert time("--info-network 50") == usual  # the value of a DGX H100: 400 Gb/s for each GPU


def test_the_speeds_of_an_unknown_gpu(tmp_path: Path) -> None:
    found = time(f"--info-hardware {written(tmp_path, SPEEDS)}")
    assert found["peak_flops"] == 200e12
    assert found["calibration"].endswith("with the kernels of H100-80GB")
    assert found["iteration_seconds"] > time()["iteration_seconds"]


def test_a_file_with_speeds_stands_for_the_gpu(tmp_path: Path) -> None:
    without = time(f"--info-hardware {written(tmp_path, SPEEDS)}", gpu="")
    assert without["peak_flops"] == 200e12


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("no JSON", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([1, 2], "is not a JSON object"),
        ({**SPEEDS, "hbm_gb_per_s": 0}, "has no valid hbm_gb_per_s"),
        ({**SPEEDS, "hbm_gb_per_s": -1}, "has no valid hbm_gb_per_s"),
        ({**SPEEDS, "hbm_gb_per_s": True}, "has no valid hbm_gb_per_s"),
        ({**SPEEDS, "nvlink_domain": "8"}, "has no valid nvlink_domain"),
        ({**SPEEDS, "nvlink_domain": 0.5}, "has no valid nvlink_domain"),
        ({**SPEEDS, "multiprocessors": 0}, "has no valid multiprocessors"),
        ({**SPEEDS, "multiprocessors": -3}, "has no valid multiprocessors"),
        ({**SPEEDS, "multiprocessors": "many"}, "has no valid multiprocessors"),
        ({**SPEEDS, "name": "two\nlines"}, "has no valid name"),
        ({**SPEEDS, "name": ["imagined"]}, "has no valid name"),
        ({**SPEEDS, "peak_tflops": {"16": 200}}, "peak_tflops"),
        ({**SPEEDS, "peak_tflops": 200}, "peak_tflops"),
        ({**SPEEDS, "peak_tflops": {"32": 100, "16": 1e400, "8": 400, "4": 800}}, "has no valid peak_tflops.16"),
        ({name: value for name, value in SPEEDS.items() if name != "network_gb_per_s"}, "network_gb_per_s"),
        ({**SPEEDS, "pod_gpus": 8}, "has no valid spine_gb_per_s"),
        ({**SPEEDS, "spine_gb_per_s": 5}, "has no valid pod_gpus"),
        ({**SPEEDS, "pod_gpus": 0.5, "spine_gb_per_s": 5}, "has no valid pod_gpus"),
    ],
)
def test_files_with_wrong_speeds(tmp_path: Path, content: object, part: str) -> None:
    refused(f"--info-hardware {written(tmp_path, content)}", "--info-hardware", part)


@pytest.mark.parametrize(
    ("content", "field", "known"),
    [
        ({**SPEEDS, "hbm_gb_per_sec": 4000}, "hbm_gb_per_sec", "hbm_gb_per_s"),
        ({**SPEEDS, "two\nlines": 1}, "two\\nlines", "network_gb_per_s"),
        ({**SPEEDS, "peak_tflops": {**SPEEDS["peak_tflops"], "64": 50}}, "peak_tflops.64", "peak_tflops.32, peak_tflops.16"),
        ({"gpus": {"imagined": SPEEDS}}, "gpus", "peak_tflops"),
    ],
)
def test_unknown_fields_of_speeds(tmp_path: Path, content: object, field: str, known: str) -> None:
    line = f"--info-hardware {written(tmp_path, content)}"
    refused(line, "--info-hardware", f"has the unknown field '{field}'; known are")
    refused(line, "--info-hardware", known)


def test_an_entry_of_the_table_is_a_valid_file(tmp_path: Path) -> None:
    entry = json.loads(SPEEDS_FILE.read_text())["gpus"]["H100-80GB"]
    found = time(f"--info-hardware {written(tmp_path, {'name': 'H100-80GB', **entry})}")
    assert found["iteration_seconds"] == time()["iteration_seconds"]


def test_a_slow_spine_between_pods(tmp_path: Path) -> None:
    """The two nodes are in two pods, and exchange gradients."""
    plain = time(f"--info-hardware {written(tmp_path, SPEEDS)}")
    slow = time(f"--info-hardware {written(tmp_path, {**SPEEDS, 'pod_gpus': 8, 'spine_gb_per_s': 1})}")
    one = time(f"--info-hardware {written(tmp_path, {**SPEEDS, 'pod_gpus': 16, 'spine_gb_per_s': 1})}")
    assert slow["iteration_seconds"] > 1.02 * plain["iteration_seconds"]
    assert one["iteration_seconds"] == plain["iteration_seconds"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for option in ("--info-hardware", "--info-calibration"):
        refused(f"{option} {tmp_path / 'missing'}", option, "missing")
        refused(f"{option} {tmp_path}", option, str(tmp_path))
        binary = tmp_path / "binary"
        binary.write_bytes(b"\xff\xfe\x00")
        refused(f"{option} {binary}", option, "is not JSON")


CALIBRATION: dict[str, Any] = {
    "schema": "training-info-calibration/1",
    "gpu": "H100-80GB",
    "efficiencies": {"gemm_16": 0.4, "memory": 0.5},
}


def test_measured_efficiencies(tmp_path: Path) -> None:
    path = written(tmp_path, CALIBRATION)
    found = time(f"--info-calibration {path}")
    assert found["calibration"] == f"measured: {path}"
    assert found["parts_seconds"]["memory_bound"] > time()["parts_seconds"]["memory_bound"]
    assert found["parts_seconds"]["gemm"] > time()["parts_seconds"]["gemm"]
    assert found["parts_seconds"]["attention"] == time()["parts_seconds"]["attention"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"gpu": "A100-80GB"}, "A100-80GB"),
        ({"schema": "other"}, "is not a calibration"),
        ({"efficiencies": [1]}, "is not a calibration"),
        ({"efficiencies": {"gemm_16": 0}}, "gemm_16"),
        ({"efficiencies": {"gemm_16": -0.1}}, "gemm_16"),
        ({"efficiencies": {"gemm_16": "0.5"}}, "gemm_16"),
        ({"efficiencies": {"gemm_16": True}}, "gemm_16"),
        ({"efficiencies": {"gemm_16": 1e400}}, "gemm_16"),
        ({"efficiencies": {"gemm_16": 1e-320}}, "gemm_16"),
        ({"efficiencies": {"latency": 1e308}}, "latency"),
        ({"efficiencies": {"gemm_17": 0.5}}, "has the unknown field 'gemm_17'; known are gemm_32, gemm_16"),
        ({"gemm_16": 0.5}, "has the unknown field 'gemm_16'; known are schema, gpu"),
    ],
)
def test_wrong_calibrations(tmp_path: Path, change: dict[str, Any], part: str) -> None:
    refused(f"--info-calibration {written(tmp_path, {**CALIBRATION, **change})}", "--info-calibration", part)


@pytest.mark.parametrize("text", ["no JSON", "[]", "3", "null"])
def test_files_that_are_no_calibrations(tmp_path: Path, text: str) -> None:
    refused(f"--info-calibration {written(tmp_path, text)}", "--info-calibration", "is not")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--info-tokens", value) for value in ("0", "-1", "T", "15X", "1e400", "nan", "inf", "many", "1e18")),
        *(("--info-price", value) for value in ("0", "-1", "nan", "inf", "free")),
        *(("--info-network", value) for value in ("0", "-5", "nan", "fast", "1e-320", "1e300")),
        *(("--info-efficiency", value) for value in ("0.5", "memory=0.9", "flops=1.1,memory=0.9", "flops=0,memory=0.9")),
        *(
            ("--info-efficiency", value)
            for value in ("flops=0.5,memory=nan", "flops=1e-320,memory=0.9", "flops=0.5,memory=0.9,speed=1", "flops=a,memory=0.9")
        ),
    ],
)
def test_wrong_values(option: str, value: str) -> None:
    refused(f"{option} {value}", option, ";")


@pytest.mark.parametrize(
    "line",
    [
        "--info-tokens 15T",
        "--info-price 2",
        "--info-network 50",
        "--info-efficiency flops=0.5,memory=0.9",
        "--info-calibration file.json",
    ],
)
def test_options_about_time_need_a_gpu(line: str) -> None:
    refused(line, line.split()[0], "--info-gpu", gpu="")


def test_suffixes_of_tokens() -> None:
    for text, tokens in (("131072", 131_072), ("300B", 300 * 10**9), ("1.4T", 1_400_000_000_000), ("1e9", 10**9), ("2k", 2000)):
        training = time(f"--info-tokens {text}")["training"]
        assert 0 <= training["tokens"] - tokens < 2048  # whole samples


def test_the_console_report_names_the_training() -> None:
    outcome = run(*f"{MODEL} {GPU} --info-tokens 300B --info-price 2".split())
    assert outcome.status == 0
    assert "Time (estimate)" in outcome.out
    assert "300.0 billion tokens" in outcome.out
    assert " GPU-hours at 2.00)" in outcome.out
