"""Communication of Muon: parts of split matrices over tensor-parallel ranks, and updated parameters over replicas.

Source: emerging_optimizers (`newton_schulz_tp`, `newton_schulz_step`, `distributed_normalize_p2`) and in
megatron/core/optimizer/layer_wise_optimizer.py (`LayerWiseDistributedOptimizer.allgather_params`), 0.16.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod

from analyzer.communication.calls import Call, Kind
from analyzer.modules.stage import StageModel
from analyzer.specs import TrainingJob
from analyzer.states.buffers.matrices import OptimizerParameter, weights
from analyzer.states.layer_wise import stage_owners
from analyzer.states.muon import group_ranks, muon_of
from analyzer.units import dtype_bytes


def muon_calls(job: TrainingJob, stage: StageModel) -> Iterator[Call]:
    """Calls of one rank's optimizer step; with the layer-wise optimizer, of the rank with most bytes."""
    listed = tuple(weights(job, stage))
    calls: Counter[Call] = Counter()
    gathers: list[Call] = []
    if muon_of(job).layer_wise and job.parallel.data_with_context > 1:
        for shared in stage_owners(job, stage):
            calls.update(max(([*_calls(job, own)] for own in shared), key=_bytes))
        gathers = [] if muon_of(job).aligned else list(_gathers(listed))
    else:
        calls.update(_calls(job, listed))
    for call, count in (*calls.items(), *((call, 1) for call in gathers)):
        yield call._replace(per_iteration=count)


def _call(group: str, kind: Kind, module: str, shape: tuple[int, ...], dtype: str) -> Call:
    return Call(group, kind, "parameter", module, shape, dtype)


def _gathers(listed: tuple[OptimizerParameter, ...]) -> Iterator[Call]:
    """One call for all dense and one for all expert parameters. Each rank sends the parameters that it owns."""
    for group, owner, expert in (("dp_cp", "data_parallel", False), ("edp", "data_parallel.experts", True)):
        held = [weight for weight in listed if weight.expert is expert]
        if held:
            yield _call(group, "all_gather", f"{owner}.parameters", (sum(weight.numel for weight in held),), held[0].dtype)


def _calls(job: TrainingJob, owned: tuple[OptimizerParameter, ...]) -> Iterator[Call]:
    """Calls for each split matrix; for queries, keys and values separately."""
    muon = muon_of(job)
    if muon.tensor_parallel == "blockwise":
        return
    for weight in owned:
        if not weight.orthogonalized or weight.partition is None:
            continue
        rows, columns = weight.shape
        groups = rows // sum(weight.parts) if weight.parts and muon.split_qkv else 1
        for part in weight.parts if weight.parts and muon.split_qkv else (rows,):
            yield from _matrix_calls(job, weight, groups * part, columns)


def _matrix_calls(job: TrainingJob, weight: OptimizerParameter, rows: int, columns: int) -> Iterator[Call]:
    muon = muon_of(job)
    if muon.tensor_parallel == "duplicated":
        ranks = group_ranks(job, weight.group)
        full = (rows * ranks, columns) if weight.partition == 0 else (rows, columns * ranks)
        yield _call(weight.group, "all_gather", "optimizer.muon.gradients", full, "fp32")
        return
    side = columns if weight.partition == 0 else rows
    yield _call(weight.group, "all_reduce", "optimizer.muon.norm", (1,), "fp32")
    for _ in range(muon.steps):
        yield _call(weight.group, "all_reduce", "optimizer.muon.square", (side, side), muon.iterates_dtype)


def _bytes(calls: Iterable[Call]) -> int:
    return sum(dtype_bytes(call.dtype, prod(call.shape)) for call in calls)
