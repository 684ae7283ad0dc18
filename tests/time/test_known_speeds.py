"""What a report says about a GPU whose speeds or efficiencies are not known."""

from __future__ import annotations

import pytest

from analyzer.api import analyze
from analyzer.errors import InputError
from analyzer.hardware.gpus import find
from analyzer.results import TimeEstimate
from analyzer.time.kernels.tables import shipped_tables

LINE = (
    "--nproc-per-node 8 pretrain_gpt.py --num-layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --bf16 "
    "--max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 16 --tokenizer-type NullTokenizer --vocab-size 32000"
)


def test_a_gpu_without_speeds_gets_a_warning_instead_of_a_time() -> None:
    report = analyze(LINE, gpu="RTX-4090", environ={})
    assert report.time is None
    assert any("--info-hardware" in sentence for sentence in report.warnings)


def width(time: TimeEstimate) -> float:
    """The range of a prediction, relative to it."""
    assert time.range_seconds is not None
    lower, upper = time.range_seconds
    return (upper - lower) / time.iteration_seconds


def test_a_gpu_without_measured_iterations_is_said_to_be_assumed() -> None:
    measured, sibling, other = (analyze(LINE, gpu=gpu, environ={}).time for gpu in ("H100-80GB", "H200-141GB", "MI300X-192GB"))
    assert measured is not None
    assert sibling is not None
    assert other is not None
    assert "assumed" not in measured.calibration
    assert measured.range_seconds is not None
    assert "its kernels were measured" in sibling.calibration
    assert "with the kernels of H100-80GB" in other.calibration
    for found in (sibling, other):
        assert found.range_seconds is not None
        assert width(found) > width(measured), "errors on GPUs that are left out are larger"


def test_without_a_gpu_there_is_neither_time_nor_warning() -> None:
    report = analyze(f"{LINE} --info-gpu-memory 80GiB", environ={})
    assert report.time is None
    assert not any("time" in sentence for sentence in report.warnings)


def test_a_price_without_the_length_of_the_training_gets_a_warning() -> None:
    without, given = (analyze(f"{LINE} --info-price 2 {more}", gpu="H100-80GB", environ={}) for more in ("", "--info-tokens 1B"))
    assert any("--info-tokens" in sentence for sentence in without.warnings)
    assert given.time is not None
    assert given.time.training is not None
    assert given.time.training.cost == pytest.approx(2 * given.time.training.gpu_hours)
    assert not any("--info-tokens" in sentence for sentence in given.warnings)


@pytest.mark.parametrize("other", ["--info-network 50", "--info-calibration file.json"])
def test_the_simple_model_does_not_take_other_settings(other: str) -> None:
    with pytest.raises(InputError, match="--info-efficiency: does not use"):
        analyze(f"{LINE} --info-efficiency flops=0.5 {other}", gpu="H100-80GB", environ={})


def test_tables_of_measured_kernels_have_names_of_gpus() -> None:
    """Otherwise the table of a GPU would be used for it as that of another one."""
    for name in shipped_tables()["gpus"]:
        assert find(name)[0].name == name
