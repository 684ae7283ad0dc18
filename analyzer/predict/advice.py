"""Advice for a launch that does not fit: changes of options that make it fit, and the memory that each of them saves.

Each kind of change is a function that yields changed jobs. Jobs that violate `analyzer.specs.rules` are skipped. The world size and
the global batch size do not change, so the number of microbatches depends on the data-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Final, NamedTuple

from analyzer.errors import InputError
from analyzer.results import Advice
from analyzer.specs import PipelineSpec, RecomputeSpec, TrainingJob
from analyzer.specs.release import is_before
from analyzer.specs.rules import first_violation
from analyzer.units import round_up

DeviceBytes = Callable[[TrainingJob], int]
"""A function that returns the device memory of the highest-memory rank of a job, in bytes."""

MAX_ADVICE: Final = 5
"""Maximum number of listed changes or pairs of changes."""
MIN_SAVING: Final = 0.01
"""Minimum fraction of the memory that a listed change saves."""


class _Change(NamedTuple):
    flags: str
    """The options to add to the command line."""
    kind: str
    """Changes of one kind exclude each other."""
    job: TrainingJob


class _Evaluated(NamedTuple):
    change: _Change
    device_bytes: int
    """Device memory with the change; may be a lower bound if it does not fit."""
    fits: bool


def advise(job: TrainingJob, *, predict: DeviceBytes, screen: DeviceBytes | None = None) -> tuple[Advice, ...]:
    """Changes that make `job` fit its GPU: single changes, those with the least effect on speed first, or else pairs of changes.

    `predict` returns the exact memory of a job. Jobs for which it raises InputError are skipped. `screen` is a faster lower
    bound of `predict`, which is used to discard changes. Sizes are in bytes. If no pair is sufficient, the single changes that
    save the most memory are returned with `fits` False. The result is empty if the job fits or the capacity is not known.
    """
    capacity = job.hardware.capacity_bytes
    if capacity is None:
        return ()
    before = predict(job)
    if before <= capacity:
        return ()
    evaluator = _Evaluator(predict, screen or predict, capacity=capacity, before=before)
    singles = [found for change in _valid_changes(job) if (found := evaluator.evaluate(change)) is not None]
    alone = [evaluator.advice(each) for each in _first_of_each_kind(singles)]
    if alone:
        return tuple(alone[:MAX_ADVICE])
    pairs = _pairs(singles, evaluator)
    if pairs:
        return tuple(pairs)
    best = sorted(singles, key=lambda each: each.device_bytes)[:3]
    exact = [found for each in best if (found := evaluator.evaluate(each.change, exact=True)) is not None]
    return tuple(sorted(map(evaluator.advice, exact), key=lambda advice: advice.device_bytes))


class _Evaluator:
    """Evaluates changes of one job."""

    def __init__(self, predict: DeviceBytes, screen: DeviceBytes, *, capacity: int, before: int) -> None:
        self._predict = predict
        self._screen = screen
        self._capacity = capacity
        self._before = before

    def evaluate(self, change: _Change, *, exact: bool = False) -> _Evaluated | None:
        """The memory with a change; None if it saves less than `MIN_SAVING` or is not supported.

        `exact`: compute the exact memory also if the change is not sufficient.
        """
        try:
            found = self._screen(change.job)
            if found <= self._capacity or exact:
                found = self._predict(change.job)
        except InputError:
            return None
        if self._before - found < MIN_SAVING * self._before:
            return None
        return _Evaluated(change, found, found <= self._capacity)

    def advice(self, evaluated: _Evaluated) -> Advice:
        """The advice for the report."""
        size = evaluated.device_bytes
        return Advice(change=evaluated.change.flags, device_bytes=size, saves_bytes=self._before - size, fits=evaluated.fits)


def _first_of_each_kind(singles: list[_Evaluated]) -> list[_Evaluated]:
    """Of the changes that fit, the first of each kind. If TP2 fits, TP4 and TP8 are not listed."""
    first: dict[str, _Evaluated] = {}
    for each in singles:
        if each.fits:
            first.setdefault(each.change.kind, each)
    return list(first.values())


def _pairs(singles: list[_Evaluated], evaluator: _Evaluator) -> list[Advice]:
    """Pairs of changes of different kinds that fit; only the first one for each pair of kinds."""
    found: dict[tuple[str, str], Advice] = {}
    after: dict[str, dict[str, _Change]] = {}
    for first, second in combinations([each.change for each in singles], 2):
        kinds = (first.kind, second.kind)
        if first.kind == second.kind or kinds in found or len(found) == MAX_ADVICE:
            continue
        if first.flags not in after:
            after[first.flags] = {change.flags: change for change in _valid_changes(first.job)}
        both = after[first.flags].get(second.flags)
        evaluated = evaluator.evaluate(both._replace(flags=f"{first.flags} {second.flags}")) if both is not None else None
        if evaluated is not None and evaluated.fits:
            found[kinds] = evaluator.advice(evaluated)
    return list(found.values())


def _valid_changes(job: TrainingJob) -> Iterator[_Change]:
    """The changes that Megatron accepts."""
    return (change for change in _changes(job) if first_violation(change.job) is None)


def _changes(job: TrainingJob) -> Iterator[_Change]:
    """Every possible single change of a job.

    The order is: changes that do not change the computation, changes with a small cost in speed, full recomputation, which repeats
    the forward pass, and changes of the parallel layout.
    """
    yield from _distributed_optimizer(job)
    yield from _sequence_parallel(job)
    yield from _selective_recompute(job)
    yield from _smaller_micro_batch(job)
    yield from _full_recompute(job)
    yield from _more_tensor_parallel(job)
    yield from _more_pipeline_parallel(job)


def _distributed_optimizer(job: TrainingJob) -> Iterator[_Change]:
    # Megatron's distributed optimizer supports Adam only (core/optimizer/distrib_optimizer.py, 0.16.1)
    sharded = job.optimizer.distributed or job.optimizer.name != "adam"
    if not sharded and job.parallel.data_with_context > 1:
        optimizer = replace(job.optimizer, distributed=True)
        yield _Change("--use-distributed-optimizer", "optimizer", replace(job, optimizer=optimizer))


def _sequence_parallel(job: TrainingJob) -> Iterator[_Change]:
    parallel = job.parallel
    if parallel.tensor > 1 and not parallel.sequence_parallel and not job.recompute.distribute_saved_activations:
        yield _Change("--sequence-parallel", "sequence", replace(job, parallel=replace(parallel, sequence_parallel=True)))


def _selective_recompute(job: TrainingJob) -> Iterator[_Change]:
    if job.recompute.granularity is None:
        recompute = RecomputeSpec(granularity="selective", modules=("core_attn",))
        yield _Change("--recompute-activations", "recompute", replace(job, recompute=recompute))
        if not is_before(job.megatron, "0.12") and job.model.moe is None:
            recompute = RecomputeSpec(granularity="selective", modules=("core_attn", "mlp"))
            flags = "--recompute-granularity selective --recompute-modules core_attn mlp"
            yield _Change(flags, "recompute", replace(job, recompute=recompute))


def _smaller_micro_batch(job: TrainingJob) -> Iterator[_Change]:
    batch = job.batch
    for size in range(batch.micro_batch_size // 2, 0, -1):
        if batch.micro_batch_size % size == 0:
            factor = batch.micro_batch_size // size
            smaller = replace(
                batch,
                micro_batch_size=size,
                microbatches=batch.microbatches * factor,
                first_microbatches=batch.first_microbatches * factor,
            )
            yield _Change(f"--micro-batch-size {size}", "batch", replace(job, batch=smaller))


def _full_recompute(job: TrainingJob) -> Iterator[_Change]:
    if job.recompute.granularity != "full":
        recompute = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
        flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        yield _Change(flags, "recompute", replace(job, recompute=recompute))


def _more_tensor_parallel(job: TrainingJob) -> Iterator[_Change]:
    """2, 4 and 8 times the tensor-parallel size within a node, with sequence parallelism if possible and less data parallelism."""
    parallel = job.parallel
    for factor in (2, 4, 8):
        tensor = parallel.tensor * factor
        padded = _padded_vocabulary(job, tensor)
        if tensor > parallel.gpus_per_node or padded is None:
            continue
        possible = job.batch.seq_length % (tensor * parallel.context) == 0 and not job.recompute.distribute_saved_activations
        wider = replace(
            parallel,
            tensor=tensor,
            expert_tensor=tensor if parallel.expert_tensor == parallel.tensor else parallel.expert_tensor,
            sequence_parallel=parallel.sequence_parallel or possible,
        )
        model = replace(job.model, padded_vocab_size=padded)
        changed = replace(_with_fewer_replicas(job, factor), parallel=wider, model=model)
        new = "" if parallel.sequence_parallel or not possible else " --sequence-parallel"
        yield _Change(f"--tensor-model-parallel-size {tensor}{new}", "sequence" if new else "tensor", changed)


def _more_pipeline_parallel(job: TrainingJob) -> Iterator[_Change]:
    """2, 4 and 8 times the pipeline-parallel size, with equal numbers of layers per stage and less data parallelism."""
    parallel = job.parallel
    if parallel.pipeline_layout != PipelineSpec() or parallel.microbatch_group_size is not None:
        return
    for factor in (2, 4, 8):
        pipeline = parallel.pipeline * factor
        changed = replace(_with_fewer_replicas(job, factor), parallel=replace(parallel, pipeline=pipeline))
        yield _Change(f"--pipeline-model-parallel-size {pipeline}", "pipeline", changed)


def _with_fewer_replicas(job: TrainingJob, factor: int) -> TrainingJob:
    """The same global batch on 1/`factor` of the data-parallel ranks, each with `factor` times the microbatches."""
    batch = job.batch
    more = replace(batch, microbatches=batch.microbatches * factor, first_microbatches=batch.first_microbatches * factor)
    return replace(job, batch=more)


def _padded_vocabulary(job: TrainingJob, tensor: int) -> int | None:
    """The vocabulary size padded to a multiple of 128 · t, the default of Megatron's `vocab_size_with_padding`.

    None if the multiple is not the default and the padded size is not divisible by `tensor`.
    """
    model = job.model
    if model.padded_vocab_size == round_up(model.vocab_size, 128 * job.parallel.tensor):
        return round_up(model.vocab_size, 128 * tensor)
    return model.padded_vocab_size if model.padded_vocab_size % tensor == 0 else None
