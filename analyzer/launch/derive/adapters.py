"""Which adapters of a launch are modelled, and why others are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError
from analyzer.specs.adapters import ADAPTER_TARGETS, DEFAULT_TARGETS, AdapterMethod, AdapterSpec, AdapterTarget, TrainedCopy

if TYPE_CHECKING:
    from analyzer.specs import ModelSpec, TrainingJob
    from analyzer.specs.fine_tuning import Adapter, AdapterKind

ALL_LINEAR: Final = ("all-linear", "all_linear")
"""What frameworks call all linear layers of the model."""
_NORMALIZED: Final = "normalize_moe_lora"
"""The setting of Megatron-Bridge that divides the rank of the adapters of experts by the number of experts of a token."""
_METHODS: Final[dict[AdapterKind, AdapterMethod]] = {"lora": "lora", "canonical_lora": "canonical", "dora": "dora"}
_PARTS: Final[dict[AdapterTarget, tuple[str, ...]]] = {
    "linear_qkv": ("linear_q", "linear_k", "linear_v"),
    "linear_fc1": ("linear_fc1_up", "linear_fc1_gate"),
}
"""Parts of layers with adapters of their own in canonical LoRA, as Megatron-Bridge names them."""
_COPIES: Final[dict[str, TrainedCopy]] = {
    "word_embeddings": "word_embeddings",
    "embedding": "word_embeddings",
    "all-embedding": "word_embeddings",
    "output_layer": "output_layer",
}
"""Names of `--modules_to_save` of ms-swift."""
_GROUPED_MULTIPLE: Final = 8
"""Of which the sizes of matrices in bf16 are multiples that PyTorch multiplies in groups."""
_OF_DORA: Final = frozenset(DEFAULT_TARGETS)
"""Layers whose adapters with a magnitude are modelled."""


def adapter_spec(adapter: Adapter | None, job: TrainingJob) -> tuple[AdapterSpec | None, str]:
    """The adapters of a launch, and why they are not counted; no adapters and no reason for a launch without them.

    Raises InputError if the rank cannot be split over tensor-parallel ranks.
    """
    if adapter is None:
        return None, ""
    adapter = _of_whole_layers(adapter)
    reason = next(_not_modelled(adapter, job), "")
    if reason:
        return None, f"{adapter.source or 'an adapter'} trains adapters, which are not modelled {reason}"
    if adapter.rank % job.parallel.tensor:
        raise InputError(
            adapter.source or "LoRA",
            f"a rank of {adapter.rank} cannot be split over {job.parallel.tensor} tensor-parallel ranks",
            f"use a multiple of {job.parallel.tensor}",
        )
    targets = _targets(adapter, job.model)
    _refuse(adapter, targets, job.model)
    return (
        AdapterSpec(
            rank=adapter.rank,
            expert_rank=_expert_rank(adapter, job),
            targets=targets,
            method=_METHODS[adapter.kind],
            per_expert=adapter.share_expert_adapters is False and job.model.moe is not None,
            layers=adapter.layers,
            dropout=adapter.dropout > 0,
            regathers=adapter.regathers,
            trained_copies=_trained_copies(adapter),
        ),
        "",
    )


def _expert_rank(adapter: Adapter, job: TrainingJob) -> int | None:
    """Rank of the adapters of routed experts with `normalize_moe_lora`; None if it is that of the others.

    Raises InputError if it is no whole number. Source: `get_effective_lora_dim` (peft/utils.py) of Megatron-Bridge.
    """
    moe = job.model.moe
    if moe is None or _NORMALIZED not in adapter.options:
        return None
    if adapter.rank % moe.topk:
        fault = f"a rank of {adapter.rank} cannot be divided by the {moe.topk} experts of a token ({_NORMALIZED})"
        raise InputError(adapter.source or "LoRA", fault, f"use a multiple of {moe.topk}")
    return adapter.rank // moe.topk


def _of_whole_layers(adapter: Adapter) -> Adapter:
    """Canonical LoRA with the names of layers instead of those of their parts. Raises InputError if it has only some of them.

    Source: `CanonicalLoRA.__post_init__` and `LoRALinearSplitQKV.forward` of Megatron-Bridge, which calls all adapters of a layer.
    """
    if adapter.kind != "canonical_lora":
        return adapter
    names = set(adapter.targets)
    for layer, parts in _PARTS.items():
        given = names & set(parts)
        if layer in names:
            fault = f"canonical LoRA of Megatron-Bridge refuses {layer}, whose parts have adapters of their own"
            raise InputError(adapter.source, fault, f"write {', '.join(parts)}")
        if given and len(given) < len(parts):
            missing = ", ".join(each for each in parts if each not in given)
            fault = f"canonical LoRA of Megatron-Bridge calls the adapters of all parts of {layer}, and {missing} has none"
            raise InputError(adapter.source, fault, f"add {missing} to its target_modules, or leave out {', '.join(sorted(given))}")
        names = names - given | ({layer} if given else set())
    return replace(adapter, targets=tuple(sorted(names)))


def _refuse(adapter: Adapter, targets: tuple[AdapterTarget, ...], model: ModelSpec) -> None:
    """Raises InputError for adapters with which the framework fails in the first forward.

    Source: `DoRALinear._get_weight_norm`, which reads one weight of a layer, and `LoRALinearSplitQKV._interleave_qkv`.
    """
    experts = {"linear_fc1", "linear_fc2"} & set(targets)
    if adapter.kind == "dora" and model.moe is not None and experts:
        fault = f"DoRA of Megatron-Bridge fails beside grouped experts ({', '.join(sorted(experts))}), which have no single weight"
        raise InputError(adapter.source, fault, "write peft.target_modules=[linear_qkv,linear_proj], or use LoRA")
    if adapter.kind == "canonical_lora" and model.output_gate and "linear_qkv" in targets:
        fault = "canonical LoRA of Megatron-Bridge has no adapter for the gate of attention outputs (attention_output_gate)"
        raise InputError(adapter.source, fault, "leave out linear_q, linear_k and linear_v, or use LoRA")


def _not_modelled(adapter: Adapter, job: TrainingJob) -> Iterator[str]:
    """Fragments of a sentence: in which launches adapters are not modelled."""
    model, parallel, flags, fp8, offload = job.model, job.parallel, job.flags, job.precision.fp8, job.optimizer.offload
    targets = _targets(adapter, model)
    if adapter.kind not in _METHODS:
        yield f"as {adapter.kind.replace('_', ' ')}" if adapter.kind != "other" else "other than as LoRA"
    if adapter.kind == "dora":
        yield from _not_modelled_with_magnitudes(adapter, targets)
    yield from _not_modelled_with_copies(adapter, job)
    if adapter.excluded:
        yield "with excluded modules"
    changed = [each for each in adapter.options if _has_effect(each, adapter, job)]
    if changed:
        yield f"with {' and '.join(changed)}"
    if not targets:
        yield f"for the modules {', '.join(adapter.targets)}"
    else:
        yield from _not_modelled_in_attention(job, targets)
        if {"linear_fc1", "linear_fc2"} & set(targets):
            yield from _not_modelled_in_experts(job, targets)
    if adapter.base_dtype not in (None, job.precision.parameters):
        yield f"beside weights in {adapter.base_dtype}"
    if adapter.adapter_dtype not in (None, job.precision.parameters):
        yield f"in {adapter.adapter_dtype}"
    reasons = {
        f"in a {model.family.upper()} model": model.family != "gpt",
        "in hybrid models with full recompute": model.hybrid is not None and job.recompute.granularity == "full",
        "with sparse attention": model.sparse_attention is not None,
        "with the attention of DeepSeek-V4": model.compressed_attention is not None,
        "with FP4": fp8 is not None and fp8.recipe == "nvfp4",
        "as DoRA with weights stored in FP8": fp8 is not None and fp8.stored_parameters and adapter.kind == "dora",
        "of each expert without grouped GEMMs of PyTorch (bf16, and sizes that are multiples of 8)": _runs_one_by_one(adapter, job),
        "of Transformer Engine's layers or of each expert with FP8": fp8 is not None and _runs_in_fp8(adapter),
        "with FP8 and full recompute": fp8 is not None and job.recompute.granularity == "full",
        "with FSDP": job.fsdp is not None,
        "with CUDA graphs other than those of attention or of FFNs without adapters": _in_graphs(adapter, job, targets),
        "with a part of the optimizer states in host memory": offload is not None and offload.fraction < 1,
        "with userbuffers": flags.tp_comm_overlap,
        "with overlapped microbatches": flags.overlap_moe_expert_parallel_comm,
        "with overlapped weight gradients of experts": flags.overlap_expert_gradients,
        "with Muon": job.optimizer.muon is not None,
        "with fewer query groups than tensor-parallel ranks": model.num_query_groups < parallel.tensor,
        "with layers of Megatron itself other than those with LayerNorm and without sequence parallelism": _is_local(job),
    }
    if offloaded := _offloads(job):
        yield f"with activations of {offloaded} in host memory"
    yield from (reason for reason, applies in reasons.items() if applies)


def _trained_copies(adapter: Adapter) -> tuple[TrainedCopy, ...]:
    return tuple(dict.fromkeys(_COPIES[each] for each in adapter.also_trained))


def _not_modelled_with_copies(adapter: Adapter, job: TrainingJob) -> Iterator[str]:
    """Why trained modules beside adapters are not modelled. Other names than those of Megatron's modules match none in ms-swift."""
    model, given = job.model, adapter.also_trained
    pipelined = job.parallel.pipeline > 1
    if not given:
        return
    others = [each for each in given if each not in _COPIES]
    if others or adapter.layers != "transformer_engine":
        yield f"with other trained modules ({', '.join(others or given)})"
        return
    reasons = {
        "position embeddings": model.position_embedding == "learned_absolute",
        "tied embeddings": model.tied_embeddings and (pipelined or "word_embeddings" not in _trained_copies(adapter)),
        "MTP layers": model.mtp_num_layers > 0,
        "another head": model.head_outputs is not None,
    }
    yield from (f"with trained {', '.join(given)} and {reason}" for reason, applies in reasons.items() if applies)


