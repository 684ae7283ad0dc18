"""Buffers of Transformer Engine's userbuffers, which overlap communication with GEMMs (`--tp-comm-overlap`).

Each GEMM of a layer that communicates has one buffer with the size of the gathered hidden states. All layers of the model share it.
The CUDA driver allocates the buffers, so PyTorch's statistics do not include them.

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
"""GEMMs whose buffer receives an all-gather. With FP8 its elements have one byte."""
SCATTERING: Final = ("proj_fprop", "fc2_fprop", "qkv_wgrad", "fc1_wgrad")
"""GEMMs whose output is reduce-scattered, or that overlap with the reduce-scatter of another GEMM's output."""
GRANULARITY: Final = 2 * MIB
"""Allocation granularity of the driver's physical memory, in bytes."""


def userbuffer_bytes(job: TrainingJob) -> int:
    """Bytes of all buffers on a rank, with the default overlap methods of Transformer Engine (no configuration file)."""
    if not job.flags.tp_comm_overlap or job.parallel.tensor == 1:
        return 0
    batch = job.batch
    elements = batch.seq_length * batch.micro_batch_size // job.parallel.context * job.model.hidden_size
    wide = DTYPE_BYTES["bf16"]
    gathered = 1 if job.precision.fp8 is not None else wide
    sizes = (*(gathered for _ in GATHERING), *(wide for _ in SCATTERING))
    return sum(round_up(int(elements * size), GRANULARITY) for size in sizes)
