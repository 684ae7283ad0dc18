"""The inputs of the module formulas. They are the cache key of module trees.

Two jobs with equal inputs have equal trees, whatever their world size, global batch size, schedule or optimizer.

`ModuleInputs` are those of a whole chunk. The inputs of a part are of a type that lacks what the part does not depend on, so that
formulas of the part cannot read it: `LayerInputs` of dense layers, `ExpertInputs` of MoE layers, `EndInputs` outside layers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Final, Self, TypeVar

from analyzer.modules.tree import Part
from analyzer.specs import Fp8Recipe, Fp8Spec, ModelSpec, RecomputeSpec, TrainingJob, VisionSpec
from analyzer.specs.hardware import MULTIPROCESSORS
from analyzer.specs.release_changes import CoreBehavior, EngineBehavior

NO_RECOMPUTE: Final = RecomputeSpec()
OF_ATTENTION: Final = frozenset({"core_attn", "layernorm", "mla_up_proj", "gdn_norm_out"})
"""Modules of `--recompute-modules` in attention, and the norms."""
OF_EXPERTS: Final = frozenset({"layernorm", "moe", "moe_act", "shared_experts"})
"""The same in the branch with the experts."""


@dataclass(frozen=True, kw_only=True)
class LayerSplit:
    """How dense layers are sharded over ranks."""

    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    cp_comm_type: str = "p2p"
    """p2p, a2a, all_gather or a2a+p2p."""
    cp_inner_size: int = 1
    """Ranks of the inner groups of a2a+p2p."""

    def over_tensor_only(self) -> Self:
        """The same tensor-parallel size without sequence, context and expert parallelism."""
        return replace(type(self)(), tensor=self.tensor)


@dataclass(frozen=True, kw_only=True)
class ExpertSplit(LayerSplit):
    """How MoE layers are sharded over ranks."""

    expert: int = 1
    expert_tensor: int = 1


@dataclass(frozen=True, kw_only=True)
class EndSplit(LayerSplit):
    """How modules outside layers are sharded over ranks."""

    pipelined: bool = False
    """There are several pipeline stages, so that two of them can have a copy of the word embedding."""

    def over_tensor_only(self) -> Self:
        """The same tensor-parallel size and stages without sequence, context and expert parallelism."""
        return replace(super().over_tensor_only(), pipelined=self.pipelined)


@dataclass(frozen=True, kw_only=True)
class Split(ExpertSplit, EndSplit):
    """How the modules of a pipeline stage are sharded over ranks."""


@dataclass(frozen=True, kw_only=True)
class CachedDummies:
    """Layers whose fused weight gradients return a cached dummy to autograd. Others allocate one for each use.

    Transformer Engine caches those of its layers, and Megatron's own layers use that cache, except in legacy models
    (`EngineBehavior.caches_dummies`, `CoreBehavior.caches_dummies`).
    """

    layers: bool = True
    """Linear layers of attention and FFN, and experts that run one after the other."""
    experts: bool = True
    """Grouped experts."""
    output_layer: bool = True


def _cached_dummies(job: TrainingJob) -> CachedDummies:
    engine, implementation = job.engine, job.model.implementation
    own = engine.caches_dummies and implementation != "legacy" and job.core.caches_dummies
    layers = engine.caches_dummies if implementation == "transformer_engine" else own
    grouped = job.model.moe is not None and job.model.moe.grouped_gemm
    return CachedDummies(layers=layers, experts=engine.caches_grouped_dummies if grouped else layers, output_layer=own)


def _attention_in_batches(job: TrainingJob) -> bool:
    model = job.model
    in_batches = job.core.attention_in_batches and job.engine.attention_in_batches
    return model.implementation == "transformer_engine" and model.rope_fusion and in_batches


def _router_in_te(job: TrainingJob) -> bool:
    """Whether the GEMMs of a router are those of Transformer Engine, also in layers of Megatron itself.

    fp64 routers use PyTorch.
    """
    moe, core, engine = job.model.moe, job.core, job.engine
    if moe is None or moe.router_dtype == "fp64" or not (core.router_in_te and engine.general_gemm):
        return False
    return engine.has_get_workspace or not core.router_needs_workspace


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """Everything that dense layers and attention depend on."""

    model: ModelSpec
    split: LayerSplit
    micro_batch_size: int
    sequence_length: int
    """Tokens of a sample, before context parallelism shards them."""
    dtype: str
    """Element type of parameters and activations."""
    fp8: Fp8Spec | None = None
    padding_recipe: Fp8Recipe | None = None
    """The rows of each expert are padded for this recipe, also in layers that stay in 16 bit."""
    recompute: RecomputeSpec
    gradient_accumulation_fusion: bool = True
    """The GEMM of a weight gradient accumulates into the gradient buffer."""
    attention_mask_in_dataloader: bool = True
    deterministic: bool = False
    userbuffers: bool = False
    """Linear layers gather and scatter in buffers outside PyTorch's allocator (`--tp-comm-overlap`). With multi-latent attention
    they do not, except one of each chunk (`one_projection_in_userbuffers`)."""
    cached_dummies: CachedDummies = CachedDummies()
    offloads_expert_input: bool = False
    """Grouped experts save their 16-bit input, which is offloaded once (`TEGroupedMLP.__init__`: `expert_fc1`)."""
    attention_in_batches: bool = False
    """Attention after the fused rotation is computed in [b, s, a, d] (`CoreBehavior.attention_in_batches`)."""
    norms_save_views: bool = False
    """Norms are those of Transformer Engine, which save a view of their input (`EngineBehavior.norms_save_views`)."""
    router_in_te: bool = False
    """The GEMMs of a router are those of Transformer Engine (`RouterGatingLinearFunction`)."""
    compute_capability: tuple[int, int] | None = None
    """Of the target GPU; None if no GPU is given."""
    multiprocessors: int = MULTIPROCESSORS
    delays_weight_gradients: bool = False
    """Linear layers compute the gradients of their weights later (`--delay-wgrad-compute`)."""
    core: CoreBehavior
    """What the release of megatron-core does."""
    engine: EngineBehavior
    """What the version of Transformer Engine does."""
    padding_mask: bool = False
    """Attention has a mask of padding instead of a causal one: BERT, and T5 outside the self-attention of its decoder."""
    masked: bool = True
    """Attention has a mask: not in the layers of Transformer Engine of vision encoders (`AttnMaskType.no_mask`)."""
    key_length: int | None = None
    """Keys of a sample if they are not those of its own tokens: in the cross-attention of T5."""
    separate_graphs: bool = False
    """The embedding, each layer and the output layers have autograd graphs of their own (`--overlap-moe-expert-parallel-comm`).
    Gradients of a weight that several of them read are then accumulated one after the other, not summed by autograd."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(map(self.__getattribute__, _NAMES)))

    @property
    def _selective(self) -> RecomputeSpec:
        """Recompute inside layers. Full recompute is around them."""
        return self.recompute if self.recompute.granularity == "selective" else NO_RECOMPUTE

    @cached_property
    def of_dense_layers(self) -> LayerInputs:
        """The inputs that dense layers and attention depend on."""
        return _narrowed(self, LayerInputs, LayerSplit, self._selective)

    @cached_property
    def of_attention(self) -> LayerInputs:
        """The inputs that attention with its norm depends on: those of dense layers, and recompute of its own modules."""
        return _recomputing(self.of_dense_layers, OF_ATTENTION)

    @cached_property
    def of_batches(self) -> LayerInputs:
        """The inputs that a micro-batch on the GPU depends on: of recompute, whether a checkpoint gets the attention mask."""
        recompute = RecomputeSpec(granularity="full", method="uniform") if self.checkpoints_attention else NO_RECOMPUTE
        return _narrowed(self, LayerInputs, LayerSplit, recompute)

    @cached_property
    def without_batch(self) -> Self:
        """The inputs of layers in a chunk that gets no batch, and so no attention mask. Only unfused attention reads the mask."""
        if "unfused" not in (self.model.attention_backend, self.model.window_backend) or self.micro_batch_size == 1:
            return self
        return replace(self, attention_mask_in_dataloader=False)

    def of_part(self, part: Part) -> Self:
        """The inputs of a part of a T5 or of a vision-language model.

        The decoder of a T5 gets no mask from Transformer Engine's path: it is causal.
        """
        short = self.model.decoder_seq_length
        if self.model.vision is not None:
            return self._of_vision(part) if part in ("vision", "projector", "text", "tags") else self
        if not part or short is None or part == "encoder":
            return self
        cache = self.__dict__.setdefault("_parts", {})
        if part not in cache:
            causal = part == "decoder"
            cache[part] = replace(
                self,
                sequence_length=short,
                key_length=None if causal else self.sequence_length,
                padding_mask=not causal,
                attention_mask_in_dataloader=self.model.implementation == "local",
            )
        return cache[part]  # type: ignore[no-any-return]

    def _of_vision(self, part: Part) -> Self:
        """The inputs of the encoder, the projector, or the embedding of the text or of the tags of tiles.

        Neither sequence nor context parallelism shards them (`model_provider` of pretrain_vlm.py, `LLaVAModel.__init__`).
        """
        vision = self.model.vision
        assert vision is not None, "the parts are those of a vision-language model"
        cache = self.__dict__.setdefault("_parts", {})
        if part not in cache:
            images = self.micro_batch_size * vision.tiles
            whole = replace(self, split=self.split.over_tensor_only(), attention_mask_in_dataloader=False, userbuffers=False)
            if part == "vision":
                if vision.kind == "hf_clip":  # transformers does not split it
                    whole = replace(whole, split=type(self.split)())
                cache[part] = replace(
                    whole,
                    model=vision.encoder,
                    micro_batch_size=images,
                    sequence_length=vision.tokens,
                    masked=vision.causal_encoder,
                    recompute=self._recompute_of_encoder(vision),
                )
            elif part == "projector":
                cache[part] = replace(
                    whole, model=vision.projector, micro_batch_size=images, sequence_length=vision.projected_tokens
                )
            elif part == "tags":
                cache[part] = replace(whole, micro_batch_size=images, sequence_length=vision.tag_tokens)
            else:
                packed = self.micro_batch_size if vision.packed else 1
                cache[part] = replace(
                    whole, micro_batch_size=self.micro_batch_size // packed, sequence_length=vision.text_length * packed
                )
        return cache[part]  # type: ignore[no-any-return]

    def _recompute_of_encoder(self, vision: VisionSpec) -> RecomputeSpec:
        if vision.recompute == "none":
            return NO_RECOMPUTE
        if vision.recompute == "same" or self.recompute.granularity != "full":
            return self.recompute
        return replace(self.recompute, num_layers=vision.encoder.num_layers)

    @property
    def keys(self) -> int:
        """Keys of a sample that attention reads."""
        return self.key_length or self.sequence_length

    @property
    def without_recompute(self) -> Self:
        """The same without activation recompute."""
        return replace(self, recompute=NO_RECOMPUTE)

    @property
    def checkpoints_attention(self) -> bool:
        """Whether a checkpoint gets the attention mask as an argument: full recompute of any layer, or of core attention."""
        recompute = self.recompute
        if recompute.granularity == "full":
            return recompute.method == "uniform" or bool(recompute.num_layers)
        return recompute.granularity == "selective" and "core_attn" in recompute.modules


