"""Streams that layers create for their shared experts (`SharedExpertMLP.__init__`, megatron-core)."""

from __future__ import annotations

from analyzer.memory.ranks import rank_classes
from tests.job_of import job_of

BASE = (
    "--hidden-size 1024 --ffn-hidden-size 2048 --num-attention-heads 8 --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 "
    "--global-batch-size 16 --bf16 --swiglu --disable-bias-linear --tokenizer-type NullTokenizer --vocab-size 32000 "
    "--use-distributed-optimizer --moe-shared-expert-overlap --moe-shared-expert-intermediate-size 4096 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)


def unused(layers: int, release: str) -> int:
    """Bytes that PyTorch reserves beyond the allocated ones at the highest peak."""
    rank = rank_classes(job_of(f"--num-layers {layers}", base=BASE, release=release))[0]
    assert rank.memory.replayed
    return rank.memory.peak_reserved_bytes - rank.memory.peak_allocated_bytes


def test_one_stream_for_all_layers_from_018_on() -> None:
    assert unused(32, "0.18.2") < unused(32, "0.17.1") / 4


def test_a_stream_of_each_layer_reserves_what_its_shared_experts_need() -> None:
    """The outputs of fc1, the activation and fc2 have 64, 32 and 8 MiB, as have their gradients, and the input gradient 8 MiB.

    A backward needs at least the first three, and all of them at most. Two segments of a stream can have 20 MiB more each.
    """
    of_a_layer = (unused(32, "0.17.1") - unused(4, "0.17.1")) / 28
    assert 104 * 2**20 <= of_a_layer <= (2 * 104 + 8 + 2 * 20) * 2**20


def test_pytorch_has_32_streams() -> None:
    assert unused(64, "0.17.1") - unused(34, "0.17.1") < (unused(34, "0.17.1") - unused(4, "0.17.1")) / 2
