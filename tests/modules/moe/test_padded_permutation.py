"""DeepEP's dispatcher from core 0.17 on: with Transformer Engine 2.12 or later one kernel permutes the rows and pads them.

Sources: `_DeepepManager.get_permuted_hidden_states_by_experts` (core/transformer/moe/token_dispatcher.py) and
`moe_permute_and_pad_with_probs` (transformer_engine/pytorch/permutation.py). Layouts of the shadow engine run both.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.modules.moe.routing import Routing
from analyzer.modules.shapes import shapes_of
from analyzer.specs import TrainingJob
from tests.job_of import HOPPER, job_of

CHOICES = 2048 * 2
LOCAL_EXPERTS = 2
DEEPEP = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-grouped-gemm --swiglu --disable-bias-linear "
    "--normalization RMSNorm --untie-embeddings-and-output-weights --expert-model-parallel-size 4 --moe-router-dtype fp32 "
    "--moe-token-dispatcher-type flex --moe-enable-deepep"
)
FUSED = "--moe-permute-fusion"
FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"


def routing(rest: str, *, release: str, te: str) -> Routing:
    job: TrainingJob = job_of(f"{DEEPEP} {rest}", release=release, gpu=HOPPER)
    return Routing(shapes_of(replace(job, software=replace(job.software, te=te))))


@pytest.mark.parametrize(
    ("rest", "release", "te", "on_arrival"),
    [
        (f"{FUSED} {FP8}", "0.18.2", "2.12", True),
        (f"{FUSED} {FP8}", "0.18.2", "2.11", False),
        (f"{FUSED} {FP8}", "0.16.1", "2.12", False),
        (FP8, "0.18.2", "2.12", False),
    ],
)
def test_rows_are_padded_once(rest: str, release: str, te: str, on_arrival: bool) -> None:
    """In the permutation, or by a copy in the experts: half of the multiple of 16 for each expert on average."""
    found = routing(rest, release=release, te=te)
    padding = LOCAL_EXPERTS * 16 // 2
    assert found.pads is not on_arrival
    assert found.rows == CHOICES + (padding if on_arrival else 0)
    assert found.multiplied_rows == CHOICES + padding


@pytest.mark.parametrize(("release", "padding"), [("0.16.1", 0), ("0.17.1", LOCAL_EXPERTS * 16 // 2), ("0.18.2", 0)])
def test_0_17_pads_in_16_bit_too(release: str, padding: int) -> None:
    """`get_align_size_for_quantization` of core 0.17 is 16 without FP8, and 0 later."""
    assert routing(FUSED, release=release, te="2.13").rows == CHOICES + padding


def test_fused_operations_pad_in_16_bit_too() -> None:
    """`get_align_size_for_quantization` returns 256 before it looks at FP8 (0.18)."""
    found = routing(f"{FUSED} --use-transformer-engine-op-fuser", release="0.18.2", te="2.14")
    assert found.rows == CHOICES + LOCAL_EXPERTS * 256 // 2
