"""Numbers of tokens that depend on values: those of tensor-parallel ranks add up to what the all-to-all returns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.shadow


def test_tensor_parallel_ranks_of_experts_have_the_same_rows() -> None:
    """`AlltoAll` checks in backward that the combined rows are those that the rank received in the dispatch."""
    torch = pytest.importorskip("torch")
    from allocator_hook.shadow.balance import equal_parts

    dispatcher = SimpleNamespace(cuda_dtoh_point="before", drop_and_pad=False, output_splits=[776, 760])
    dispatcher.output_splits_tp = torch.tensor([1544, 1528]).numpy()
    copy = equal_parts(lambda _, point: point)
    assert copy(dispatcher, "after") == "after"
    assert dispatcher.output_splits_tp.tolist() == [1544, 1528]
    copy(dispatcher, "before")
    assert dispatcher.output_splits_tp.tolist() == [1536, 1536]


def test_one_tensor_parallel_rank_has_no_splits() -> None:
    pytest.importorskip("torch")
    from allocator_hook.shadow.balance import equal_parts

    dispatcher = SimpleNamespace(cuda_dtoh_point="before", drop_and_pad=False, output_splits=[776, 760], output_splits_tp=None)
    equal_parts(lambda _, point: point)(dispatcher, "before")
    assert dispatcher.output_splits_tp is None
