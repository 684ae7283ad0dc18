"""What a launch asks for: frozen dataclasses that the whole analysis reads and nothing changes.

`analyzer.launch` makes them from argv. Everything derived that Megatron's `validate_args` derives (padded
vocabulary, ffn_hidden_size, data-parallel size, microbatches) is already in them. Names are Megatron's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from analyzer.specs_optimizer import FsdpSpec as FsdpSpec
from analyzer.specs_optimizer import MuonSpec as MuonSpec
from analyzer.specs_optimizer import OffloadSpec as OffloadSpec
from analyzer.specs_optimizer import OptimizerSpec as OptimizerSpec

Implementation = Literal["transformer_engine", "local", "legacy"]
AttentionBackend = Literal["flash", "fused", "unfused"]
CrossEntropy = Literal["unfused", "native", "te"]
Fp8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"]
Activation = Literal["gelu", "swiglu", "geglu", "quick_geglu", "squared_relu", "silu"]


@dataclass(frozen=True, kw_only=True)
class FlexSpec:
    """The library that the flex dispatcher sends tokens with."""

    backend: Literal["deepep", "hybridep"] = "deepep"
    sms: int = 20
    """Multiprocessors that DeepEP's kernels take (`--moe-deepep-num-sms`)."""
    nvlink_ranks: int = 8
    """Ranks of a group that HybridEP takes to reach each other over NVLink."""


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Mixture of experts: which layers have it, and how tokens reach their experts."""

    num_experts: int
    topk: int
    ffn_hidden_size: int
    """`--moe-ffn-hidden-size`, of one expert."""
    layers: tuple[bool, ...]
    """For each decoder layer whether it is a mixture (`--moe-layer-freq` unrolled)."""
    shared_ffn_hidden_size: int | None = None
    """`--moe-shared-expert-intermediate-size`: the total width of the shared experts."""
    shared_overlap: bool = False
    shared_gate: bool = False
    grouped_gemm: bool = False
    legacy_grouped_gemm: bool = False
    """The experts of one layer in two fused weights, without Transformer Engine."""
    dispatcher: Literal["allgather", "alltoall", "flex"] = "allgather"
    flex: FlexSpec | None = None
    """Of the flex dispatcher; None for the others."""
    permute_fusion: bool = False
    adds_by_index: bool = False
    """Rows of experts are added up to tokens by an operation that keeps them (`--deterministic-mode`, from 0.15 on)."""
    capacity_factor: float | None = None
    pad_to_capacity: bool = False
    pad_for_quantization: bool = False
    """The router pads each expert's tokens to a multiple that FP8 products need (`--moe-router-padding-for-quantization`)."""
    router_dtype: Literal["fp32", "fp64"] | None = None
    """None: the router works in the parameters' type."""
    load_balancing: tuple[str, ...] = ("aux_loss",)
    aux_loss_coeff: float = 0.0
    """Sum of the coefficients; 0 switches the loss off."""
    z_loss_coeff: float = 0.0
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    pre_softmax: bool = False
    expert_bias: bool = False
    latent_size: int | None = None
    imbalance: float = 1.0
    """Tokens of the fullest rank's experts over the mean (`--info-moe-imbalance`)."""


@dataclass(frozen=True, kw_only=True)
class MlaSpec:
    """Multi-latent attention: queries, keys and values through low-rank projections."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    yarn: bool = True
    """Positions by YaRN (`--rope-type`), of which each layer keeps tables."""
    first_angles_stay: bool = False
    """The cache of angles is not emptied of what the tables were made from (before core 0.16)."""

    @property
    def query_head_dim(self) -> int:
        """Elements of a query or key head: without and with position."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


