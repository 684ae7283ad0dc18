"""Fields of a job that do not change the recorded step are supported with every value."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allocator_hook.step.supported import check_supported
from analyzer.hardware.gpus import GPUS, Gpu
from analyzer.specs.software import NcclSpec
from tests.job_of import job_of


@pytest.mark.parametrize("gpu", GPUS, ids=lambda each: each.name)
def test_every_gpu_is_supported(gpu: Gpu) -> None:
    check_supported(replace(job_of("--global-batch-size 16"), hardware=gpu.spec))


def test_settings_of_nccl_are_supported() -> None:
    settings = NcclSpec(buffer_bytes=1, nvlink_chunk=1, network_chunk=1, fewest_channels=2, most_channels=2, trees=False)
    check_supported(replace(job_of("--global-batch-size 16"), nccl=replace(settings, sharp=False, forwards=False)))
