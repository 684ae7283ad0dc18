"""Muon: which weights it takes, what it keeps for them, and what one orthogonalization needs.

Read in megatron/core/optimizer/muon.py (`TensorParallelMuon`, `get_megatron_muon_optimizer`, 0.16.1) and in the
orthogonalized_optimizers of emerging_optimizers (`OrthogonalizedOptimizer.step`, `newton_schulz_tp`, `newton_schulz`,
`newton_schulz_step`, the releases of November 2025 to 2026 alike). Muon keeps one momentum for each element (Jordan et
al. 2024), Adam two; both update fp32 masters of 16-bit parameters (`Float16OptimizerWithFloat16Params`).
Symbols: m, n rows and columns of what is orthogonalized; k the side that is squared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from analyzer.buffers import modules_in_order
from analyzer.modules.tree import Module, Parameter, Tensor
from analyzer.results import StageModel
from analyzer.specs import Launch, MuonSpec
from analyzer.states import States
from analyzer.timeline import size
from analyzer.units import BLOCK, round_up

NEVER_ORTHOGONALIZED: Final = ("word_embeddings", "output_layer")
"""Marked `is_embedding_or_output_parameter` (`setup_embeddings_and_output_layer`); the position table is not, and gets Muon."""
UNSPLIT: Final = ("position_embeddings", "router", "shared_experts")
"""Matrices of plain modules: the position table, the router's weight, the gate of the shared experts."""
SPLIT_BY_COLUMN: Final = ("linear_proj", "linear_fc2")
"""Row-parallel layers."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter as the optimizer sees it: of grouped experts one for each."""

    shape: tuple[int, ...]
    dtype: str
    orthogonalized: bool
    expert: bool = False
    """Reduced over the experts' replicas."""
    group: str = "tp"
    """Ranks over which it is split."""
    partition: int | None = None
    """The dimension along which it is split, also over a group of one; None where Muon takes it for whole."""
    parts: tuple[int, ...] = ()
    """Rows of queries, keys and values of one query group."""

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        return prod(self.shape)


def weights(launch: Launch, stage: StageModel) -> Iterator[Weight]:
    """The parameters of a rank in the order in which the optimizers list them: Muon's, then Adam's."""
    listed = [weight for tree in stage.trees for module in modules_in_order(tree) for weight in _of_module(launch, module)]
    yield from (weight for weight in listed if weight.orthogonalized)
    yield from (weight for weight in listed if not weight.orthogonalized and len(weight.shape) > 1)
    yield from (weight for weight in listed if not weight.orthogonalized and len(weight.shape) == 1)


def _of_module(launch: Launch, module: Module) -> Iterator[Weight]:
    for parameter in module.parameters:
        expert = parameter.sharding == "expert"
        fused = expert and launch.model.moe is not None and launch.model.moe.legacy_grouped_gemm
        shapes = [parameter.shape]
        if fused:
            shapes = [_fused(module, parameter)]
        elif expert:
            shapes = [parameter.shape[1:]] * parameter.shape[0]
        split_qkv = module.name == "linear_qkv" and parameter.name == "weight"
        for shape in shapes:
            yield Weight(
                shape=shape,
                dtype=parameter.dtype,
                orthogonalized=len(shape) == 2 and module.name not in NEVER_ORTHOGONALIZED,
                expert=expert and launch.parallel.expert > 1,
                group="etp" if expert else "tp",
                partition=_partition(launch, module, expert=expert, fused=fused),
                parts=_query_key_value(launch) if split_qkv else (),
            )


def _fused(module: Module, parameter: Parameter) -> tuple[int, ...]:
    """`GroupedMLP` keeps the experts of a layer in one matrix: side by side for fc1, one below the other for fc2."""
    if len(parameter.shape) != 3:
        return parameter.shape
    experts, rows, columns = parameter.shape
    return (columns, experts * rows) if module.name == "linear_fc1" else (experts * columns, rows)


def _partition(launch: Launch, module: Module, *, expert: bool, fused: bool) -> int | None:
    """`partition_dim` of a weight.

    Transformer Engine's layers set it also where they know of no split, to 0: whole projections, and experts that leave
    communication to the dispatcher (`reset_parameters` of Linear and GroupedLinear, TE 2.11).
    """
    if module.name in UNSPLIT:
        return None
    by_column = module.name in SPLIT_BY_COLUMN
    if fused:
        return 0 if by_column else 1
    unknowing = expert and (launch.parallel.expert > 1 or launch.parallel.expert_tensor > 1)
    if unknowing and launch.model.implementation == "transformer_engine":
        return 0
    return 1 if by_column else 0


