"""A fast lower bound of the memory of the highest-memory rank.

A search uses it to discard layouts that do not fit. It differs from the exact peak in three points: gradient buffers are not
padded, allocator blocks have the size of their tensors, and only pipeline messages that are allocated in every case are counted.
No module trees, rank classes or ordered operations are created: a chunk is a list of distinct modules with their number, and the
figures of a chunk are cached.

Symbols: p pipeline size, v chunks per rank, g microbatches that run through one chunk before the next, m microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from analyzer.layout.data_parallel import reduction_size
from analyzer.layout.stages import mtp_stage
from analyzer.memory.chunk_memory import ChunkFigures, chunk_figures
from analyzer.memory.collector import collector_paused
from analyzer.memory.device_overhead import SEGMENT, outside_allocator_bytes
from analyzer.memory.features import has_rare_features
from analyzer.memory.messages import MessageTensors, received_gradient
from analyzer.memory.ranks import tensor_classes
from analyzer.memory.stages import distinct_stages
from analyzer.memory.workspaces import workspace_bytes
from analyzer.modules.inputs import ModuleInputs, module_inputs, one_projection_in_userbuffers
from analyzer.modules.layer import LayerRuns
from analyzer.modules.models.gpt import CACHED_CHUNKS, chunk_modules, has_final_norm, layer_kinds, layers_of_chunk
from analyzer.modules.models.parts import ChunkKind
from analyzer.modules.shapes import Shapes, shapes_of
from analyzer.modules.tree import Module, Tensor
from analyzer.program.chunks import Block
from analyzer.program.schedule.references import Kind, Message
from analyzer.specs import TrainingJob
from analyzer.specs.release import is_before
from analyzer.specs.stage_sizes import layers_of_stages
from analyzer.states.adam import copies_gradients, step_tensors_of_torch
from analyzer.states.buffers.parameter_order import sum_of_parameters, trained_numel
from analyzer.states.bytes_per_parameter import FP32, bytes_per_parameter
from analyzer.units import DTYPE_BYTES, round_up


class Screen(NamedTuple):
    """Lower bounds for the highest-memory rank, in bytes."""

    peak_allocated_bytes: int
    device_bytes: int


class _Chunk(NamedTuple):
    """Figures of one model chunk."""

    figures: ChunkFigures
    modules: tuple[tuple[Module, int], ...]
    """Distinct modules, each with its number."""
    dense: int
    """Elements of all parameters except those of experts."""
    experts: int
    """Elements of the parameters of experts."""
    parameter_bytes: int
    referenced: int
    """Bytes that modules reference throughout an iteration."""


def screen(job: TrainingJob) -> Screen:
    """A lower bound of the memory of the highest-memory rank, in bytes.

    Jobs that the fast computation does not cover get the exact peak without the allocator simulation.
    """
    with collector_paused():
        peak = _peak(job) if is_screened(job) else None
        if peak is None:
            peak = max(each.memory.peak_allocated_bytes for each in tensor_classes(job, distinct_stages(job)))
    return Screen(peak, round_up(peak, SEGMENT) + outside_allocator_bytes(job))


def microbatches_in_flight(job: TrainingJob, rank: int) -> tuple[int, ...]:
    """For each chunk of a pipeline rank, the microbatches that are between forward and backward when the first backward starts.

    Only for jobs for which `has_known_flight` is true.
    """
    parallel, microbatches = job.parallel, job.batch.microbatches
    p, v = parallel.pipeline, parallel.chunks
    if v == 1:
        return (min(p - rank, microbatches),)
    g = parallel.microbatch_group_size or p
    forwards = min(min(2 * (p - rank - 1) + (v - 1) * g, microbatches * v) + 1, microbatches * v)
    rounds, rest = divmod(forwards, g * v)
    return tuple(rounds * g + min(g, max(0, rest - chunk * g)) for chunk in range(v))


def is_screened(job: TrainingJob) -> bool:
    """Whether the fast computation covers a job: 1F1B or interleaved, Adam or SGD on the GPU."""
    differs = job.flags.delay_wgrad_compute or job.flags.defer_embedding_wgrad or is_before(job.megatron, "0.12")
    return has_known_flight(job) and not differs


def has_known_flight(job: TrainingJob) -> bool:
    """Whether `microbatches_in_flight` covers a job: 1F1B, or interleaved with complete groups of microbatches."""
    parallel = job.parallel
    group = parallel.microbatch_group_size or parallel.pipeline
    return not has_rare_features(job) and (parallel.chunks == 1 or job.batch.microbatches % group == 0)


def least_state_bytes(job: TrainingJob, *, dense: int, experts: int, parameter_bytes: int) -> int:
    """A lower bound of the model states from the elements of a rank's parameters; 0 for states that are sharded in other ways.

    With FP8 a weight has at least one byte.
    """
    optimizer = job.optimizer
    if job.fsdp is not None or optimizer.offload is not None or optimizer.facts.updates != "in place":
        return 0
    least = dense + experts if job.precision.fp8 is not None else parameter_bytes
    return state_bytes(job, dense=dense, experts=experts, parameter_bytes=least)[0]


def _peak(job: TrainingJob) -> int | None:
    """The highest peak of all pipeline ranks, in bytes; None if a chunk has no modules."""
    parallel = job.parallel
    inputs, shapes = module_inputs(job), shapes_of(job)
    received = received_gradient(job)
    kinds = kinds_of_stages(job)
    known: dict[ChunkKind, _Chunk | None] = {}
    highest = 0
    for rank, chunk_kinds in _distinct_ranks(kinds, parallel.pipeline):
        chunks = []
        for kind in chunk_kinds:
            if kind not in known:
                known[kind] = _chunk(inputs, kind, received)
            chunk = known[kind]
            if chunk is None:
                return None
            chunks.append(chunk)
        highest = max(highest, _peak_of_rank(job, shapes, rank, chunks))
    return highest


def kinds_of_stages(job: TrainingJob) -> tuple[ChunkKind, ...]:
    """The kind of every virtual stage, in model order."""
    model, parallel = job.model, job.parallel
    counts = layers_of_stages(model.num_layers, parallel)
    layers, in_userbuffers = layer_kinds(model, job.precision.fp8), one_projection_in_userbuffers(job)
    return _kinds_of_counts(layers, counts, model.mtp_num_layers, mtp_stage(parallel), in_userbuffers)


@lru_cache(maxsize=CACHED_CHUNKS)
def _kinds_of_counts(
    layers: LayerRuns, counts: tuple[int, ...], mtp_layers: int, mtp_stage: int, in_userbuffers: bool
) -> tuple[ChunkKind, ...]:
    """The same for stages with so many layers."""
    last, total = len(counts) - 1, sum(counts)
    found: list[ChunkKind] = []
    known: dict[ChunkKind, ChunkKind] = {}
    for stage, end in enumerate(accumulate(counts)):
        runs = layers_of_chunk(layers, end - counts[stage], end, in_userbuffers)
        kind = ChunkKind(
            layers=runs,
            pre_process=stage == 0,
            post_process=stage == last,
            final_norm=has_final_norm(
                last_layer=bool(counts[stage]) and end == total, post_process=stage == last, mtp_layers=mtp_layers
            ),
            mtp_layers=mtp_layers if stage == mtp_stage else 0,
        )
        found.append(known.setdefault(kind, kind))
    return tuple(found)


def _distinct_ranks(kinds: Sequence[ChunkKind], pipeline: int) -> list[tuple[int, tuple[ChunkKind, ...]]]:
    """The first of the pipeline ranks with equal chunks, with its chunks: later ones have no more microbatches in flight."""
    found: dict[tuple[int, ...], tuple[int, tuple[ChunkKind, ...]]] = {}
    for rank in range(pipeline):
        chunk_kinds = tuple(kinds[rank::pipeline])
        found.setdefault(tuple(map(id, chunk_kinds)), (rank, chunk_kinds))
    return list(found.values())


@lru_cache(maxsize=CACHED_CHUNKS)
def _chunk(inputs: ModuleInputs, kind: ChunkKind, received: Tensor) -> _Chunk | None:
    modules = chunk_modules(inputs, kind)
    if modules is None:
        return None
    blocks = [Block(module, "", times) for module, times in modules]
    counts = [(times, *module.derived(parameter_figures)) for module, times in modules]
    return _Chunk(
        figures=chunk_figures(blocks, received=() if kind.post_process else (received,)),
        modules=modules,
        dense=sum(times * dense for times, dense, _, _ in counts),
        experts=sum(times * experts for times, _, experts, _ in counts),
        parameter_bytes=sum(times * size for times, _, _, size in counts),
        referenced=sum(times * module.lingering_once for module, times in modules),
    )


def parameter_figures(module: Module) -> tuple[int, int, int]:
    """Elements of all trained parameters except experts, elements of trained experts, and bytes of all parameters."""
    experts = sum_of_parameters(
        module, lambda parameter: parameter.numel if parameter.sharding == "expert" and not parameter.frozen else 0
    )
    every = trained_numel(module)
    size = sum_of_parameters(module, lambda parameter: int(DTYPE_BYTES[parameter.dtype]) * parameter.numel)
    return every - experts, experts, size


def _peak_of_rank(job: TrainingJob, shapes: Shapes, rank: int, chunks: Sequence[_Chunk]) -> int:
    modules: dict[int, tuple[Module, int]] = {}
    for chunk in chunks:
        for module, times in chunk.modules:
            _, before = modules.get(id(module), (module, 0))
            modules[id(module)] = (module, before + times)
    constant = workspace_bytes(job, shapes, tuple(modules.values()), chunks=len(chunks)) + sum(chunk.referenced for chunk in chunks)
    states, copies = _states(job, chunks)
    messages_bytes = _messages(job, rank, len(chunks))
    figures = [chunk.figures for chunk in chunks]
    if len(chunks) == 1:
        in_iteration = _one_chunk(figures[0], job.parallel.pipeline - rank, job.batch.microbatches, messages_bytes)
    else:
        in_iteration = _interleaved(job, rank, figures, messages_bytes)
    return max(states + constant + max(copies, in_iteration), _moved_parameters(job, chunks))


def _moved_parameters(job: TrainingJob, chunks: Sequence[_Chunk]) -> int:
    """Bytes at the peak of the creation of the parameter buffers, at least (`states.of_rank`)."""
    fp8 = job.precision.fp8
    if not job.optimizer.distributed or not job.core.parameters_in_buffers or (fp8 is not None and fp8.stored_parameters):
        return 0
    parameter, gradient = int(DTYPE_BYTES[job.precision.parameters]), int(DTYPE_BYTES[job.precision.gradients])
    together = job.parallel.expert == 1
    buffers = [
        numel for chunk in chunks for numel in ((chunk.dense + chunk.experts,) if together else (chunk.dense, chunk.experts))
    ]
    existing, highest = sum(chunk.parameter_bytes for chunk in chunks), 0
    for numel in buffers:
        highest = max(highest, existing + (parameter + gradient) * numel)
        existing += gradient * numel
    return highest


def _messages(job: TrainingJob, rank: int, chunks: int) -> tuple[int, int]:
    """Bytes of the messages that the schedule references in a steady forward and in a steady backward, at least."""
    first, last = rank == 0, rank == job.parallel.pipeline - 1
    backward = [] if first and chunks == 1 else [Kind.INPUT_GRADIENT]
    forward = [*backward]
    if chunks == 1:
        forward += ([] if first else [Kind.INPUT]) + ([] if last else [Kind.OUTPUT_GRADIENT])
    tensors = MessageTensors(job, rank, (False,) * chunks)
    of_forward, of_backward = (tensors.bytes([Message(kind, 0, 0) for kind in kinds]) for kinds in (forward, backward))
    return of_forward, of_backward


def _states(job: TrainingJob, chunks: Sequence[_Chunk]) -> tuple[int, int]:
    """Bytes of the model states without padding, and bytes of gradient copies in the optimizer step."""
    return state_bytes(
        job,
        dense=sum(chunk.dense for chunk in chunks),
        experts=sum(chunk.experts for chunk in chunks),
        parameter_bytes=sum(_parameter_bytes(job, chunk) for chunk in chunks),
    )


def _parameter_bytes(job: TrainingJob, chunk: _Chunk) -> int:
    """Bytes of the parameters of a chunk. Those in FP8 are partly in buffers, if there is a distributed optimizer."""
    fp8 = job.precision.fp8
    if fp8 is None or not fp8.stored_parameters:
        return chunk.parameter_bytes
    from analyzer.states.fp8_weights import in_buffer_bytes, outside_buffer_bytes  # for such jobs only, for a short start-up

    return in_buffer_bytes(job, chunk.modules) + outside_buffer_bytes(job, chunk.modules)


def state_bytes(job: TrainingJob, *, dense: int, experts: int, parameter_bytes: int) -> tuple[int, int]:
    """The same from the elements of a rank's parameters, without and of experts, and the bytes of all of them."""
    owned = dense + experts
    if job.parallel.expert == 1:  # experts are reduced together with all other parameters
        dense, experts = owned, 0
    if job.optimizer.distributed:
        owned = dense // reduction_size(job.parallel, "dp_cp") + experts // reduction_size(job.parallel, "edp")
    each = bytes_per_parameter(job)
    kept = parameter_bytes + int(DTYPE_BYTES[job.precision.gradients]) * (dense + experts)
    in_step = copies_gradients(job) + len(step_tensors_of_torch(job))
    return kept + int((each.master + each.total_moments) * owned), FP32 * owned * in_step


