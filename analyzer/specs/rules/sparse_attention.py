"""Rules for DeepSeek sparse attention: what Megatron refuses or fails with, and what is not modelled with it.

Sources: `TransformerConfig.__post_init__`, `MultiLatentAttention.forward` (core/transformer/multi_latent_attention.py),
`DSAttention` (core/transformer/experimental_attention_variant/dsa.py) and `gpt_builder`, 0.18.2; `AbsorbedMLASelfAttention` and
dsa_cudnn_kernels.py beside it, `QKNormConfigResolver` (core/transformer/mla_qk_norm_config.py) and
`_validate_dsa_index_share_pipeline_split` (core/models/gpt/experimental_attention_variant_module_specs.py), 0.19.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final

from analyzer.specs.attention import AbsorbedSpec, SparseAttentionSpec
from analyzer.specs.job import TrainingJob
from analyzer.specs.model import ModelSpec
from analyzer.specs.rules.stages import stage_violations
from analyzer.specs.rules.violation import Violation
from analyzer.specs.stage_sizes import layers_of_stages

_LEAVE: Final = "leave it out"
_NOT_MODELLED: Final = "is not modelled with sparse attention (dsa)"
_VALUE_WIDTH: Final = 512
"""The elements of a compressed value that FlashMLA's sparse attention reads (`_FLASH_MLA_REQUIRED_VALUE_DIM`)."""
_MODELLED_MODULES: Final = frozenset({"mlp", "moe", "moe_act", "shared_experts"})


def sparse_attention_violations(job: TrainingJob) -> Iterator[Violation]:
    """Layouts and features that exclude sparse attention."""
    yield from _split_between_keys(job)
    if job.model.compressed_attention is not None:
        yield from _refused_compressed(job)
    sparse = job.model.sparse_attention
    if sparse is None:
        return
    if sparse.absorbed is None:
        yield from _refused(job)
    else:
        yield from _refused_absorbed(job, sparse, sparse.absorbed)
    yield from _recompute(job)
    yield from _features(job)


def _refused_compressed(job: TrainingJob) -> Iterator[Violation]:
    """DeepSeek-V4: `DSv4HybridAttention` and `TransformerConfig.__post_init__` of the branch dev, August 2026 (b3b1e2d7)."""
    if job.parallel.tensor > 1:
        fault = "is not 1, and the attention of DeepSeek-V4 is not split over tensor-parallel ranks"
        yield Violation(("tensor_model_parallel_size",), fault, "use --tensor-model-parallel-size 1")
    if job.model.implementation != "transformer_engine":
        fault = "has no layers for the attention of DeepSeek-V4"
        yield Violation(("transformer_impl",), fault, "use --transformer-impl transformer_engine")
    if "core_attn" in job.recompute.modules:
        yield Violation(("recompute_modules",), "core_attn is not supported with the attention of DeepSeek-V4", "leave it out")
    yield from _refused_kernels(job)
    yield from _refused_tables(job)
    if job.flags.overlap_moe_expert_parallel_comm and job.model.moe is not None and job.model.moe.hash_layers:
        fault = "does not support layers whose experts are chosen by a table"
        yield Violation(("overlap_moe_expert_parallel_comm",), fault, _LEAVE)


def _refused_kernels(job: TrainingJob) -> Iterator[Violation]:
    spec, capability = job.model.compressed_attention, job.hardware.compute_capability
    if spec is None or not spec.kernels or capability is None:
        return
    backend = ("dsa_kernel_backend",)
    if capability < (9, 0):
        fault = f"cudnn needs compute capability 9.0 or later, and {job.hardware.name} has {capability[0]}.{capability[1]}"
        yield Violation(backend, fault, "use none, or another GPU")
    elif capability < (10, 0) and spec.logged and not spec.sparse_loss:
        fault = f"cudnn has no loss over all keys on {job.hardware.name}"
        yield Violation(backend, fault, "use none, or set dsa_indexer_use_sparse_loss")


def _refused_tables(job: TrainingJob) -> Iterator[Violation]:
    """Layers whose experts are chosen by a table must be in the stage of the embedding, which only a layout says."""
    hashed = 0 if job.model.moe is None else job.model.moe.hash_layers
    if not hashed or job.parallel.pipeline == 1:
        return
    layout = job.parallel.pipeline_layout.layout
    if layout is None or layout[0].count("t") < hashed:
        fault = f"must have the first {hashed} layers, whose experts are chosen by a table, in the stage of the embedding"
        yield Violation(("pipeline_model_parallel_layout",), fault, "add a layout with them in its first stage")


