"""Rules for DeepSeek sparse attention: what Megatron refuses or fails with, and what is not modelled with it.

Source: `TransformerConfig.__post_init__`, `MultiLatentAttention.forward` (core/transformer/multi_latent_attention.py),
`DSAttention` (core/transformer/experimental_attention_variant/dsa.py) and `gpt_builder`, 0.18.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from analyzer.specs.job import TrainingJob
from analyzer.specs.rules.violation import Violation

_LEAVE: Final = "leave it out"
_NOT_MODELLED: Final = "is not modelled with sparse attention (dsa)"
_MODELLED_MODULES: Final = frozenset({"mlp", "moe", "moe_act", "shared_experts"})


def sparse_attention_violations(job: TrainingJob) -> Iterator[Violation]:
    """Layouts and features that exclude sparse attention."""
    if job.model.sparse_attention is None:
        return
    yield from _refused(job)
    yield from _recompute(job)
    yield from _features(job)


def _refused(job: TrainingJob) -> Iterator[Violation]:
    if job.parallel.context > 1:
        yield Violation(("context_parallel_size",), "cannot be used with sparse attention (dsa)", "use --context-parallel-size 1")
    if job.model.rope_fusion:
        yield Violation(("apply_rope_fusion",), "is not supported with sparse attention (dsa)", "add --no-rope-fusion")
    if job.model.mtp_num_layers:
        # the layers have the attention of a model without dsa, which does not take the inputs of the indexer
        yield Violation(("mtp_num_layers",), "Megatron stops in MTP layers with sparse attention (dsa)", _LEAVE)


def _recompute(job: TrainingJob) -> Iterator[Violation]:
    recompute = job.recompute
    if recompute.granularity == "selective":
        if "core_attn" in recompute.modules:
            # `_checkpointed_attention_forward` does not pass the inputs of the indexer
            yield Violation(
                ("recompute_modules",), "Megatron stops if it recomputes core_attn with sparse attention (dsa)", "use mlp or moe"
            )
        elif set(recompute.modules) - _MODELLED_MODULES:
            yield Violation(("recompute_modules",), _NOT_MODELLED, f"use {', '.join(sorted(_MODELLED_MODULES))}")
    elif recompute.granularity == "full" and job.parallel.tensor > 1:
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
