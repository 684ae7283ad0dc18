"""Compares parameter ownership of layer-wise optimizers and optimizer offloading with megatron-core on random parameters.

`test_megatron_optimizers` runs it in a separate process in which Transformer Engine is disabled.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer import layer_wise_optimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from analyzer.states.buffers.matrices import OptimizerParameter
from analyzer.states.cpu_offload import Piece, place
from analyzer.states.layer_wise import Owned, owners

CASES = 100
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class FakeParameter:
    """A parameter with the interface that `_get_sub_optimizer_param_groups` uses; on the GPU until `cpu` copies it."""

    def __init__(self, piece: Piece, *, is_cuda: bool = True, dtype: Any = None) -> None:
        self.piece, self.is_cuda, self.dtype = piece, is_cuda, dtype or DTYPES[piece.dtype]

    def numel(self) -> int:
        return self.piece.numel

    def detach(self) -> FakeParameter:
        return self

    def clone(self) -> FakeParameter:
        return FakeParameter(self.piece, is_cuda=self.is_cuda, dtype=self.dtype)

    def cpu(self) -> FakeParameter:
        return FakeParameter(self.piece, is_cuda=False, dtype=self.dtype)

    def pin_memory(self) -> FakeParameter:
        return self

    def float(self) -> FakeParameter:
        return FakeParameter(self.piece, is_cuda=self.is_cuda, dtype=torch.float32)


def check_owners() -> None:
    """Compare `owners` with `shard_params` on every rank of two groups. The group of experts has half the size."""
    replicas = random.randint(1, 3)
    sizes = {2 * replicas: numels(), replicas: numels()}
    expected = {ranks: places(owners(map(weight, enumerate(held)), ranks)) for ranks, held in sizes.items()}
    for rank in range(2 * replicas):
        params = {ranks: [torch.empty(numel, device="meta") for numel in held] for ranks, held in sizes.items()}
        groups: list[dict[str, Any]] = [
            {"params": list(held), "is_expert_parallel": ranks == replicas} for ranks, held in params.items()
        ]
        fake_optimizer = SimpleNamespace(
            pg_collection=SimpleNamespace(dp_cp=group(2 * replicas, rank), expt_dp=group(replicas, rank % replicas))
        )
        layer_wise_optimizer.LayerWiseDistributedOptimizer.shard_params(fake_optimizer, [SimpleNamespace(param_groups=groups)])
        for (ranks, held), found in zip(params.items(), groups, strict=True):
            numbers = {id(param): number for number, param in enumerate(held)}
            assert [numbers[id(param)] for param in found["params"]] == expected[ranks][rank % ranks]


def check_places() -> None:
    """Compare `place` with `_get_sub_optimizer_param_groups` on the parameter groups of a `DistributedOptimizer`."""
    held = [Piece(numel, random.choice(["bf16", "fp32"]), random.random() < 0.5) for numel in numels()]
    fraction = random.choice([0.0, random.random(), 1.0])
    groups = [
        {
            "params": [
                FakeParameter(each) for dtype in ("fp32", "bf16") for each in held if (each.decays, each.dtype) == (decays, dtype)
            ]
        }
        for decays in (True, False)
    ]
    fake_optimizer = SimpleNamespace(param_groups=groups, param_update_in_fp32=True)
    on_host, on_gpu, *_, copied = HybridDeviceOptimizer._get_sub_optimizer_param_groups(fake_optimizer, fraction)
    placed = place(held, fraction)
    assert [param.piece for each in on_host for param in each["params"]] == list(placed.host)
    assert [param.piece for each in on_gpu for param in each["params"]] == list(placed.gpu)
    assert len(copied) == sum(each.dtype == "bf16" for each in held)
    assert all(param.dtype == torch.float32 for each in (*on_host, *on_gpu) for param in each["params"])


def numels() -> list[int]:
    return [random.randint(1, 9) for _ in range(random.randint(0, 30))]


def weight(numbered: tuple[int, int]) -> OptimizerParameter:
    number, numel = numbered
    return OptimizerParameter(shape=(numel,), dtype="bf16", orthogonalized=True, parts=(number,))


def places(owned: tuple[Owned, ...]) -> list[list[int]]:
    return [[each.parts[0] for each in own] for own in owned]


def group(ranks: int, own: int) -> SimpleNamespace:
    """Return a fake process group."""
    return SimpleNamespace(size=lambda: ranks, rank=lambda: own)


# with a fake process group these functions would return 1 and 0
layer_wise_optimizer.get_pg_size = lambda group: group.size()
layer_wise_optimizer.get_pg_rank = lambda group: group.rank()
for seed in range(CASES):
    random.seed(seed)
    check_owners()
    check_places()
print(CASES)
