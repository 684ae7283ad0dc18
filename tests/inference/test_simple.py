"""The tables and runs of llm-analysis, under its assumptions: an MLP of four times the hidden size, and tied embeddings."""

from __future__ import annotations

from typing import Any

import pytest

from analyzer.inference.estimate import inference_time
from analyzer.inference.results import BatchTime
from tests.command import assert_refused, run
from tests.data_files import truth
from tests.inference.job_of import launch_of, report_of

TRUTH = truth("llm_analysis.json")
MODELS: dict[str, list[int]] = {**TRUTH["models"], "test-13b": [40, 5120, 40]}
TYPES = {
    "w16a16e16": "w16a16kv16", "w4a4e16": "w4a4kv4", "w4a8e16": "w4a8kv8", "w4a16e16": "w4a16kv16", "w8a8e16": "w8a8kv8",
}  # fmt: skip
"""Its caches have the bits of the activations."""


def line(model: str, types: str, *, tensor: int = 1, flops: float = 1, memory: float = 1, **more: Any) -> str:
    layers, hidden, heads = MODELS[model]
    return (
        f"--nproc-per-node {tensor} --tensor-model-parallel-size {tensor} --num-layers {layers} --hidden-size {hidden} "
        f"--num-attention-heads {heads} --ffn-hidden-size {4 * hidden} --normalization RMSNorm --disable-bias-linear --fp16 "
        "--seq-length 2048 --max-position-embeddings 2048 --position-embedding-type rope --tokenizer-type NullTokenizer "
        f"--vocab-size {more.get('vocabulary', 32000) - 1} --make-vocab-size-divisible-by 1 --info-quantize {TYPES[types]} "
        f"--info-inference batch=1,prompt=512,generate={more.get('generate', 32)} --info-gpu {more.get('gpu', 'A100-80GB')} "
        f"--info-efficiency flops={flops},memory={memory}"
    )


def times(text: str) -> BatchTime:
    launch = launch_of(text)
    assert launch.time is not None
    return inference_time(launch.job, launch.time, None).given


def tensor_of(model: str, types: str) -> int:
    return 2 if model == "65b" and types == "w16a16e16" else 1


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("model", TRUTH["models"])
def test_tables_of_the_readme(model: str, types: str) -> None:
    place = list(TRUTH["models"]).index(model)
    found = times(line(model, types, tensor=tensor_of(model, types)))
    assert found.prefill.total * 1e3 == pytest.approx(TRUTH["prefill_ms"][types][place], rel=0.001)
    assert found.decode.total * 1e3 == pytest.approx(TRUTH["decode_ms"][types][place], rel=0.001)


@pytest.mark.parametrize("model", TRUTH["models"])
def test_table_with_shares_of_the_peaks(model: str) -> None:
    place = list(TRUTH["models"]).index(model)
    found = times(line(model, "w16a16e16", tensor=tensor_of(model, "w16a16e16"), flops=0.7, memory=0.9))
    assert found.prefill.total * 1e3 == pytest.approx(TRUTH["prefill_ms_at_0.7_and_0.9"][place], rel=0.001)
    assert found.decode.total * 1e3 == pytest.approx(TRUTH["decode_ms_at_0.7_and_0.9"][place], rel=0.001)


@pytest.mark.parametrize("record", TRUTH["runs"], ids=lambda record: record["id"])
def test_runs_of_the_release(record: dict[str, Any]) -> None:
    words = record["argv"].split()
    given = dict(zip(words[1::2], words[2::2], strict=True))
    types = given.get("--dtype_name", "w16a16e16")
    own = given["--model_name"] == "test-13b"
    more = {"vocabulary": 50272, "gpu": "A100-40GB", "generate": record["num_tokens_to_generate"]} if own else {}
    text = line(
        "test-13b" if own else record["id"].rpartition("/")[2],
        types,
        flops=float(given["--flops_efficiency"]),
        memory=float(given["--hbm_memory_efficiency"]),
        **more,
    )
    found = times(text)
    assert found.prefill.total == pytest.approx(record["prefill_latency"], rel=1e-6)
    assert found.decode.total == pytest.approx(record["decode_latency"], rel=1e-6)
    if types == "w16a16e16":  # quantized tensors of llm-analysis have no scales
        stage = report_of(text).stages[0]
        assert stage.kv_cache_bytes == record["kv_cache_memory_per_gpu"]
        assert stage.weights_bytes == pytest.approx(record["weight_memory_per_gpu"], rel=1e-4)


def test_models_that_it_does_not_have_are_refused() -> None:
    common = "--info-inference batch=1,prompt=512,generate=32 --info-gpu H200-141GB --info-efficiency flops=1,memory=1"
    outcome = run(*f"--info-model deepseek-ai/DeepSeek-V2-Lite {common}".split())
    assert_refused(outcome, "--info-efficiency")
    assert "latent attention" in outcome.err
