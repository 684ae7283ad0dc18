"""Passes without gradients compared with megatron-core on tensors without data.

The log-probabilities of the last stage are those of NeMo-RL and verl (`allocator_hook/shadow/forward_pass.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from allocator_hook.shadow.job_json import to_json
from analyzer.api import read_launch
from analyzer.inference.phases.forward import forward_bytes, job_of_pass
from analyzer.specs.fine_tuning import ForwardPass

ROOT = Path(__file__).resolve().parents[3]
COMMON = (
    "--bf16 --info-gpu H100-80GB --tokenizer-type NullTokenizer --vocab-size 31999 --make-vocab-size-divisible-by 1 --num-layers 4 "
    "--hidden-size 2048 --num-attention-heads 16 --swiglu --seq-length 2048 --max-position-embeddings 8192 --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --micro-batch-size 1 "
    "--no-create-attention-mask-in-dataloader --attention-dropout 0 --hidden-dropout 0"
)
LLAMA = f"{COMMON} --ffn-hidden-size 7168 --group-query-attention --num-query-groups 4"
MIXTRAL = f"{LLAMA} --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
LATENT = (
    f"{COMMON} --ffn-hidden-size 10944 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --rope-type rope --no-rope-fusion --qk-layernorm"
)
PIPELINE = "--pipeline-model-parallel-size 2"
SEQUENCE = "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = f"{PIPELINE} {SEQUENCE} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --moe-permute-fusion"
LAYOUTS: dict[str, tuple[int, str, int, str | None]] = {
    "logits in fp32": (1, LLAMA, 0, None),
    "nemo_rl": (1, LLAMA, 0, "nemo_rl"),
    "nemo_rl, tensor": (4, f"{LLAMA} --tensor-model-parallel-size 4 --sequence-parallel", 1, "nemo_rl"),
    "nemo_rl, last stage, context": (4, f"{LLAMA} {PIPELINE} --context-parallel-size 2", 2, "nemo_rl"),
    "verl": (1, LLAMA, 0, "verl"),
    "verl, tensor": (4, f"{LLAMA} --tensor-model-parallel-size 4", 1, "verl"),
    "first stage": (2, f"{LLAMA} {PIPELINE}", 0, None),
    "first stage, context": (4, f"{LLAMA} {PIPELINE} --context-parallel-size 2", 0, None),
    "first stage, sequence": (4, f"{LLAMA} {PIPELINE} {SEQUENCE}", 0, None),
    "experts": (8, f"{MIXTRAL} {PIPELINE} --expert-model-parallel-size 4", 0, None),
    "experts, sequence": (8, f"{MIXTRAL} {EXPERTS}", 0, None),
    "latent": (2, f"{LATENT} {PIPELINE}", 0, None),
    "latent, sequence": (4, f"{LATENT} {PIPELINE} {SEQUENCE}", 0, None),
}
"""The number of GPUs, the launch, the rank that is run, and what makes log-probabilities of the logits."""


@pytest.mark.shadow
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_peak_of_a_pass_is_that_of_a_run(name: str) -> None:
    try:
        if not metadata.version("megatron-core").startswith("0.16"):
            raise metadata.PackageNotFoundError
    except metadata.PackageNotFoundError:
        pytest.skip("needs torch and megatron-core 0.16")
    gpus, line, rank, head = LAYOUTS[name]
    words = ["--nproc-per-node", str(gpus), "pretrain_gpt.py", *line.split()]
    job = read_launch(words, environ={}, folder=Path("/nowhere")).job
    work = ForwardPass(tokens=4096, logit_bytes=6 if head is None else 12)
    own = forward_bytes(job, work)[rank * job.parallel.pipeline // gpus]
    request = {"job": json.loads(to_json(job_of_pass(job, work))), "rank": rank, "head": head}
    command = [sys.executable, "-m", "allocator_hook.shadow.forward_pass"]
    done = subprocess.run(command, input=json.dumps(request), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert own == pytest.approx(json.loads(done.stdout)["peak"], rel=0.002)
