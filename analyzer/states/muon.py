"""Muon: optimizer states, and the workspace of one orthogonalization.

Source: megatron/core/optimizer/muon.py (`TensorParallelMuon`, `get_megatron_muon_optimizer`, 0.16.1) and the
orthogonalized_optimizers of emerging_optimizers (`OrthogonalizedOptimizer.step`, `newton_schulz_tp`, `newton_schulz`,
`newton_schulz_step`, releases of November 2025 to 2026). Muon stores one momentum per element (Jordan et al. 2024), Adam
two moments. Both update fp32 master weights of 16-bit parameters (`Float16OptimizerWithFloat16Params`).
Symbols: m, n rows and columns of the orthogonalized matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from analyzer.errors import InputError
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Tensor, total_bytes
from analyzer.specs import OPTIMIZERS, MuonSpec, TrainingJob
from analyzer.states.buffers.matrices import OptimizerParameter, weights
from analyzer.states.one_by_one import largest_updates
from analyzer.states.record import States
from analyzer.units import BLOCK, round_up


def muon_of(job: TrainingJob) -> MuonSpec:
    """The Muon settings of a job that uses it."""
    assert job.optimizer.muon is not None
    return job.optimizer.muon


def muon_states(job: TrainingJob, stage: StageModel, *, parameters: int, gradients: int) -> States:
    """Model states of a rank that updates all of its parameters.

    Raises InputError if Megatron cannot separate the matrices of the experts from the others.
    """
    owned = tuple(weights(job, stage))
    if not muon_of(job).layer_wise:
        _check_groups(job, owned)
    unowned = States(parameters=parameters, gradients=gradients, master_weights=0, moments=0, gradient_copies=0)
    return with_owned(job, unowned, owned)


def _check_groups(job: TrainingJob, owned: Sequence[OptimizerParameter]) -> None:
    """Refuses a rank with as many matrices of experts as of other modules.

    `get_megatron_muon_optimizer` (0.16) calls `list.remove` with the parameter group of the experts. It compares the groups, and
    lists of the same length compare their tensors with `==`, which raises RuntimeError.
    """
    if not job.core.muon_compares_groups:
        return
    dense, experts = (sum(each.orthogonalized and each.expert is expert for each in owned) for expert in (False, True))
    if dense == experts > 0:
        raise InputError(
            "--optimizer",
            f"muon fails in this release if a rank has as many matrices of experts as others, here {experts}",
            "use dist_muon, or another --expert-model-parallel-size",
        )


def with_owned(job: TrainingJob, states: States, owned: Sequence[OptimizerParameter], *, adam_numel: int = 0) -> States:
    """`states` of a rank that updates `owned` and, with the distributed Adam, a shard of `adam_numel` elements."""
    each = [round_up(4 * weight.numel, BLOCK) for weight in owned]
    half = [weight.dtype != "fp32" for weight in owned]
    copied = job.precision.parameters != "fp32" and job.precision.gradients != "fp32"
    peaks = tuple(_orthogonalizing(job, owned))
    orthogonalizing = max((tensors for tensors, _ in peaks), key=total_bytes, default=())
    others = [weight for weight in owned if not weight.orthogonalized]
    scalar = OPTIMIZERS[muon_of(job).scalar_optimizer]
    updating = largest_updates(others) if scalar.updates == "one by one" else ()
    moments = len(scalar.states(job.optimizer))
    of_others = moments * sum(round_up(4 * weight.numel, BLOCK) for weight in others) + 8 * adam_numel
    master_weights = sum(bytes_each for bytes_each, is_half in zip(each, half, strict=True) if is_half)
    master_weights += 4 * adam_numel if job.precision.parameters != "fp32" else 0
    return replace(
        states,
        # the moments of the other optimizer are created after Muon's step
        first_step_bytes=max(total_bytes(updating), *(total_bytes(tensors) - missing - of_others for tensors, missing in peaks), 0),
        master_weights=master_weights,
        moments=sum(bytes_each for bytes_each, weight in zip(each, owned, strict=True) if weight.orthogonalized) + of_others,
        gradient_copies=master_weights if copied else 0,
        step_workspace=max(orthogonalizing, updating, key=total_bytes),
    )


def _orthogonalizing(job: TrainingJob, owned: Sequence[OptimizerParameter]) -> Iterator[tuple[tuple[Tensor, ...], int]]:
    """Tensors at the peaks of Muon's step, and bytes of the momentum that its first step has not created yet.

    Matrices of experts are updated last, by an optimizer of their own or in the last group of parameters. The variable of the
    update references that of the previous matrix until it is assigned again.
    """
    dense, experts = ([weight for weight in owned if weight.orthogonalized and weight.expert is expert] for expert in (False, True))
    of_experts = sum(round_up(4 * weight.numel, BLOCK) for weight in experts)
    one_loop = muon_of(job).layer_wise
    for matrices, before, missing in ((dense, [], of_experts), (experts, dense if one_loop else [], 0)):
        updated: list[OptimizerParameter | None] = [before[-1] if before else None, *matrices]
        for previous, weight in dict.fromkeys(zip(updated[:-1], matrices, strict=True)):
            held = (_fp32("update of the previous matrix", *previous.shape),) if previous is not None else ()
            yield (*held, *orthogonalization(job, weight)), missing


def orthogonalization(job: TrainingJob, weight: OptimizerParameter) -> tuple[Tensor, ...]:
    """Tensors at the peak of one weight's update, in addition to gradients, momentum and the previous update."""
    return max(instants_of_update(job, weight), key=total_bytes)


