"""Model FLOPs of hybrid models, as Megatron-LM counts them."""

from __future__ import annotations

from analyzer.time.work.model_flops import model_flops
from tests.job_of import job_of

LINE = (
    "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --hybrid-override-pattern MM-M*E-M --num-experts 8 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 256 --disable-bias-linear "
    "--group-query-attention --num-query-groups 4 --global-batch-size 16"
)


def test_flops_are_those_of_megatron() -> None:
    """The value that `hybrid_flops` of megatron/training/training.py (0.16.1) returns for these sizes and 32,128 logits."""
    found = job_of(LINE)
    assert found.model.padded_vocab_size == 32128
    assert model_flops(found) == 18_554_258_718_720


def test_flops_of_gated_delta_nets_are_those_of_megatron() -> None:
    """The value that `hybrid_flops` of megatron/training/training.py (0.18.2) returns for these sizes and 32,000 logits."""
    line = (
        "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --hybrid-layer-pattern MGG-*G --swiglu "
        "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 64 --linear-value-head-dim 96 "
        "--linear-conv-kernel-dim 3 --group-query-attention --num-query-groups 4 --global-batch-size 16"
    )
    found = job_of(line, release="0.18.2")
    assert found.model.padded_vocab_size == 32000
    assert model_flops(found) == 12_716_441_862_144
