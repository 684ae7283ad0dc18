"""All-reduces of amax values with delayed scaling."""

from __future__ import annotations

import pytest

from analyzer.communication.amax import amax_calls
from analyzer.passes.stages import stage_models
from tests.job_of import job_of

OVERLAPPED = (
    "--fp8-format hybrid --fp8-recipe delayed --num-experts 8 --moe-grouped-gemm --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm "
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 --global-batch-size 64"
)


@pytest.mark.parametrize(("rank", "alone"), [(0, 5), (1, 3)])
def test_backwards_without_a_forward_reduce_once_more(rank: int, alone: int) -> None:
    """`combined_forward_backward_step` enters `fp8_autocast` in each step, also in one with a backward only (0.16.1).

    Two stages with two chunks and groups of two microbatches: `get_pp_rank_microbatches` gives (2 - 1 - r)·2 + 2 forwards of
    warm-up and one more with this option. As many backwards are left after the last forward.
    """
    job = job_of(OVERLAPPED)
    [forward] = [call for call in amax_calls(job, stage_models(job)[rank]) if call.phase == "forward"]
    assert forward.per_iteration == alone
    assert forward.per_microbatch == 2  # one for each chunk


def test_recomputed_norms_of_delta_nets_reduce_once_more() -> None:
    """`CheckpointWithoutOutput._recompute` enters `fp8_autocast`. Core 0.19.0 issues one call for each layer with a delta net."""
    job = job_of(
        "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-num-key-heads 4 "
        "--linear-num-value-heads 16 --linear-key-head-dim 64 --linear-value-head-dim 128 --num-layers 4 --swiglu "
        "--disable-bias-linear --fp8-format hybrid --fp8-recipe delayed --recompute-granularity selective "
        "--recompute-modules gdn_norm_out",
        release="0.19.0",
    )
    [recomputed] = [call for call in amax_calls(job, stage_models(job)[0]) if call.phase == "recompute"]
    assert recomputed.per_microbatch == 3
