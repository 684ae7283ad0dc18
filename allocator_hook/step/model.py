"""Builds the model chunks of one rank, as `model_provider` of the training script and `get_model` of training.py do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from typing import Any, Final

import torch

from allocator_hook.step.adapters import add_adapters
from allocator_hook.step.config import starts_from_meta
from allocator_hook.step.families.bert import bert_module
from allocator_hook.step.families.branch_norms import with_branch_norms
from allocator_hook.step.families.gemma import (
    change_ends,
    with_local_positions,
    with_norms_in_projections,
    without_input_norms,
)
from allocator_hook.step.families.llava import llava_module
from allocator_hook.step.families.sample_head import replace_output_layer
from allocator_hook.step.families.t5 import t5_module
from allocator_hook.step.freezing import freeze_parameters
from allocator_hook.step.hybrid import hybrid_model
from allocator_hook.step.language_model import language_model
from allocator_hook.step.muon import buffer_layout
from allocator_hook.step.optimizer_config import ddp_config, uses_torch_fsdp
from allocator_hook.step.versions import accepted_by, known_to
from analyzer.errors import AnalyzerError
from analyzer.specs import Family, ModelSpec, MoeSpec, TrainingJob


def layer_spec(job: TrainingJob, config: Any, *, virtual_stage: int | None) -> Any:
    """Return the layer spec that Megatron selects for `--transformer-impl`. For MoE models: the layer specs of this stage."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if _has_variant(job.model):
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

        return variants.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=virtual_stage)
    if job.model.moe is not None:
        te = job.model.implementation == "transformer_engine"
        block = specs.get_gpt_decoder_block_spec
        # before 0.13, layers of Transformer Engine read the normalization from `config`, and the stage is that of `parallel_state`
        norm = known_to(block, normalization=None if te else config.normalization)
        return block(config, use_transformer_engine=te, **norm, **accepted_by(block, vp_stage=virtual_stage))
    if job.model.blocks:
        from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec

        return get_gpt_heterogeneous_layer_spec(config, use_te=True)
    return _uniform_spec(job, config)


def _has_variant(model: ModelSpec) -> bool:
    """Return whether it has attention of another kind (`experimental_attention_variant`)."""
    return any(each is not None for each in (model.linear_attention, model.sparse_attention, model.compressed_attention))


def _uniform_spec(job: TrainingJob, config: Any, *, experts: MoeSpec | None = None) -> Any:
    """Return the spec of one layer, for a model with equal layers."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    modules: dict[str, Any] = {"multi_latent_attention": job.model.mla is not None}
    if experts is not None:
        modules |= {"num_experts": experts.num_experts, "moe_grouped_gemm": experts.grouped_gemm}
    if job.model.implementation == "transformer_engine":
        function = specs.get_gpt_layer_with_transformer_engine_spec
        return function(**known_to(function, qk_layernorm=config.qk_layernorm, **modules))
    function = specs.get_gpt_layer_local_spec
    options = known_to(function, qk_layernorm=config.qk_layernorm, normalization=config.normalization, **modules)
    return function(**options)


def mtp_spec(job: TrainingJob, config: Any, decoder: Any, *, virtual_stage: int | None) -> Any:
    """Return the spec of the MTP layers, which equal the last decoder layer (`gpt_builder`); None without MTP layers.

    Before core 0.16 it was the decoder spec of this stage, or an MoE layer spec on a stage without decoder layers.
    """
    if not job.model.mtp_num_layers:
        return None
    from megatron.core.models.gpt import gpt_layer_specs as specs

    te = job.model.implementation == "transformer_engine"
    variant = _has_variant(job.model)
    if job.core.mtp_attention_of_last_layer and variant:
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

        layer = variants.get_transformer_layer_with_experimental_attention_variant_spec(config=config)[-1]
    elif hasattr(specs, "get_gpt_decoder_layer_specs"):
        build = specs.get_gpt_decoder_layer_specs
        layer = build(config, use_transformer_engine=te, **known_to(build, normalization=config.normalization))[-1]
    elif getattr(decoder, "layer_specs", None) == []:
        layer = _uniform_spec(job, config, experts=job.model.moe)
    else:
        layer = decoder
    block = specs.get_gpt_mtp_block_spec
    return block(config, layer, use_transformer_engine=te, **known_to(block, vp_stage=virtual_stage))


def chunk(job: TrainingJob, config: Any, *, virtual_stage: int | None) -> Any:
    """Build one model chunk on the GPU in the precision of the job, not yet wrapped for data parallelism.

    Raises AnalyzerError if the installed megatron-core does not support the position embedding.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.module import Float16Module

    stage = {"ignore_virtual": False, "vp_stage": virtual_stage}
    if virtual_stage is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(virtual_stage)
    first, last = (_at_end(getattr(parallel_state, f"is_pipeline_{end}_stage"), stage) for end in ("first", "last"))
    with torch.device("meta") if starts_from_meta(job) else nullcontext():
        build = _BUILDERS[job.model.family] if job.model.hybrid is None else hybrid_model
        module = build(job, config, pre_process=first, post_process=last, virtual_stage=virtual_stage)
    replace_output_layer(job, config, module)
    add_adapters(job, config, module)
    freeze_parameters(job, module)
    module.model_type = _encoder_or_decoder()
    for parameter in module.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if not starts_from_meta(job):
        module.cuda(torch.cuda.current_device())
    return Float16Module(config, module) if config.fp16 or config.bf16 else module


