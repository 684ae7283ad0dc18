"""Weights of the plugins of slime. Their numbers are those of the model classes of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analyzer.api import analyze
from analyzer.errors import InputError
from analyzer.results import Report

COUNTS = json.loads((Path(__file__).parents[2] / "data" / "published_models.json").read_text(encoding="utf-8"))["parameters"]
QWEN = (
    "--actor-num-nodes 4 --use-dynamic-batch-size --max-tokens-per-gpu 8192 --advantage-estimator grpo "
    "--spec slime_plugins.models.qwen3_5 get_qwen3_5_spec --disable-bias-linear --qk-layernorm --group-query-attention "
    "--num-attention-heads 24 --num-query-groups 4 --kv-channels 256 --num-layers 64 --hidden-size 5120 --ffn-hidden-size 17408 "
    "--normalization RMSNorm --apply-layernorm-1p --position-embedding-type rope --rotary-percent 0.25 --swiglu "
    "--untie-embeddings-and-output-weights --vocab-size 248320 --attention-output-gate --tensor-model-parallel-size 4 "
    "--sequence-parallel --pipeline-model-parallel-size 2 --global-batch-size 64 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1"
)
GLM = (
    "--actor-num-nodes 32 --use-dynamic-batch-size --max-tokens-per-gpu 16384 --advantage-estimator grpo "
    "--spec slime_plugins.models.glm5.glm5 get_glm5_spec --moe-layer-freq [0]*3+[1]*75 --num-experts 256 "
    "--moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-grouped-gemm --moe-ffn-hidden-size 2048 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --num-layers 78 --hidden-size 6144 "
    "--ffn-hidden-size 12288 --num-attention-heads 64 --disable-bias-linear --swiglu --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --normalization RMSNorm --qk-layernorm --multi-latent-attention --q-lora-rank 2048 "
    "--kv-lora-rank 512 --qk-head-dim 192 --v-head-dim 256 --kv-channels 192 --qk-pos-emb-head-dim 64 --vocab-size 154880 "
    "--make-vocab-size-divisible-by 16 "
    "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 18 "
    "--expert-model-parallel-size 32 --expert-tensor-parallel-size 1 --global-batch-size 64"
)
DELTA_NET = 2 * 48 + 4 * (2 * 2048 + 6144) + 5120 * (2 * 2048 + 2 * 6144 + 2 * 48) + 128 + 6144 * 5120 + 5120
"""Weights of linear attention of Qwen3.5-27B: 16 heads of keys and 48 of values of 128 elements."""
INDEXER = 2048 * 32 * 128 + 6144 * 128 + 2 * 128 + 6144 * 32


def report_of(line: str, checkpoint: str) -> Report:
    report = analyze(["train.py", *line.split(), "--hf-checkpoint", checkpoint], gpu="H200-141GB")
    assert isinstance(report, Report)
    return report


@pytest.mark.parametrize(("line", "model"), [(QWEN, "Qwen/Qwen3.5-27B"), (GLM, "zai-org/GLM-5")])
def test_the_parameters_are_those_of_the_model(line: str, model: str) -> None:
    assert report_of(line, f"/root/{model.rpartition('/')[2]}").parameters == COUNTS[model]


def test_each_rank_has_all_of_the_linear_attention() -> None:
    """Tensor-parallel ranks share the other weights. The second stage has 24 layers with a delta net, and 8 others."""
    report = report_of(QWEN, "/root/Qwen3.5-27B")
    last = report.ranks[-1]
    attention = (2 * 24 + 2 * 4) * 256 * 5120 + 24 * 256 * 5120
    split = 8 * attention + 32 * 3 * 5120 * 17408 + 248320 * 5120
    norms = 8 * (5120 + 2 * 256) + 32 * 5120 + 5120
    assert last.parameters == split // 4 + norms + 24 * DELTA_NET


def test_layers_that_use_the_keys_of_others_have_no_indexer() -> None:
    """GLM-5.2 has indexers in layers 1, 2, 3, 7, 11, and so on: 21 of 78."""
    split = "--decoder-last-pipeline-num-layers 18"
    line = GLM.replace(split, "--decoder-first-pipeline-num-layers 14 --decoder-last-pipeline-num-layers 16").replace(
        "--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 8"
    )
    more = report_of(line, "/root/GLM-5").parameters - report_of(line, "/root/GLM-5.2").parameters
    assert more == 57 * INDEXER
    with pytest.raises(InputError, match="a stage begins with layer 21, which uses the keys that layer 19 of another stage"):
        report_of(GLM, "/root/GLM-5.2")


def test_what_is_not_counted_is_said() -> None:
    linear = "the activations and the time of the linear attention of slime_plugins.models.qwen3_5 are not counted"
    assert linear in report_of(QWEN, "/root/Qwen3.5-27B").verdict.withheld
    indexers = "counted as those of dense multi-latent attention, without those of its indexers"
    assert indexers in report_of(GLM, "/root/GLM-5").verdict.withheld


@pytest.mark.parametrize("checkpoint", ["/root/own-model", "/root/Qwen3.5-4B", "/root/GLM-5"])
def test_other_checkpoints_have_no_known_weights(checkpoint: str) -> None:
    """Of another model, or one with other sizes than the options."""
    report = report_of(QWEN, checkpoint)
    assert "--spec slime_plugins has layers of a plugin" in report.verdict.withheld
    assert report.parameters < COUNTS["Qwen/Qwen3.5-27B"]
