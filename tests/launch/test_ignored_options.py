"""Options that Megatron ignores are reported, each with its reason."""

from __future__ import annotations

import pytest

from tests.job_of import job_of


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--sequence-parallel", "--sequence-parallel has no effect: there is one tensor-parallel rank."),
        (
            "--moe-router-topk 2 --moe-grouped-gemm",
            "--moe-grouped-gemm and --moe-router-topk have no effect: there are no experts.",
        ),
        ("--qk-head-dim 64", "--qk-head-dim has no effect: --multi-latent-attention is not set."),
        ("--cuda-graph-scope attn", "--cuda-graph-scope has no effect: there are no CUDA graphs."),
        ("--optimizer-offload-fraction 0.5", "--optimizer-offload-fraction has no effect: the optimizer is not offloaded."),
        ("--recompute-modules mlp", "--recompute-modules has no effect: nothing is recomputed."),
    ],
)
def test_an_ignored_option_is_reported(line: str, sentence: str) -> None:
    assert sentence in job_of(line).assumptions


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--sequence-parallel --tensor-model-parallel-size 2",
        "--num-experts 8 --moe-router-topk 2 --disable-bias-linear",
        "--multi-latent-attention --qk-head-dim 64 --position-embedding-type rope",
        "--cuda-graph-impl transformer_engine --cuda-graph-scope attn",
        "--recompute-granularity selective --recompute-modules mlp --disable-bias-linear",
    ],
)
def test_an_option_with_an_effect_is_not_reported(line: str) -> None:
    assert not [sentence for sentence in job_of(line).assumptions if "no effect" in sentence]