def _gpt_module(job: TrainingJob, config: Any, *, virtual_stage: int | None, **stage: bool) -> Any:
    from megatron.core.models.gpt import GPTModel, gpt_model

    if job.model.yarn_positions is not None and not hasattr(gpt_model, "YarnRotaryEmbedding"):
        raise AnalyzerError(
            "--info-engine shadow: the installed megatron-core has no --position-embedding-type yarn; "
            "install megatron-core 0.15 or later, or use --info-engine formula"
        )
    decoder = layer_spec(job, config, virtual_stage=virtual_stage)
    if job.model.branch_norms:
        decoder = with_norms_in_projections(decoder) if job.model.norms_in_projections else with_branch_norms(decoder)
    if job.model.norm_modules == "none":
        decoder = without_input_norms(decoder)
    if job.model.local_rope:
        decoder = with_local_positions(decoder, job.model)
    mtp = known_to(GPTModel.__init__, mtp_block_spec=mtp_spec(job, config, decoder, virtual_stage=virtual_stage))
    module = language_model(GPTModel, job, config, **stage, virtual_stage=virtual_stage, transformer_layer_spec=decoder, **mtp)
    change_ends(job.model, module)
    return module


_BUILDERS: Final[dict[Family, Callable[..., Any]]] = {
    "gpt": _gpt_module,
    "bert": bert_module,
    "t5": t5_module,
    "llava": llava_module,
}


def _at_end(query: Any, stage: dict[str, Any]) -> bool:
    """Before 0.13, the query reads the virtual stage that `parallel_state` was given."""
    return bool(query(**accepted_by(query, **{name: value for name, value in stage.items() if value is not None})))


def _encoder_or_decoder() -> Any:
    from megatron.core.enums import ModelType

    return ModelType.encoder_or_decoder


def chunks(job: TrainingJob, config: Any) -> list[Any]:
    """Build all chunks of the rank in the order of virtual stages, not yet wrapped for data parallelism.

    Each chunk has its own config, which `gpt_builder` creates from the arguments. Schedules use that of the first.
    """
    virtual = job.parallel.virtual_pipeline
    if not virtual:
        return [chunk(job, config, virtual_stage=None)]
    configs = [config, *(copy(config) for _ in range(virtual - 1))]
    return [chunk(job, each, virtual_stage=stage) for stage, each in enumerate(configs)]


def _wrapper(job: TrainingJob) -> Any:
    """Return the class that wraps a chunk."""
    from megatron.core import distributed

    if uses_torch_fsdp(job):
        return distributed.TorchFullyShardedDataParallel
    if job.fsdp is None:
        return distributed.DistributedDataParallel
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    return FullyShardedDataParallel


def wrap(job: TrainingJob, config: Any, modules: list[Any]) -> list[Any]:
    """Wrap each chunk for data parallelism.

    DistributedDataParallel moves parameters and gradients into contiguous buffers, Megatron-FSDP and torch FSDP2 shard them.
    """
    kind = _wrapper(job)
    total = sum(parameter.numel() for module in modules for parameter in module.parameters())
    aligned = job.optimizer.muon is not None and job.optimizer.muon.aligned
    wrapped = []
    for index, module in enumerate(modules):
        data_parallel = ddp_config(job, parameters=total)
        # only the first chunk may have several buckets; not with --overlap-param-gather-with-optimizer-step
        single = index > 0 or job.optimizer.overlap_param_gather_with_optimizer_step
        layout = {"full_param_layout": buffer_layout(data_parallel, module, bucketing=not single)} if aligned else {}
        wrapped.append(
            kind(config=config, ddp_config=data_parallel, module=module, **known_to(kind, disable_bucketing=single), **layout)
        )
    if uses_torch_fsdp(job):
        for each in wrapped:
            each.finish_grad_sync = _nothing  # core 0.16 passes an argument that the method of FSDP2, which is empty, does not have
    return wrapped


def _nothing(**_: Any) -> None:
    """Replaces a method that does nothing."""
