"""Which frozen parameters of a launch are modelled, and why others are not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError

if TYPE_CHECKING:
    from analyzer.specs import TrainingJob
    from analyzer.specs.fine_tuning import FineTuning
    from analyzer.specs.freezing import FreezeSpec

_NUMBERED: Final = re.compile(r"layers?(?:\\?\.|\W)*[\[(\d]")
"""A number of a layer in a prefix or a regular expression."""


def freeze_spec(tuning: FineTuning, job: TrainingJob) -> tuple[FreezeSpec | None, str]:
    """The frozen parameters of a launch, and why they are counted as trained ones.

    Raises InputError for a ratio that ms-swift refuses.
    """
    spec = tuning.freezing
    if spec is None:
        return None, ""
    if spec.ratio and job.parallel.pipeline > 1:
        fault = f"ms-swift refuses it with {job.parallel.pipeline} pipeline stages"
        raise InputError("--freeze_parameters_ratio", fault, "use --freeze_parameters, or one stage")
    reason = next(_not_modelled(spec, job), "")
    listed = ", ".join(tuning.frozen)
    return (None, f"{listed}: frozen parameters are not modelled {reason}") if reason else (spec, "")


def _not_modelled(spec: FreezeSpec, job: TrainingJob) -> Iterator[str]:
    """Fragments of a sentence: in which launches frozen parameters are not modelled."""
    model, parallel, flags, fp8 = job.model, job.parallel, job.flags, job.precision.fp8
    biases = model.bias_linear or model.bias_qkv
    several = parallel.pipeline > 1
    reasons = {
        f"in a {model.family.upper()} model": model.family != "gpt",
        "in hybrid models": model.hybrid is not None,
        "with sparse attention": model.sparse_attention is not None,
        f"with {'' if model.plugin is None else model.plugin.described}": model.plugin is not None,
        "with the attention of DeepSeek-V4": model.compressed_attention is not None,
        "with tied embeddings and pipeline stages, which have copies of other names": several and model.tied_embeddings,
        "by numbers of layers, which begin at 0 in each stage of interleaved pipelines": parallel.virtual_pipeline is not None
        and any(_NUMBERED.search(each) for each in spec.words),
        "for biases without their weights": biases and any(re.search("bias|weight", each) for each in spec.words),
        "with overlapped shared experts": model.moe is not None and model.moe.shared_overlap,
        "for single experts": any(re.search(r"(?:weight|bias)\d", each) for each in spec.words),
        "in experts that run one after the other": model.moe is not None
        and (not model.moe.grouped_gemm or model.moe.legacy_grouped_gemm),
        "with FP4": fp8 is not None and fp8.recipe == "nvfp4",
        "with FP8 and full recompute": fp8 is not None and job.recompute.granularity == "full",
        "with FP8 and latent attention": fp8 is not None and model.mla is not None,
        "with FSDP": job.fsdp is not None,
        "with CUDA graphs other than those of Transformer Engine": job.graphs is not None
        and job.graphs.implementation != "transformer_engine",
        "with activation offloading": job.activation_offload is not None,
        "with a part of the optimizer states in host memory": job.optimizer.offload is not None
        and job.optimizer.offload.fraction < 1,
        "with userbuffers": flags.tp_comm_overlap,
        "with overlapped microbatches": flags.overlap_moe_expert_parallel_comm,
        "with overlapped weight gradients of experts": flags.overlap_expert_gradients,
        "with Muon": job.optimizer.muon is not None,
        "with layers of Megatron itself": model.implementation != "transformer_engine",
    }
    yield from (reason for reason, applies in reasons.items() if applies)
