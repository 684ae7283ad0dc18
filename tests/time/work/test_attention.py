"""Work of attention: half of all pairs under the causal mask, fewer with a window, and a backward of five products for two.

Sources: FlashAttention-2 (arXiv 2307.08691), section 4.1; Korthikanti et al. 2022 (arXiv 2205.05198), appendix A.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.api import analyze
from analyzer.errors import InputError
from analyzer.specs import ModelSpec
from analyzer.time.work.attention import attended_pairs
from analyzer.time.work.kernels import Gemm
from tests.job_of import job_of
from tests.small_job import job as small_job
from tests.time.work.executed import HEADS, HIDDEN, LAYERS, SAMPLES, SEQUENCE, executed, job, kernels

FORWARD = LAYERS * SAMPLES * 2 * SEQUENCE**2 * HIDDEN
"""Two products of 2·s²·h operations for each sample and layer, and half of the pairs."""


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "--tensor-model-parallel-size 4",
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2",
        "--context-parallel-size 8",
        "--context-parallel-size 4 --cp-comm-type a2a",
        "--pipeline-model-parallel-size 4",
        "--micro-batch-size 1",
        "--group-query-attention --num-query-groups 4",
    ],
)
def test_causal_attention(layout: str) -> None:
    assert executed(layout).attention == 3.5 * FORWARD


def test_latent_attention_has_heads_of_two_sizes() -> None:
    """Queries and keys of 64 + 32 elements, values of 48: s²·n·(96 + 48) for each sample."""
    line = (
        "--multi-latent-attention --kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 48 "
        "--attention-backend fused"
    )
    assert executed(line).attention == 3.5 * LAYERS * SAMPLES * SEQUENCE**2 * HEADS * (96 + 48)


def test_unfused_attention_computes_all_pairs() -> None:
    """Forward two products of all pairs, backward four. They are GEMMs."""
    extra = executed("--attention-backend unfused").gemm - executed().gemm
    assert extra == 3 * 2 * FORWARD
    found = job("--attention-backend unfused")
    shapes = {(each.m, each.n, each.k) for _, each, _ in kernels(found) if isinstance(each, Gemm) and each.name == "scores"}
    assert shapes == {(SEQUENCE, SEQUENCE, HIDDEN // HEADS)}


def windowed_model(before: int, windowed: tuple[bool, ...]) -> ModelSpec:
    return small_job(window=(before, 0), windowed=windowed).model


def counted(keys: int, before: int | None) -> int:
    """Pairs of a query and a key at most `before` tokens before it, one by one."""
    return sum(key <= query and (before is None or query - key <= before) for query in range(keys) for key in range(keys))


@pytest.mark.parametrize("before", [0, 1, 7, 31, 63, 100, 126, 127, 200])
def test_pairs_in_a_window(before: int) -> None:
    """Without the diagonal's half, which the causal count of n²/2 leaves out, the counts are equal."""
    keys = 128
    exact = counted(keys, before)
    found = attended_pairs(windowed_model(before, (True,)), queries=keys, keys=keys)
    assert keys**2 / 2 - found == pytest.approx(max(0, keys**2 / 2 - exact))
    assert found == pytest.approx(exact, abs=keys / 2)


def test_causal_pairs() -> None:
    assert attended_pairs(small_job().model, queries=128, keys=128) == pytest.approx(counted(128, None), abs=128 / 2)


def test_pairs_are_an_average_over_the_layers() -> None:
    """Three layers with a window, and one without."""
    found = attended_pairs(windowed_model(15, (True, True, True, False)), queries=128, keys=128)
    assert found == pytest.approx((3 * counted(128, 15) + 128**2 / 2) / 4)


def test_context_parallel_ranks_share_the_pairs_of_a_window() -> None:
    """Each of four ranks has a quarter of the queries: two pieces of eight, one from the start and one from the end."""
    found = attended_pairs(windowed_model(15, (True,)), queries=32, keys=128)
    assert 4 * found == pytest.approx(counted(128, 15))


def test_a_window_reduces_the_work() -> None:
    """A window of 255 tokens before each: s·256 - 256·255/2 pairs."""
    pairs = SEQUENCE * 256 - 256 * 255 // 2
    assert executed("--window-size 255,0").attention == 3.5 * LAYERS * SAMPLES * pairs * 4 * HIDDEN


def test_packed_samples_attend_to_themselves() -> None:
    """By hand: each of 8 samples of 1,024 tokens has half of 1,024² pairs; on two context-parallel ranks each has half of them."""
    model = replace(job_of("--seq-length 8192 --max-position-embeddings 8192").model, sample_length=1024)
    assert attended_pairs(model, queries=8192, keys=8192) == 8 * 1024 * 1024 / 2
    assert attended_pairs(model, queries=4096, keys=8192) == 4 * 1024 * 1024 / 2


def test_the_length_of_samples_is_stated_or_assumed() -> None:
    line = "--nproc-per-node 8 --tuner_type full --packing true --model Qwen/Qwen3-8B --max_length 8192 --info-gpu B200"
    whole, samples = (analyze([*line.split(), *more], environ={}) for more in (["--info-sample-length", "8192"], []))
    assert whole.time is not None
    assert samples.time is not None
    assert samples.time.iteration_seconds < whole.time.iteration_seconds
    assert samples.ranks[0].memory == whole.ranks[0].memory
    assert any("Packed samples of 512 tokens are assumed" in each for each in samples.job.assumptions)
    with pytest.raises(InputError, match="9000 is above the sequence length of 8192"):
        analyze([*line.split(), "--info-sample-length", "9000"], environ={})
