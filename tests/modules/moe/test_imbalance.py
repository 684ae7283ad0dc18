"""`--info-moe-imbalance`: the rows of a rank whose experts receive more than the mean."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.modules.tree import Module
from analyzer.passes.stages import stage_models
from tests.job_of import job_of

S, B, H, F, K = 2048, 1, 1024, 512, 2
MOE = (
    f"--num-experts 8 --moe-router-topk {K} --moe-grouped-gemm --moe-ffn-hidden-size {F} --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 4"
)


@pytest.mark.parametrize("imbalance", [1.0, 1.5, 3.0])
def test_linear_layers_of_experts_save_rows_in_proportion_to_the_imbalance(imbalance: float) -> None:
    """Balanced, a rank receives k·s·b rows. fc1 saves its input [rows, h] and fc2 its input [rows, f] in bf16."""
    job = job_of(MOE)
    assert job.model.moe is not None
    job = replace(job, model=replace(job.model, moe=replace(job.model.moe, imbalance=imbalance)))
    [tree] = stage_models(job)[0].trees
    rows = int(imbalance * K * S * B)
    assert saved(tree, "experts.linear_fc1") == 2 * rows * H
    assert saved(tree, "experts.linear_fc2") == 2 * rows * F


def saved(tree: Module, path: str) -> int:
    """Bytes that one layer's module saves."""
    [module] = {module for where, module in tree.walk() if where.endswith(path)}
    return sum(tensor.bytes for tensor in module.saved)
