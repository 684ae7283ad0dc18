"""The precision-aware Adam: which states Megatron-LM and Transformer Engine create, and which are copied to fp32.

The expected bytes follow from `FusedAdam.step` and `get_unscaled_state` of transformer_engine/pytorch/optimizers/fused_adam.py
(2.11 to 2.18), and from `OptimizerConfig.__post_init__` of core/optimizer/optimizer_config.py (0.12.1 to 0.19.0).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.modules.tree import total_bytes
from analyzer.specs import TrainingJob
from tests.job_of import HOPPER, job_of, states_of

LINE = "--use-distributed-optimizer --use-precision-aware-optimizer"
BF16_MOMENTS = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
LAYER = 12 * 1024**2 + 13 * 1024
PARAMETERS = 8 * LAYER + (32_000 + 2048 + 2) * 1024
"""Parameters of `tests.job_of.BASE`: eight layers with biases, word and position embeddings, and the final norm."""
LARGEST = 32_000 * 1024
WORDS = "--vocab-size 31999"
"""32,000 with the padding of each release."""


def with_te(line: str, version: str, *, release: str = "0.16.1") -> TrainingJob:
    job = job_of(f"{LINE} {WORDS} {line}", gpus=1, release=release)
    return replace(job, software=replace(job.software, te=version))


def copies(job: TrainingJob) -> int:
    """Bytes of the temporary tensors of Adam's step."""
    return total_bytes(states_of(job).step_workspace)


@pytest.mark.parametrize("version", ["2.11", "2.12"])
def test_earlier_kernels_read_fp32_copies_of_bf16_moments(version: str) -> None:
    assert copies(with_te(BF16_MOMENTS, version)) == 2 * 4 * PARAMETERS + 2 * LARGEST


@pytest.mark.parametrize("version", ["2.13", "2.14.1", "2.18"])
def test_later_kernels_update_bf16_moments_in_place(version: str) -> None:
    assert copies(with_te(BF16_MOMENTS, version)) == 0


def test_later_kernels_still_copy_other_types_of_moments() -> None:
    one = 4 * PARAMETERS
    assert copies(with_te("--exp-avg-dtype bf16", "2.13")) == one + 2 * LARGEST
    assert copies(with_te("--exp-avg-sq-dtype bf16", "2.13")) == one + 2 * LARGEST
    assert copies(with_te("--exp-avg-dtype fp16 --exp-avg-sq-dtype fp16", "2.13")) == 2 * one
    assert copies(with_te("--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8", "2.13")) == 2 * one
    assert copies(with_te("--exp-avg-dtype bf16 --exp-avg-sq-dtype fp16", "2.13")) == 2 * one + 2 * LARGEST


def test_later_kernels_still_copy_fp16_master_weights() -> None:
    assert copies(with_te(f"{BF16_MOMENTS} --main-params-dtype fp16", "2.13")) == 4 * PARAMETERS


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("release", ["0.14.0", "0.16.1", "0.19.0"])
def test_a_recipe_without_fp8_makes_megatron_create_master_weights(recipe: str, release: str) -> None:
    states = states_of(with_te(f"--fp8-recipe {recipe} --main-grads-dtype bf16", "2.11", release=release))
    assert (states.master_weights, states.moments) == (4 * PARAMETERS, 8 * PARAMETERS)
    assert states.gradient_copies == 4 * PARAMETERS


@pytest.mark.parametrize(
    ("line", "release"),
    [
        ("", "0.16.1"),
        ("--fp8-recipe delayed", "0.16.1"),
        ("--fp8-format hybrid --fp8-recipe delayed", "0.16.1"),
        ("--fp8-recipe tensorwise", "0.12.3"),
    ],
)
def test_otherwise_adam_stores_remainders_of_master_weights(line: str, release: str) -> None:
    states = states_of(with_te(f"{line} --main-grads-dtype bf16", "2.11", release=release))
    assert (states.master_weights, states.moments, states.gradient_copies) == (0, (8 + 2) * PARAMETERS, 0)


def test_adam_stores_fp16_master_weights_with_every_recipe() -> None:
    states = states_of(with_te("--fp8-recipe tensorwise --main-params-dtype fp16 --main-grads-dtype bf16", "2.11"))
    assert (states.master_weights, states.moments, states.gradient_copies) == (0, (8 + 2) * PARAMETERS, 0)


def test_transformer_engine_before_2_1_stores_whole_master_weights() -> None:
    assert states_of(with_te("", "2.0", release="0.11.0")).moments == (8 + 4) * PARAMETERS


def test_fp4_uses_the_recipe_of_fp8_for_master_weights() -> None:
    job = job_of(
        f"{LINE} {WORDS} --fp8-recipe tensorwise --main-grads-dtype bf16 --fp4-format e2m1",
        gpus=1,
        gpu=replace(HOPPER, compute_capability=(10, 0)),
    )
    assert states_of(job).master_weights == 4 * PARAMETERS
