"""Containers of Megatron-Bridge with attention in MXFP8 (`fp8_dot_product_attention`).

The sizes are those of the tensors that `FusedAttnFunc` and `mxfp8_quantize_fast_path` of Transformer Engine 2.17 make: two copies
of a byte for each element, and scales in [b, a, s, d] with a last dimension of a multiple of 4 or 128.
"""

from __future__ import annotations

from typing import Any

import pytest

import analyzer
from analyzer.errors import InputError
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module
from analyzer.passes.stages import stage_models
from analyzer.results import Report

MODEL: dict[str, Any] = {
    "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider", "num_layers": 2, "hidden_size": 4096,
    "ffn_hidden_size": 14336, "num_attention_heads": 32, "num_query_groups": 8, "kv_channels": 128, "vocab_size": 32000,
    "normalization": "RMSNorm", "gated_linear_unit": True, "position_embedding_type": "rope", "add_bias_linear": False,
    "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False}, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "share_embeddings_and_output_weights": False, "seq_length": 8192, "apply_rope_fusion": True, "fp8": "e4m3",
    "fp8_recipe": "mxfp8", "fp8_dot_product_attention": True, "fp8_output_proj": False,
}  # fmt: skip
"""`fp8_output_proj` exists since core 0.18, the first release that gives attention to the recipe of mxfp8."""
LATENT: dict[str, Any] = {
    "multi_latent_attention": True, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128, "num_query_groups": 32, "apply_rope_fusion": True, "rope_type": "rope", "qk_layernorm": True,
}  # fmt: skip
TOKENS = 8192


def report_of(*, dataset: dict[str, Any] | None = None, **model: Any) -> Report:
    return _analyzed({**MODEL, **model}, dataset)


def _analyzed(model: dict[str, Any], dataset: dict[str, Any] | None = None) -> Report:
    container = {
        "model": model,
        "train": {"micro_batch_size": 1, "global_batch_size": 8},
        "optimizer": {"optimizer": "adam", "use_distributed_optimizer": True, "bf16": True},
        "ddp": {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True},
        "mixed_precision": {"bf16": True, "grad_reduce_in_fp32": True},
        "dataset": dataset or {"seq_length": TOKENS},
    }
    return analyzer.analyze_config(container, gpus=8, gpu="B200-192GB", environ={})


def _kernels(tree: Module) -> list[Module]:
    own = [tree] if tree.kind is ModuleKind.ATTENTION_KERNEL else []
    return own + [found for child in tree.children for found in _kernels(child)]


def saved(report: Report) -> dict[str, int]:
    """The bytes of the tensors that the kernel of the first layer saves."""
    kernel = _kernels(stage_models(report.job)[0].trees[0])[0]
    return {tensor.name: tensor.bytes for tensor in kernel.saved}


def test_both_copies_of_queries_keys_and_values_are_saved_with_their_scales() -> None:
    found = saved(report_of())
    copies = {name: found.pop(name) for name in list(found) if "in fp8" in name and not name.startswith("scales")}
    assert sorted(copies.values()) == sorted([TOKENS * 32 * 128] * 2 + [TOKENS * 8 * 128] * 4)
    heads = 32 + 8 + 8
    assert found == {
        "scales of query, key and value in fp8": TOKENS * heads * 128 // 32,
        "scales of query, key and value in fp8, column-wise": TOKENS // 32 * heads * 128,
        "output": 2 * TOKENS * 32 * 128,
        "softmax statistics": 4 * TOKENS * 32,
        "random state": 512,
    }


def test_scales_of_heads_of_192_elements_are_padded() -> None:
    found = saved(report_of(**LATENT))
    assert found["query in fp8"] == found["key in fp8, column-wise"] == TOKENS * 32 * 192
    assert found["value in fp8"] == TOKENS * 32 * 128
    assert found["scales of query, key and value in fp8"] == TOKENS * 32 * (8 + 8 + 4)  # 6 scales are padded to 8
    assert found["scales of query, key and value in fp8, column-wise"] == TOKENS // 32 * 32 * (256 + 256 + 128)


def test_a_checkpoint_keeps_the_inputs_in_16_bit() -> None:
    report = report_of(recompute_granularity="selective", recompute_modules=["core_attn"])
    [tree, *_] = stage_models(report.job)[0].trees
    [around] = [each for each in _all(tree) if each.kind is ModuleKind.ATTENTION_KERNEL_CHECKPOINT][:1]
    assert {tensor.dtype for tensor in around.saved} == {"bf16"}


def _all(tree: Module) -> list[Module]:
    return [tree, *(found for child in tree.children for found in _all(child))]


def test_the_time_is_that_of_attention_in_16_bit() -> None:
    in_fp8, plain = report_of(), report_of(fp8_dot_product_attention=False)
    assert in_fp8.time is not None
    assert plain.time is not None
    assert in_fp8.time.iteration_seconds == plain.time.iteration_seconds
    assert "attention in FP8, which is timed as in 16 bit" in in_fp8.time.not_counted
    assert "attention in FP8, which is timed as in 16 bit" not in plain.time.not_counted


def test_before_core_0_18_it_has_no_effect() -> None:
    report = _analyzed({name: value for name, value in MODEL.items() if name != "fp8_output_proj"})
    assert report.job.precision.fp8 is not None
    assert not report.job.precision.fp8.attention
    assert not report.job.withheld
    assert any(sentence.startswith("fp8_dot_product_attention has no effect") for sentence in report.job.assumptions)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"fp8_recipe": "tensorwise"}, "the tensorwise recipe"),
        ({"context_parallel_size": 2}, "context parallelism"),
        ({"dataset": {"offline_packing_specs": {"packed_sequence_size": TOKENS}}}, "packed sequences"),
        ({"attention_backend": "flash"}, "a kernel other than cuDNN's"),
    ],
)
def test_other_kinds_are_without_a_verdict(fields: dict[str, Any], where: str) -> None:
    report = report_of(**fields)
    assert report.job.withheld == (f"fp8_dot_product_attention is not modelled with {where}",)
    assert report.verdict.fits is None


@pytest.mark.parametrize(
    ("fields", "fault"),
    [({"kv_channels": 80}, "heads of 80 elements"), ({"dataset": {"seq_length": 8000}}, "8000 tokens")],
)
def test_sizes_that_cannot_be_quantized_are_refused(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        report_of(**fields)