def _refused(job: TrainingJob) -> Iterator[Violation]:
    if job.parallel.context > 1:
        yield Violation(("context_parallel_size",), "cannot be used with sparse attention (dsa)", "use --context-parallel-size 1")
    if job.model.rope_fusion:
        yield Violation(("apply_rope_fusion",), "is not supported with sparse attention (dsa)", "add --no-rope-fusion")
    if job.model.mtp_num_layers:
        # the layers have the attention of a model without dsa, which does not take the inputs of the indexer
        yield Violation(("mtp_num_layers",), "Megatron stops in MTP layers with sparse attention (dsa)", _LEAVE)


def _refused_absorbed(job: TrainingJob, sparse: SparseAttentionSpec, absorbed: AbsorbedSpec) -> Iterator[Violation]:
    model, parallel = job.model, job.parallel
    if model.bias_linear:
        yield Violation(("experimental_attention_variant",), "dsa has no biases in linear layers", "add --disable-bias-linear")
    if model.rope_fusion:
        yield Violation(("apply_rope_fusion",), "is not supported with sparse attention (dsa)", "add --no-rope-fusion")
    if parallel.context > 1 and parallel.cp_comm_type != "all_gather":
        yield Violation(("cp_comm_type",), "context parallelism of dsa gathers the keys", "use --cp-comm-type all_gather")
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        yield Violation(("tensor_model_parallel_size",), "dsa needs sequence parallelism", "add --sequence-parallel")
    assert model.mla is not None
    if model.qk_layernorm and model.mla.q_lora_rank is None:
        yield Violation(("qk_layernorm",), "dsa normalizes compressed queries only", "add --q-lora-rank 1536, or leave it out")
    if absorbed.shares and job.recompute.granularity == "full" and job.flags.attention_mask_in_dataloader:
        # the mask carries the chosen keys, and a checkpoint gives its layers a copy of it (`_get_index_share_topk_holder`)
        yield Violation(
            ("dsa_indexer_topk_freq", "recompute_granularity"),
            "Megatron stops: layers that are recomputed with an attention mask do not find the keys that others chose",
            "add --no-create-attention-mask-in-dataloader",
        )
    if absorbed.backend == "cudnn":
        yield from _refused_by_cudnn(job, sparse, absorbed, rank=model.mla.kv_lora_rank)


def _refused_by_cudnn(job: TrainingJob, sparse: SparseAttentionSpec, absorbed: AbsorbedSpec, *, rank: int) -> Iterator[Violation]:
    """What the kernels of cuDNN and FlashMLA cannot do: operations of PyTorch then take the place of some of them."""
    capability, heads = job.hardware.compute_capability or (9, 0), job.model.num_attention_heads // job.parallel.tensor
    if capability < (9, 0):
        yield Violation(("dsa_kernel_backend",), "the kernels of cuDNN need Hopper or later", "use --dsa-kernel-backend none")
    elif rank != _VALUE_WIDTH:
        yield Violation(("kv_lora_rank",), f"{_NOT_MODELLED} by cuDNN", f"use {_VALUE_WIDTH}, or --dsa-kernel-backend none")
    elif absorbed.computed_heads(heads, capability) is None:
        fault = f"{heads} heads of a tensor-parallel rank are not modelled with --dsa-kernel-backend cudnn"
        yield Violation(("num_attention_heads",), fault, "use 64 or 128, or --dsa-kernel-backend none")
    if sparse.logged and not sparse.sparse_loss:
        fault = "the loss over all keys is not modelled with kernels of cuDNN"
        yield Violation(("dsa_kernel_backend",), fault, "add --dsa-indexer-use-sparse-loss")


