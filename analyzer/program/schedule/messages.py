"""Messages of the interleaved schedule that are received before their step is next.

With groups of more microbatches than pipeline ranks, the stages of the ring are apart by more steps than there are ranks: the first
stage queues inputs, and the last stage queues gradients. Other stages receive a message one step before they use it.

Source: `forward_backward_pipelining_with_interleaving` (core/pipeline_parallel/schedules.py, 0.10 to 0.16):
`recv_tensor_from_previous_stage`, `fwd_recv_buffer` and `bwd_recv_buffer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from analyzer.program.schedule.pipeline import Step


class Ring(NamedTuple):
    """How a rank exchanges messages in the interleaved schedule."""

    pipeline: int
    group_size: int
    """Microbatches that run through one chunk before the next."""
    overlaps: bool
    """An input is received after the forward of a pair of steps, and a gradient after its backward; otherwise both at the end."""
    first: bool
    """The rank is the first stage."""
    last: bool
    """The rank is the last stage."""


class _Message(NamedTuple):
    received: int
    """Number of the pass, of those of its direction, after which it is received."""
    used: int
    """Number of the pass that reads it."""


def waiting_messages(order: Sequence[Step], ring: Ring) -> tuple[int, ...]:
    """For each step, messages of later steps than the next of its direction, and gradients that stay in the receive buffer."""
    found = [0] * len(order)
    for kind, queues in (("forward", ring.first), ("backward", ring.last)):
        if not queues or ring.group_size == ring.pipeline:
            continue
        places = [place for place, step in enumerate(order) if step.kind == kind]
        ends = [_end(order, place, ring) for place in places]
        received = list(_messages([order[place] for place in places], ring))
        size = ring.group_size - ring.pipeline + 1
        replacing = {message.received for message in received}
        for message in received:
            start = ends[message.received]
            if message.used - 1 > message.received and start and order[start - 1].paired:
                start -= 2  # the backward of a pair exchanges its messages while the forward runs
            spans = [(start, ends[message.used - 1])]
            if kind == "backward":
                # the next message empties the next place of the buffer
                cleared = message.received + size - ((message.received + size - 1) in replacing)
                spans.append((places[message.used], ends[min(cleared, len(ends) - 1)]))
            for begin, end in spans:
                for place in range(begin + 1, end + 1):
                    found[place] += 1
    return tuple(found)


def last_input_of_warmup(order: Sequence[Step], ring: Ring) -> tuple[int, int] | None:
    """Microbatch and chunk of the input that is received after the last forward of the warm-up; None without one (first stage).

    Forwards must be left after the first backward.
    """
    steady = next(place for place, step in enumerate(order) if step.kind == "backward") - 1
    if not ring.first:
        return order[steady].microbatch, order[steady].chunk
    passes = [step for step in order if step.kind == "forward"]
    message = next((each for each in _messages(passes, ring) if each.received == steady - 1), None)
    return None if message is None else (passes[message.used].microbatch, passes[message.used].chunk)


def _messages(passes: Sequence[Step], ring: Ring) -> Iterator[_Message]:
    """The messages of the leading stage of a direction: what the other end of the ring sends for another chunk of it."""
    forward = passes[0].kind == "forward"
    chunks = 1 + max(step.chunk for step in passes)
    ending, change = (chunks - 1, 1) if forward else (0, -1)
    number = {(step.microbatch, step.chunk): place for place, step in enumerate(passes)}
    for index in range(ring.pipeline - 1, len(passes) - 1):
        sent = passes[index - (ring.pipeline - 1)]
        if sent.chunk != ending:
            yield _Message(index, number[sent.microbatch, sent.chunk + change])


def _end(order: Sequence[Step], place: int, ring: Ring) -> int:
    """The last step that runs before the messages of this step are exchanged."""
    paired = not ring.overlaps and order[place].kind == "forward" and place + 1 < len(order) and order[place + 1].kind == "backward"
    return place + paired
