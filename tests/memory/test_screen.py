"""Three levels of effort agree: the screen is a lower bound, and the highest-memory rank is that of the full report."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

import pytest

from analyzer.memory.ranks import highest_rank, rank_classes, replayed_classes
from analyzer.memory.screen import screen
from analyzer.memory.stages import analysed_stages
from analyzer.memory.verdict import highest
from analyzer.specs import TrainingJob
from benchmarks.layouts import DEEPSEEK_V3, LLAMA_3_70B, layouts, problem
from tests.examples import examples
from tests.job_of import BLACKWELL, HOPPER, job_of

DENSE = "--num-layers 8 --global-batch-size 64 --swiglu --disable-bias-linear --normalization RMSNorm"
MOE = f"{DENSE} --num-experts 8 --moe-grouped-gemm --moe-router-topk 2 --disable-bias-linear"
LINES = [
    DENSE,
    f"{DENSE} --tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer",
    f"{DENSE} --pipeline-model-parallel-size 4",
    f"{DENSE} --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1",
    f"{DENSE} --pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method block --recompute-num-layers 2",
    f"{DENSE} --context-parallel-size 2 --untie-embeddings-and-output-weights --accumulate-allreduce-grads-in-fp32",
    f"{MOE} --expert-model-parallel-size 4 --use-distributed-optimizer",
    f"{MOE} --pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    f"{DENSE} --mtp-num-layers 1 --position-embedding-type rope",
    f"{DENSE} --fp8-format hybrid",
    f"{DENSE} --fp8-format hybrid --fp8-recipe delayed --fp8-param-gather --use-distributed-optimizer",
    f"{DENSE} --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather --use-distributed-optimizer",
    f"{MOE} --fp8-format hybrid --fp8-recipe blockwise --expert-model-parallel-size 4 --use-distributed-optimizer",
    f"{MOE} --fp8-format e4m3 --fp8-recipe mxfp8 --use-distributed-optimizer --pipeline-model-parallel-size 2",
    f"{MOE} --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    f"{DENSE} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer "
    "--no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor",
    f"{DENSE} --optimizer sgd",
]


def some_layouts(line: str, count: int) -> Iterator[TrainingJob]:
    """Layouts of 1,024 GPUs, of every part of the list."""
    return islice(layouts(problem(line).given, order=random.Random(1)), count)


def compare(job: TrainingJob, *, within: float) -> None:
    ranks = rank_classes(job)
    peak = max(each.memory.peak_allocated_bytes for each in ranks)
    report = highest(ranks)
    screened = screen(job)
    assert (1 - within) * peak <= screened.peak_allocated_bytes <= peak
    assert screened.device_bytes <= report.memory.device_bytes
    first_ranks = replayed_classes(job, analysed_stages(job))
    assert highest_rank(job).memory == highest(first_ranks).memory
    assert highest(first_ranks).memory.device_bytes <= report.memory.device_bytes


@pytest.mark.parametrize("line", LINES)
def test_the_screen_is_a_close_lower_bound(line: str) -> None:
    compare(job_of(f"--bf16 {line}", gpu=BLACKWELL if "mxfp8" in line else HOPPER), within=0.02)


@pytest.mark.parametrize("line", [LLAMA_3_70B, DEEPSEEK_V3], ids=["Llama 3 70B", "DeepSeek-V3"])
def test_levels_agree_on_layouts_of_large_models(line: str) -> None:
    for job in some_layouts(line, examples(20)):
        compare(job, within=0.03)