def _one_chunk(figures: ChunkFigures, stages: int, microbatches: int, messages_bytes: tuple[int, int]) -> int:
    """The peak of 1F1B in bytes. At most `stages` microbatches are in flight: the number of stages from this one to the last."""
    in_flight = min(stages, microbatches)
    forward, backward = messages_bytes if microbatches > in_flight else (0, 0)
    saved = (in_flight - 1) * figures.retained
    found = max(saved + figures.forward_peak + forward, saved + figures.backward_peak + backward)
    if in_flight > 1:  # a backward that directly follows another one
        found = max(found, saved - figures.retained + figures.next_backward_peak)
    return found


def _interleaved(job: TrainingJob, rank: int, figures: Sequence[ChunkFigures], messages_bytes: tuple[int, int]) -> int:
    """The peak of the interleaved schedule in bytes.

    Only steps at which the chunk of a forward or of a backward changes are evaluated: between them the bytes in flight change by
    a constant per step.
    """
    p, v = job.parallel.pipeline, len(figures)
    g = job.parallel.microbatch_group_size or p
    total = job.batch.microbatches * v
    warmup = min(2 * (p - rank - 1) + (v - 1) * g, total)
    after_forward = list(accumulate((each.retained for each in figures), initial=0))
    after_backward = list(accumulate((each.retained for each in reversed(figures)), initial=0))

    def total_after(steps: int, sums: Sequence[int]) -> int:
        """Bytes saved or freed by the first `steps` forwards or backwards."""
        rounds, rest = divmod(steps, g * v)
        chunks, begun = divmod(rest, g)
        return g * (rounds * sums[v] + sums[chunks]) + (begun * (sums[chunks + 1] - sums[chunks]) if begun else 0)

    def in_flight(forwards: int, backwards: int) -> int:
        return total_after(forwards, after_forward) - total_after(backwards, after_backward)

    found = 0
    changes = {at for first in (0, warmup) for place in range(v + 1) for at in (first + place * g, first + place * g - 1)}
    for forward in {warmup, *(at for at in changes if warmup <= at)}:
        backward = forward - warmup
        sent = messages_bytes if backward else (0, 0)
        if forward < total:
            chunk = figures[forward // g % v]
            found = max(found, in_flight(forward, backward) + chunk.forward_peak + sent[0])
        done = min(forward + 1, total)
        if backward < total:
            chunk = figures[v - 1 - backward // g % v]
            found = max(found, in_flight(done, backward) - chunk.retained + chunk.backward_peak + sent[1])
    return found