def instants_of_update(job: TrainingJob, weight: OptimizerParameter) -> Iterator[tuple[Tensor, ...]]:
    """Tensors at the highest instants of one weight's update, in order, in addition to gradients, momentum and the previous update.

    Queries, keys and values are copied out, orthogonalized sequentially and concatenated. With one query group on the rank
    they are views instead of copies.
    """
    muon = muon_of(job)
    rows, columns = weight.shape
    momentum: tuple[Tensor, ...] = (_fp32("gradient with Nesterov momentum", rows, columns),) if muon.nesterov else ()
    if not weight.parts or not muon.split_qkv:
        yield from ((*momentum, *candidate) for candidate in _peak_candidates(job, weight, rows, columns))
        return
    groups = rows // sum(weight.parts)
    copies = (
        tuple(_fp32("copies of queries, keys and values", groups * part, columns) for part in weight.parts) if groups > 1 else ()
    )
    done: tuple[Tensor, ...] = ()
    for part in weight.parts:
        for candidate in _peak_candidates(job, weight, groups * part, columns):
            yield (*momentum, *copies, *done, *candidate)
        done += (_fp32("orthogonalized parts", groups * part, columns),)
    yield (*momentum, *done, _fp32("orthogonalized gradient", rows, columns))


def _peak_candidates(job: TrainingJob, weight: OptimizerParameter, rows: int, columns: int) -> Iterator[tuple[Tensor, ...]]:
    """Tensors that are allocated at the same time, at each possible peak of `newton_schulz_tp` and the scaling."""
    muon = muon_of(job)
    partition = None if muon.tensor_parallel == "blockwise" else weight.partition
    m, n = rows, columns
    squared = min(m, n)
    gathered: tuple[Tensor, ...] = ()
    if partition is not None and muon.tensor_parallel == "duplicated":
        ranks = group_ranks(job, weight.group)
        m, n = (m * ranks, n) if partition == 0 else (m, n * ranks)
        squared = min(m, n)
        gathered = (_fp32("gathered parts", m, n), _fp32("gathered gradient", m, n))
    elif partition is not None:
        squared = n if partition == 0 else m
    iterate = replace(_fp32("iterate", m, n), dtype=muon.iterates_dtype)
    square = replace(_fp32("square of the iterate", squared, squared), dtype=muon.iterates_dtype)
    if muon.iterates_dtype != "fp32":
        yield (*gathered, _fp32("normalized gradient", m, n), iterate)
    yield (*gathered, iterate, square, replace(square, name="polynomial of the square"), replace(iterate, name="next iterate"))
    scaled = _fp32("scaled update", rows, columns)
    yield (_fp32("orthogonalized gradient", m, n), scaled, scaled)


def group_ranks(job: TrainingJob, group: str) -> int:
    """Number of ranks over which a weight is split."""
    return job.parallel.expert_tensor if group == "etp" else job.parallel.tensor


def _fp32(name: str, rows: int, columns: int) -> Tensor:
    return Tensor(name=name, shape=(rows, columns), dtype="fp32", formula="4·m·n")