Branch = Literal["full", "linear", "none"]
"""What a branch of a layer is: itself, one linear layer in its place, or nothing."""


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """One decoder layer of a model whose layers differ (`--heterogeneous-layers-config-path`)."""

    attention: Branch = "full"
    feed_forward: Branch = "full"
    ffn_hidden_size: int | None = None
    """Width of the feed-forward branch where it is a full one; None for that of the model."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A GPT decoder as Megatron would build it."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key and value heads; equal to num_attention_heads without grouped-query attention."""
    kv_channels: int
    """Elements of one head."""
    vocab_size: int
    """Tokens the tokenizer knows, before padding."""
    padded_vocab_size: int
    max_position_embeddings: int
    position_embedding: Literal["learned_absolute", "rope", "none"]
    yarn_positions: int | None = None
    """Positions that the tables of YaRN are made for (`--position-embedding-type yarn`); None for other rotations."""
    rotary_percent: float = 1.0
    rope_fusion: bool = False
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    activation: Activation = "gelu"
    bias_linear: bool = True
    """Biases on the projections, fc1 and fc2 (`--disable-bias-linear` turns them off)."""
    bias_qkv: bool = True
    """Bias on the query/key/value projection: `--add-qkv-bias`, or bias_linear."""
    qk_layernorm: bool = False
    tied_embeddings: bool = True
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    bias_activation_fusion: bool = True
    """`--no-bias-gelu-fusion` / `--no-bias-swiglu-fusion` turn it off."""
    bias_dropout_fusion: bool = True
    masked_softmax_fusion: bool = True
    attention_softmax_in_fp32: bool = False
    apply_query_key_layer_scaling: bool = False
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Whether attention has a sink, and whether it is learned: one parameter for each head."""
    window: tuple[int, int] | None = None
    """Tokens that attention sees before and after each (`--window-size`)."""
    windowed: tuple[bool, ...] = ()
    """For each decoder layer whether attention sees a window only; empty without `--window-size`."""
    window_backend: AttentionBackend | None = None
    """The kernel of those layers where it is not attention_backend."""
    activation_clamped: bool = False
    """`--activation-func-clamp-value`."""
    glu_offset: bool = False
    """The linear half of an unfused gated activation gets an offset, also where that is 0 (core 0.15 on)."""
    apply_residual_connection_post_layernorm: bool = False
    fp32_residual_connection: bool = False
    implementation: Implementation = "transformer_engine"
    """`legacy` is the 2023 code (Megatron-LM of August 2023, before core 0.3) with its own layers."""
    attention_backend: AttentionBackend = "flash"
    """What Transformer Engine (or the 2023 `--use-flash-attn`) picks; unfused keeps the score matrices."""
    cross_entropy: CrossEntropy = "unfused"
    fp16_lm_cross_entropy: bool = False
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    blocks: tuple[BlockSpec, ...] = ()
    """For each decoder layer what it is made of, where they differ by configuration; else empty."""
    mtp_num_layers: int = 0
    """Multi-token-prediction depths, after the last decoder layer."""

    @property
    def gated(self) -> bool:
        """Whether fc1 has a gate beside its up-projection, twice ffn_hidden_size wide."""
        return self.activation in ("swiglu", "geglu", "quick_geglu")

    @property
    def query_projection_size(self) -> int:
        """a·d, the width of all queries."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_value_projection_size(self) -> int:
        """g·d, the width of all keys (and of all values)."""
        return self.num_query_groups * self.kv_channels


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """How layers are spread over pipeline ranks: what `--decoder-first-pipeline-num-layers` and its kin say."""

    num_layers_in_first: int | None = None
    num_layers_in_last: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    layout: tuple[str, ...] | None = None
    """`--pipeline-model-parallel-layout` unrolled: for each virtual stage, in model order, letters of E t m L."""


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """Sizes of every dimension of parallelism, and the order in which ranks are counted."""

    world_size: int
    nodes: int
    gpus_per_node: int
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    """Model chunks of each pipeline rank; None without interleaving."""
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    order: str = "tp-cp-ep-dp-pp"
    """Fastest-changing dimension first; `--use-tp-pp-dp-mapping` gives tp-cp-ep-pp-dp."""
    sequence_parallel: bool = False
    microbatch_group_size: int | None = None
    """`--microbatch-group-size-per-virtual-pipeline-stage`; None is the pipeline size."""
    distributed_optimizer_instances: int = 1
    overlap_p2p: bool = False
    """Interleaved schedules send asynchronously; 1F1B never does."""
    pipeline_layout: PipelineSpec = PipelineSpec()
    cp_comm_type: str = "p2p"
    """p2p, a2a, all_gather or a2a+p2p."""
    cp_inner_size: int = 1
    """Ranks of the inner groups of a2a+p2p: the first of `--hierarchical-context-parallel-sizes`."""

    @property
    def data(self) -> int:
        """Data-parallel size, context parallelism not counted in."""
        return self.world_size // (self.tensor * self.pipeline * self.context)

    @property
    def data_with_context(self) -> int:
        """Ranks over which gradients of dense parameters are reduced (Megatron's dp_cp)."""
        return self.data * self.context

    @property
    def expert_data(self) -> int:
        """Replicas of each expert."""
        return self.world_size // (self.expert_tensor * self.expert * self.pipeline)

    @property
    def chunks(self) -> int:
        """Model chunks on a pipeline rank: virtual_pipeline, or 1."""
        return self.virtual_pipeline or 1


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """Samples of one iteration."""

    micro_batch_size: int
    global_batch_size: int
    seq_length: int
    microbatches: int
    """For each data-parallel replica, at the full global batch."""
    first_microbatches: int
    """In the first iteration: fewer with `--rampup-batch-size`."""


