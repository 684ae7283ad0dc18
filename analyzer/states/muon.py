"""Muon: which weights it takes, what it keeps for them, and what one orthogonalization needs.

Read in megatron/core/optimizer/muon.py (`TensorParallelMuon`, `get_megatron_muon_optimizer`, 0.16.1) and in the
orthogonalized_optimizers of emerging_optimizers (`OrthogonalizedOptimizer.step`, `newton_schulz_tp`, `newton_schulz`,
`newton_schulz_step`, the releases of November 2025 to 2026 alike). Muon keeps one momentum for each element (Jordan et
al. 2024), Adam two; both update fp32 masters of 16-bit parameters (`Float16OptimizerWithFloat16Params`).
Symbols: m, n rows and columns of what is orthogonalized; k the side that is squared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from analyzer.buffers.matrices import OptimizerParameter, weights
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Tensor, total_bytes
from analyzer.specs import MuonSpec, TrainingJob
from analyzer.states.lion import lion_updates
from analyzer.states.record import States
from analyzer.units import BLOCK, round_up


def muon_of(job: TrainingJob) -> MuonSpec:
    """Its settings. The launch has some."""
    assert job.optimizer.muon is not None
    return job.optimizer.muon


def muon_states(job: TrainingJob, stage: StageModel, *, parameters: int, gradients: int) -> States:
    """States of a rank that owns every parameter it holds."""
    unowned = States(parameters=parameters, gradients=gradients, masters=0, moments=0, gradient_copies=0)
    return with_owned(job, unowned, tuple(weights(job, stage)))


def with_owned(job: TrainingJob, states: States, owned: Sequence[OptimizerParameter], *, adams_shard: int = 0) -> States:
    """The states of a rank that updates `owned`, and beside them so many elements of a shard by the distributed Adam."""
    each = [round_up(4 * weight.numel, BLOCK) for weight in owned]
    half = [weight.dtype != "fp32" for weight in owned]
    copied = job.precision.parameters != "fp32" and job.precision.gradients != "fp32"
    orthogonalizing = _largest_orthogonalization(job, owned)
    others = [weight for weight in owned if not weight.orthogonalized]
    lion = muon_of(job).scalar_optimizer == "lion"
    updating = lion_updates(others) if lion else ()
    of_others = sum((1 if lion else 2) * round_up(4 * weight.numel, BLOCK) for weight in others) + 8 * adams_shard
    masters = sum(bytes_each for bytes_each, is_half in zip(each, half, strict=True) if is_half)
    masters += 4 * adams_shard if job.precision.parameters != "fp32" else 0
    return replace(
        states,
        first_step_bytes=max(
            total_bytes(updating), total_bytes(orthogonalizing) - of_others, 0
        ),  # their moments come after Muon's step
        masters=masters,
        moments=sum(bytes_each for bytes_each, weight in zip(each, owned, strict=True) if weight.orthogonalized) + of_others,
        gradient_copies=masters if copied else 0,
        step_workspace=max(orthogonalizing, updating, key=total_bytes),
    )


def _largest_orthogonalization(job: TrainingJob, owned: Sequence[OptimizerParameter]) -> tuple[Tensor, ...]:
    kinds = dict.fromkeys(replace(weight, expert=False) for weight in owned if weight.orthogonalized)
    return max((orthogonalization(job, weight) for weight in kinds), key=total_bytes, default=())


def orthogonalization(job: TrainingJob, weight: OptimizerParameter) -> tuple[Tensor, ...]:
    """What is alive beside gradients and momentum at the fullest instant of one weight's update.

    Queries, keys and values are cut out into copies, orthogonalized one after the other and put together again; with one
    query group on the rank they are views.
    """
    muon = muon_of(job)
    rows, columns = weight.shape
    moved: tuple[Tensor, ...] = (_fp32("gradient with Nesterov momentum", rows, columns),) if muon.nesterov else ()
    if not weight.parts or not muon.split_qkv:
        return max(((*moved, *instant) for instant in _instants(job, weight, rows, columns)), key=total_bytes)
    groups = rows // sum(weight.parts)
    apart = tuple(_fp32("queries, keys and values apart", groups * part, columns) for part in weight.parts) if groups > 1 else ()
    instants = []
    done: tuple[Tensor, ...] = ()
    for part in weight.parts:
        instants += [(*moved, *apart, *done, *instant) for instant in _instants(job, weight, groups * part, columns)]
        done += (_fp32("orthogonalized parts", groups * part, columns),)
    instants.append((*moved, *done, _fp32("orthogonalized gradient", rows, columns)))
    return max(instants, key=total_bytes)


def _instants(job: TrainingJob, weight: OptimizerParameter, rows: int, columns: int) -> Iterator[tuple[Tensor, ...]]:
    """Tensors that are alive together, for each instant that may be the fullest of `newton_schulz_tp` and the scaling."""
    muon = muon_of(job)
    partition = None if muon.tensor_parallel == "blockwise" else weight.partition
    m, n = rows, columns
    squared = min(m, n)
    around: tuple[Tensor, ...] = ()
    if partition is not None and muon.tensor_parallel == "duplicated":
        ranks = group_ranks(job, weight.group)
        m, n = (m * ranks, n) if partition == 0 else (m, n * ranks)
        squared = min(m, n)
        around = (_fp32("gathered parts", m, n), _fp32("gathered gradient", m, n))
    elif partition is not None:
        squared = n if partition == 0 else m
    iterate = replace(_fp32("iterate", m, n), dtype=muon.iterates_dtype)
    square = replace(_fp32("square of the iterate", squared, squared), dtype=muon.iterates_dtype)
    if muon.iterates_dtype != "fp32":
        yield (*around, _fp32("normalized gradient", m, n), iterate)
    yield (*around, iterate, square, replace(square, name="polynomial of the square"), replace(iterate, name="next iterate"))
    scaled = _fp32("scaled update", rows, columns)
    yield (_fp32("orthogonalized gradient", m, n), scaled, scaled)


def group_ranks(job: TrainingJob, group: str) -> int:
    """Ranks over which a weight is split."""
    return job.parallel.expert_tensor if group == "etp" else job.parallel.tensor


def _fp32(name: str, rows: int, columns: int) -> Tensor:
    return Tensor(name=name, shape=(rows, columns), dtype="fp32", formula="4·m·n")
