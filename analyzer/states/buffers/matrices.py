"""The parameters of a rank for optimizers that update matrices and vectors differently.

Source: megatron/core/optimizer/muon.py (`get_megatron_muon_optimizer`), megatron/core/transformer/moe/experts.py and
tensor_parallel/layers.py, 0.16.1, and Transformer Engine 2.11.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

from analyzer.layout.stages import Chunk
from analyzer.modules.kinds import ModuleKind, Parallel
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module, Parameter
from analyzer.specs import TrainingJob
from analyzer.states.buffers.parameter_order import modules_in_order

UNSPLIT: Final = frozenset({ModuleKind.POSITION_EMBEDDINGS, ModuleKind.ROUTER, ModuleKind.SHARED_EXPERTS})
"""Modules with matrices that are not split: the position table, the weight of the router, the gate of shared experts."""


@dataclass(frozen=True, kw_only=True)
class OptimizerParameter:
    """A parameter of the optimizer. Grouped experts have one per expert."""

    shape: tuple[int, ...]
    dtype: str
    orthogonalized: bool
    expert: bool = False
    """Its gradient is reduced over the data-parallel ranks of experts."""
    group: str = "tp"
    """The group of ranks over which it is split."""
    partition: int | None = None
    """The dimension along which it is split, also over a group of one; None if Muon assumes that it is not split."""
    parts: tuple[int, ...] = ()
    """Rows of queries, keys and values of one query group."""

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        return prod(self.shape)


def weights(job: TrainingJob, stage: StageModel) -> Iterator[OptimizerParameter]:
    """The parameters of a rank in the order in which the optimizers list them: Muon's, then Adam's."""
    listed = parameters_in_creation_order(job, stage)
    yield from (weight for weight in listed if weight.orthogonalized)
    yield from (weight for weight in listed if not weight.orthogonalized and len(weight.shape) > 1)
    yield from (weight for weight in listed if not weight.orthogonalized and len(weight.shape) == 1)


def parameters_in_creation_order(job: TrainingJob, stage: StageModel) -> tuple[OptimizerParameter, ...]:
    """The parameters of a rank, chunk by chunk, as `named_parameters` lists them."""
    moe = job.model.moe
    pairs = zip(stage.chunks, stage.trees, strict=True)
    sequential = moe is not None and not moe.grouped_gemm
    return tuple(weight for chunk, tree in pairs for weight in _in_order(chunk_parameters(job, chunk, tree), sequential=sequential))


def _in_order(
    parameters: Iterable[tuple[Parameter, tuple[OptimizerParameter, ...]]], *, sequential: bool
) -> Iterator[OptimizerParameter]:
    """The parameters of the optimizer, those of `sequential` experts expert by expert (`SequentialMLP.local_experts`)."""
    experts: list[tuple[OptimizerParameter, ...]] = []
    for parameter, weights in parameters:
        if sequential and parameter.sharding == "expert":
            experts.append(weights)
            continue
        yield from (weight for expert in zip(*experts, strict=True) for weight in expert)
        experts = []
        yield from weights
    yield from (weight for expert in zip(*experts, strict=True) for weight in expert)


def chunk_parameters(job: TrainingJob, chunk: Chunk, tree: Module) -> Iterator[tuple[Parameter, tuple[OptimizerParameter, ...]]]:
    """Each parameter of a chunk, with the parameters of the optimizer for it."""
    marked = _marked(chunk)
    for module in modules_in_order(tree):
        for parameter in module.parameters:
            yield parameter, tuple(_of_parameter(job, module, parameter, marked=marked))


def _marked(chunk: Chunk) -> frozenset[ModuleKind]:
    """Modules whose weights are marked `is_embedding_or_output_parameter`: Adam updates them instead of Muon.

    The position table and the MTP copy of the word embedding on another stage are not marked
    (`LanguageModule.setup_embeddings_and_output_layer`).
    """
    embeddings = {ModuleKind.WORD_EMBEDDINGS} if chunk.pre_process else set()
    return frozenset({ModuleKind.OUTPUT_LAYER, *embeddings})


def _of_parameter(
    job: TrainingJob, module: Module, parameter: Parameter, *, marked: frozenset[ModuleKind]
) -> Iterator[OptimizerParameter]:
    expert = parameter.sharding == "expert"
    fused = expert and job.model.moe is not None and job.model.moe.legacy_grouped_gemm
    shapes = [parameter.shape]
    if fused:
        shapes = [_fused(module, parameter)]
    elif expert:
        shapes = [parameter.shape[1:]] * parameter.shape[0]
    split_qkv = module.kind is ModuleKind.QKV and parameter.name == "weight"
    for shape in shapes:
        yield OptimizerParameter(
            shape=shape,
            dtype=parameter.dtype,
            orthogonalized=len(shape) == 2 and module.kind not in marked,
            expert=expert and job.parallel.expert > 1,
            group="etp" if expert else "tp",
            partition=_partition(job, module, expert=expert, fused=fused),
            parts=_query_key_value(job) if split_qkv else (),
        )


def _fused(module: Module, parameter: Parameter) -> tuple[int, ...]:
    """`GroupedMLP` stores the experts of a layer in one matrix: concatenated by columns for fc1, by rows for fc2."""
    if len(parameter.shape) != 3:
        return parameter.shape
    experts, rows, columns = parameter.shape
    return (columns, experts * rows) if module.kind is ModuleKind.FC1 else (experts * columns, rows)


def _partition(job: TrainingJob, module: Module, *, expert: bool, fused: bool) -> int | None:
    """`partition_dim` of a weight.

    Transformer Engine's layers set it to 0 also for unsplit weights: for replicated projections, and before core 0.17 for
    experts whose dispatcher does the communication (`reset_parameters` of Linear and GroupedLinear, TE 2.11).
    """
    if module.kind in UNSPLIT:
        return None
    by_column = module.kind.facts.parallel is Parallel.ROW
    if fused:
        return 0 if by_column else 1
    unaware = expert and not job.core.marks_split_experts and (job.parallel.expert > 1 or job.parallel.expert_tensor > 1)
    if unaware and job.model.implementation == "transformer_engine":
        return 0
    return 1 if by_column else 0


def _query_key_value(job: TrainingJob) -> tuple[int, ...]:
    model = job.model
    width = model.kv_channels
    return (model.num_attention_heads // model.num_query_groups * width, width, width)
