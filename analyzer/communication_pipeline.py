"""Messages between pipeline stages: activations to the next, their gradients to the previous.

Read in megatron/core/pipeline_parallel/schedules.py (`get_tensor_shapes` and the three schedules) and
p2p_communication.py (`P2PCommunicator`), 0.16.1. Symbols: s sequence, b micro-batch, h hidden, c context-parallel and
t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Iterator

from analyzer.communication_rows import Phase, row
from analyzer.results import Message, StageModel
from analyzer.specs import Launch


def hidden_states_shape(launch: Launch) -> tuple[int, int, int]:
    """[s/c, b, h] without sequence parallelism, where every tensor-parallel rank sends the whole; else [s/c/t, b, h]."""
    parallel, batch = launch.parallel, launch.batch
    sequence = batch.seq_length // parallel.context
    if parallel.sequence_parallel:
        sequence //= parallel.tensor
    return sequence, batch.micro_batch_size, launch.model.hidden_size


def pipeline_messages(launch: Launch, stage: StageModel) -> Iterator[Message]:
    """What a rank of this stage sends; the receive of the other rank is the same message and is not repeated.

    Every chunk sends its output on, but the one with the loss, and the gradient of its input back, but the one with
    the embedding. Interleaved, the last pipeline rank sends chunk i to the first pipeline rank's chunk i + 1, so that
    a microbatch crosses v·p - 1 boundaries in each direction.
    """
    sends: tuple[tuple[Phase, str, str, int], ...] = (
        ("forward", "pipeline.hidden_states", "next", sum(not chunk.post_process for chunk in stage.chunks)),
        ("backward", "pipeline.hidden_states_gradient", "previous", sum(not chunk.pre_process for chunk in stage.chunks)),
    )
    for phase, module, peer, calls in sends:
        if calls:
            yield row(
                launch,
                pipeline_rank=stage.pipeline_rank,
                group="pp",
                kind="send",
                phase=phase,
                module=module,
                shape=hidden_states_shape(launch),
                dtype=launch.precision.parameters,
                per_microbatch=calls,
                peer=peer,
                batched=launch.parallel.chunks == 1 or not launch.parallel.overlap_p2p,
            )