def _is_local(job: TrainingJob) -> bool:
    """Whether layers of Megatron itself are used in a way that was not compared with adapters."""
    model = job.model
    if model.implementation == "transformer_engine":
        return False
    compared = model.normalization == "LayerNorm" and model.moe is None and model.mla is None and not job.parallel.sequence_parallel
    return model.implementation != "local" or not compared


def _has_effect(option: str, adapter: Adapter, job: TrainingJob) -> bool:
    """Whether a setting that changes adapters in some launches does so here.

    Source: `ParallelLinearAdapter` and `get_effective_lora_dim` (peft/utils.py) of Megatron-Bridge.
    """
    if option == "a2a_experimental":  # beside layers whose input is split
        return job.parallel.sequence_parallel
    if option == "dropout_position=post":
        return adapter.dropout > 0
    if option == _NORMALIZED:  # ranks of fc1 and fc2 differ if one of them is rounded up
        return job.model.moe is not None and job.parallel.expert_tensor > 1
    return job.model.moe is not None


_OFFLOADED: Final = frozenset({"core_attn", "attn_norm", "mlp_norm"})
"""Modules of `--offload-modules` that have no adapters of their own."""


def _offloads(job: TrainingJob) -> str:
    """What is offloaded that adapters read."""
    spec = job.activation_offload
    if spec is None:
        return ""
    return "whole layers" if spec.layers else " and ".join(sorted(set(spec.modules) - _OFFLOADED))


