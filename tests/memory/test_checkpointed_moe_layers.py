"""Tensors that stay allocated after checkpointed MoE layers, and checkpointed attention.

The dispatcher references the probabilities of its last forward (`self.probs`, moe/token_dispatcher.py). After the recomputation of
a checkpoint, their autograd graph references the input of the checkpoint and its gradient. Both stay allocated until the next
forward.
"""

from __future__ import annotations

import pytest

from analyzer.memory.chunk_memory import BACKWARD, chunk_memory
from analyzer.memory.point import Point
from analyzer.memory.ranks import rank_classes
from analyzer.modules.tree import Module
from analyzer.passes.stages import stage_models
from tests.job_of import job_of

S, H, HEADS = 2048, 1024, 16
HIDDEN = 2 * S * H
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
MOE = "--num-experts 8 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --disable-bias-linear"
MLA = (
    "--multi-latent-attention --position-embedding-type rope --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 "
    "--v-head-dim 64"
)


def module(line: str, name: str) -> Module:
    return next(module for _, module in stage_models(job_of(line))[0].trees[0].walk() if module.name == name)


def allocated_after_a_step(line: str) -> int:
    return rank_classes(job_of(line))[0].memory.allocated_bytes


def test_checkpointed_moe_layers_leave_their_input_and_its_gradient_allocated() -> None:
    bias = allocated_after_a_step(f"--num-layers 6 {FULL}") - allocated_after_a_step(f"--num-layers 6 --disable-bias-linear {FULL}")
    assert bias < HIDDEN  # without MoE layers only the biases differ
    two_moe_layers = f"--num-layers 6 --moe-layer-freq [1,1,0,0,0,0] {MOE}"
    without, recomputed = (allocated_after_a_step(f"{two_moe_layers} {each}") for each in ("", FULL))
    assert recomputed - without == 2 * 2 * HIDDEN


def test_the_tensors_left_by_a_layer_are_allocated_in_the_backward_of_earlier_layers() -> None:
    """The input of the layer is not freed. Its gradient is also the output gradient of the previous layer."""
    memory = chunk_memory(stage_models(job_of(f"--num-layers 2 {MOE} {FULL}"))[0].trees[0])

    def runs(name: str) -> tuple[Point, Point]:
        """Return the points in the backward of the last layer and of the layer before it."""
        found = [point for point in memory.points(BACKWARD) if point.path.endswith(name)]
        assert len(found) == 4  # each layer is first recomputed
        return found[1], found[3]

    last, before = runs("experts.activation_func")
    assert before.saved == last.saved
    last, before = runs("linear_qkv")
    assert before.saved == last.saved + HIDDEN
    assert before.bytes == last.bytes  # the output gradient is in `saved` then, and not counted again


@pytest.mark.parametrize("backend", ["fused", "unfused"])
def test_checkpointed_mla_core_attention_saves_queries_keys_and_values(backend: str) -> None:
    line = f"{MLA} --attention-backend {backend}"
    checkpoint = module(f"{line} --recompute-activations", "core_attention_checkpoint")
    assert checkpoint.recomputed
    assert checkpoint.retained_bytes == 2 * S * HEADS * (96 + 96 + 64)
    assert not any(tensor.name.startswith("softmax") for tensor in checkpoint.saved)
    assert module(line, "core_attention").retained_bytes > 0


@pytest.mark.parametrize(
    ("more", "parts"), [("", 1), ("--deterministic-mode", 9), ("--deterministic-mode --micro-batch-size 4", 3)]
)
def test_deterministic_flash_attention_accumulates_dq_in_parts(more: str, parts: int) -> None:
    """`mha_bwd` of flash-attn 2: the number of parts is chosen so that 16 heads per sample occupy 132 multiprocessors."""
    core = module(f"--attention-backend flash {more}", "core_attention")
    (summed,) = (tensor for tensor in core.backward_workspace if tensor.name == "query gradient in fp32")
    assert summed.bytes == parts * 4 * S * H * (4 if "micro" in more else 1)
