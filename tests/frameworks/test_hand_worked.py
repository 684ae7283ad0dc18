"""Four launches of each framework, whose layout, batch, model and trained parameters were worked out by hand.

The options are those that public examples of the frameworks have. The numbers of parameters are those of the model classes of
transformers (tests/data/published_models.json). For LoRA of rank r beside a layer with m inputs and n outputs it is r × (m + n).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from analyzer.passes.stages import full_model
from analyzer.predict.parameter_counts import parameter_counts
from analyzer.specs import TrainingJob
from tests.frameworks.files import batch, layout, read, write

pytest.importorskip("omegaconf")

_DATA: Final = Path(__file__).resolve().parent.parent / "data" / "published_models.json"
COUNTS: Final[dict[str, int]] = json.loads(_DATA.read_text(encoding="utf-8"))["parameters"]
QWEN3_8B_RANK_8: Final = 36 * 8 * ((4096 + 6144) + (4096 + 4096) + (4096 + 24576) + (12288 + 4096))
"""Beside qkv, whose outputs are 32 heads and 2 × 8 groups of 128, the output projection, both halves of fc1, and fc2."""
QWEN3_30B_ATTENTION_RANK_16: Final = 48 * 16 * ((2048 + 5120) + (4096 + 2048))
"""Beside qkv, with 32 heads and 2 × 4 groups of 128, and the output projection."""


class Case(NamedTuple):
    """A launch, and what it is."""

    name: str
    files: Mapping[str, str]
    words: str
    layout: tuple[int, int, int, int, int, int]
    """GPUs, tensor, pipeline, context, expert, expert tensor."""
    batch: tuple[int, int, int]
    """Micro, global, tokens of a sequence."""
    model: tuple[int, int, int]
    """Layers, hidden size, experts."""
    trained: int


def nemo(text: str, *, model: str, sizes: str, cluster: str) -> dict[str, str]:
    """A file of NeMo-RL with a recipe's keys, after a file of defaults."""
    base = """
policy:
  train_global_batch_size: 512
  train_micro_batch_size: 1
  max_total_sequence_length: 4096
  precision: bfloat16
  generation: {colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}}
  sequence_packing:
    enabled: false
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
  dynamic_batching: {enabled: false}
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 1
    pipeline_model_parallel_size: 1
    context_parallel_size: 1
    expert_model_parallel_size: 1
    expert_tensor_parallel_size: 1
    peft: {enabled: false, dim: 8}
"""
    recipe = f"defaults: base.yaml\npolicy:\n  model_name: {model}\n{text}  megatron_cfg: {{{sizes}}}\ncluster: {{{cluster}}}\n"
    return {"base.yaml": base, "run.yaml": recipe}


def primus(model: str, overrides: str) -> dict[str, str]:
    """A configuration of Primus with a model file and overrides."""
    return {
        "primus/configs/modules/megatron/pre_trainer.yaml": "bf16: true\nuse_distributed_optimizer: true\nseq_length: 1024\n",
        "primus/configs/models/megatron/base.yaml": (
            "swiglu: true\nadd_bias_linear: false\nadd_qkv_bias: false\nnormalization: RMSNorm\nposition_embedding_type: rope\n"
            "untie_embeddings_and_output_weights: true\ngroup_query_attention: true\ntokenizer_type: NullTokenizer\n"
            "make_vocab_size_divisible_by: 1\nmax_position_embeddings: 8192\nsequence_parallel: true\n"
        ),
        "primus/configs/models/megatron/m.yaml": f"extends: [base.yaml]\n{model}",
        "run.yaml": (
            "modules:\n  pre_trainer:\n    framework: megatron\n    config: pre_trainer.yaml\n    model: ${MODEL:m}.yaml\n"
            f"    overrides: {{{overrides}}}\n"
        ),
    }


