"""Latent attention: what both kernels of the rotation have in common."""

from __future__ import annotations

import pytest

from tests.command import report
from tests.job_of import BASE

LAUNCH = (
    f"--nproc-per-node 2 pretrain_gpt.py {BASE} --global-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel --swiglu "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope --multi-latent-attention --q-lora-rank 96 "
    "--kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32 --qk-layernorm"
)


@pytest.mark.parametrize("fusion", ["", "--no-rope-fusion"])
def test_the_rotary_part_of_the_key_is_gathered(fusion: str) -> None:
    """It has `--qk-pos-emb-head-dim` elements for each token, and is not split (`multi_latent_attention.py` of core 0.16.1)."""
    found = report(*LAUNCH.split(), *fusion.split())
    tokens, width, layers = 2048, 16, 8
    calls = [row["calls_per_microbatch"] for row in found["communication"] if row["message_bytes"] == 2 * tokens * width]
    assert calls == [layers, layers]  # gathered in forward, and its gradient scattered in backward