def _query_key_value(launch: Launch) -> tuple[int, ...]:
    model = launch.model
    width = model.kv_channels
    return (model.num_attention_heads // model.num_query_groups * width, width, width)


def muon_of(launch: Launch) -> MuonSpec:
    """Its settings. The launch has some."""
    assert launch.optimizer.muon is not None
    return launch.optimizer.muon


def muon_states(launch: Launch, stage: StageModel, *, parameters: int, gradients: int) -> States:
    """States of a rank that owns every parameter it holds."""
    unowned = States(parameters=parameters, gradients=gradients, masters=0, moments=0, gradient_copies=0)
    return with_owned(launch, unowned, tuple(weights(launch, stage)))


def with_owned(launch: Launch, states: States, owned: Sequence[Weight]) -> States:
    """The states of a rank that updates `owned`."""
    each = [round_up(4 * weight.numel, BLOCK) for weight in owned]
    half = [weight.dtype != "fp32" for weight in owned]
    copied = launch.precision.parameters != "fp32" and launch.precision.gradients != "fp32"
    workspace = _largest_orthogonalization(launch, owned)
    of_adam = sum(2 * bytes_each for bytes_each, weight in zip(each, owned, strict=True) if not weight.orthogonalized)
    return replace(
        states,
        first_step_bytes=max(0, size(workspace) - of_adam),  # Adam steps after Muon
        masters=sum(bytes_each for bytes_each, is_half in zip(each, half, strict=True) if is_half),
        moments=sum(each) + of_adam // 2,
        gradient_copies=sum(bytes_each for bytes_each, is_half in zip(each, half, strict=True) if is_half) if copied else 0,
        step_workspace=workspace,
    )


def _largest_orthogonalization(launch: Launch, owned: Sequence[Weight]) -> tuple[Tensor, ...]:
    kinds = dict.fromkeys(replace(weight, expert=False) for weight in owned if weight.orthogonalized)
    return max((orthogonalization(launch, weight) for weight in kinds), key=size, default=())


def orthogonalization(launch: Launch, weight: Weight) -> tuple[Tensor, ...]:
    """What is alive beside gradients and momentum at the fullest instant of one weight's update.

    Queries, keys and values are cut out into copies, orthogonalized one after the other and put together again; with one
    query group on the rank they are views.
    """
    muon = muon_of(launch)
    rows, columns = weight.shape
    moved: tuple[Tensor, ...] = (_fp32("gradient with Nesterov momentum", rows, columns),) if muon.nesterov else ()
    if not weight.parts or not muon.split_qkv:
        return max(((*moved, *instant) for instant in _instants(launch, weight, rows, columns)), key=size)
    groups = rows // sum(weight.parts)
    apart = tuple(_fp32("queries, keys and values apart", groups * part, columns) for part in weight.parts) if groups > 1 else ()
    instants = []
    done: tuple[Tensor, ...] = ()
    for part in weight.parts:
        instants += [(*moved, *apart, *done, *instant) for instant in _instants(launch, weight, groups * part, columns)]
        done += (_fp32("orthogonalized parts", groups * part, columns),)
    instants.append((*moved, *done, _fp32("orthogonalized gradient", rows, columns)))
    return max(instants, key=size)


def _instants(launch: Launch, weight: Weight, rows: int, columns: int) -> Iterator[tuple[Tensor, ...]]:
    """Tensors that are alive together, for each instant that may be the fullest of `newton_schulz_tp` and the scaling."""
    muon = muon_of(launch)
    partition = None if muon.tensor_parallel == "blockwise" else weight.partition
    m, n = rows, columns
    squared = min(m, n)
    around: tuple[Tensor, ...] = ()
    if partition is not None and muon.tensor_parallel == "duplicated":
        ranks = group_ranks(launch, weight.group)
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


def group_ranks(launch: Launch, group: str) -> int:
    """Ranks over which a weight is split."""
    return launch.parallel.expert_tensor if group == "etp" else launch.parallel.tensor


def _fp32(name: str, rows: int, columns: int) -> Tensor:
    return Tensor(name=name, shape=(rows, columns), dtype="fp32", formula="4·m·n")