def roll(config: str, *, model: str, gpus: str, more: str = "", arguments: str = "dtype: bf16") -> dict[str, str]:
    """A configuration of ROLL whose actor is trained by Megatron-LM."""
    return {
        "run.yaml": (
            f"pretrain: {model}\nsequence_length: 8192\nactor_train:\n  model_args: {{{arguments}}}\n"
            "  training_args: {per_device_train_batch_size: 1, gradient_accumulation_steps: 32}\n"
            f"  strategy_args: {{strategy_name: megatron_train, strategy_config: {{{config}}}}}\n"
            f"  device_mapping: {gpus}\n{more}"
        )
    }


ACTOR: Final = "actor_rollout_ref.actor."
VERL: Final = f"-m verl.trainer.main_ppo model_engine=megatron {ACTOR}strategy=megatron trainer.n_gpus_per_node=8 "
SWIFT: Final = "megatron sft --dataset x --packing true "
SLIME: Final = "train.py --actor-num-gpus-per-node 8 --colocate --bf16 "
LLAMA_8B: Final = (
    "num_layers: 32\nhidden_size: 4096\nffn_hidden_size: 14336\nnum_attention_heads: 32\nnum_query_groups: 8\nvocab_size: 128255\n"
)
QWEN3_30B: Final = (
    "num_layers: 48\nhidden_size: 2048\nffn_hidden_size: 6144\nnum_attention_heads: 32\nnum_query_groups: 4\nkv_channels: 128\n"
    "qk_layernorm: true\nnum_experts: 128\nmoe_router_topk: 8\nmoe_ffn_hidden_size: 768\nvocab_size: 151935\n"
    "moe_token_dispatcher_type: alltoall\nmoe_grouped_gemm: true\n"
)
DEEPSEEK_V2_LITE: Final = (
    "num_layers: 27\nhidden_size: 2048\nffn_hidden_size: 10944\nnum_attention_heads: 16\ngroup_query_attention: false\n"
    "multi_latent_attention: true\nq_lora_rank: null\nkv_lora_rank: 512\nqk_head_dim: 128\nqk_pos_emb_head_dim: "
    "64\nv_head_dim: 128\n"
    "qk_layernorm: true\nnum_experts: 64\nmoe_router_topk: 6\nmoe_ffn_hidden_size: "
    "1408\nmoe_shared_expert_intermediate_size: 2816\n"
    "moe_layer_freq: ([0]*1+[1]*26)\nvocab_size: 102399\nmoe_token_dispatcher_type: alltoall\nmoe_grouped_gemm: true\n"
)
SMALL: Final = (
    "num_layers: 8\nhidden_size: 1024\nffn_hidden_size: 4096\nnum_attention_heads: 16\nnum_query_groups: 4\nvocab_size: 999\n"
)
SMALL_COUNT: Final = 8 * (1024 * (1024 + 2 * 256) + 1024 * 1024 + 3 * 1024 * 4096 + 2 * 1024) + 1024 + 2 * 1000 * 1024
BRIDGE_SIZES: Final = (
    "num_layers: 32, hidden_size: 4096, ffn_hidden_size: 14336, num_attention_heads: 32, num_query_groups: 8, vocab_size: 128256, "
    "should_pad_vocab: false, gated_linear_unit: true, activation_func: {_target_: torch.nn.functional.silu, _call_: false}, "
    "add_bias_linear: false, normalization: RMSNorm, position_embedding_type: rope, share_embeddings_and_output_weights: false, "
    "seq_length: 8192, bf16: true, attention_backend: flash"
)
_QWEN_1_5B: Final = "Qwen/Qwen2.5-1.5B"


def bridge(sizes: str, batch: str, more: str = "") -> dict[str, str]:
    """A dumped container of Megatron-Bridge."""
    provider = "_target_: megatron.bridge.models.gpt_provider.GPTModelProvider"
    return {
        "run.yaml": (
            f"model: {{{provider}, {BRIDGE_SIZES}, {sizes}}}\ntrain: {{{batch}, train_iters: 100}}\n"
            "optimizer: {optimizer: adam, use_distributed_optimizer: true}\nddp: {use_distributed_optimizer: true}\n"
            f"dataset: {{seq_length: 8192}}\nmixed_precision: bf16_mixed\n{more}"
        )
    }