class ExpertInputs(LayerInputs):
    """Everything that MoE layers depend on."""

    split: ExpertSplit

    @cached_property
    def of_moe_layers(self) -> ExpertInputs:
        """The inputs that MoE layers depend on."""
        return _narrowed(self, ExpertInputs, ExpertSplit, self._selective)

    @cached_property
    def of_experts(self) -> ExpertInputs:
        """The inputs that the branch with the experts depends on."""
        return _recomputing(self.of_moe_layers, OF_EXPERTS)


class EndInputs(LayerInputs):
    """Everything that the embedding, the final norm, the output layer and the loss depend on."""

    split: EndSplit

    @cached_property
    def of_ends(self) -> EndInputs:
        """The inputs that modules outside layers depend on."""
        return _narrowed(self, EndInputs, EndSplit, NO_RECOMPUTE)


class ModuleInputs(ExpertInputs, EndInputs):
    """Everything that the tree of a model chunk depends on, in addition to its `ChunkKind`."""

    split: Split

    @cached_property
    def of_checkpoints(self) -> ExpertInputs:
        """The inputs that checkpoints around layers depend on: not how many layers they cover."""
        recompute = RecomputeSpec(granularity="full", distribute_saved_activations=self.recompute.distribute_saved_activations)
        return _narrowed(self, ExpertInputs, ExpertSplit, recompute)


