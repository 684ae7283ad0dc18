"""Layers that do not divide over the pipeline: left out up to core 0.10, refused later.

megatron/core/transformer/transformer_block.py, `get_num_layers_to_build`: 0.10.0 rounds down, 0.11.0 asserts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer.errors import InputError
from analyzer.launch.build import build
from analyzer.launch.parse import parse
from analyzer.specs import TrainingJob
from tests.job_of import BASE, HOPPER, job_of

UNEVEN = "--num-layers 27 --pipeline-model-parallel-size 4"


@pytest.mark.parametrize(("release", "layers"), [("0.8", 24), ("0.10", 24)])
def test_earlier_releases_leave_layers_out(release: str, layers: int) -> None:
    job = job_of(UNEVEN, release=f"{release}.0", gpus=4)
    assert job.model.num_layers == layers
    assert "builds 24 layers" in job.unknown[0]


@pytest.mark.parametrize("release", ["0.11.0", "0.12.3", "0.16.1"])
def test_later_releases_refuse_them(release: str) -> None:
    with pytest.raises(InputError, match=r"^--pipeline-model-parallel-size: 27 layers .* --decoder-last-pipeline-num-layers 6"):
        job_of(UNEVEN, release=release, gpus=4)


def test_legacy_models_refuse_them() -> None:
    with pytest.raises(InputError, match=r"^--pipeline-model-parallel-size: 27 layers"):
        job_of(UNEVEN, release="0.7.0", gpus=4)
    assert job_of(f"{UNEVEN} --use-mcore-models", release="0.7.0", gpus=4).model.num_layers == 24


def of_words(line: str) -> TrainingJob:
    arguments, world, _ = parse(line.split(), environ={}, folder=Path("/nowhere"))
    return build(arguments, world, environ={}, gpu=HOPPER, folder=Path("/nowhere"))


def test_a_launch_of_a_fork_may_be_for_an_earlier_release() -> None:
    """Pai-Megatron-Patch has examples for several releases; a launch of Megatron-LM itself is for the preferred one."""
    line = f"--nproc-per-node 4 pretrain_gpt.py {BASE} {UNEVEN}"
    job = of_words(f"{line} --patch-tokenizer-type Qwen2Tokenizer --dataset MMAP")
    assert (job.megatron, job.model.num_layers) == ("0.10.0", 24)
    with pytest.raises(InputError, match=r"^--pipeline-model-parallel-size: 27 layers"):
        of_words(line)
