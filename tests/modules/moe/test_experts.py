"""Grouped experts whose activation is recomputed (`--recompute-modules moe_act`)."""

from __future__ import annotations

import pytest

from analyzer.modules.moe.experts import experts
from analyzer.modules.shapes import shapes_of
from analyzer.modules.tree import total_bytes
from tests.job_of import job_of

LINE = (
    "--bf16 --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 256 --disable-bias-linear --squared-relu "
    "--expert-model-parallel-size 2 --recompute-granularity selective --recompute-modules moe_act"
)
ELEMENTS = 2 * 2048 * 256
"""Two rows of each of 2,048 tokens."""


@pytest.mark.parametrize(
    ("more", "width"),
    [
        # bf16: the input of the product, the output and its gradient, and gradients of both factors
        ("", 2 + 2 + 2 + 2 + 2),
        # fp32 products: three gradients in fp32, and the gradient of the activation in bf16
        ("--moe-router-dtype fp32", 2 + 2 + 2 + 2 + 4 + 4 + 4),
    ],
)
def test_the_backward_of_a_recomputed_activation_references_its_output_and_gradient(more: str, width: int) -> None:
    """`CheckpointWithoutOutputFunction.backward` (core/tensor_parallel/random.py, 0.16.1)."""
    parts = experts(shapes_of(job_of(f"{LINE} {more}")), dispatched=()).children
    (activation,) = (each for each in parts if each.name == "activation_func")
    assert total_bytes(activation.backward_workspace) == width * ELEMENTS
