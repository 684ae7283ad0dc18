"""The simple model of `--info-efficiency` gives the figures of llm-analysis.

Sources: llm-analysis 0.2.2, run with `run_train.sh` of its examples/llama (A100 and H100), and the GPU-hours in its README.md.
Its model has an FFN of two matrices of h·4·h also for LLaMA, and ties the embeddings. `--activation_recomputation 1` recomputes
the core of attention. The README's figures of 33B and 65B are of 1.4e12 tokens, as in the LLaMA paper (arXiv 2302.13971, table 2).
"""

from __future__ import annotations

import pytest

import analyzer
from analyzer.results import TimeEstimate

SIZES = {"7b": (32, 4096, 32), "13b": (40, 5120, 40), "33b": (60, 6656, 52), "65b": (80, 8192, 64)}
"""Layers, hidden size and heads."""


def estimate(size: str, *, tokens: str, gpu: str = "A100-80GB", share: str = "0.5", layout: str = "") -> TimeEstimate:
    layers, hidden, heads = SIZES[size]
    split = 4 if heads % 8 or layers % 8 else 8
    line = (
        f"--nnodes 256 --nproc-per-node 8 pretrain_gpt.py --num-layers {layers} --hidden-size {hidden} "
        f"--num-attention-heads {heads} --seq-length 2048 --max-position-embeddings 2048 "
        "--micro-batch-size 1 --global-batch-size 4000000 "
        "--bf16 --sequence-parallel --tokenizer-type NullTokenizer --vocab-size 31999 "
        "--make-vocab-size-divisible-by 1 --position-embedding-type rope "
        f"--recompute-granularity selective --info-tokens {tokens} --info-efficiency flops={share},memory=0.9 "
        + (layout or f"--tensor-model-parallel-size {split} --pipeline-model-parallel-size {split}")
    )
    found = analyzer.analyze(line, gpu=gpu, environ={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}).time
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("size", "gpu", "share", "seconds", "hours"),
    [
        ("7b", "A100-80GB", "0.5", 1121.4385887179487, 77832.82222853106),
        ("7b", "A100-80GB", "1", 560.7192943589744, 38916.41111426553),
        ("7b", "H100-80GB", "0.5", 353.7804243478261, 24553.933807180678),
        ("13b", "A100-80GB", "0.5", 2133.1127794871795, 148047.50739765243),
        ("13b", "A100-80GB", "1", 1066.5563897435898, 74023.75369882621),
        ("13b", "H100-80GB", "0.5", 672.9334552072801, 46704.57260674171),
    ],
)
def test_figures_of_llm_analysis(size: str, gpu: str, share: str, seconds: float, hours: float) -> None:
    """122 iterations of 4,000,000 samples: 1e12 tokens are 122.07 of them."""
    found = estimate(size, tokens="1T", gpu=gpu, share=share)
    assert found.iteration_seconds == pytest.approx(seconds, rel=1e-6)
    assert found.training is not None
    assert found.training.iterations == 122
    assert found.training.gpu_hours == pytest.approx(hours, rel=1e-6)


@pytest.mark.parametrize(
    ("size", "tokens", "hours"),
    [("7b", "1T", 77_832), ("13b", "1T", 148_047), ("33b", "1.4T", 510_213), ("65b", "1.4T", 1_015_701)],
)
def test_gpu_hours_in_its_readme(size: str, tokens: str, hours: int) -> None:
    found = estimate(size, tokens=tokens)
    assert found.training is not None
    assert found.training.gpu_hours == pytest.approx(hours, rel=2e-5)  # it rounds down


def test_communication_and_layout_cost_nothing() -> None:
    other = estimate("7b", tokens="1T", layout="--tensor-model-parallel-size 2 --pipeline-model-parallel-size 16")
    assert other.iteration_seconds == pytest.approx(1121.4385887179487, rel=1e-6)
    assert {name for name, seconds in other.parts_seconds.items() if seconds} == {"gemm", "attention"}
    assert sum(other.parts_seconds.values()) == pytest.approx(other.iteration_seconds)
