"""Containers of Megatron-Bridge with DeepSeek-V4, as `DeepSeekV4Bridge` and its recipes set it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import analyzer
from analyzer.communication.pipeline import hidden_states_shape
from analyzer.errors import InputError
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module
from analyzer.passes.stages import stage_models
from analyzer.results import Report
from analyzer.time.work.model_flops import _compressed_attention, model_flops

COUNTS = json.loads((Path(__file__).parents[1] / "data" / "published_models.json").read_text(encoding="utf-8"))["parameters"]
HIDDEN, STREAMS = 4096, 4
MAPPINGS = STREAMS * STREAMS + 2 * STREAMS
CONNECTION = MAPPINGS * STREAMS * HIDDEN + MAPPINGS + 3
"""The projection of the parts of the stream, its bias, and three factors."""
HEAD = STREAMS * STREAMS * HIDDEN + STREAMS + 1
"""What makes one hidden state of the parts."""
WINDOW = 1024 * HIDDEN + 1024 + 64 * 512 * 1024 + 512 * HIDDEN + 512 + 64 + 8 * 1024 * 4096 + HIDDEN * 8 * 1024
"""Attention with a window only: queries of rank 1024, one key of 512, a sink of each head, and outputs in 8 groups of rank 1024."""
EXPERTS = 257 * 3 * HIDDEN * 2048 + 256 * HIDDEN
MTP = 2 * HIDDEN * HIDDEN + 3 * HIDDEN + WINDOW + EXPERTS + 2 * HIDDEN + 2 * CONNECTION + HEAD
"""Projections of the hidden states and of the embedding, three norms, a layer with two norms, and a head of its own."""
MODEL: dict[str, Any] = {
    "_target_": "megatron.bridge.models.mla_provider.MLAModelProvider", "num_layers": 43, "hidden_size": HIDDEN,
    "ffn_hidden_size": 2048, "num_attention_heads": 64, "num_query_groups": 64, "vocab_size": 129280, "should_pad_vocab": True,
    "make_vocab_size_divisible_by": 1280, "max_position_embeddings": 1048576, "normalization": "RMSNorm",
    "gated_linear_unit": True, "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
    "add_bias_linear": False, "share_embeddings_and_output_weights": False, "qk_layernorm": True, "multi_latent_attention": True,
    "q_lora_rank": 1024, "kv_lora_rank": 448, "qk_head_dim": 448, "qk_pos_emb_head_dim": 64, "v_head_dim": 512,
    "o_groups": 8, "o_lora_rank": 1024, "position_embedding_type": "rope", "rope_type": "yarn", "apply_rope_fusion": True,
    "experimental_attention_variant": "dsv4_hybrid", "csa_window_size": 128, "csa_compress_rotary_base": 160000.0,
    "csa_compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "dsa_indexer_head_dim": 128, "dsa_indexer_n_heads": 64,
    "dsa_indexer_topk": 512, "dsa_indexer_loss_coeff": 0.01, "apply_dsa_kernel_fusion": True,
    "dsa_indexer_use_sparse_loss": True,
    "enable_hyper_connections": True, "num_residual_streams": STREAMS, "use_fused_mhc": True, "mhc_sinkhorn_iterations": 20,
    "num_moe_experts": 256, "moe_router_topk": 6, "moe_ffn_hidden_size": 2048, "moe_shared_expert_intermediate_size": 2048,
    "moe_layer_freq": [1] * 43, "moe_grouped_gemm": True, "moe_router_score_function": "sqrtsoftplus", "moe_n_hash_layers": 3,
    "moe_router_load_balancing_type": "noaux_tc", "moe_router_enable_expert_bias": True, "actual_vocab_size": 129280,
    "moe_token_dispatcher_type": "alltoall", "hidden_dropout": 0.0, "attention_dropout": 0.0, "mtp_num_layers": 1,
    "recompute_granularity": "selective", "recompute_modules": ["moe_act", "mhc", "mla_up_proj"], "linear_cp_mode": "chunkwise",
    "pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Et*11|t*11|t*11|t*10mL",
    "expert_model_parallel_size": 8, "seq_length": 4096,
}  # fmt: skip


def container(**model: Any) -> dict[str, Any]:
    """The container with other fields of its model."""
    return {
        "model": {**MODEL, **model},
        "train": {"micro_batch_size": 1, "global_batch_size": 256},
        "optimizer": {"optimizer": "adam", "use_distributed_optimizer": True, "bf16": True},
        "ddp": {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True},
        "mixed_precision": {"bf16": True, "grad_reduce_in_fp32": True},
        "dataset": {"seq_length": 4096},
    }


def report_of(**model: Any) -> Report:
    return analyzer.analyze_config(container(**model), gpus=64, gpu="GB200-186GB", environ={})


def modules_of(report: Report, kind: ModuleKind) -> list[Module]:
    """The modules of one kind in all stages."""
    trees = (tree for stage in stage_models(report.job) for tree in stage.trees)
    return [module for tree in trees for _, module in tree.walk() if module.kind is kind]


def test_parameters_and_layout() -> None:
    """The model class of transformers has no MTP layer. That of Megatron-LM has a window only."""
    report = report_of()
    assert report.parameters == COUNTS["deepseek-ai/DeepSeek-V4-Flash"] + MTP
    assert not report.unknown
    assert (report.job.parallel.pipeline, report.job.parallel.expert, report.job.parallel.data) == (4, 8, 16)
    assert report.job.recompute.modules == ("mla_up_proj", "moe_act")


@pytest.mark.parametrize(
    ("model", "compared"),
    [
        ({}, True),
        ({"enable_hyper_connections": False}, True),
        ({"use_fused_mhc": False}, True),
        ({"context_parallel_size": 2, "cp_partition_mode": "contiguous"}, False),
        ({"dsa_indexer_use_sparse_loss": False}, False),
        ({"mhc_recompute_layer_num": 2}, False),
        ({"apply_rope_fusion": False}, False),
        ({"recompute_modules": ["layernorm", "mhc"]}, False),
        ({"moe_layer_freq": [0] + [1] * 42}, False),
    ],
)
def test_a_verdict_where_megatron_has_been_run(model: dict[str, Any], compared: bool) -> None:
    """`tests/allocator_hook/shadow/test_compressed_attention.py` runs the layers of Megatron-LM with these features, or not."""
    report = report_of(**model)
    assert (report.verdict.state is not None) is compared
    assert ("DeepSeek-V4" in str(report.verdict.withheld)) is not compared


def test_equal_numbers_of_tokens_are_agreed_on() -> None:
    """The field has another name than in core 0.19 (`moe_hybridep_pad_uneven_dispatch_inputs`)."""
    flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    report = report_of(**flex, moe_hybridep_pad_variable_tokens=True)
    assert not report.unknown
    assert report.job.model.moe is not None
    assert report.job.model.moe.flex is not None
    assert report.job.model.moe.flex.equalizes


def test_packed_samples_have_no_verdict() -> None:
    packing = {"_target_": "megatron.bridge.data.packing.config.PackedSequenceSpecs", "packed_sequence_size": 4096}
    packed = {**container(), "dataset": {"seq_length": 4096, "offline_packing_specs": packing}}
    report = analyzer.analyze_config(packed, gpus=64, gpu="GB200-186GB", environ={})
    assert report.job.model.sample_length is not None
    assert "DeepSeek-V4 with packed samples" in str(report.verdict.withheld)


def test_layers_by_their_ratio() -> None:
    """21 layers with an indexer, 20 that read all keys of 128 tokens, and 3 with a window."""
    kernels = modules_of(report_of(), ModuleKind.COMPRESSED_ATTENTION)
    read = [each.shape[-1] for kernel in kernels for each in kernel.saved if each.name == "indices of the read keys"]
    assert sorted(read) == sorted([128 + 512] * 21 + [128 + 4096 // 128] * 20 + [128] * 3)


def test_stages_exchange_all_parts_of_the_stream() -> None:
    """`get_tensor_shapes` of core/pipeline_parallel/schedules.py, branch dev."""
    assert hidden_states_shape(report_of().job) == (4096, 1, STREAMS * HIDDEN)
    assert hidden_states_shape(report_of(enable_hyper_connections=False).job) == (4096, 1, HIDDEN)


def test_parameters_without_hyper_connections() -> None:
    assert report_of().parameters - report_of(enable_hyper_connections=False).parameters == 44 * 2 * CONNECTION + 2 * HEAD


def test_context_parallel_ranks_exchange_keys() -> None:
    """`_forward_thd_cp`: rows before the part of a rank, compressed keys with their gradients, and those of the indexer."""
    report = report_of(context_parallel_size=2, cp_partition_mode="contiguous")
    calls = {
        (call.kind, call.phase, call.shape)
        for kernel in modules_of(report, ModuleKind.COMPRESSED_ATTENTION)
        for call in kernel.collectives
    }
    both = ("forward", "backward")
    assert calls == {
        *(("send", phase, (128, 1, HIDDEN)) for phase in both),
        *((kind, phase, (1024, 1, 512)) for kind, phase in zip(("all_gather", "reduce_scatter"), both, strict=True)),
        *((kind, phase, (32, 1, 512)) for kind, phase in zip(("all_gather", "reduce_scatter"), both, strict=True)),
        ("all_gather", "forward", (1024, 1, 128)),
    }


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, "not split over tensor-parallel ranks"),
        ({"csa_compress_ratios": [0, 2] * 22}, "ratios of 0, 4 and 128"),
        ({"csa_compress_ratios": [0, 4]}, "list of 44 ratios"),
        ({"csa_dense_mode": True}, "csa_dense_mode"),
        ({"o_groups": None}, "model.o_groups: is missing"),
        ({"o_groups": 0}, "model.o_groups: 0 is not a number of 1 or more"),
        ({"o_groups": 7}, "64 heads cannot be divided into 7 groups"),
        ({"num_residual_streams": "abc"}, "model.num_residual_streams: 'abc' is not a number"),
        ({"num_residual_streams": 10_000_000}, "parts is above 1000, the most that are modelled"),
        ({"moe_n_hash_layers": -1}, "model.moe_n_hash_layers: -1 is not a number"),
        ({"moe_n_hash_layers": 44}, "hashed routing in the first 44"),
        ({"dsa_indexer_loss_coeff": "abc"}, "model.dsa_indexer_loss_coeff: 'abc' is not a number"),
        ({"context_parallel_size": 2}, "another partition than contiguous"),
        ({"dsa_kernel_backend": "tilelang"}, "no kernels of tilelang"),
        ({"recompute_modules": ["mhc", "mlp"]}, "does not recompute mhc and mlp together"),
        ({"pipeline_model_parallel_layout": "Et*2|t*20|t*11|t*10mL"}, "the first 3 layers, whose experts are chosen by a table"),
        (
            {"pipeline_model_parallel_layout": None, "num_layers_in_last_pipeline_stage": 10},
            "the first 3 layers, whose experts are chosen by a table",
        ),
        ({"hidden_dropout": 0.1}, "--hidden-dropout: is not modelled with hyper-connections"),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]}, "graphs of layers with hyper-connections"),
    ],
)
def test_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        report_of(**model)


@pytest.mark.parametrize(
    ("gpu", "changed", "message"),
    [
        ("A100-80GB", {}, "cudnn needs compute capability 9.0 or later"),
        ("H100-80GB", {"dsa_indexer_use_sparse_loss": False}, "cudnn has no loss over all keys on H100-80GB"),
    ],
)
def test_kernels_need_a_gpu(gpu: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        analyzer.analyze_config(container(**changed), gpus=64, gpu=gpu, environ={})


def test_one_module_to_recompute_may_be_a_string() -> None:
    assert report_of(recompute_modules="mhc").job.model == report_of(recompute_modules=["mhc"]).job.model


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--mtp-num-layers 2", "--mtp-num-layers: 2 layers, and the model states the attention of 1"),
        ("--num-layers 45", "--num-layers: 45 layers, and the model states the attention of 43"),
        ("--num-layers 2", "hashed routing in the first 3"),
        ("--v-head-dim 256", "--v-head-dim: 256, and the attention of the model has 512"),
        ("--q-lora-rank 512", "--q-lora-rank: 512, and the attention of the model has 1024"),
    ],
)
def test_options_that_contradict_the_model(words: str, message: str) -> None:
    line = f"--info-model deepseek-ai/DeepSeek-V4-Flash --nproc-per-node 8 --nnodes 8 --info-megatron 0.19.0 {words}"
    with pytest.raises(InputError, match=message):
        analyzer.analyze(f"{line} --expert-model-parallel-size 8", environ={}, folder="/nowhere")


def test_fewer_layers_keep_the_attention_of_the_mtp_layer() -> None:
    line = "--info-model deepseek-ai/DeepSeek-V4-Flash --nproc-per-node 8 --nnodes 8 --info-megatron 0.19.0 --num-layers 40"
    report = analyzer.analyze(f"{line} --expert-model-parallel-size 8 --mtp-num-layers 1", environ={}, folder="/nowhere")
    attention = report.job.model.compressed_attention
    assert attention is not None
    assert attention.ratios == (0, 0, *[4, 128] * 19, 0)


@pytest.mark.parametrize(("length", "token"), [(512, 33_894_051_840), (1024, 34_422_534_144), (4096, 36_536_463_360)])
def test_flops_of_attention_are_those_that_megatron_counts(length: int, token: int) -> None:
    """Six times what `_dsv4_hybrid_self_attention_flops` of the branch dev returns for a token and for a pair of tokens."""
    model = report_of().job.model
    assert model.compressed_attention is not None
    assert _compressed_attention(model, model.compressed_attention, length) == (token, 288_768)


def test_flops_of_a_token_are_those_of_a_published_run() -> None:
    """128 GB200: 731.4 TFLOP/s for each GPU, and 8.1346 s for 2,048 sequences of 4,096 tokens (verification card)."""
    job = report_of().job
    found = model_flops(job) / (job.batch.global_batch_size * 4096)
    assert found == pytest.approx(731.4e12 * 8.1346 * 128 / (2048 * 4096), rel=1e-4)
