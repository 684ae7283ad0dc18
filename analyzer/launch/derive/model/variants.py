"""Models with modules that Megatron-LM does not have, and a library adds: norms of the outputs of attention and FFN, and others.

Sources: model/gpts/glm4.py of mcore-bridge 1.6, with which ms-swift builds GLM-4; docker/patch/latest/megatron.patch of slime;
models/gemma and models/exaone/exaone4 of Megatron-Bridge, August 2026.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.info_options import MODEL
from analyzer.specs.attention import PluginLayers
from analyzer.specs.vision_part import Variant

if TYPE_CHECKING:
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.specs import ModelSpec, TrainingJob

BRIDGE: Final = "Megatron-Bridge"
NEMO_RL: Final = "NeMo-RL"
"""It builds models with Megatron-Bridge."""


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What a variant is."""

    builders: tuple[str, ...]
    """Forks and frameworks that build it."""
    fields: Mapping[str, Any]
    """The fields of `ModelSpec` that say what it has."""
    described: str
    """What is added, for a sentence."""
    not_counted: str = ""
    """Why there is no verdict that it fits."""
    splits_sequences: bool = True
    """Its attention has context parallelism."""
    backends: tuple[str, ...] = ()
    """The values of --attention-backend that it has; empty for all."""
    around_experts: bool = False
    """Each layer has experts, with norms around them."""


_NORMS: Final = "norms after attention and FFN"
_GEMMA_3: Final = {"branch_norms": True, "norms_in_projections": True, "scaled_embedding": True, "local_rope": True}
_OF_GEMMA_3: Final = f"{_NORMS}, scaling of the embedding and rotary positions of layers with a window"
_VARIANTS: Final[Mapping[Variant, _Facts]] = {
    "GLM-4": _Facts(builders=("ms-swift", "slime"), fields={"branch_norms": True}, described=_NORMS),
    "Gemma": _Facts(builders=(BRIDGE,), fields={"scaled_embedding": True}, described="scaling of the embedding"),
    "Gemma 2": _Facts(
        builders=(BRIDGE,),
        fields={"branch_norms": True, "norms_in_projections": True, "scaled_embedding": True},
        described=f"{_NORMS} and scaling of the embedding",
        not_counted="the soft caps of logits and attention scores of Gemma 2, and its FlexAttention, are not counted",
        splits_sequences=False,
    ),
    "Gemma 3": _Facts(
        builders=(BRIDGE, NEMO_RL),
        fields=_GEMMA_3,
        described=_OF_GEMMA_3,
    ),
    "Gemma 4": _Facts(
        builders=(BRIDGE, NEMO_RL),
        fields=_GEMMA_3,
        described=f"{_OF_GEMMA_3}, other heads of the others, norms around experts and scales of the router",
        not_counted=(
            "the memory and the time of Gemma 4 are counted without the norms around its experts, the scales of its router, the "
            "norms of values and the soft cap of the logits"
        ),
        around_experts=True,
    ),
    "EXAONE 4": _Facts(
        builders=(BRIDGE, NEMO_RL),
        fields={"branch_norms": True, "norms_in_projections": True, "norm_modules": "none"},
        described=f"{_NORMS} in place of those before them",
    ),
    "Gemma 3 with images": _Facts(
        builders=(BRIDGE, NEMO_RL),
        fields=_GEMMA_3,
        described=_OF_GEMMA_3,
        not_counted="the attention biases of all pairs of tokens in Gemma 3 with images are not counted",
        splits_sequences=False,
        backends=("auto", "fused"),
    ),
}


def check_context_parallelism(variant: Variant, size: int, *, option: str = "--context-parallel-size") -> None:
    """Raises InputError if the attention of a variant has no context parallelism, and `size` is not 1."""
    if size > 1 and not _VARIANTS[variant].splits_sequences:
        raise InputError(option, f"Megatron-Bridge refuses context parallelism with the attention of {variant}", "set it to 1")


def is_counted(variant: Variant) -> bool:
    """Whether all of its modules are counted."""
    return not _VARIANTS[variant].not_counted


