"""Tensors that autograd references in a backward beyond the module that made them."""

from __future__ import annotations

import pytest

from analyzer.memory.chunk_memory import BACKWARD, ChunkMemory, chunk_memory
from analyzer.modules.moe.alltoall import alltoall_combine
from analyzer.modules.shapes import shapes_of
from analyzer.modules.tree import Module, total_bytes
from analyzer.passes.stages import stage_models
from tests.job_of import job_of

FUSION = ("", "--no-gradient-accumulation-fusion")
UNTIED = "--untie-embeddings-and-output-weights"


def tree_of(line: str) -> Module:
    return stage_models(job_of(line))[0].trees[0]


def peak_in(memory: ChunkMemory, name: str) -> int:
    """The highest point of the backward in the modules whose path contains `name`."""
    return max(point.bytes for point in memory.points(BACKWARD) if name in point.path)


def test_the_gradient_of_a_tied_embedding_waits_for_the_embedding() -> None:
    """`InputBuffer` of autograd: `AccumulateGrad` of the weight runs after the output layer and the embedding."""
    attention = {
        options: peak_in(chunk_memory(tree_of(options)), "self_attention")
        for fusion in FUSION
        for options in (fusion, f"{fusion} {UNTIED}")
    }
    fused, separate = (attention[fusion] - attention[f"{fusion} {UNTIED}"] for fusion in FUSION)
    assert fused == 0
    assert separate == 2 * 32128 * 1024  # one more token than --vocab-size, padded to a multiple of 128


@pytest.mark.parametrize(("samples", "copies"), [(1, 0), (2, 1)])
def test_flash_attention_in_batches_returns_a_copy_under_a_checkpoint(samples: int, copies: int) -> None:
    """`FlashAttention.forward` transposes its output to [s, b, a·d]; `CheckpointFunction.backward` references the result."""
    line = f"--attention-backend flash --recompute-granularity selective --recompute-modules core_attn --micro-batch-size {samples}"
    checkpoints = [module for _, module in tree_of(line).walk() if module.name == "core_attention_checkpoint"]
    held = [tensor for tensor in checkpoints[0].backward_workspace if tensor.name == "recomputed output"]
    assert [tensor.bytes for tensor in held] == copies * [2 * 2048 * samples * 1024]


def test_the_output_of_experts_is_freed_before_the_summed_rows_are_received() -> None:
    """`MoEAlltoAllTokenDispatcher.combine_preprocess` returns the sorted rows; `index_add_` then saves those that are received."""
    line = (
        "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--moe-ffn-hidden-size 512 --deterministic-mode"
    )
    combine = alltoall_combine(shapes_of(job_of(line)))
    rows = 2 * 2048 * 1024 * 2
    assert total_bytes(combine.saved) == rows
    # sent and received tokens, the sorted rows; not the output of the experts
    assert total_bytes(combine.forward_workspace) == 3 * rows
