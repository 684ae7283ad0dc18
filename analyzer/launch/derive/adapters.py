"""Which adapters of a launch are modelled, and why others are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError
from analyzer.specs.adapters import ADAPTER_TARGETS, AdapterSpec, AdapterTarget

if TYPE_CHECKING:
    from analyzer.specs import TrainingJob
    from analyzer.specs.fine_tuning import Adapter

ALL_LINEAR: Final = ("all-linear", "all_linear")
"""What frameworks call all linear layers of the model."""


def adapter_spec(adapter: Adapter | None, job: TrainingJob) -> tuple[AdapterSpec | None, str]:
    """The adapters of a launch, and why they are not counted; no adapters and no reason for a launch without them.

    Raises InputError if the rank cannot be split over tensor-parallel ranks.
    """
    if adapter is None:
        return None, ""
    reason = next(_not_modelled(adapter, job), "")
    if reason:
        return None, f"{adapter.source or 'an adapter'} trains adapters, which are not modelled {reason}"
    if adapter.rank % job.parallel.tensor:
        raise InputError(
            adapter.source or "LoRA",
            f"a rank of {adapter.rank} cannot be split over {job.parallel.tensor} tensor-parallel ranks",
            f"use a multiple of {job.parallel.tensor}",
        )
    return (
        AdapterSpec(
            rank=adapter.rank,
            targets=_targets(adapter) or (),
            per_expert=adapter.share_expert_adapters is False and job.model.moe is not None,
            dropout=adapter.dropout > 0,
        ),
        "",
    )


def _not_modelled(adapter: Adapter, job: TrainingJob) -> Iterator[str]:
    """Fragments of a sentence: in which launches adapters are not modelled."""
    model, parallel, flags = job.model, job.parallel, job.flags
    targets = _targets(adapter)
    if adapter.kind != "lora":
        yield f"as {adapter.kind.replace('_', ' ')}" if adapter.kind != "other" else "other than as LoRA"
    if adapter.also_trained:
        yield f"with other trained modules ({', '.join(adapter.also_trained)})"
    if adapter.excluded:
        yield "with excluded modules"
    if targets is None:
        yield f"for the modules {', '.join(adapter.targets)}"
    elif {"linear_fc1", "linear_fc2"} & set(targets):
        yield from _not_modelled_in_experts(job)
    if adapter.base_dtype not in (None, job.precision.parameters):
        yield f"beside weights in {adapter.base_dtype}"
    if adapter.adapter_dtype not in (None, job.precision.parameters):
        yield f"in {adapter.adapter_dtype}"
    reasons = {
        f"in a {model.family.upper()} model": model.family != "gpt",
        "in hybrid models": model.hybrid is not None,
        "with multi-latent attention": model.mla is not None,
        "with linear attention": model.linear_attention is not None,
        "in layers that differ": bool(model.blocks),
        "with MTP layers": bool(model.mtp_num_layers),
        "with FP8 or FP4": job.precision.fp8 is not None,
        "with FSDP": job.fsdp is not None,
        "with CUDA graphs": job.graphs is not None,
        "with activation offloading": job.activation_offload is not None,
        "with states in host memory": job.optimizer.offload is not None,
        "with userbuffers": flags.tp_comm_overlap,
        "with overlapped microbatches": flags.overlap_moe_expert_parallel_comm,
        "with Muon": job.optimizer.muon is not None,
        "with fewer query groups than tensor-parallel ranks": model.num_query_groups < parallel.tensor,
        "with layers of Megatron itself": model.implementation != "transformer_engine",
    }
    yield from (reason for reason, applies in reasons.items() if applies)


def _not_modelled_in_experts(job: TrainingJob) -> Iterator[str]:
    moe = job.model.moe
    if moe is None:
        return
    reasons = {
        "in experts that run one after the other": not moe.grouped_gemm or moe.legacy_grouped_gemm,
        "in experts that are split over tensor-parallel ranks": job.parallel.expert_tensor > 1,
        "in latent experts": moe.latent_size is not None,
        "in experts with a recomputed activation": "moe_act" in job.recompute.modules,
        "with overlapped shared experts": moe.shared_overlap,
    }
    yield from (reason for reason, applies in reasons.items() if applies)


def _targets(adapter: Adapter) -> tuple[AdapterTarget, ...] | None:
    """The linear layers with an adapter; None if a name is not that of one. Without names all have one, as in Megatron-Bridge."""
    named = set(adapter.targets)
    if not named or named & set(ALL_LINEAR):
        return ADAPTER_TARGETS
    if named - set(ADAPTER_TARGETS):
        return None
    return tuple(each for each in ADAPTER_TARGETS if each in named)
