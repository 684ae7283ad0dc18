"""Kernels of DeepSeek-V4, against operations that are counted pair by pair."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.modules.attention.compressed_attention import Compressed
from analyzer.modules.inputs import module_inputs
from analyzer.modules.shapes import Shapes
from analyzer.specs.attention import AttentionKind, CompressedAttentionSpec
from analyzer.time.work.compressed_attention import _pairs
from tests.job_of import job_of

SPEC = CompressedAttentionSpec(
    ratios=(0,), head_dim=64, q_lora_rank=32, output_groups=2, output_rank=16, window=8, index_heads=2, index_head_dim=32, topk=6
)

KINDS: dict[int, AttentionKind] = {0: "sliding", 4: "compressed", 128: "heavily_compressed"}


def sizes_of(ratio: int, tokens: int, *, window: int, topk: int, sample: int | None = None) -> Compressed:
    inputs = module_inputs(job_of("--position-embedding-type rope"))
    spec = replace(SPEC, window=window, topk=topk)
    model = replace(inputs.model, compressed_attention=spec, sample_length=sample)
    return Compressed(Shapes(replace(inputs, model=model, sequence_length=tokens)), KINDS[ratio])


def counted(ratio: int, tokens: int, *, window: int, topk: int) -> int:
    """Pairs of a query at i: the last tokens with their own keys, and the (i + 1) // m compressed keys before it, or the chosen."""
    most = {0: 0, 4: topk, 128: tokens}[ratio]
    return sum(min(window, i + 1) + (min(most, (i + 1) // ratio) if ratio else 0) for i in range(tokens))


@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_pairs_of_a_sequence_within_the_window(ratio: int, tokens: int) -> None:
    found = _pairs(sizes_of(ratio, tokens, window=128, topk=512))
    assert found == pytest.approx(counted(ratio, tokens, window=128, topk=512), abs=tokens / 2)


@given(ratio=st.sampled_from([0, 4, 128]), groups=st.integers(2, 40), window=st.integers(1, 128), topk=st.integers(1, 300))
def test_pairs_of_a_sequence(ratio: int, groups: int, window: int, topk: int) -> None:
    """Groups of keys are counted as if they grew by one element of a key for each query: half a key too many at most."""
    tokens = 128 * groups
    sizes = sizes_of(ratio, tokens, window=window, topk=topk)
    pairs, exact = _pairs(sizes), counted(ratio, tokens, window=window, topk=topk)
    assert abs(pairs - exact) <= tokens / 2
    assert pairs > 0


def test_pairs_of_packed_samples() -> None:
    """A sequence of four samples has the pairs of these."""
    whole = sizes_of(4, 2048, window=128, topk=512, sample=512)
    alone = sizes_of(4, 512, window=128, topk=512)
    assert _pairs(whole) == pytest.approx(4 * _pairs(alone))