Inputs = TypeVar("Inputs", bound=LayerInputs)


def _narrowed(inputs: LayerInputs, kind: type[Inputs], split: type[LayerSplit], recompute: RecomputeSpec) -> Inputs:
    """The values of `inputs` that the type `kind`, whose split is of the type `split`, has. With other recompute."""
    values = {name: getattr(inputs, name) for name in _NAMES}
    values["split"] = split(**{name: getattr(inputs.split, name) for name in split.__dataclass_fields__})
    values["recompute"] = recompute
    return kind(**values)


def _recomputing(inputs: Inputs, modules: frozenset[str]) -> Inputs:
    """Inputs with selective recompute of no other modules than these."""
    recompute = inputs.recompute
    kept = tuple(module for module in recompute.modules if module in modules)
    if kept == recompute.modules:
        return inputs
    return replace(inputs, recompute=replace(recompute, modules=kept) if kept else NO_RECOMPUTE)


_NAMES = tuple(each.name for each in fields(LayerInputs))


def module_inputs(job: TrainingJob) -> ModuleInputs:
    """The inputs of a job's module trees, created once for each job object."""
    cache = job.__dict__
    if "_module_inputs" not in cache:
        cache["_module_inputs"] = _module_inputs(job)
    return cache["_module_inputs"]  # type: ignore[no-any-return]


