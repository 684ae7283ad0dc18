"""Bytes of parameters, gradients and optimizer states on a rank, and when they appear.

Sources: core/distributed/param_and_grad_buffer.py, core/optimizer/{optimizer,distrib_optimizer}.py (0.16.1), and
transformer_engine/pytorch/optimizers/fused_adam.py (TE 2.11).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from analyzer.layout.groups import pipeline_rank_ranges
from analyzer.modules.models.gpt import parameters
from analyzer.modules.tree import Tensor
from analyzer.results import RankRanges, StageModel
from analyzer.specs import TrainingJob
from analyzer.states.buffers import Buffer, reduction_size, shard_numel, stage_buffers
from analyzer.units import BLOCK, DTYPE_BYTES, dtype_bytes, round_up

REMAINDER_BYTES: Final = 2
"""TE FusedAdam keeps the low half of an fp32 master beside a bf16 parameter (store_param_remainders, TE 2.1 on)."""


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    masters: int
    """fp32 copies of 16-bit parameters, made with the optimizer."""
    moments: int
    """Made at the first step."""
    gradient_copies: int
    """fp32 copies of 16-bit gradients: made in the step, dropped before the next forward."""
    moments_from_start: bool = False
    """Moments are there before the first forward."""
    gathered: int = 0
    """Parameters that are unsharded between iterations."""
    at_start: int = 0
    """The most that is there while states are made."""
    at_start_where: str = "sharding of the model"
    at_start_rest: str = "model before it is sharded"
    kept_copies: int = 0
    """fp32 copies of 16-bit gradients that are made in the first step and stay."""
    step_workspace: tuple[Tensor, ...] = ()
    """Alive together at the fullest instant of the optimizer step, beside `gradient_copies`."""
    first_step_bytes: int = 0
    """At the fullest instant of the first step, beyond what is there after it: some moments may be made later in it."""

    @property
    def before_first_step(self) -> int:
        """What is there when the first forward starts."""
        return self.parameters + self.gradients + self.masters + (self.moments if self.moments_from_start else 0)

    @property
    def steady(self) -> int:
        """What is there when any later forward starts."""
        return self.parameters + self.gradients + self.masters + self.moments + self.kept_copies


def shares(job: TrainingJob, stage: StageModel) -> tuple[tuple[RankRanges, States], ...]:
    """Ranks of a pipeline stage that hold equal states, with those states.

    All of them, unless whole parameters are shared out or go to the host.
    """
    held = states(job, stage)
    muon, offload = job.optimizer.muon, job.optimizer.offload
    if muon is not None and muon.layer_wise and job.parallel.data_with_context > 1:
        from analyzer.states.layer_wise import owned_states  # a millisecond that most launches need not spend

        return owned_states(job, stage, held)
    if offload is not None and 0 < offload.fraction < 1:
        from analyzer.states.cpu_offload import states_of_ranks  # a millisecond that most launches need not spend

        return states_of_ranks(job, stage, held)
    return ((pipeline_rank_ranges(job.parallel, stage.pipeline_rank), held),)


def states(job: TrainingJob, stage: StageModel) -> States:
    """States of one rank of a pipeline stage; with the distributed optimizer, of one with a full shard.

    Where whole parameters are shared out, those of a rank that owns all of them: `shares` has what each rank owns.
    """
    if job.fsdp is not None:
        from analyzer.states.fsdp import fsdp_states  # a millisecond that most launches need not spend

        return fsdp_states(job, stage)
    buffers = [buffer for chunk in stage_buffers(job, stage) for buffer in chunk]
    numels = [parameter.numel for tree in stage.trees for parameter in parameters(tree)]
    optimizer = job.optimizer
    element = int(DTYPE_BYTES[job.precision.parameters])
    gradients = sum(round_up(dtype_bytes(buffer.gradient_dtype, buffer.numel), BLOCK) for buffer in buffers)
    own_storage = sum(round_up(element * numel, BLOCK) for numel in numels)
    if optimizer.distributed and job.megatron != "2023":
        own_buffer = (buffer for buffer in buffers if not buffer.gathers_through_gradients)
        held = sum(round_up(dtype_bytes(buffer.parameter_dtype, buffer.numel), BLOCK) for buffer in own_buffer)
        if job.precision.fp8 is not None:
            from analyzer.states.fp8_weights import beside_the_buffer_bytes  # a millisecond that most launches need not spend

            held += beside_the_buffer_bytes(job, stage.trees)
    else:
        held = own_storage
    if optimizer.muon is not None:
        from analyzer.states.muon import muon_states  # a millisecond that most launches need not spend

        return muon_states(job, stage, parameters=held, gradients=gradients)
    if optimizer.name == "lion":
        from analyzer.states.lion import lion_states  # a millisecond that most launches need not spend

        return lion_states(job, stage, parameters=held, gradients=gradients)
    if optimizer.offload is not None:
        from analyzer.states.cpu_offload import offloaded_states  # a millisecond that most launches need not spend

        return offloaded_states(job, stage, parameters=held, gradients=gradients)
    owned = _owned(job, buffers) if optimizer.distributed else sum(numels)
    masters, moments = _optimizer_bytes(job)
    copied = job.precision.parameters != "fp32" and job.precision.gradients != "fp32" and not adam_keeps_masters(job)
    return States(
        parameters=held,
        gradients=gradients,
        masters=0 if adam_keeps_masters(job) else int(masters * owned),
        moments=int((moments + (masters if adam_keeps_masters(job) else 0)) * owned),
        gradient_copies=4 * owned if copied else 0,
    )


def _owned(job: TrainingJob, buffers: Sequence[Buffer]) -> int:
    """Elements whose optimizer states one rank keeps."""
    return sum(shard_numel(buffer, reduction_size(job, buffer.group)) for buffer in buffers)


def adam_keeps_masters(job: TrainingJob) -> bool:
    """Whether the precision-aware Adam holds the masters itself, from its first step on.

    It does not know scaling factors of FP8 but those of the delayed recipe, so Megatron keeps fp32 masters for the
    others (`use_precision_aware_optimizer_no_fp8_or_ds_fp8`, core/optimizer/optimizer_config.py, 0.16.1).
    """
    optimizer, fp8 = job.optimizer, job.precision.fp8
    known = fp8 is None or fp8.recipe in ("delayed", "nvfp4") or optimizer.main_params_dtype != "fp32"
    return optimizer.precision_aware and known


def _optimizer_bytes(job: TrainingJob) -> tuple[float, float]:
    """Bytes of master and of moments for each element."""
    optimizer = job.optimizer
    masters: float = 0 if job.precision.parameters == "fp32" else 4
    if optimizer.precision_aware:
        moments = DTYPE_BYTES[optimizer.exp_avg_dtype] + DTYPE_BYTES[optimizer.exp_avg_sq_dtype]
        if not adam_keeps_masters(job):
            return masters, moments
        return remainder_bytes(job), moments
    if optimizer.name == "sgd":
        return masters, 4 if optimizer.sgd_momentum else 0
    return masters, 8


def remainder_bytes(job: TrainingJob) -> float:
    """Bytes of a master that the precision-aware Adam holds itself: of a bf16 parameter only what it lacks."""
    optimizer = job.optimizer
    lacks = job.precision.parameters == "bf16" and optimizer.main_params_dtype == "fp32"
    return REMAINDER_BYTES if lacks else DTYPE_BYTES[optimizer.main_params_dtype]