def _not_modelled_with_magnitudes(adapter: Adapter, targets: tuple[AdapterTarget, ...]) -> Iterator[str]:
    others = [each for each in targets if each not in _OF_DORA]
    if adapter.dropout:
        yield "as DoRA with dropout"
    if others:
        yield f"as DoRA beside {', '.join(others)}"


def _runs_in_fp8(adapter: Adapter) -> bool:
    """Whether the GEMMs of an adapter are those of Transformer Engine, which can be in FP8."""
    return adapter.layers == "transformer_engine" or adapter.share_expert_adapters is False


def _runs_one_by_one(adapter: Adapter, job: TrainingJob) -> bool:
    """Whether the adapters of a rank's experts run one after the other (`GroupedExpertLinearAdapter._can_use_grouped_mm`)."""
    moe = job.model.moe
    if moe is None or adapter.share_expert_adapters is not False or adapter.layers != "megatron":
        return False
    sizes = (_expert_rank(adapter, job) or adapter.rank, moe.latent_size or job.model.hidden_size, moe.ffn_hidden_size)
    return job.precision.parameters != "bf16" or any(size % _GROUPED_MULTIPLE for size in sizes)


def _not_modelled_in_attention(job: TrainingJob, targets: tuple[AdapterTarget, ...]) -> Iterator[str]:
    if job.model.mla is None:
        return
    projections = [each for each in _of_attention(job.model) if each != "linear_proj"]
    adapted = [each for each in projections if each in targets]
    if adapted and adapted != projections:
        yield "for some of the projections of multi-latent attention only"
    if adapted and "mla_up_proj" in job.recompute.modules:
        yield "with recomputed up projections"


