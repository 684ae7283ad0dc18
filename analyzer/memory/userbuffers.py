"""Buffers of Transformer Engine's userbuffers, through which messages overlap with products (`--tp-comm-overlap`).

Every product of a layer that sends has one for the whole model, as large as the gathered hidden states. They are memory of the
driver, which PyTorch does not know of.

Sources: transformer_engine/pytorch/module/base.py `initialize_ub` (TE 2.11); common/comm_gemm_overlap/comm_gemm_overlap.cpp
and userbuffers-host.cpp `register_user_buffer_collective`; megatron/training/initialize.py `_initialize_tp_communicators`.
"""

from __future__ import annotations

from typing import Final

from analyzer.specs import TrainingJob
from analyzer.units import DTYPE_BYTES, MIB, round_up

GATHERING: Final = (
    "qkv_fprop",
    "qkv_dgrad",
    "proj_dgrad",
    "proj_wgrad",
    "fc1_fprop",
    "fc1_dgrad",
    "fc2_dgrad",
    "fc2_wgrad",
)
"""Products that read what is gathered: of bytes where they are in FP8."""
SCATTERING: Final = ("proj_fprop", "fc2_fprop", "qkv_wgrad", "fc1_wgrad")
"""Products whose result is scattered, or beside which another one's is."""
GRANULARITY: Final = 2 * MIB
"""Of physical memory that the driver hands out."""


def userbuffer_bytes(job: TrainingJob) -> int:
    """Memory of all buffers on a rank, with the methods that Transformer Engine takes where no file names others."""
    if not job.flags.tp_comm_overlap or job.parallel.tensor == 1:
        return 0
    batch = job.batch
    elements = batch.seq_length * batch.micro_batch_size // job.parallel.context * job.model.hidden_size
    wide = DTYPE_BYTES["bf16"]
    gathered = 1 if job.precision.fp8 is not None else wide
    sizes = (*(gathered for _ in GATHERING), *(wide for _ in SCATTERING))
    return sum(round_up(int(elements * size), GRANULARITY) for size in sizes)
