"""Launches of frameworks that the release which the framework is based on refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer import analyze
from analyzer.errors import InputError

OPTIONS = "--model Qwen/Qwen3-Next-80B-A3B-Instruct --max_length 4096 --expert_model_parallel_size 8 --micro_batch_size 1"
"""`megatron sft` of ms-swift, which is based on 0.16. Linear attention exchanges its state between ranks from 0.18 on."""


def script(tmp_path: Path, more: str) -> str:
    path = tmp_path / "train.sh"
    path.write_text(f"NPROC_PER_NODE=8 megatron sft {OPTIONS} --global_batch_size 16 {more}\n")
    return str(path)


def test_a_later_release_is_assumed(tmp_path: Path) -> None:
    report = analyze([script(tmp_path, "--context_parallel_size 2")], environ={}, folder=tmp_path)
    assert report.job.megatron in ("0.18.2", "0.19.0")
    assert "the release that the framework is based on refuses the launch: --context-parallel-size" in " ".join(report.assumptions)


def test_the_release_that_is_asked_for_is_not_changed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be used with linear attention"):
        analyze([script(tmp_path, "--context_parallel_size 2"), "--info-megatron", "0.16.1"], environ={}, folder=tmp_path)


def test_what_all_releases_refuse_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="8 GPUs cannot be split"):
        analyze([script(tmp_path, "--pipeline_model_parallel_size 2")], environ={}, folder=tmp_path)
