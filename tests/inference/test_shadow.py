"""Formulas of inference compared with megatron-core's static and dynamic inference contexts on tensors without data."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from allocator_hook.shadow.job_json import to_json
from analyzer.inference.forward_job import forward_job
from analyzer.inference.memory import TABLES, stage_memories
from analyzer.specs import InferenceSpec
from tests.inference.job_of import launch_of

ROOT = Path(__file__).resolve().parents[2]
COMMON = "--bf16 --info-gpu H100-80GB --tokenizer-type NullTokenizer --vocab-size 31999 --make-vocab-size-divisible-by 1"
LLAMA = (
    f"{COMMON} --num-layers 8 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --seq-length 2048 --max-position-embeddings 8192 --position-embedding-type rope "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
)
GPT = f"{COMMON} --num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 4096"
QWEN = LLAMA.replace("--disable-bias-linear", "--disable-bias-linear --add-qkv-bias --qk-layernorm")
MIXTRAL = f"{LLAMA} --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
LATENT = (
    f"{COMMON} --num-layers 4 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --multi-latent-attention "
    "--swiglu --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
    "--normalization RMSNorm --position-embedding-type rope --rope-type rope --no-rope-fusion --disable-bias-linear --qk-layernorm "
    "--seq-length 2048 --max-position-embeddings 4096"
)
BATCH = "--info-inference batch={},prompt={},generate={}"
LAYOUTS = {
    "llama": (f"--nproc-per-node 1 {LLAMA} {BATCH.format(8, 2048, 256)}", 0),
    "long": (f"--nproc-per-node 1 {LLAMA} {BATCH.format(1, 16384, 512)}", 0),
    "tensor": (f"--nproc-per-node 4 {LLAMA} --tensor-model-parallel-size 4 {BATCH.format(16, 1024, 128)}", 1),
    "first": (
        f"--nproc-per-node 4 {LLAMA} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 {BATCH.format(4, 2048, 64)}",
        0,
    ),
    "last": (
        f"--nproc-per-node 4 {LLAMA} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 {BATCH.format(4, 2048, 64)}",
        2,
    ),
    "gpt": (f"--nproc-per-node 1 {GPT} {BATCH.format(8, 1024, 128)}", 0),
    "qwen": (f"--nproc-per-node 1 {QWEN} {BATCH.format(4, 2048, 256)}", 0),
    "mixtral": (f"--nproc-per-node 1 {MIXTRAL} {BATCH.format(4, 1024, 64)}", 0),
    "experts": (f"--nproc-per-node 4 {MIXTRAL} --expert-model-parallel-size 4 {BATCH.format(4, 1024, 64)}", 0),
    "latent": (f"--nproc-per-node 1 {LATENT} {BATCH.format(4, 1024, 128)}", 0),
}
"""The launch, and the rank that is run."""
DYNAMIC = {
    "tensor": ("--inference-dynamic-batching --inference-dynamic-batching-max-requests 128", 4096),
    "last": ("--inference-dynamic-batching --inference-dynamic-batching-max-requests 128", 4096),
    "mixtral": ("--inference-dynamic-batching --inference-dynamic-batching-block-size 128", 2048),
    "qwen": ("tools/run_text_generation_server.py --inference-max-requests 8", 4096),
}
"""Options of the dynamic engine for some layouts, and most tokens of a request. The static engine of a script uses it too."""


def compared(name: str, *, dynamic: bool = False) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the run and of the formulas."""
    line, rank = LAYOUTS[name]
    if dynamic:
        options, longest = DYNAMIC[name]
        words = f"{options} {line} --inference-dynamic-batching-buffer-size-gb 4 --inference-max-seq-length {longest}"
        job = launch_of(words).job
        job = replace(job, inference=replace(job.inference, decode_graphs=False))
    else:
        job = launch_of(line).job
        job = replace(job, inference=replace(job.inference, cache="static", latent_cache=False, decode_graphs=False))
    spec = job.inference
    stage = next(each for each in stage_memories(job) if any(first <= rank <= last for first, last in each.ranks))
    own = {
        "weights": stage.weights_bytes,
        "cache": stage.kv_cache_bytes,
        "tables": sum(part.bytes for part in stage.workspaces if part.name == TABLES),
        "kept": sum(part.bytes for part in stage.workspaces if part.name != TABLES),
        "prefill": stage.prefill_bytes,
        "decode": stage.decode_bytes,
    }
    forward = forward_job(job, requests=spec.batch_size, tokens=spec.prompt_tokens)
    engine = {"dynamic": settings(spec)} if dynamic else {"cache_tokens": spec.sequence_length}
    request = {"job": json.loads(to_json(forward)), "rank": rank, **engine}
    command = [sys.executable, "-m", "allocator_hook.shadow.generation"]
    done = subprocess.run(command, input=json.dumps(request), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, int] = {"tables": 0, **json.loads(done.stdout)}
    return found, own


def settings(spec: InferenceSpec) -> dict[str, object]:
    """The arguments of `DynamicInferenceContext` and the batch."""
    assert spec.dynamic is not None
    inside = spec.dynamic.in_static_engine
    return {
        "requests": spec.batch_size,
        "tokens": spec.prompt_tokens,
        "longest": spec.dynamic.request_tokens,
        "buffer_bytes": spec.dynamic.buffer_bytes,
        "block_tokens": spec.dynamic.block_tokens,
        "max_requests": None if inside else spec.dynamic.max_requests,
        "max_tokens": spec.dynamic.max_tokens,
        "last_logits": not inside,  # `DynamicInferenceContext.from_config` and `StaticInferenceEngine.__init__`
        "graphs": 1 if inside else None,
    }


def run_or_skip(name: str, *, dynamic: bool = False) -> tuple[dict[str, int], dict[str, int]]:
    try:
        if metadata.version("megatron-core").startswith("0.16"):
            return compared(name, dynamic=dynamic)
    except metadata.PackageNotFoundError:
        pass
    pytest.skip("needs torch and megatron-core 0.16")


@pytest.mark.shadow
@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_is_that_of_a_run(name: str) -> None:
    found, own = run_or_skip(name)
    assert own["cache"] == found["cache"]
    assert own["weights"] == pytest.approx(found["weights"], rel=1e-5)
    assert own["prefill"] == pytest.approx(found["prefill"], rel=0.0001)
    assert own["decode"] == pytest.approx(found["decode"], rel=0.002)
    assert total(own) == pytest.approx(total(found), rel=0.0001)


@pytest.mark.shadow
@pytest.mark.parametrize("name", DYNAMIC)
def test_memory_is_that_of_a_run_of_the_dynamic_engine(name: str) -> None:
    """In decode, MoE layers have freed what they referenced in prefill, which the run counts before the step."""
    found, own = run_or_skip(name, dynamic=True)
    assert (own["cache"], own["tables"]) == (found["cache"], found["tables"])
    assert own["weights"] == pytest.approx(found["weights"], rel=1e-5)
    assert own["prefill"] == pytest.approx(found["prefill"], rel=0.0001)
    assert own["decode"] == pytest.approx(found["decode"], rel=0.02 if name == "mixtral" else 0.001)
    assert total(own) == pytest.approx(total(found), rel=0.0001)


def total(parts: dict[str, int]) -> int:
    """The peak of generation."""
    return sum(parts[name] for name in ("weights", "cache", "tables", "kept")) + max(parts["prefill"], parts["decode"])