def _fp8(job: TrainingJob) -> Fp8Spec | None:
    """How GEMMs are quantized. Overlapped microbatches run FP4 layers in 16 bit.

    `TransformerLayerSchedulePlan.get_fp8_context` of core/models/common/model_chunk_schedule_plan.py (0.16.1) has no FP4.
    """
    fp8 = job.precision.fp8
    ignored = fp8 is not None and fp8.recipe == "nvfp4" and job.flags.overlap_moe_expert_parallel_comm
    return None if ignored else fp8


def _in_userbuffers(job: TrainingJob) -> bool:
    return job.flags.tp_comm_overlap and job.model.implementation == "transformer_engine"


def one_projection_in_userbuffers(job: TrainingJob) -> bool:
    """Whether only the output projection of attention in the first layer of each chunk uses userbuffers.

    Multi-latent attention creates it first, and its other projections switch userbuffers off in the config of the chunk
    (`TELinear.__init__`, core/extensions/transformer_engine.py, 0.16.1).
    """
    return _in_userbuffers(job) and job.model.mla is not None


def _module_inputs(job: TrainingJob) -> ModuleInputs:
    parallel = job.parallel
    return ModuleInputs(
        model=job.model,
        split=Split(
            tensor=parallel.tensor,
            sequence_parallel=parallel.sequence_parallel and parallel.tensor > 1,
            context=parallel.context,
            cp_comm_type=parallel.cp_comm_type,
            cp_inner_size=parallel.cp_inner_size,
            expert=parallel.expert,
            expert_tensor=parallel.expert_tensor,
            pipelined=parallel.pipeline > 1,
        ),
        micro_batch_size=job.batch.micro_batch_size,
        sequence_length=job.batch.seq_length,
        dtype=job.precision.parameters,
        fp8=_fp8(job),
        padding_recipe=job.precision.fp8.recipe if job.precision.fp8 is not None else None,
        recompute=job.recompute,
        gradient_accumulation_fusion=job.flags.gradient_accumulation_fusion,
        attention_mask_in_dataloader=job.flags.attention_mask_in_dataloader and job.model.vision is None,
        deterministic=job.flags.deterministic,
        userbuffers=_in_userbuffers(job) and job.model.mla is None,
        cached_dummies=_cached_dummies(job),
        offloads_expert_input=job.activation_offload is not None and "expert_fc1" in job.activation_offload.modules,
        attention_in_batches=_attention_in_batches(job),
        norms_save_views=job.model.implementation == "transformer_engine" and job.engine.norms_save_views,
        router_in_te=_router_in_te(job),
        compute_capability=job.hardware.compute_capability,
        multiprocessors=job.hardware.multiprocessors or MULTIPROCESSORS,
        delays_weight_gradients=job.flags.delay_wgrad_compute,
        core=job.core,
        engine=job.engine,
        padding_mask=job.model.family in ("bert", "t5"),
        separate_graphs=job.flags.overlap_moe_expert_parallel_comm,
    )
