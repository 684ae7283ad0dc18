"""Creates Muon as `get_megatron_optimizer` of megatron/training/training.py does (0.16)."""

from __future__ import annotations

from typing import Any

from allocator_hook.step.versions import known_to
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
    return known_to(OptimizerConfig, **options)


def muon_optimizer(muon: MuonSpec, config: Any, chunks: list[Any]) -> Any:
    """Build the optimizer."""
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    return get_megatron_muon_optimizer(
        config, chunks, use_gloo_process_groups=False, layer_wise_distributed_optimizer=muon.layer_wise
    )
