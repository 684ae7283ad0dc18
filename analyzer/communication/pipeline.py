"""Messages between pipeline stages: activations to the next, their gradients to the previous.

Read in megatron/core/pipeline_parallel/schedules.py (`get_tensor_shapes` and the three schedules) and
p2p_communication.py (`P2PCommunicator`), 0.16.1. Symbols: s sequence, b micro-batch, h hidden, c context-parallel and
t tensor-parallel size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from analyzer.communication.rows import Phase, row
from analyzer.layout.stages import mtp_stage
from analyzer.modules.stage import StageModel
from analyzer.results import Message
from analyzer.specs import TrainingJob

SHAPE_MESSAGE = (3,)
"""The three sizes of a tensor, sent before it where its receiver does not know them (`_communicate_shapes`)."""


def hidden_states_shape(job: TrainingJob, *, states: int = 1) -> tuple[int, int, int]:
    """[s/c, b, h] without sequence parallelism, where every tensor-parallel rank sends the whole; else [s/c/t, b, h].

    `states` of them, one after the other, go past multi-token prediction layers.
    """
    parallel, batch = job.parallel, job.batch
    sequence = batch.seq_length // parallel.context
    if parallel.sequence_parallel:
        sequence //= parallel.tensor
    return states * sequence, batch.micro_batch_size, job.model.hidden_size


def pipeline_messages(job: TrainingJob, stage: StageModel) -> Iterator[Message]:
    """What a rank of this stage sends; the receive of the other rank is the same message and is not repeated.

    Every chunk sends its output on, but the one with the loss, and the gradient of its input back, but the one with
    the embedding. Interleaved, the last pipeline rank sends chunk i to the first pipeline rank's chunk i + 1, so that
    a microbatch crosses v·p - 1 boundaries in each direction. With multi-token prediction layers on a rank other than
    the last, the sizes of every tensor are sent before it.
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
            yield row(
                job,
                pipeline_rank=stage.pipeline_rank,
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
    """Boundaries that this rank's microbatch crosses, by the hidden states in the message.

    Multi-token prediction layers that have no loss on their stage send on what they received and the output of each depth.
    """
    boundaries: Counter[int] = Counter()
    for chunk in stage.chunks:
        if chunk.post_process if forward else chunk.pre_process:
            continue
        sender = chunk.virtual_stage * job.parallel.pipeline + stage.pipeline_rank
        past = (sender if forward else sender - 1) >= mtp_stage(job.parallel)
        boundaries[1 + (job.model.mtp_num_layers if past else 0)] += 1
    return boundaries
