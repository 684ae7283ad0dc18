"""What Muon sends: parts of split matrices among tensor-parallel ranks, and updated parameters among replicas.

Read in emerging_optimizers (`newton_schulz_tp`, `newton_schulz_step`, `distributed_normalize_p2`) and in
megatron/core/optimizer/layer_wise_optimizer.py (`LayerWiseDistributedOptimizer.allgather_params`), 0.16.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod

from analyzer.buffers.matrices import OptimizerParameter, weights
from analyzer.communication.rows import Kind, row
from analyzer.modules.stage import StageModel
from analyzer.results import Message
from analyzer.specs import TrainingJob
from analyzer.states.muon import group_ranks, muon_of
from analyzer.units import dtype_bytes

Call = tuple[str, Kind, str, tuple[int, ...], str]
"""Group, kind, module, shape and dtype."""


def muon_messages(job: TrainingJob, stage: StageModel) -> Iterator[Message]:
    """Rows of one rank's optimizer step; where whole parameters are shared out, of the rank that sends most over a split matrix."""
    listed = tuple(weights(job, stage))
    calls: Counter[Call] = Counter()
    gathers: list[Call] = []
    if muon_of(job).layer_wise and job.parallel.data_with_context > 1:
        from analyzer.states.layer_wise import stage_owners

        for shared in stage_owners(job, stage):
            calls.update(max(([*_calls(job, own)] for own in shared), key=_bytes))
        gathers = [] if muon_of(job).aligned else list(_gathers(listed))
    else:
        calls.update(_calls(job, listed))
    for (group, kind, module, shape, dtype), count in (*calls.items(), *((call, 1) for call in gathers)):
        yield row(
            job,
            pipeline_rank=stage.pipeline_rank,
            group=group,
            kind=kind,
            phase="parameter",
            module=module,
            shape=shape,
            dtype=dtype,
            per_iteration=count,
        )


def _gathers(listed: tuple[OptimizerParameter, ...]) -> Iterator[Call]:
    """One call for all parameters of a kind; what a rank sends is what it owns, so parts are of unequal size."""
    for group, owner, expert in (("dp_cp", "data_parallel", False), ("edp", "data_parallel.experts", True)):
        held = [weight for weight in listed if weight.expert is expert]
        if held:
            yield group, "all_gather", f"{owner}.parameters", (sum(weight.numel for weight in held),), held[0].dtype


def _calls(job: TrainingJob, owned: tuple[OptimizerParameter, ...]) -> Iterator[Call]:
    """For each split matrix, of queries, keys and values one by one."""
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
        whole = (rows * ranks, columns) if weight.partition == 0 else (rows, columns * ranks)
        yield weight.group, "all_gather", "optimizer.muon.gradients", whole, "fp32"
        return
    side = columns if weight.partition == 0 else rows
    yield weight.group, "all_reduce", "optimizer.muon.norm", (1,), "fp32"
    for _ in range(muon.steps):
        yield weight.group, "all_reduce", "optimizer.muon.square", (side, side), muon.iterates_dtype


def _bytes(calls: Iterable[Call]) -> int:
    return sum(dtype_bytes(dtype, prod(shape)) for *_, shape, dtype in calls)
