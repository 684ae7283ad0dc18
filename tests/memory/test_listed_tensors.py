"""The tensors that a report lists at an instant are those whose bytes are counted there."""

from __future__ import annotations

import pytest

from analyzer.memory.block_memory import block_memory, explained
from analyzer.modules.tree import total_bytes
from analyzer.passes.stages import stage_models
from analyzer.program.chunks import chunk_program
from tests.job_of import job_of

SELECTIVE = "--recompute-granularity selective --recompute-modules"
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --disable-bias-linear"


@pytest.mark.parametrize(
    "line",
    [
        "",
        f"{SELECTIVE} core_attn mlp --disable-bias-linear",  # with dropout: allocates in two steps
        f"{SELECTIVE} mlp --disable-bias-linear --hidden-dropout 0",
        f"{EXPERTS} {SELECTIVE} moe",
        f"{EXPERTS} --moe-grouped-gemm {SELECTIVE} moe_act layernorm",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "--tensor-model-parallel-size 2 --sequence-parallel --mtp-num-layers 1 --position-embedding-type rope",
    ],
)
def test_the_listed_tensors_are_the_counted_ones(line: str) -> None:
    job = job_of(line)
    blocks = [block.module for stage in stage_models(job) for tree in stage.trees for block in chunk_program(tree).blocks]
    instants = [(block, each) for block in blocks for each in (*block_memory(block).forward, *block_memory(block).backward)]
    assert instants
    for block, instant in instants:
        path, tensors = explained(block, instant)
        assert total_bytes(tensors) == instant.temporary, path
