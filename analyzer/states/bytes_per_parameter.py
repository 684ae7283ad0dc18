"""Bytes of optimizer states per parameter element, for all optimizers with element-wise updates.

Sources: core/optimizer/{optimizer,optimizer_config,distrib_optimizer}.py (0.16.1) and
transformer_engine/pytorch/optimizers/fused_adam.py (TE 2.11).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from analyzer.specs import TrainingJob
from analyzer.units import DTYPE_BYTES

FP32: Final = 4
REMAINDER: Final = 2
"""TE FusedAdam stores only the low half of the fp32 master weight of a bf16 parameter (store_param_remainders, from TE 2.1 on)."""


@dataclass(frozen=True, kw_only=True)
class ParameterBytes:
    """Bytes of optimizer states per parameter element."""

    master: float
    """Bytes of the fp32 master weight; 0 if the parameter is fp32."""
    moments: tuple[float, ...]
    """Bytes of each state that the first step creates."""

    @property
    def total_moments(self) -> float:
        """Bytes of all states that the first step creates."""
        return sum(self.moments)


def bytes_per_parameter(job: TrainingJob) -> ParameterBytes:
    """Bytes in mixed precision. Master weights that Adam stores are created in the first step and count as moments."""
    moments = tuple(DTYPE_BYTES[dtype] for dtype in job.optimizer.state_dtypes)
    if adam_stores_master_weights(job):
        return ParameterBytes(master=0, moments=(*moments, remainder_bytes(job)))
    return ParameterBytes(master=0 if job.precision.parameters == "fp32" else FP32, moments=moments)


def adam_stores_master_weights(job: TrainingJob) -> bool:
    """Whether the precision-aware Adam stores the master weights, from its first step on.

    It supports FP8 scaling factors of the delayed recipe only, so Megatron creates fp32 master weights for the other recipes
    (except in the releases of `CoreBehavior.adam_keeps_masters`). The condition reads `--fp8-recipe` alone: a recipe without
    `--fp8-format`, or with FP4, counts too (`use_precision_aware_optimizer_no_fp8_or_ds_fp8`, core/optimizer/optimizer_config.py,
    0.13.1 to 0.19.0).
    """
    optimizer = job.optimizer
    supported = optimizer.fp8_recipe == "delayed" or optimizer.main_params_dtype != "fp32" or job.core.adam_keeps_masters
    return optimizer.precision_aware and supported


def casts_to_stored_fp8(job: TrainingJob) -> bool:
    """Whether the optimizer step casts shards of master weights to stored FP8 weights (`cast_master_weights_to_fp8`).

    mxfp8 is cast from full 16-bit parameters after they are gathered. An Adam with its own master weights casts them itself, and
    without the distributed optimizer each weight is cast as a whole.
    """
    fp8 = job.precision.fp8
    if not job.optimizer.distributed:
        return False
    return fp8 is not None and fp8.stored_parameters and fp8.recipe != "mxfp8" and not adam_stores_master_weights(job)


def stores_remainders(job: TrainingJob) -> bool:
    """Whether the precision-aware Adam stores of each fp32 master weight only what its bf16 parameter lacks: the low half.

    Some versions of Transformer Engine cannot (core/optimizer/__init__.py, 0.11.0 to 0.19.0).
    """
    supported = job.software.te is None or job.engine.stores_remainders
    return supported and job.precision.parameters == "bf16" and job.optimizer.main_params_dtype == "fp32"


def remainder_bytes(job: TrainingJob) -> float:
    """Bytes of a master weight that the precision-aware Adam stores."""
    return REMAINDER if stores_remainders(job) else DTYPE_BYTES[job.optimizer.main_params_dtype]
