"""The kernels that all ranks execute in an iteration, summed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from analyzer.passes.stages import stage_models
from analyzer.specs import TrainingJob
from analyzer.time.pass_work import chunk_work
from analyzer.time.work.kernels import Attention, Gemm, Kernel, MemoryBound
from tests.job_of import job_of

BASE = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 2 --global-batch-size 32 --bf16 --tokenizer-type NullTokenizer "
    "--vocab-size 32767 --position-embedding-type rope "
    "--attention-backend flash"
)
"""A GPT whose vocabulary of 32,768 needs no padding."""
LAYERS, HIDDEN, HEADS, SEQUENCE, SAMPLES, VOCABULARY = 4, 1024, 16, 2048, 32, 32768
TOKENS = SAMPLES * SEQUENCE


@dataclass(frozen=True)
class Executed:
    """Sums over all ranks and microbatches of an iteration."""

    gemm: int
    """FLOPs of GEMMs."""
    attention: float
    """FLOPs of fused attention."""
    cast_bytes: float
    """Bytes of the kernels that quantize activations and gradients."""


def job(line: str = "", *, gpus: int = 8) -> TrainingJob:
    """A job of the GPT with further options."""
    return job_of(line, base=BASE, gpus=gpus, environ={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


def kernels(found: TrainingJob) -> Iterator[tuple[str, Kernel, int]]:
    """Direction, kernel, and the number of its launches on all ranks in an iteration."""
    parallel = found.parallel
    for stage in stage_models(found):
        for tree in stage.trees:
            work = chunk_work(found, tree)
            for direction, half in (("forward", work.forward), ("backward", work.backward)):
                for kernel, count in half.kernels:
                    yield direction, kernel, count * found.batch.microbatches * parallel.world_size // parallel.pipeline


def executed(line: str = "", *, gpus: int = 8) -> Executed:
    """What all ranks execute for a line of options."""
    gemm, attention, casts = 0, 0.0, 0.0
    for _, kernel, count in kernels(job(line, gpus=gpus)):
        if isinstance(kernel, Gemm):
            gemm += count * kernel.flops
        elif isinstance(kernel, Attention):
            attention += count * kernel.flops
        elif isinstance(kernel, MemoryBound) and kernel.kind == "cast":
            casts += count * kernel.bytes
    return Executed(gemm, attention, casts)
