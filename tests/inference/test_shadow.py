"""Formulas of inference compared with megatron-core's static inference context on tensors without data, for ten layouts."""

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
from analyzer.inference.memory import stage_memories
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
TWO_BY_TWO = f"--nproc-per-node 4 {LLAMA} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
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


def compared(name: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the run and of the formulas."""
    line, rank = LAYOUTS[name]
    job = launch_of(line).job
    spec = replace(job.inference, cache="static", latent_cache=False, decode_graphs=False)
    job = replace(job, inference=spec)
    stage = next(each for each in stage_memories(job) if any(first <= rank <= last for first, last in each.ranks))
    own = {
        "weights": stage.weights_bytes,
        "cache": stage.kv_cache_bytes,
        "kept": sum(part.bytes for part in stage.workspaces),
        "prefill": stage.prefill_bytes,
        "decode": stage.decode_bytes,
    }
    forward = forward_job(job, requests=spec.batch_size, tokens=spec.prompt_tokens)
    request = {"job": json.loads(to_json(forward)), "rank": rank, "cache_tokens": spec.sequence_length}
    command = [sys.executable, "-m", "allocator_hook.shadow.generation"]
    done = subprocess.run(command, input=json.dumps(request), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, int] = json.loads(done.stdout)
    return found, own


@pytest.mark.shadow
@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_is_that_of_a_run(name: str) -> None:
    try:
        found, own = compared(name) if metadata.version("megatron-core").startswith("0.16") else ({}, {})
    except metadata.PackageNotFoundError:
        found, own = {}, {}
    if not found:
        pytest.skip("needs torch and megatron-core 0.16")
    assert own["cache"] == found["cache"]
    assert own["weights"] == pytest.approx(found["weights"], rel=1e-5)
    assert own["prefill"] == pytest.approx(found["prefill"], rel=0.002)
    assert total(own) == pytest.approx(total(found), rel=0.001)


def total(parts: dict[str, int]) -> int:
    """The peak of generation."""
    return parts["weights"] + parts["cache"] + parts["kept"] + max(parts["prefill"], parts["decode"])
