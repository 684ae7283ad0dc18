"""Communication between pipeline stages: activations to the next stage, gradients to the previous one.

Source: megatron/core/pipeline_parallel/schedules.py (`get_tensor_shapes` and the three schedules) and
p2p_communication.py (`P2PCommunicator`), 0.16.1. Symbols: s sequence, b micro-batch, h hidden, c context-parallel and
t tensor-parallel size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from analyzer.communication.calls import Call, Phase
from analyzer.layout.stages import mtp_stage
from analyzer.modules.stage import StageModel
from analyzer.specs import TrainingJob

SHAPE_MESSAGE = (3,)
"""The three sizes of a tensor, sent before it if the receiver does not know them (`_communicate_shapes`)."""


def hidden_states_shape(job: TrainingJob, *, states: int = 1) -> tuple[int, int, int]:
    """[s/c, b, h], or [s/c/t, b, h] with sequence parallelism; n·h elements with hyper-connections of n parts.

    `states`: hidden states in one message; several past MTP layers.
    """
    parallel, batch = job.parallel, job.batch
    sequence = batch.seq_length // parallel.context
    if parallel.sequence_parallel:
        sequence //= parallel.tensor
    return states * sequence, batch.micro_batch_size, job.model.stream_width


def pipeline_calls(job: TrainingJob, stage: StageModel) -> Iterator[Call]:
    """Sends of a rank of this stage. The receive of the other rank is the same message and is not listed.

    Every chunk except the one with the loss sends its output, and every chunk except the one with the embedding sends the
    gradient of its input back. If interleaved, the last pipeline rank sends the output of chunk i to chunk i + 1 of the first, so
    a microbatch crosses v·p - 1 boundaries in each direction. With MTP layers on a rank other than the last, the sizes of every
    tensor are sent before it.
    """
    parallel = job.parallel
    sends: tuple[tuple[Phase, str, str, Counter[int]], ...] = (
        ("forward", "pipeline.hidden_states", "next", _states_sent(job, stage, forward=True)),
        ("backward", "pipeline.hidden_states_gradient", "previous", _states_sent(job, stage, forward=False)),
    )
    sizes = job.model.mtp_num_layers > 0 and mtp_stage(parallel) % parallel.pipeline != parallel.pipeline - 1
    for phase, module, peer, boundaries in sends:
        tensors: list[tuple[str, tuple[int, ...], str, int]] = [
            (module, hidden_states_shape(job, states=states), job.precision.parameters, calls)
            for states, calls in boundaries.items()
        ]
        if sizes and boundaries:
            tensors.append((f"{module}.shape", SHAPE_MESSAGE, "int64", boundaries.total()))
        for name, shape, dtype, calls in tensors:
            yield Call(
                group="pp",
                kind="send",
                phase=phase,
                module=name,
                shape=shape,
                dtype=dtype,
                per_microbatch=calls,
                peer=peer,
                batched=parallel.chunks == 1 or not parallel.overlap_p2p,
            )


def _states_sent(job: TrainingJob, stage: StageModel, *, forward: bool) -> Counter[int]:
    """Boundaries that a microbatch of this rank crosses, by the number of hidden states in the message.

    MTP layers without the loss on their stage send what they received and the output of each depth.
    """
    boundaries: Counter[int] = Counter()
    for chunk in stage.chunks:
        if chunk.post_process if forward else chunk.pre_process:
            continue
        sender = chunk.virtual_stage * job.parallel.pipeline + stage.pipeline_rank
        past = (sender if forward else sender - 1) >= mtp_stage(job.parallel)
        boundaries[1 + (job.model.mtp_num_layers if past else 0)] += 1
    return boundaries