def _split_between_keys(job: TrainingJob) -> Iterator[Violation]:
    """A stage that begins with a layer which uses the keys that a layer of another stage chose."""
    model, parallel = job.model, job.parallel
    chooses = _chooses_keys(model)
    if all(chooses) or any(stage_violations(model.num_layers, parallel, mtp_layers=model.mtp_num_layers)):
        return
    first = 1
    for count in layers_of_stages(model.num_layers, parallel):
        if count and not chooses[first - 1]:
            before = max(layer for layer in range(1, first) if chooses[layer - 1])
            fault = f"a stage begins with layer {first}, which uses the keys that layer {before} of another stage chose"
            split = None if parallel.virtual_pipeline else _split_at_indexers(chooses, parallel.pipeline)
            remedy = "begin each stage with a layer that has an indexer"
            if split is not None:
                remedy += "".join(
                    f"{' ' if number else ': add '}--decoder-{end}-pipeline-num-layers {count}"
                    for number, (end, count) in enumerate(zip(("first", "last"), split, strict=False))
                )
            yield Violation(("pipeline_model_parallel_size",), fault, remedy)
            return
        first += count


@cache
def _split_at_indexers(chooses: tuple[bool, ...], stages: int) -> tuple[int, ...] | None:
    """Layers of the first and, with more than two stages, of the last stage with which each stage begins with an indexer.

    The split that is nearest to an even one; None if there is none.
    """
    layers, even = len(chooses), len(chooses) / stages
    if stages == 2:
        splits = [(first,) for first in range(1, layers) if chooses[first]]
        return min(splits, key=lambda split: abs(split[0] - even), default=None)
    found = []
    for first in (each for each in range(1, layers) if chooses[each]):
        for each in range(1, (layers - first - 1) // (stages - 2) + 1):
            starts = [first + each * stage for stage in range(stages - 1)]
            if all(chooses[start] for start in starts):
                found.append((first, layers - starts[-1], each))
    best = min(found, key=lambda split: max(abs(count - even) for count in split), default=None)
    return None if best is None else best[:2]


def _chooses_keys(model: ModelSpec) -> tuple[bool, ...]:
    """For each decoder layer, whether it chooses the keys that its attention reads; empty if all do."""
    if model.plugin is not None and model.plugin.shares_keys:
        return model.plugin.layers
    absorbed = model.absorbed_attention
    if absorbed is None or not absorbed.shares:
        return ()
    return tuple(absorbed.chooses(layer) for layer in range(model.num_layers))


def _recompute(job: TrainingJob) -> Iterator[Violation]:
    recompute, absorbed = job.recompute, job.model.absorbed_attention is not None
    if recompute.granularity == "selective":
        if "core_attn" in recompute.modules and not absorbed:
            # `_checkpointed_attention_forward` does not pass the inputs of the indexer
            yield Violation(
                ("recompute_modules",), "Megatron stops if it recomputes core_attn with sparse attention (dsa)", "use mlp or moe"
            )
        elif set(recompute.modules) - _MODELLED_MODULES:
            yield Violation(("recompute_modules",), _NOT_MODELLED, f"use {', '.join(sorted(_MODELLED_MODULES))}")
    elif recompute.granularity == "full" and job.parallel.tensor > 1 and not absorbed:
        yield Violation(
            ("recompute_granularity", "tensor_model_parallel_size"), _NOT_MODELLED, "use --tensor-model-parallel-size 1"
        )


def _features(job: TrainingJob) -> Iterator[Violation]:
    """Features that change the modules of attention."""
    flags, model = job.flags, job.model
    asked = (
        ("deterministic_mode", flags.deterministic),
        ("cuda_graph_impl", job.graphs is not None),
        ("overlap_moe_expert_parallel_comm", flags.overlap_moe_expert_parallel_comm),
        ("delay_wgrad_compute", flags.delay_wgrad_compute),
        ("optimizer", job.optimizer.muon is not None),
        ("fp4_format" if job.precision.fp8 is not None and job.precision.fp8.recipe == "nvfp4" else "fp8_format",
         job.precision.fp8 is not None),
        ("softmax_type", model.softmax_type != "vanilla"),
        ("window_size", model.window is not None),
        ("tp_comm_overlap", flags.tp_comm_overlap and job.parallel.sequence_parallel),
    )  # fmt: skip
    yield from (Violation((dest,), _NOT_MODELLED, _LEAVE) for dest, is_on in asked if is_on)
    if job.activation_offload is not None:
        layers = bool(job.activation_offload.layers)
        yield Violation(("cpu_offloading_num_layers" if layers else "fine_grained_activation_offloading",), _NOT_MODELLED, _LEAVE)
    if job.fsdp is not None:
        dest = "use_torch_fsdp2" if job.fsdp.implementation == "torch" else "use_megatron_fsdp"
        yield Violation((dest,), _NOT_MODELLED, "use --use-distributed-optimizer")
