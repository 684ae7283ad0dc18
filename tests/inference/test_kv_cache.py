"""Parameters and caches equal those that Hugging Face transformers and megatron-core allocate."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from analyzer.inference.kv_cache import (
    block_count,
    cache_bytes,
    decode_tokens,
    requests_of_blocks,
    table_bytes,
    table_requests,
    token_bytes,
    vector_bytes,
)
from analyzer.modules.paged_attention import splits_of_keys
from analyzer.specs import DynamicEngineSpec, InferenceJob, QuantizationSpec
from tests.data_files import truth
from tests.inference.job_of import launch_of, report_of

TRUTH = truth("kv_cache.json")
ROOT = Path(__file__).resolve().parents[2]


def job_with(**changes: Any) -> InferenceJob:
    """A Llama-3.1-8B job with changes of its inference."""
    job = launch_of("--info-model meta-llama/Llama-3.1-8B --info-inference batch=4,prompt=1000,generate=24").job
    return replace(job, inference=replace(job.inference, **changes))


@pytest.mark.parametrize("record", TRUTH["hugging_face"], ids=lambda record: record["model"])
def test_parameters_and_cache_are_those_of_hugging_face(record: dict[str, Any]) -> None:
    lengths = f"batch={record['requests']},prompt={record['tokens'] - 256},generate=256"
    report = report_of(f"--info-model {record['model']} --info-inference {lengths}")
    assert report.parameters_unpadded == record["parameters"]
    assert sum(stage.kv_cache_bytes for stage in report.stages) == record["cache_bytes"]


@pytest.mark.parametrize("record", TRUTH["megatron_dynamic"], ids=lambda record: str(record["num_layers"]))
def test_blocks_are_those_of_the_dynamic_context(record: dict[str, Any]) -> None:
    model = "deepseek-ai/DeepSeek-V3" if record.get("cache_mla_latent") else "meta-llama/Llama-3.1-8B"
    job = launch_of(f"--info-model {model} --info-inference batch=1,prompt=8,generate=8").job
    shape = replace(
        job.model,
        num_layers=record["num_layers"],
        kv_channels=record["kv_channels"],
        num_query_groups=record["num_attention_heads"],
    )
    dynamic = DynamicEngineSpec(buffer_bytes=int(record["buffer_size_gb"] * 2**30), block_tokens=record["block_size_tokens"])
    changed = replace(
        job,
        model=shape,
        parallel=replace(job.parallel, tensor=record["tp"]),
        inference=replace(job.inference, cache="dynamic", dynamic=dynamic),
    )
    stages = [tuple(range(1, record["num_layers"] + 1))]
    assert block_count(changed, stages) == record["blocks"]
    assert cache_bytes(changed, stages, 0) == record["cache_bytes"]


def test_requests_of_the_dynamic_engine_take_whole_blocks() -> None:
    dynamic = DynamicEngineSpec(buffer_bytes=10 * 2**30, block_tokens=256)
    job = job_with(cache="dynamic", dynamic=dynamic)
    stages = [tuple(range(1, 33))]
    blocks = block_count(job, stages)
    assert blocks == 10 * 2**30 // (256 * 131072)
    assert requests_of_blocks(job, stages, 257) == (blocks - 1) // 2
    assert (
        requests_of_blocks(replace(job, inference=replace(job.inference, dynamic=replace(dynamic, max_requests=3))), stages, 257)
        == 3
    )


def test_the_static_engine_allocates_every_layer_for_its_longest_sequence() -> None:
    """[tokens, requests, groups, elements] for keys and values of each layer (`Attention._allocate_memory`)."""
    job = job_with(cache="static", cache_requests=16, cache_tokens=2560)
    assert cache_bytes(job, [(1, 2, 3)], 0) == 3 * 2 * 2560 * 16 * 8 * 128 * 2


def test_fewer_groups_than_tensor_parallel_ranks_are_repeated() -> None:
    job = job_with()
    shared = replace(job, parallel=replace(job.parallel, tensor=16))
    assert token_bytes(shared) == 2 * 128 * 2
    assert token_bytes(replace(job, parallel=replace(job.parallel, tensor=4))) == 2 * 2 * 128 * 2


def test_latent_attention_caches_heads_without_latents() -> None:
    """Keys of 128 + 64 elements and values of 128 for each of the 128 heads (`MLASelfAttention`), over the ranks."""
    job = launch_of("--info-model deepseek-ai/DeepSeek-V3 --info-inference batch=1,prompt=8,generate=8").job
    heads = replace(job, parallel=replace(job.parallel, tensor=8), inference=replace(job.inference, latent_cache=False))
    assert token_bytes(heads) == 16 * (192 + 128) * 2
    assert token_bytes(replace(job, parallel=replace(job.parallel, tensor=8))) == (512 + 64) * 2


def test_quantized_vectors_have_scales() -> None:
    """4 bit: half a byte for each element, and 4 bytes for each group of 64; 8 bit: a byte, and 4 bytes for the vector."""
    assert vector_bytes(128, QuantizationSpec(cache_bits=4), "bf16") == 64 + 2 * 4
    assert vector_bytes(128, QuantizationSpec(cache_bits=8), "bf16") == 128 + 4
    assert vector_bytes(128, QuantizationSpec(), "bf16") == 256
    assert vector_bytes(80, QuantizationSpec(cache_bits=4), "bf16") == 40 + ceil(80 / 64) * 4


@pytest.mark.shadow
def test_the_truth_is_what_megatron_allocates() -> None:
    try:
        released = metadata.version("megatron-core"), metadata.version("torch")
    except metadata.PackageNotFoundError:
        pytest.skip("needs torch and megatron-core")
    if not released[0].startswith("0.16"):
        pytest.skip("the signature of the context is that of 0.16")
    program = (
        "import json\nfrom tools.cache_truth import CONTEXTS, megatron\n"
        "print(json.dumps([megatron(settings) for settings in CONTEXTS]))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == TRUTH["megatron_dynamic"]


def test_tables_are_those_of_the_dynamic_context() -> None:
    """827,904 bytes: the tensors of `DynamicInferenceContext` and its controller in megatron-core 0.16.1, in a recorded run."""
    layers = ((1, 2, 3, 4, 5, 6, 7, 8),)
    engine = DynamicEngineSpec(buffer_bytes=4 * 2**30, max_requests=128, request_tokens=4096)
    job = job_with(cache="dynamic", dynamic=engine)
    assert block_count(job, layers) == 512
    assert table_bytes(job, layers) == 827_904
    assert decode_tokens(job, layers) == 64
    inside = job_with(cache="dynamic", dynamic=replace(engine, in_static_engine=True))
    assert table_requests(inside, layers) == decode_tokens(inside, layers) == 508


def test_keys_are_split_for_idle_multiprocessors() -> None:
    """The example in a comment of `num_splits_heuristic` of flash-attn: 48 blocks in 108 places, whose number is twice the SMs."""
    assert splits_of_keys(48, keys=8192, width=128, multiprocessors=54) == 2
    assert splits_of_keys(87, keys=8192, width=128, multiprocessors=54) == 1
