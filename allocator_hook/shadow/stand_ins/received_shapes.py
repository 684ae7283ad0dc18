"""The shapes of tensors that a pipeline stage receives, if Megatron does not know them before (`_communicate_shapes`, 0.16).

Without peers the messages with the shapes are recorded, but contain no values. If MTP layers are not on the last stage, their stage
and later ones send the hidden states of all depths.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from allocator_hook.step.patching import Patch
from analyzer.layout.stages import mtp_stage
from analyzer.specs import TrainingJob


def received_shapes(job: TrainingJob) -> Iterator[Patch]:
    """Yield the patch of the function that exchanges shapes, for a job without interleaved stages."""
    parallel, batch = job.parallel, job.batch
    if not job.model.mtp_num_layers or parallel.pipeline_layout.layout is None:
        return
    communicator = import_module("megatron.core.pipeline_parallel.p2p_communication").P2PCommunicator
    exchange, predicting = communicator._communicate_shapes, mtp_stage(parallel)
    rows = batch.seq_length // parallel.context // (parallel.tensor if parallel.sequence_parallel else 1)

    def shape(sender: int) -> list[int]:
        states = 1 + job.model.mtp_num_layers if sender >= predicting else 1
        return [states * rows, batch.micro_batch_size, job.model.hidden_size]

    def communicate(self: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool) -> tuple[list[int], list[int]]:
        exchange(self, send_next, send_prev, recv_prev, recv_next)
        rank = self.pp_group.rank()
        return shape(rank - 1), shape(rank)

    yield Patch(communicator, "_communicate_shapes", communicate, "the messages have no values")
