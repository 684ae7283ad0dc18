"""Messages that wait in the interleaved schedule: `forward_backward_pipelining_with_interleaving` (0.16.1), receive buffers."""

from __future__ import annotations

import pytest

from analyzer.program.schedule.messages import Ring, last_input_of_warmup, waiting_messages
from analyzer.program.schedule.pipeline import Step, steps

PIPELINE, GROUP, CHUNKS = 2, 3, 2


def order_of(rank: int, group: int = GROUP) -> tuple[Step, ...]:
    return steps(pipeline=PIPELINE, pipeline_rank=rank, chunks=CHUNKS, microbatches=2 * group, group_size=group)


def ring_of(rank: int, group: int = GROUP, *, overlaps: bool = True) -> Ring:
    return Ring(PIPELINE, group, overlaps, first=rank == 0, last=rank == PIPELINE - 1)


def during(order: tuple[Step, ...], waiting: tuple[int, ...], kind: str) -> list[int]:
    return [count for step, count in zip(order, waiting, strict=True) if step.kind == kind]


def test_the_last_stage_queues_gradients_of_a_group() -> None:
    """Backward k of the last stage receives the gradient of backward k - 1 on the first stage, for chunk 0. The microbatches of
    backwards 0 to 2 in chunk 1 are used in backwards 3 to 5: one step later than if a group had two microbatches.
    """
    order = order_of(1)
    waiting = waiting_messages(order, ring_of(1))
    assert during(order, waiting, "backward") == [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0]


def test_the_first_stage_queues_inputs_of_a_group() -> None:
    order = order_of(0)
    assert during(order, waiting_messages(order, ring_of(0)), "forward") == [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_groups_of_the_pipeline_size_queue_nothing(rank: int) -> None:
    order = order_of(rank, PIPELINE)
    assert not any(waiting_messages(order, ring_of(rank, PIPELINE)))


def test_a_last_group_that_is_smaller_leaves_gradients_in_the_buffer() -> None:
    """Groups of 4 and 2 microbatches: the buffer has 3 places, and the second group is used one step after it is received."""
    order = steps(pipeline=PIPELINE, pipeline_rank=1, chunks=CHUNKS, microbatches=6, group_size=4)
    counts = during(order, waiting_messages(order, ring_of(1, 4)), "backward")
    # backwards 9 and 10 receive for 10 and 11; the first of them stays in the buffer during the last backward
    assert counts == [0, 0, 1, 2, 2, 2, 1, 0, 0, 0, 0, 1]


def test_the_last_input_of_the_warmup_is_for_a_later_step_on_the_first_stage() -> None:
    """Five forwards of warm-up on the first stage. After the last one it would receive the output of forward 3 of the last stage,
    which is of the last chunk, so there is no message.
    """
    assert last_input_of_warmup(order_of(0), ring_of(0)) is None
    assert last_input_of_warmup(order_of(1), ring_of(1)) == (0, 1)  # three forwards of warm-up, then microbatch 0 in chunk 1


@pytest.mark.parametrize(("overlaps", "counts"), [(True, [0, 0, 1, 1, 1, 0]), (False, [0, 0, 0, 1, 1, 1])])
def test_without_overlaps_an_input_is_received_after_the_backward_of_its_pair(overlaps: bool, counts: list[int]) -> None:
    """`send_forward_backward_recv_forward_backward` runs after the backward, and with overlaps the forward has its own messages.

    Forwards 7, 8 and 9 of the first stage, beside backwards 2, 3 and 4, receive the inputs of forwards 9, 10 and 11. Each input
    waits from its receipt until that of the next: in the backward of its own pair or of the next one.
    """
    order = order_of(0)
    waiting = during(order, waiting_messages(order, ring_of(0, overlaps=overlaps)), "backward")
    assert waiting == [*counts, 0, 0, 0, 0, 0, 0]