CASES: Final = (
    # NeMo-RL: 512 sequences; packed, 4096 × 4 tokens are a microbatch and 512 × 4096 / 16384 / 4 replicas are 32 for each of the 4
    Case(
        "NeMo-RL dense", nemo("", model="meta-llama/Llama-3.1-8B-Instruct", sizes="tensor_model_parallel_size: 2",
                              cluster="num_nodes: 2, gpus_per_node: 8"),
        "run.yaml", (16, 2, 1, 1, 1, 1), (1, 512, 4096), (32, 4096, 0), COUNTS["meta-llama/Llama-3.1-8B"],
    ),
    Case(
        "NeMo-RL packed", nemo("  train_micro_batch_size: 4\n  sequence_packing: {enabled: true}\n", model="Qwen/Qwen3-30B-A3B",
                               sizes="expert_model_parallel_size: 8, tensor_model_parallel_size: 4, sequence_parallel: true",
                               cluster="num_nodes: 2, gpus_per_node: 8"),
        "run.yaml", (16, 4, 1, 1, 8, 1), (1, 128, 16384), (48, 2048, 128), COUNTS["Qwen/Qwen3-30B-A3B"],
    ),
    Case(
        "NeMo-RL with GPUs of its own for the rollout",
        nemo("  generation: {colocated: {enabled: false, resources: {num_nodes: 1, gpus_per_node: 8}}}\n", model=_QWEN_1_5B,
             sizes="context_parallel_size: 2", cluster="num_nodes: 3, gpus_per_node: 8"),
        "run.yaml policy.train_global_batch_size=64", (16, 1, 1, 2, 1, 1), (1, 64, 4096), (28, 1536, 0), COUNTS[_QWEN_1_5B],
    ),
    Case(
        "NeMo-RL LoRA", nemo("", model="Qwen/Qwen3-8B", sizes="pipeline_model_parallel_size: 2, peft: {enabled: true, dim: 8}",
                             cluster="num_nodes: 1, gpus_per_node: 8"),
        "run.yaml", (8, 1, 2, 1, 1, 1), (1, 512, 4096), (36, 4096, 0), QWEN3_8B_RANK_8,
    ),
    # Primus: the sizes are in the model file, with a token less than NullTokenizer has; without NNODES the fewest nodes are counted
    Case(
        "Primus dense", primus(LLAMA_8B, "micro_batch_size: 4, global_batch_size: 128, seq_length: 8192"),
        "run.yaml", (8, 1, 1, 1, 1, 1), (4, 128, 8192), (32, 4096, 0), COUNTS["meta-llama/Llama-3.1-8B"],
    ),
    Case(
        "Primus experts", primus(QWEN3_30B, "micro_batch_size: 2, global_batch_size: 256, expert_model_parallel_size: 8"),
        "run.yaml", (8, 1, 1, 1, 8, 1), (2, 256, 1024), (48, 2048, 128), COUNTS["Qwen/Qwen3-30B-A3B"],
    ),
    Case(
        "Primus latent attention",
        primus(DEEPSEEK_V2_LITE, "micro_batch_size: 1, global_batch_size: 64, pipeline_model_parallel_size: '${PP:3}', "
                                 "expert_model_parallel_size: 8"),
        "run.yaml", (24, 1, 3, 1, 8, 1), (1, 64, 1024), (27, 2048, 64), COUNTS["deepseek-ai/DeepSeek-V2-Lite"],
    ),
    Case(
        "Primus overrides", primus(SMALL, "micro_batch_size: 1, global_batch_size: 32, tensor_model_parallel_size: 8"),
        "run.yaml --seq_length 2048 tensor_model_parallel_size=2 --pipeline_model_parallel_size=2",
        (8, 2, 2, 1, 1, 1), (1, 32, 2048), (8, 1024, 0), SMALL_COUNT,
    ),
    # ROLL: 32 microbatches of each of GPUs / (tensor × pipeline × context) replicas
    Case(
        "ROLL dense", roll("tensor_model_parallel_size: 4, sequence_parallel: true", model="Qwen/Qwen2.5-7B",
                           gpus="list(range(0,16))"),
        "run.yaml", (16, 4, 1, 1, 1, 1), (1, 128, 8192), (28, 3584, 0), COUNTS["Qwen/Qwen2.5-7B"],
    ),
    Case(
        "ROLL experts", roll("pipeline_model_parallel_size: 4, expert_model_parallel_size: 8", model="Qwen/Qwen3-30B-A3B",
                             gpus="list(range(0,32))"),
        "run.yaml sequence_length=4096", (32, 1, 4, 1, 8, 1), (1, 256, 4096), (48, 2048, 128), COUNTS["Qwen/Qwen3-30B-A3B"],
    ),
    Case(
        "ROLL context", roll("context_parallel_size: 4", model="Qwen/Qwen3-8B", gpus="list(range(8,16))"),
        "run.yaml", (8, 1, 1, 4, 1, 1), (1, 64, 8192), (36, 4096, 0), COUNTS["Qwen/Qwen3-8B"],
    ),
    Case(
        "ROLL LoRA", roll("tensor_model_parallel_size: 1", model="Qwen/Qwen3-8B", gpus="[0, 1, 2, 3]",
                          arguments="dtype: bf16, lora_rank: 8, lora_target: all-linear"),
        "run.yaml", (4, 1, 1, 1, 1, 1), (1, 128, 8192), (36, 4096, 0), QWEN3_8B_RANK_8,
    ),
    # verl: mini-batch × rollout.n samples; packed, of ppo_max_token_len_per_gpu tokens for each context-parallel rank
    Case(
        "verl dense", {},
        f"{VERL}actor_rollout_ref.model.path=Qwen/Qwen3-8B {ACTOR}megatron.tensor_model_parallel_size=2 "
        f"{ACTOR}ppo_mini_batch_size=64 "
        f"{ACTOR}ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.n=5 data.max_prompt_length=1024 "
        "data.max_response_length=2048",
        (8, 2, 1, 1, 1, 1), (4, 320, 3072), (36, 4096, 0), COUNTS["Qwen/Qwen3-8B"],
    ),
    Case(
        "verl packed", {},  # 16 × 8 samples of 2048 + 8192 tokens in microbatches of 20480: 64, on 1 replica
        f"{VERL}actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B {ACTOR}megatron.tensor_model_parallel_size=4 "
        f"{ACTOR}megatron.pipeline_model_parallel_size=2 {ACTOR}megatron.expert_model_parallel_size=4 "
        f"{ACTOR}megatron.expert_tensor_parallel_size=1 {ACTOR}ppo_mini_batch_size=16 actor_rollout_ref.rollout.n=8 "
        f"{ACTOR}use_dynamic_bsz=True {ACTOR}ppo_max_token_len_per_gpu=20480 data.max_prompt_length=2048 "
        "data.max_response_length=8192",
        (8, 4, 2, 1, 4, 1), (1, 64, 20480), (48, 2048, 128), COUNTS["Qwen/Qwen3-30B-A3B"],
    ),
    Case(
        "verl LoRA", {},
        f"{VERL}actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.model.lora.rank=8 "
        f"{ACTOR}megatron.context_parallel_size=2 "
        f"{ACTOR}ppo_mini_batch_size=32 {ACTOR}ppo_micro_batch_size_per_gpu=1 trainer.nnodes=2",
        (16, 1, 1, 2, 1, 1), (1, 32, 1024), (36, 4096, 0), QWEN3_8B_RANK_8,
    ),
    Case(
        "verl fine-tuning", {},  # 96 samples of 2048 tokens, 2048 tokens in a microbatch: 96
        "--nproc_per_node=8 -m verl.trainer.sft_trainer engine=megatron optim=megatron model.path=Qwen/Qwen2.5-7B "
        "data.max_length=2048 "
        "data.train_batch_size=96 data.max_token_len_per_gpu=2048 engine.tensor_model_parallel_size=4 "
        "engine.use_megatron_fsdp=True "
        "+engine.override_transformer_config.gradient_accumulation_fusion=False",
        (8, 4, 1, 1, 1, 1), (1, 96, 2048), (28, 3584, 0), COUNTS["Qwen/Qwen2.5-7B"],
    ),
    # ms-swift: NPROC_PER_NODE gives the GPUs; experts are not split by tensor parallelism by default; 16 is the default batch
    Case(
        "ms-swift dense", {}, f"{SWIFT}--model Qwen/Qwen2.5-14B --tensor_model_parallel_size 4 --max_length 8192",
        (8, 4, 1, 1, 1, 1), (1, 16, 8192), (48, 5120, 0), COUNTS["Qwen/Qwen2.5-14B"],
    ),
    Case(
        "ms-swift experts", {},
        f"{SWIFT}--model Qwen/Qwen3-30B-A3B-Instruct-2507 --tensor_model_parallel_size 2 --expert_model_parallel_size 8 "
        "--sequence_parallel true "
        "--micro_batch_size 2 --global_batch_size 32 --max_length 4096 --moe_grouped_gemm true",
        (8, 2, 1, 1, 8, 1), (2, 32, 4096), (48, 2048, 128), COUNTS["Qwen/Qwen3-30B-A3B"],
    ),
    Case(
        "ms-swift LoRA", {},
        f"{SWIFT}--model Qwen/Qwen3-8B --tuner_type lora --lora_rank 8 --target_modules all-linear --max_length 2048 "
        "--pipeline_model_parallel_size 2 --global_batch_size 64",
        (8, 1, 2, 1, 1, 1), (1, 64, 2048), (36, 4096, 0), QWEN3_8B_RANK_8,
    ),
    Case(
        "ms-swift DPO with LoRA", {},  # two sequences for each sample
        "megatron rlhf --rlhf_type dpo --dataset x --model Qwen/Qwen3-30B-A3B --tuner_type lora --lora_rank 16 --max_length 4096 "
        "--target_modules linear_qkv linear_proj --expert_model_parallel_size 4 --micro_batch_size 1 --global_batch_size 8",
        (8, 1, 1, 1, 4, 1), (2, 16, 4096), (48, 2048, 128), QWEN3_30B_ATTENTION_RANK_16,
    ),
    # slime: --max-tokens-per-gpu tokens for each context-parallel rank
    Case(
        "slime packed", {},
        f"{SLIME}--actor-num-nodes 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216 --num-layers 36 --hidden-size 4096 "
        "--ffn-hidden-size 12288 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 --swiglu "
        "--disable-bias-linear --qk-layernorm --normalization RMSNorm --position-embedding-type rope --vocab-size 151936 "
        "--untie-embeddings-and-output-weights --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 "
        "--global-batch-size 256",
        (8, 2, 1, 2, 1, 2), (1, 256, 18432), (36, 4096, 0), COUNTS["Qwen/Qwen3-8B"],
    ),
    Case(
        "slime experts", {},
        f"{SLIME}--actor-num-nodes 2 --use-dynamic-batch-size --max-tokens-per-gpu 20480 --num-layers 48 --hidden-size 2048 "
        "--ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 --swiglu "
        "--disable-bias-linear --qk-layernorm --normalization RMSNorm --position-embedding-type rope --vocab-size 151936 "
        "--untie-embeddings-and-output-weights --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm "
        "--moe-token-dispatcher-type alltoall --tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8 "
        "--expert-tensor-parallel-size 1 --global-batch-size 128",
        (16, 4, 1, 1, 8, 1), (1, 128, 20480), (48, 2048, 128), COUNTS["Qwen/Qwen3-30B-A3B"],
    ),
    Case(
        "slime with microbatches of samples", {},
        f"{SLIME}--actor-num-nodes 1 --micro-batch-size 2 --global-batch-size 32 --seq-length 2048 "
        "--max-position-embeddings 2048 --num-layers 8 --hidden-size 1024 "
        "--ffn-hidden-size 4096 --num-attention-heads 16 --group-query-attention --num-query-groups 4 --swiglu "
        "--disable-bias-linear "
        "--normalization RMSNorm --position-embedding-type rope --vocab-size 1000 --untie-embeddings-and-output-weights "
        "--pipeline-model-parallel-size 4",
        (8, 1, 4, 1, 1, 1), (2, 32, 2048), (8, 1024, 0), SMALL_COUNT,
    ),
    Case(
        "slime on four GPUs of each node", {},
        "train.py --actor-num-nodes 2 --actor-num-gpus-per-node 4 --rollout-num-gpus 8 --advantage-estimator grpo "
        "--use-dynamic-batch-size --max-tokens-per-gpu 4096 --num-layers 8 --hidden-size 1024 --ffn-hidden-size 4096 "
        "--num-attention-heads 16 --group-query-attention --num-query-groups 4 --swiglu --disable-bias-linear "
        "--normalization RMSNorm "
        "--position-embedding-type rope --vocab-size 1000 --untie-embeddings-and-output-weights --tensor-model-parallel-size 4 "
        "--sequence-parallel --global-batch-size 64",
        (8, 4, 1, 1, 1, 4), (1, 64, 4096), (8, 1024, 0), SMALL_COUNT,
    ),
    # Megatron-Bridge: the number of GPUs is not in the container
    Case(
        "Megatron-Bridge pretraining", bridge("tensor_model_parallel_size: 2, sequence_parallel: true",
                                              "micro_batch_size: 1, global_batch_size: 128"),
        "run.yaml --info-world-size 16", (16, 2, 1, 1, 1, 2), (1, 128, 8192), (32, 4096, 0), COUNTS["meta-llama/Llama-3.1-8B"],
    ),
    Case(
        "Megatron-Bridge stages", bridge("pipeline_model_parallel_size: 4, virtual_pipeline_model_parallel_size: 8",
                                         "micro_batch_size: 2, global_batch_size: 64"),
        "run.yaml --info-world-size 8 train.micro_batch_size=1", (8, 1, 4, 1, 1, 1), (1, 64, 8192), (32, 4096, 0),
        COUNTS["meta-llama/Llama-3.1-8B"],
    ),
    Case(
        "Megatron-Bridge context", bridge("context_parallel_size: 4", "micro_batch_size: 1, global_batch_size: 32"),
        "run.yaml --info-world-size 32 dataset.seq_length=32768 model.seq_length=32768", (32, 1, 1, 4, 1, 1), (1, 32, 32768),
        (32, 4096, 0), COUNTS["meta-llama/Llama-3.1-8B"],
    ),
    Case(
        "Megatron-Bridge LoRA",
        bridge("tensor_model_parallel_size: 1", "micro_batch_size: 1, global_batch_size: 8",
               "peft: {_target_: megatron.bridge.peft.lora.LoRA, dim: 32, target_modules: [linear_qkv, linear_fc2]}\n"),
        "run.yaml --info-world-size 1", (1, 1, 1, 1, 1, 1), (1, 8, 8192), (32, 4096, 0),
        32 * 32 * ((4096 + 4096 + 2 * 1024) + (14336 + 4096)),
    ),
)  # fmt: skip


def trained(job: TrainingJob) -> int:
    """The number of trained parameters, without padding of the vocabulary."""
    counts = parameter_counts(job.model, full_model(job))
    return counts.adapters if job.tuning.adapter else counts.unpadded


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layout_batch_model_and_trained_parameters(case: Case, tmp_path: Path) -> None:
    write(tmp_path, case.files)
    environ = {"NPROC_PER_NODE": "8"} if case.words.startswith("megatron") else {}
    job = read(tmp_path, *case.words.split(), environ=environ).job
    experts = job.model.moe.num_experts if job.model.moe else 0
    expected = case.layout if case.model[2] else (*case.layout[:5], layout(job)[5])  # without experts their sizes have no effect
    assert (layout(job), batch(job), (job.model.num_layers, job.model.hidden_size, experts)) == (expected, case.batch, case.model)
    assert trained(job) == case.trained