def _in_graphs(adapter: Adapter, job: TrainingJob, targets: tuple[AdapterTarget, ...]) -> bool:
    """Whether CUDA graphs capture adapters, or are of another kind than those whose frozen layers are modelled."""
    graphs, model = job.graphs, job.model
    if graphs is None:
        return False
    modelled = graphs.implementation == "transformer_engine" and graphs.warmup_steps > 0 and job.flags.gradient_accumulation_fusion
    captured = set(graphs.scope)
    if (
        adapter.kind != "lora"
        or not modelled
        or model.moe is not None
        or model.hybrid is not None
        or not captured
        or captured - {"attn", "mlp"}
    ):
        return True
    adapted = {"mlp" if target in ("linear_fc1", "linear_fc2") else "attn" for target in targets}
    return bool(captured & adapted)


def _not_modelled_in_experts(job: TrainingJob, targets: tuple[AdapterTarget, ...]) -> Iterator[str]:
    moe = job.model.moe
    if moe is None:
        return
    reasons = {
        "in experts that run one after the other": not moe.grouped_gemm or moe.legacy_grouped_gemm,
        "in experts that are split over tensor-parallel ranks": job.parallel.expert_tensor > 1,
        "in the second layer of experts only, with a recomputed activation": "moe_act" in job.recompute.modules
        and "linear_fc1" not in targets,
    }
    yield from (reason for reason, applies in reasons.items() if applies)


def _targets(adapter: Adapter, model: ModelSpec) -> tuple[AdapterTarget, ...]:
    """The linear layers of the model with an adapter; none if a name is not that of one, or that of no layer of the model.

    Without names those have one that have one by default in Megatron-Bridge. A name of which the model has no layer has no effect
    if there are others (`ModuleMatcher._validate_target_matches`).
    """
    named = set(adapter.targets)
    if named - {*ADAPTER_TARGETS, *ALL_LINEAR}:
        return ()
    chosen = named if named else {*DEFAULT_TARGETS}
    return tuple(each for each in _layers_of(model) if named & set(ALL_LINEAR) or each in chosen)


def _layers_of(model: ModelSpec) -> tuple[AdapterTarget, ...]:
    """The linear layers of a model that can have an adapter, in the order of `ADAPTER_TARGETS`."""
    found: set[AdapterTarget] = {*_of_attention(model), "linear_fc1", "linear_fc2"}
    if model.linear_attention is not None or model.hybrid is not None:
        found |= {"in_proj", "out_proj"}
    if model.mtp_num_layers:
        found.add("eh_proj")
    return tuple(each for each in ADAPTER_TARGETS if each in found)


def _of_attention(model: ModelSpec) -> tuple[AdapterTarget, ...]:
    """The linear layers of full attention, in the order of `ADAPTER_TARGETS`."""
    if model.mla is None:
        return ("linear_qkv", "linear_proj")
    queries: tuple[AdapterTarget, ...] = ("linear_q_down_proj", "linear_q_up_proj")
    if model.mla.q_lora_rank is None:
        queries = ("linear_q_proj",)
    return ("linear_proj", *queries, "linear_kv_down_proj", "linear_kv_up_proj")
