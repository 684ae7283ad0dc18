"""Tensors that the 1F1B schedule references beside those of the step that runs, from its local variables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.memory.messages import MessageTensors
from analyzer.memory.order import ends_of, has_leaf_input, iteration_of
from analyzer.memory.ranks import rank_classes_of_tensors
from analyzer.passes.stages import stage_models
from analyzer.program.schedule.iteration import Iteration, Moment
from analyzer.program.schedule.messages import Ring
from analyzer.program.schedule.pipeline import steps
from analyzer.specs import TrainingJob
from analyzer.specs.adapters import DEFAULT_TARGETS, AdapterLayers, AdapterSpec
from tests.job_of import job_of

S, B, H, STAGES, MICROBATCHES = 2048, 1, 1024, 4, 8
HIDDEN = 2 * S * B * H
"""Hidden states of a microbatch, or their gradient, in bf16."""
LINE = f"--pipeline-model-parallel-size {STAGES} --global-batch-size {2 * MICROBATCHES}"

MTP_LINE = (
    "--num-layers 2 --position-embedding-type rope --ffn-hidden-size 1024 --pipeline-model-parallel-size 2 --mtp-num-layers 2 "
    "--global-batch-size 16"
)


def moments(job: TrainingJob, rank: int) -> tuple[Moment, ...]:
    """The steps of 1F1B in the first iteration."""
    order = steps(pipeline=STAGES, pipeline_rank=rank, chunks=1, microbatches=MICROBATCHES)
    return tuple(Iteration(order, ends_of(stage_models(job)[rank].chunks)).moments(warm=False))


def bytes_by_step(job: TrainingJob, rank: int) -> list[tuple[str, int]]:
    """The steps of a rank, such as F0 for the forward of microbatch 0, with the bytes of the messages that are referenced."""
    tensors = MessageTensors(job, rank, freed=(False,))
    return [(f"{each.step.kind[0].upper()}{each.step.microbatch}", tensors.bytes(each.held)) for each in moments(job, rank)]


@pytest.mark.parametrize(
    ("rank", "forward", "backward"),
    [
        (0, 1, 0),  # no stage before: only output_tensor_grad
        (1, 3, 1),
        (2, 3, 1),
        (3, 2, 1),  # no stage after: no output_tensor_grad
    ],
)
def test_a_steady_forward_has_the_input_and_both_gradients_of_the_previous_microbatch(
    rank: int, forward: int, backward: int
) -> None:
    """core/pipeline_parallel/schedules.py `forward_backward_pipelining_without_interleaving` (0.16.1), local variables.

    While `forward_step` runs, three of them belong to the microbatch whose backward ran before. `output_tensor_grad` [s, b, h]
    was received from the next stage. `input_tensor_grad` [s, b, h] was sent to the previous stage. `output_tensor` has no data
    (`deallocate_output_tensor`), but its autograd graph references the leaf that it was computed from, the input [s, b, h].
    While `backward_step` runs, only `input_tensor_grad` belongs to the microbatch before.
    """
    found = dict(bytes_by_step(job_of(LINE), rank))
    assert found["F5"] == forward * HIDDEN
    assert found["B3"] == backward * HIDDEN


@pytest.mark.parametrize(("rank", "messages"), [(0, 2), (1, 2), (2, 2), (3, 0)])
def test_the_output_of_a_forward_is_freed_after_the_gradient_is_received(rank: int, messages: int) -> None:
    """`send_forward_recv_backward` allocates the next gradient before `deallocate_output_tensor` frees the output."""
    first = [each for each in moments(job_of(LINE), rank) if each.exchanged][:1]
    assert sum(len(each.exchanged) for each in first) == messages


def test_the_messages_of_two_mtp_layers_can_be_the_peak() -> None:
    """Each message has the hidden states of the decoder and of both depths: the output, the gradient of the last microbatch and
    the next one. The attention mask and the input of the last microbatch are not allocated any more."""
    job = job_of(f"{MTP_LINE} --pipeline-model-parallel-layout Ettmm|L")
    memory = rank_classes_of_tensors(job)[0].memory
    assert memory.peak_at == "forward of microbatch 2, messages to and from the next stage"
    assert {part.name: part.bytes for part in memory.transient_parts} == {
        "output sent to the next stage": 3 * HIDDEN,
        "gradient received from the next stage": 6 * HIDDEN,
    }


def test_nothing_is_referenced_before_the_first_backward() -> None:
    """The second of four stages: two forwards of the warm-up, then 1F1B, then two backwards of the cool-down."""
    warmup = [("F0", 0), ("F1", 0), ("F2", 0), ("B0", 0)]
    steady = [each for i in range(3, MICROBATCHES) for each in ((f"F{i}", 3 * HIDDEN), (f"B{i - 2}", HIDDEN))]
    cooldown = [("B6", HIDDEN), ("B7", HIDDEN)]
    assert bytes_by_step(job_of(LINE), 1) == [*warmup, *steady, *cooldown]


def test_sequence_parallel_stages_exchange_their_part_of_the_sequence() -> None:
    """`get_tensor_shapes`: the sequence length is divided by the tensor-parallel size t = 2."""
    found = dict(bytes_by_step(job_of(f"{LINE} --tensor-model-parallel-size 2 --sequence-parallel"), 1))
    assert found["F5"] == 3 * HIDDEN // 2


def test_after_the_last_overlapped_step_only_the_next_backward_needs_a_message() -> None:
    """`forward_backward_pipelining_with_interleaving`: each steady step receives for a forward and a backward, the last for none of
    the forwards, because none is left."""
    line = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --num-layers 8 --num-experts 8 "
    job = job_of(f"{line} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --disable-bias-linear", gpus=8)
    order = steps(pipeline=4, pipeline_rank=1, chunks=2, microbatches=16, combined=True)
    ring = Ring(4, 4, overlaps=True, first=False, last=False)
    iteration = Iteration(order, ends_of(stage_models(job)[1].chunks), ring)
    pairs = [each.pair for each in iteration.moments(warm=True) if each.pair is not None]
    assert pairs[0].ahead == 2
    assert pairs[-1].ahead == 1


@pytest.mark.parametrize(
    ("layers", "recompute", "forward"),
    [
        ("megatron", "", 1),  # only output_tensor_grad
        ("megatron", " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 3),
        ("transformer_engine", "", 3),
    ],
)
def test_the_output_of_a_frozen_embedding_that_gets_a_gradient_is_referenced_as_a_received_input(
    layers: AdapterLayers, recompute: str, forward: int
) -> None:
    """`decoder_input.requires_grad_(True)` of mcore-bridge 1.6 (model/gpt_model.py), in Megatron-Bridge under checkpoints only.

    It makes the output of the frozen embedding [s, b, h] a leaf. The autograd graph of `output_tensor` references it and its `grad`
    until the next forward has run.
    """
    job = job_of(f"{LINE}{recompute}")
    job = replace(job, model=replace(job.model, adapters=AdapterSpec(rank=8, targets=DEFAULT_TARGETS, layers=layers)))
    order = steps(pipeline=STAGES, pipeline_rank=0, chunks=1, microbatches=MICROBATCHES)
    ends = ends_of(stage_models(job)[0].chunks, leaf=has_leaf_input(job))
    tensors = MessageTensors(job, 0, freed=(False,))
    ran = Iteration(order, ends).moments(warm=False)
    found = {(each.step.kind, each.step.microbatch): tensors.bytes(each.held) for each in ran}
    assert found["forward", 5] == forward * HIDDEN
    assert found["backward", 5] == 0


@pytest.mark.parametrize(("megatron", "references"), [("0.17.1", True), ("0.18.2", False)])
def test_from_0_18_on_a_schedule_without_a_pipeline_drops_the_output_of_each_microbatch(megatron: str, references: bool) -> None:
    """`del output_tensor` in `forward_backward_no_pipelining`. With a pipeline the output is referenced as before."""
    for pipeline, expected in ((1, references), (2, True)):
        line = f"--pipeline-model-parallel-size {pipeline} --global-batch-size 16"
        job = replace(job_of(line), megatron=megatron)
        adapters = AdapterSpec(rank=8, targets=DEFAULT_TARGETS, layers="transformer_engine")
        job = replace(job, model=replace(job.model, adapters=adapters))
        made = iteration_of(job, 0, 2, stage_models(job)[0].chunks)
        assert made.ends.leaf is expected
