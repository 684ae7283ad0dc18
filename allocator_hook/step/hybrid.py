"""Builds the chunks of a hybrid model, as `mamba_builder` and from core 0.18 on `hybrid_builder` do."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from allocator_hook.step.language_model import language_model
from allocator_hook.step.versions import accepted_by
from analyzer.specs import TrainingJob


def hybrid_options(job: TrainingJob) -> dict[str, Any]:
    """Return the options of TransformerConfig for the Mamba layers; none for other models."""
    hybrid = job.model.hybrid
    if hybrid is None:
        return {}
    return {
        "is_hybrid_model": True,
        "mamba_state_dim": hybrid.state_dim,
        "mamba_head_dim": hybrid.head_dim,
        "mamba_num_groups": hybrid.groups,
        "mamba_num_heads": hybrid.heads,
        "use_mamba_mem_eff_path": hybrid.memory_efficient,
        "mtp_use_repeated_layer": hybrid.mtp_repeated,
        # releases with stages in the pattern have no layout
        "pipeline_model_parallel_layout": None,
    }


def hybrid_model(job: TrainingJob, config: Any, **stage: Any) -> Any:
    """Return one chunk of the model, not yet in 16 bit. The stages of the pattern are those of the job."""
    try:
        model_class = import_module("megatron.core.models.hybrid.hybrid_model").HybridModel
        spec = {"hybrid_stack_spec": import_module("megatron.core.models.hybrid.hybrid_layer_specs").hybrid_stack_spec}
    except ImportError:
        model_class = import_module("megatron.core.models.mamba").MambaModel
        spec = {"mamba_stack_spec": import_module("megatron.core.models.mamba.mamba_layer_specs").mamba_stack_spec}
    pattern = accepted_by(model_class.__init__, hybrid_layer_pattern=_pattern(job)) or {"hybrid_override_pattern": _letters(job)}
    return language_model(model_class, job, config, **stage, **spec, **pattern)


def _letters(job: TrainingJob) -> str:
    assert job.model.hybrid is not None
    return job.model.hybrid.pattern


def _pattern(job: TrainingJob) -> str:
    """The pattern with its pipeline stages and MTP depths."""
    hybrid, layout = job.model.hybrid, job.parallel.pipeline_layout.layout
    assert hybrid is not None
    letters = iter(hybrid.pattern)
    main = hybrid.pattern
    if layout is not None:
        main = "|".join("".join(next(letters) for _ in range(stage.count("t"))) for stage in layout)
    return "/".join([main, *[hybrid.mtp_pattern] * job.model.mtp_num_layers])
