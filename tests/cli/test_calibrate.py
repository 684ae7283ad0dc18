"""`--info-calibrate`: refusals without a GPU, and a run on a machine whose efficiencies are known."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from analyzer import analyze
from analyzer.api import Launch, read_launch
from analyzer.cli import calibrate
from analyzer.errors import InputError
from tests.command import Outcome, assert_refused, run

LAUNCH = (
    "--nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --bf16 --lr 1e-4 --train-iters 10 "
    "--vocab-size 32000 --tokenizer-type NullTokenizer"
).split()
H100 = "NVIDIA H100 80GB HBM3"


def with_torch(monkeypatch: pytest.MonkeyPatch, *, gpu: bool) -> None:
    """Pretend that torch is installed, with or without a GPU."""
    monkeypatch.setattr(calibrate, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: gpu)))


def calibrated(path: Path, *options: str) -> Outcome:
    return run(*LAUNCH, "--info-calibrate", str(path), *options)


def known_offload(disk: Path | None, show: object) -> tuple[dict[str, object], list[str]]:
    """A machine with a slow link to the GPU."""
    assert callable(show)
    return {"rates": {"pcie_to_gpu_gb_per_s": 10.0}, "measured": [], "disk": None}, [f"the disk of {disk} failed"]


def test_without_a_gpu_the_exit_status_is_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(monkeypatch, gpu=False)
    outcome = calibrated(tmp_path / "file.json", "--info-gpu", "H100-80GB")
    assert_refused(outcome, "--info-calibrate")
    expected = "--info-calibrate: there is no CUDA GPU on this machine; run it on the machine of the training\n"
    assert outcome.err == f"get-training-info: {expected}"
    assert list(tmp_path.iterdir()) == []


def test_without_torch_the_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "find_spec", lambda name: None if name == "torch" else importlib.util.find_spec(name))
    outcome = calibrated(tmp_path / "file.json")
    assert_refused(outcome, "--info-calibrate")
    assert "torch" in outcome.err


def test_a_file_that_cannot_be_written_is_refused_before_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(monkeypatch, gpu=True)
    for path in (tmp_path / "missing" / "file.json", tmp_path, Path("/dev/null")):
        assert_refused(calibrated(path), "--info-calibrate")


def test_the_option_needs_a_value_and_is_no_part_of_the_api() -> None:
    assert_refused(run(*LAUNCH, "--info-calibrate"), "--info-calibrate")
    with pytest.raises(InputError, match=r"--info-calibrate: belongs to the command line"):
        analyze([*LAUNCH, "--info-calibrate", "file.json"])


def test_the_speeds_are_those_of_the_gpu_of_the_machine() -> None:
    def launch_on(*options: str) -> Launch:
        return read_launch([*LAUNCH, *options], environ={}, folder=Path())

    assert calibrate.speed_of_gpu(launch_on("--info-gpu", "H100"), H100).name == "H100-80GB"
    assert calibrate.speed_of_gpu(launch_on("--info-gpu", "MI300X"), "a name that is not known").name == "MI300X-192GB"
    with pytest.raises(InputError, match=r"--info-gpu: this machine has H100-80GB, not A100-80GB"):
        calibrate.speed_of_gpu(launch_on("--info-gpu", "A100-80GB"), H100)
    with pytest.raises(InputError, match=r"the speeds of the GPU NVIDIA GeForce RTX 4090 are not known.*--info-hardware"):
        calibrate.speed_of_gpu(launch_on("--info-gpu", "RTX-4090"), "NVIDIA GeForce RTX 4090")


def test_progress_without_a_terminal_is_a_line_for_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    show = calibrate.plain_progress()
    for done in range(101):
        show(done, 100, "GEMM" if done < 100 else "")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[0] == "measured 0 of 100: GEMM"
    assert lines[-1] == "measured 100 of 100"


def test_a_calibration_changes_the_predicted_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from allocator_hook.calibrate import session
    from tests.allocator_hook.calibrate.known_machine import KNOWN, KnownRunner

    monkeypatch.setattr(calibrate, "require_gpu", lambda: None)
    monkeypatch.setattr(session, "gpu_name", lambda _environ: H100)
    monkeypatch.setattr(session, "TorchRunner", KnownRunner)
    monkeypatch.setattr(session, "measured_offload", known_offload)
    path = tmp_path / "calibration.json"
    path.write_text("an older file")
    outcome = calibrated(path, "--info-gpu", "H100-80GB", "--info-calibrate-disk", str(tmp_path))
    assert outcome.status == 0, outcome.err
    assert outcome.err.count("measured ") == 11
    assert "gemm_16" in outcome.out
    assert "Not measured" in outcome.out
    assert "torchrun did not start several processes" in " ".join(outcome.out.split())
    assert f"the disk of {tmp_path} failed" in " ".join(outcome.out.split())
    assert "pcie to gpu 10" in " ".join(outcome.out.split())
    assert [each.name for each in tmp_path.iterdir()] == ["calibration.json"]
    assert json.loads(path.read_text())["efficiencies"]["gemm_16"] == pytest.approx(KNOWN["gemm_16"], rel=0.01)

    def predicted(*options: str) -> dict[str, float]:
        report = run(*LAUNCH, "--info-gpu", "H100-80GB", "--info-json", "-", *options).report
        parts: dict[str, float] = report["time"]["parts_seconds"]
        return parts

    shipped, measured = predicted(), predicted("--info-calibration", str(path))
    assert measured["gemm"] < 0.95 * shipped["gemm"], "the known machine has faster GEMMs"
    assert measured["attention"] < 0.95 * shipped["attention"]
    assert_refused(run(*LAUNCH, "--info-gpu", "A100-80GB", "--info-calibration", str(path)), "--info-calibration")

    offloaded = (
        "--info-model facebook/opt-30b --info-gpu H100-80GB --info-world-size 1 --info-inference batch=4,prompt=128,generate=8 "
    )
    offloaded += "--info-offload weights=0/100/0"
    before = run(*offloaded.split(), "--info-json", "-").report["inference"]["latency_seconds"]
    after = run(*offloaded.split(), "--info-json", "-", "--info-calibration", str(path)).report["inference"]["latency_seconds"]
    assert after / before == pytest.approx(0.8 * 63 / 10, rel=0.05), "the link limits this policy, and is that much slower"


@pytest.mark.parametrize("place", ["missing", "calibration.json"])
def test_the_folder_of_the_disk_is_refused_before_the_measurement(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_torch(monkeypatch, gpu=True)
    (tmp_path / "calibration.json").write_text("")
    outcome = calibrated(tmp_path / "new.json", "--info-gpu", "H100-80GB", "--info-calibrate-disk", str(tmp_path / place))
    assert_refused(outcome, "--info-calibrate-disk")
    assert "is no folder that you may write to" in outcome.err


def test_the_folder_of_the_disk_needs_a_calibration(tmp_path: Path) -> None:
    assert_refused(run(*LAUNCH, "--info-calibrate-disk", str(tmp_path)), "--info-calibrate-disk")