def with_variant(launch: LaunchInput, job: TrainingJob) -> TrainingJob:
    """The job with the added modules. Raises UnsupportedError for launches of a framework that does not build them."""
    parts = launch.arguments.parts
    assert parts.variant is not None
    facts = _VARIANTS[parts.variant]
    builder = parts.builder or launch.arguments.fork
    if builder not in facts.builders:
        fault = f"the model has {_NORMS}, which layers of Megatron-LM do not have"
        raise UnsupportedError(MODEL, fault, f"analyze a launch of {' or '.join(facts.builders)}, which add{_ending(facts)} them")
    verb = "are those" if facts.fields.get("branch_norms") else "is that"
    launch.assume(f"The {facts.described} {verb} that {builder} adds to modules of Megatron-LM.")
    reason = next(_not_modelled(job, facts), "") if facts.fields.get("branch_norms") else ""
    withheld = (*job.withheld, *([f"{_NORMS} are not modelled {reason}"] if reason else []))
    withheld += (facts.not_counted,) if facts.not_counted else ()
    check_context_parallelism(parts.variant, job.parallel.context)
    backend = launch.arguments.get("attention_backend")
    if facts.backends and backend not in (None, *facts.backends):
        fault = f"Megatron-Bridge refuses {backend} attention with the attention biases of {parts.variant}"
        raise InputError("--attention-backend", fault, "write --attention-backend auto")
    if facts.around_experts and not (job.model.moe is not None and all(job.model.moe.layers)):
        fault = "layers of Gemma 4 without experts have embeddings of their own, which are not modelled"
        raise UnsupportedError(MODEL, fault, "give a model with experts in each layer")
    model = replace(job.model, **facts.fields, global_heads=parts.global_heads)
    if facts.around_experts:
        model = replace(model, plugin=_around_experts(model))
    return replace(job, model=model, withheld=withheld)


def _around_experts(model: ModelSpec) -> PluginLayers:
    """The weights of `Gemma4TransformerLayer`, `Gemma4MoELayer` and `Gemma4TopKRouter` that MoE layers of Megatron-LM lack."""
    width, experts = (model.hidden_size,), 0 if model.moe is None else model.moe.num_experts
    norms = ("pre_shared_expert_layernorm", "post_ffn_layernorm", "mlp.post_moe_layernorm", "mlp.post_shared_expert_layernorm")
    return PluginLayers(
        plugin="Megatron-Bridge",
        described="norms around experts",
        layers=(True,) * model.num_layers,
        weights=(
            *((f"{name}.weight", width) for name in norms),
            ("mlp.router.scale", width),
            ("mlp.router.per_expert_scale", (experts,)),
        ),
        replaces=False,
        summed=True,
    )


def _ending(facts: _Facts) -> str:
    """That of the verb for one framework."""
    return "s" if len(facts.builders) == 1 else ""


def _not_modelled(job: TrainingJob, facts: _Facts) -> Iterator[str]:
    """Fragments of a sentence: in which launches the norms were not compared with recorded runs."""
    reasons = {
        "with MTP layers": job.model.mtp_num_layers > 0,
        "in layers of Megatron itself": job.model.implementation != "transformer_engine",
        "with fp32 residual connections": job.model.fp32_residual_connection,
        "with recomputed norms or FFN": bool({"layernorm", "mlp"} & set(job.recompute.modules)),
        "with FP4": job.precision.fp8 is not None and job.precision.fp8.recipe == "nvfp4",
        "in FP8 without norms before attention and FFN": job.precision.fp8 is not None
        and facts.fields.get("norm_modules") == "none",
        "with FSDP": job.fsdp is not None,
        "with CUDA graphs": job.graphs is not None,
        "with activation offloading": job.activation_offload is not None,
        "with userbuffers": job.flags.tp_comm_overlap,
        "with overlapped microbatches": job.flags.overlap_moe_expert_parallel_comm,
    }
    yield from (reason for reason, applies in reasons.items() if applies)
