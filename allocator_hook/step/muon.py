"""Creates Muon and its buffers as `get_megatron_optimizer` (0.16) and `wrap_model_chunks_with_ddp` (0.18) of training.py do."""

from __future__ import annotations

from typing import Any

from allocator_hook.step.versions import known_to
from analyzer.errors import AnalyzerError
from analyzer.specs import MuonSpec


def muon_options(muon: MuonSpec | None) -> dict[str, Any]:
    """Return the options of the OptimizerConfig for Muon."""
    from megatron.core.optimizer import OptimizerConfig

    if muon is None:
        return {}
    options: dict[str, Any] = {
        "muon_use_nesterov" if hasattr(OptimizerConfig, "muon_use_nesterov") else "muon_nesterov": muon.nesterov,
        "muon_split_qkv": muon.split_qkv,
        "muon_num_ns_steps": muon.steps,
        "muon_tp_mode": muon.tensor_parallel,
        "muon_fp32_matmul_prec": "medium" if muon.iterates_dtype == "bf16" else "high",
    }
    if muon.scalar_optimizer != "adam":  # the default, and an option since 0.17
        options["muon_scalar_optimizer"] = muon.scalar_optimizer
    if muon.layer_wise and hasattr(OptimizerConfig, "use_layer_wise_distributed_optimizer"):  # since 0.18
        options["use_layer_wise_distributed_optimizer"] = True
    return known_to(OptimizerConfig, **options)


def muon_optimizer(muon: MuonSpec, config: Any, chunks: list[Any]) -> Any:
    """Build the optimizer."""
    if hasattr(config, "use_layer_wise_distributed_optimizer"):
        from megatron.core.optimizer import get_megatron_optimizer

        return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    return get_megatron_muon_optimizer(
        config, chunks, use_gloo_process_groups=False, layer_wise_distributed_optimizer=muon.layer_wise
    )


def buffer_layout(config: Any, module: Any, *, bucketing: bool) -> Any:
    """Return the layout of a chunk's buffers with each matrix in one shard. `config`: of data parallelism.

    Raises AnalyzerError if the installed megatron-core is older than 0.18.
    """
    from megatron.core import parallel_state
    from megatron.core.optimizer import layer_wise_optimizer

    if not hasattr(layer_wise_optimizer, "tag_params_for_buffer_routing"):
        raise AnalyzerError(
            "--info-engine shadow: the installed megatron-core has no buffers of Muon that are laid out by matrices; "
            "install megatron-core 0.18 or later, or use --info-engine formula"
        )
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    size = (config.bucket_size or max(40_000_000, 1_000_000 * ranks)) if config.overlap_grad_reduce else None
    layer_wise_optimizer.tag_params_for_buffer_routing([module])
    return layer_wise_optimizer.LayerWiseDistributedOptimizer.compute_full_param_layout(
        list(module.parameters()),
        size if bucketing and parallel_state.get_pipeline_model_parallel_rank() == 0 else None,
        ranks,
        config,
        expert_data_parallel_world_size=parallel_state.get_expert_data_parallel_world_size(),
    )