@dataclass(frozen=True, kw_only=True)
class Fp8Spec:
    """Products of Transformer Engine's linear layers in FP8 or FP4. Attention, norms, embedding, output layer stay in 16 bit."""

    format: Literal["e4m3", "hybrid", "e2m1"]
    """hybrid: gradients of activations in e5m2, no difference in bytes; e2m1: FP4, with the recipe nvfp4."""
    recipe: Fp8Recipe = "delayed"
    stored_parameters: bool = False
    """`--fp8-param-gather`: the weights of those layers are stored and gathered in FP8."""
    layers_at_start_in_16_bit: int = 0
    """With `--first-last-layers-bf16`."""
    layers_at_end_in_16_bit: int = 0
    amax_history_len: int = 1
    """Of each scaling factor, with the delayed recipe."""


@dataclass(frozen=True, kw_only=True)
class PrecisionSpec:
    """Element types, as the keys of `units.DTYPE_BYTES`."""

    parameters: Literal["fp32", "fp16", "bf16"] = "fp32"
    gradients: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Of the contiguous gradient buffer (`--accumulate-allreduce-grads-in-fp32`, `--grad-reduce-in-bf16`)."""
    fp8: Fp8Spec | None = None


@dataclass(frozen=True, kw_only=True)
class RecomputeSpec:
    """Activation recomputation."""

    granularity: Literal["selective", "full"] | None = None
    method: Literal["uniform", "block"] | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ()
    """With selective: core_attn, mlp, layernorm …"""
    distribute_saved_activations: bool = False


@dataclass(frozen=True, kw_only=True)
class ActivationOffloadSpec:
    """Activations that wait for their backward in host memory: of parts of layers, or of the first so many layers."""

    layers: int = 0
    """Whole layers (`--cpu-offloading-num-layers`)."""
    modules: tuple[str, ...] = ()
    """Of `--fine-grained-activation-offloading`: attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, expert_fc1, moe_act."""
    min_elements: int = 1024 * 1024
    """Smaller tensors stay (`--min-offloaded-tensor-size`)."""
    last_stays: bool = True
    """The last layer before the loss stays, since its backward comes next; not so where another microbatch's does."""


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """CUDA graphs: kernels recorded once and replayed, in memory that stays theirs."""

    implementation: Literal["transformer_engine", "local"]
    """Who captures (`--cuda-graph-impl`)."""
    scope: tuple[str, ...] = ()
    """attn, mlp, moe, moe_router, moe_preprocess, or full_iteration; nothing is whole layers."""
    warmup_steps: int = 3
    """Iterations without graphs before they are captured."""


@dataclass(frozen=True, kw_only=True)
class RuntimeSpec:
    """Everything else that decides about bytes or messages."""

    gradient_accumulation_fusion: bool = True
    attention_mask_in_dataloader: bool = True
    deterministic: bool = False
    calculate_per_token_loss: bool = False
    check_for_nan_in_loss_and_grad: bool = True
    tp_comm_overlap: bool = False
    defer_embedding_wgrad: bool = False
    cublas_workspace_config: str | None = None
    """The environment's CUBLAS_WORKSPACE_CONFIG."""
    cuda_device_max_connections: str | None = None
    allocator_config: str | None = None
    """The environment's PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF."""
    use_cpu_initialization: bool = False
    empty_unused_memory_level: int = 0
    data_parallel_random_init: bool = False
    overlap_moe_expert_parallel_comm: bool = False
    """The forward of a microbatch and the backward of another run side by side, layer by layer."""
    early_attention_backward: bool = False
    """There a layer's attention goes backward before the other one's experts run (`--ep-overlap-early-attn-memory-release`)."""
    delay_wgrad_compute: bool = False
    """There weight gradients of a branch are computed once it has been through backward."""


@dataclass(frozen=True, kw_only=True)
class HardwareSpec:
    """The GPU that the launch is held against; all None where none is named and none is at hand."""

    name: str | None = None
    capacity_bytes: int | None = None
    """Memory that the driver reports as total."""
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch, understood."""

    model: ModelSpec
    parallel: ParallelSpec
    batch: BatchSpec
    precision: PrecisionSpec
    optimizer: OptimizerSpec
    recompute: RecomputeSpec
    runtime: RuntimeSpec
    hardware: HardwareSpec
    megatron: str
    """The release whose behaviour is assumed: '0.16.1', or '2023' for the code before core 0.3."""
    assumptions: tuple[str, ...] = ()
    """What was taken for granted while the arguments were read, one sentence each."""
    fsdp: FsdpSpec | None = None
    graphs: GraphSpec | None = None
    activation_offload: ActivationOffloadSpec | None = None
