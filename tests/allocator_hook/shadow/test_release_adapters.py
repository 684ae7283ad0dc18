"""What the shadow engine does for releases of megatron-core that are not installed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from allocator_hook.shadow.balance import means  # noqa: E402
from allocator_hook.shadow.imports import StubModule  # noqa: E402
from allocator_hook.shadow.placement import Placement  # noqa: E402
from allocator_hook.shadow.recorder import Recorder  # noqa: E402
from allocator_hook.step.data import part_of_batch  # noqa: E402
from allocator_hook.step.patching import Patches  # noqa: E402

pytestmark = pytest.mark.shadow

BATCH = {"tokens": 0, "labels": 1}


class _Counter:
    """Counts live bytes."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def allocation(self, pointer: int, bytes: int, **_: Any) -> None:
        self.sizes[pointer] = bytes

    def free(self, pointer: int) -> None:
        del self.sizes[pointer]

    def label(self, *_: Any, **__: Any) -> None:
        """Labels are not needed."""

    @property
    def live(self) -> int:
        return sum(self.sizes.values())


def test_a_batch_is_split_with_the_arguments_of_each_release() -> None:
    """`get_batch_on_this_cp_rank` of megatron/core/utils.py in 0.11, 0.16, 0.18 and 0.19."""

    def of_0_11(batch: Any) -> Any:
        return batch, None, None

    def of_0_16(batch: Any, cp_group: Any = None) -> Any:
        return batch, None, cp_group

    def of_0_18(batch: Any, is_hybrid_cp: bool, cp_group: Any = None, hybrid_cp_group_func: Any = None) -> Any:
        assert hybrid_cp_group_func is None
        return batch, is_hybrid_cp, cp_group

    def of_0_19(
        batch: Any,
        is_hybrid_cp: bool,
        cp_group: Any = None,
        hybrid_cp_group_func: Any = None,
        use_per_sequence_balancing: bool = False,
    ) -> Any:
        assert not use_per_sequence_balancing
        return of_0_18(batch, is_hybrid_cp, cp_group, hybrid_cp_group_func)

    assert part_of_batch(of_0_11, BATCH, group="cp") == (BATCH, None, None)
    assert part_of_batch(of_0_16, BATCH, group="cp") == (BATCH, None, "cp")
    assert part_of_batch(of_0_18, BATCH, group="cp") == (BATCH, False, "cp")
    assert part_of_batch(of_0_19, BATCH, group="cp") == (BATCH, False, "cp")


def test_a_shared_storage_is_counted_once() -> None:
    """`share_storage` of core/tensor_parallel/random.py from 0.17 on: both storages use the memory until the last is freed."""
    counter = _Counter()
    recorder = Recorder(counter, cublas_workspace_bytes=0)
    with Patches(recorder.patches()), recorder:
        output = torch.empty(1 << 20, dtype=torch.uint8, device="meta")
        view = output.view(2, -1)
        output.untyped_storage().resize_(0)
        assert counter.live == 0
        recomputed = torch.empty(1 << 20, dtype=torch.uint8, device="meta")
        recorder.share(output, recomputed)
        del recomputed
        assert view.detach().numel() == 1 << 20
        assert counter.live == 1 << 20
        output.untyped_storage().resize_(0)
        assert counter.live == 0
        recomputed = torch.empty(1 << 20, dtype=torch.uint8, device="meta")
        recorder.share(output, recomputed)
        del recomputed, view, output
        assert counter.live == 0


def test_values_of_tensors_without_data_are_finite() -> None:
    with Placement(), Recorder(_Counter(), cublas_workspace_bytes=0):
        norm = torch.linalg.norm(torch.empty(8, device="cuda"))
        assert torch.isfinite(norm)
        assert not torch.isnan(norm)
        assert torch.isfinite(torch.ones(2, device="cpu")).tolist() == [True, True]
    assert means.of(torch.empty(0, device="meta")) is None


def test_configurations_of_stubbed_kernels_have_their_arguments() -> None:
    """`triton.Config`, whose options core/ssm/ops/common/determinism.py of 0.20 reads."""
    config = StubModule("triton").Config({"BLOCK": 64}, num_warps=4)
    assert (config.kwargs, config.num_warps) == ({"BLOCK": 64}, 4)
    assert StubModule("triton").Config().kwargs == {}
