"""When a launch does not fit: the few changes of flags that would make it fit, and what each saves.

A change is a function from a Launch to changed ones. Only launches that Megatron would take come out: sizes divide,
the world stays as large as it is, and the global batch too, so that the number of microbatches follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from analyzer.errors import InputError
from analyzer.memory.verdict import highest
from analyzer.results import Advice, RankClass
from analyzer.specs import PipelineSpec, RecomputeSpec, TrainingJob
from analyzer.units import round_up

Predict = Callable[[TrainingJob], tuple[RankClass, ...]]

MOST = 5
"""Pieces of advice; more than that is no advice."""
WORTH = 0.01
"""Share of the peak that a change must save to be named."""


class _Change(NamedTuple):
    flags: str
    """What the user would write."""
    kind: str
    """Changes of one kind exclude each other."""
    job: TrainingJob


def advise(job: TrainingJob, *, predict: Predict, screen: Predict | None = None) -> tuple[Advice, ...]:
    """Changes that make `launch` fit its GPU: those that do it alone, the mildest first, else pairs of them.

    `predict` gives the memory of every rank class of a launch; one that it refuses with InputError is passed over. `screen` is a
    quicker one, for a first look at the many changes that will not do. `device_bytes` and `saves_bytes` are bytes on the device
    of the highest-memory rank, which the verdict compares with the capacity. Where no pair is enough, the single changes that
    save most come back with `fits` False. Empty where the launch fits already or no capacity is known.
    """
    capacity = job.hardware.capacity_bytes
    if capacity is None:
        return ()
    before = highest(predict(job)).memory.device_bytes
    if before <= capacity:
        return ()
    screen = screen or predict

    def weigh(flags: str, changed: TrainingJob, *, exact: bool = False) -> Advice | None:
        try:
            peak = highest(screen(changed)).memory.device_bytes
            if (exact or peak <= capacity) and screen is not predict:
                peak = highest(predict(changed)).memory.device_bytes
        except InputError:
            return None
        if before - peak < WORTH * before:
            return None
        return Advice(change=flags, device_bytes=peak, saves_bytes=before - peak, fits=peak <= capacity)

    singles = [(change, advice) for change in _changes(job) if (advice := weigh(change.flags, change.job))]
    alone = _mildest_of_each_kind([(change, advice) for change, advice in singles if advice.fits])
    if alone:
        return tuple(alone[:MOST])
    pairs: dict[tuple[str, str], Advice] = {}
    for first, second in combinations([change for change, _ in singles], 2):
        kinds = (first.kind, second.kind)
        if first.kind == second.kind or kinds in pairs or len(pairs) == MOST:
            continue
        both = next((c for c in _changes(first.job) if c.flags == second.flags), None)
        advice = weigh(f"{first.flags} {second.flags}", both.job) if both else None
        if advice and advice.fits:
            pairs[kinds] = advice
    if pairs:
        return tuple(pairs.values())
    best = sorted(singles, key=lambda single: single[1].device_bytes)[:3]
    weighed = [weigh(change.flags, change.job, exact=True) or advice for change, advice in best]
    return tuple(sorted(weighed, key=lambda advice: advice.device_bytes))


def _mildest_of_each_kind(fitting: list[tuple[_Change, Advice]]) -> list[Advice]:
    """One advice for each kind: changes come mildest first, so TP 2 stands for TP 4 and TP 8."""
    first: dict[str, Advice] = {}
    for change, advice in fitting:
        first.setdefault(change.kind, advice)
    return list(first.values())


def _changes(job: TrainingJob) -> Iterator[_Change]:
    """Every single change that is open to this launch, the mildest first.

    First what leaves the computation as it is, then what costs some speed, then what costs a third more of the
    forward pass, and last what changes the layout of the cluster.
    """
    yield from _distributed_optimizer(job)
    yield from _sequence_parallel(job)
    yield from _selective_recompute(job)
    yield from _smaller_micro_batch(job)
    yield from _full_recompute(job)
    yield from _more_tensor_parallel(job)
    yield from _more_pipeline_parallel(job)


def _distributed_optimizer(job: TrainingJob) -> Iterator[_Change]:
    # Megatron's distributed optimizer takes Adam only (core/optimizer/distrib_optimizer.py, 0.16.1)
    sharded = job.optimizer.distributed or job.optimizer.name != "adam"
    if not sharded and job.parallel.data_with_context > 1:
        optimizer = replace(job.optimizer, distributed=True)
        yield _Change("--use-distributed-optimizer", "optimizer", replace(job, optimizer=optimizer))


def _sequence_parallel(job: TrainingJob) -> Iterator[_Change]:
    parallel = job.parallel
    divides = job.batch.seq_length % (parallel.tensor * parallel.context) == 0
    if parallel.tensor > 1 and not parallel.sequence_parallel and divides and not job.recompute.distribute_saved_activations:
        yield _Change("--sequence-parallel", "sequence", replace(job, parallel=replace(parallel, sequence_parallel=True)))


def _selective_recompute(job: TrainingJob) -> Iterator[_Change]:
    if job.recompute.granularity is None:
        recompute = RecomputeSpec(granularity="selective", modules=("core_attn",))
        yield _Change("--recompute-activations", "recompute", replace(job, recompute=recompute))
        if job.megatron != "2023" and job.model.moe is None:
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
    """Within a node: 2, 4 and 8 times the size, with sequence parallelism, taken from data parallelism."""
    model, parallel = job.model, job.parallel
    for factor in (2, 4, 8):
        tensor = parallel.tensor * factor
        heads = model.num_attention_heads % tensor == 0 and (
            model.num_query_groups % tensor == 0 or tensor % model.num_query_groups == 0
        )
        widths = model.hidden_size % tensor == 0 and model.ffn_hidden_size % tensor == 0
        sequence = job.batch.seq_length % (tensor * parallel.context) == 0 and not job.recompute.distribute_saved_activations
        if tensor > parallel.gpus_per_node or not (heads and widths) or not _gives(job, factor):
            continue
        wider = replace(
            parallel,
            tensor=tensor,
            expert_tensor=tensor if parallel.expert_tensor == parallel.tensor else parallel.expert_tensor,
            sequence_parallel=parallel.sequence_parallel or sequence,
        )
        padded = _padded_vocabulary(job, tensor)
        if padded is None:
            continue
        changed = replace(_with_less_data_parallel(job, factor), parallel=wider, model=replace(model, padded_vocab_size=padded))
        new = "" if parallel.sequence_parallel or not sequence else " --sequence-parallel"
        yield _Change(f"--tensor-model-parallel-size {tensor}{new}", "sequence" if new else "tensor", changed)


def _more_pipeline_parallel(job: TrainingJob) -> Iterator[_Change]:
    """2, 4 and 8 times the stages, evenly split, taken from data parallelism."""
    parallel = job.parallel
    if parallel.pipeline_layout != PipelineSpec() or parallel.microbatch_group_size is not None:
        return
    for factor in (2, 4, 8):
        pipeline = parallel.pipeline * factor
        changed = replace(_with_less_data_parallel(job, factor), parallel=replace(parallel, pipeline=pipeline))
        whole = job.model.num_layers % (pipeline * parallel.chunks) == 0
        # an interleaved schedule refuses fewer microbatches than stages, and a last group of them that is not whole
        scheduled = parallel.virtual_pipeline is None or changed.batch.first_microbatches % pipeline == 0
        if whole and scheduled and _gives(job, factor):
            yield _Change(f"--pipeline-model-parallel-size {pipeline}", "pipeline", changed)


def _gives(job: TrainingJob, factor: int) -> bool:
    """Whether data parallelism can give up `factor`: it and the expert grid stay whole numbers."""
    parallel = job.parallel
    shrinks = parallel.data % factor == 0 and (parallel.data_with_context // factor) % parallel.distributed_optimizer_instances == 0
    return shrinks and parallel.expert_data % factor == 0


def _with_less_data_parallel(job: TrainingJob, factor: int) -> TrainingJob:
    """The same global batch on data / factor replicas: each takes `factor` times the microbatches."""
    batch = job.batch
    more = replace(batch, microbatches=batch.microbatches * factor, first_microbatches=batch.first_microbatches * factor)
    return replace(job, batch=more)


def _padded_vocabulary(job: TrainingJob, tensor: int) -> int | None:
    """Padded to a multiple of 128 · t, as Megatron's `vocab_size_with_padding` does by default; None if it cannot be known."""
    model = job.model
    if model.padded_vocab_size == round_up(model.vocab_size, 128 * job.parallel.tensor):
        return round_up(model.vocab_size, 128 * tensor)
    return model.padded_vocab_size if model.padded_vocab_size % tensor == 0 else None
