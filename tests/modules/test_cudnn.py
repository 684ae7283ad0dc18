"""The workspace of cuDNN's deterministic backward, worked out by hand from cudnn-frontend and Transformer Engine."""

from __future__ import annotations

import pytest

from analyzer.modules.attention.cudnn import score_gradients_bytes, stores_score_gradients


@pytest.mark.parametrize(
    ("batch", "heads", "queries", "keys", "scores"),
    [
        (2, 8, 4096, 4096, 2 * 8 * 4096 * 4096),
        (1, 4, 100, 1000, 4 * 128 * 1024),  # multiples of 64
    ],
)
def test_each_score_has_a_gradient_in_16_bit(batch: int, heads: int, queries: int, keys: int, scores: int) -> None:
    assert score_gradients_bytes(batch=batch, heads=heads, queries=queries, keys=keys) == 2 * scores


@pytest.mark.parametrize(
    ("sequences", "tokens", "of_graph"),
    [
        (1, 904, (32, 1024)),  # the fewest: `get_max_batch_size`, `get_max_tokens`
        (33, 1025, (64, 2048)),  # the next power of two
        (513, 32769, (1024, 65536)),  # the next multiple of 512 and of 32768
    ],
)
def test_a_graph_of_packed_sequences_has_rounded_sizes(sequences: int, tokens: int, of_graph: tuple[int, int]) -> None:
    batch, length = of_graph
    expected = 2 * batch * 4 * length * length
    assert score_gradients_bytes(batch=sequences, heads=4, queries=tokens, keys=tokens, packed=True) == expected


def test_only_hopper_stores_them_and_only_if_deterministic() -> None:
    assert stores_score_gradients((9, 0), deterministic=True)
    assert stores_score_gradients(None, deterministic=True)  # an H100 is assumed
    assert not stores_score_gradients((9, 0), deterministic=False)
    assert not stores_score_gradients((8, 0), deterministic=True)
    assert not stores_score_gradients((10, 0), deterministic=True)  # cuDNN has a deterministic kernel without them
