"""Creates Transformer Engine's userbuffers, as `_initialize_tp_communicators` of megatron/training/initialize.py does (0.16)."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from allocator_hook.step.patching import Patch, Patches
from analyzer.specs import TrainingJob


def initialize(job: TrainingJob) -> None:
    """Create the buffers of `--tp-comm-overlap` with the default overlap methods. Call it after the process groups are created."""
    if not job.flags.tp_comm_overlap:
        return
    from transformer_engine.pytorch.module import base

    batch, fp8 = job.batch, job.precision.fp8
    modes = [base.UserBufferQuantizationMode.FP8 if fp8 is not None else base.UserBufferQuantizationMode.NONE]
    if fp8 is not None and (fp8.layers_at_start_in_16_bit or fp8.layers_at_end_in_16_bit):
        modes.append(base.UserBufferQuantizationMode.NONE)
    os.environ.setdefault("UB_SKIPMC", "1")  # GPUs before Hopper
    reason = "the groups are only used to exchange addresses with peers, which do not exist"
    patches = [
        Patch(dist, "new_group", lambda *_, **__: dist.group.WORLD, reason),
        Patch(dist, "new_subgroups_by_enumeration", _no_subgroups, reason),
        Patch(dist, "is_backend_available", lambda *_: True, reason),
    ]
    with Patches(patches):
        base.initialize_ub(
            shape=[batch.seq_length * batch.micro_batch_size // job.parallel.context, job.model.hidden_size],
            tp_size=job.parallel.tensor,
            quantization_modes=modes,
            ub_cfgs={},
            bootstrap_backend="nccl",
        )


def _no_subgroups(*_: Any, **__: Any) -> tuple[Any, list[Any]]:
    return dist.group.WORLD, []
