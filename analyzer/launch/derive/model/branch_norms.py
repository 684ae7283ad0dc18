"""Models whose outputs of attention and FFN are normalized, which layers of Megatron-LM do not do.

Sources: model/gpts/glm4.py of mcore-bridge 1.6, with which ms-swift builds GLM-4; docker/patch/latest/megatron.patch of slime.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from analyzer.errors import UnsupportedError
from analyzer.launch.info_options import MODEL

if TYPE_CHECKING:
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.specs import TrainingJob

_BUILDERS: Final = ("ms-swift", "slime")
"""Forks whose layers have the norms."""


def with_branch_norms(launch: LaunchInput, job: TrainingJob) -> TrainingJob:
    """The job with the norms. Raises UnsupportedError for launches of a framework that does not build them."""
    fork = launch.arguments.fork
    if fork not in _BUILDERS:
        fault = "the model has norms after attention and FFN, which layers of Megatron-LM do not have"
        raise UnsupportedError(MODEL, fault, "analyze a launch of ms-swift or slime, which add them")
    launch.assume(f"The norms after attention and FFN are those that {fork} adds to layers of Megatron-LM.")
    reason = next(_not_modelled(job), "")
    withheld = (*job.withheld, f"norms after attention and FFN are not modelled {reason}") if reason else job.withheld
    return replace(job, model=replace(job.model, branch_norms=True), withheld=withheld)


def _not_modelled(job: TrainingJob) -> Iterator[str]:
    """Fragments of a sentence: in which launches the norms were not compared with recorded runs."""
    reasons = {
        "with MTP layers": job.model.mtp_num_layers > 0,
        "in layers of Megatron itself": job.model.implementation != "transformer_engine",
        "with fp32 residual connections": job.model.fp32_residual_connection,
        "with recomputed norms or FFN": bool({"layernorm", "mlp"} & set(job.recompute.modules)),
        "with FP4": job.precision.fp8 is not None and job.precision.fp8.recipe == "nvfp4",
        "with FSDP": job.fsdp is not None,
        "with CUDA graphs": job.graphs is not None,
        "with activation offloading": job.activation_offload is not None,
        "with userbuffers": job.flags.tp_comm_overlap,
        "with overlapped microbatches": job.flags.overlap_moe_expert_parallel_comm,
    }
    yield from (reason for reason, applies in reasons.items() if applies)
