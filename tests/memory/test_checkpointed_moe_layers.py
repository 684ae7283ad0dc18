"""What checkpoints around mixtures leave behind, and attention under a checkpoint of its own.

The dispatcher names the probabilities of its last forward (`self.probs`, moe/token_dispatcher.py). In the second run of a
checkpoint these lead back, through their graph, to the input of the checkpoint and to its gradient, which stay until then.
"""

from __future__ import annotations

import pytest

from analyzer.memory.chunk_memory import Point, chunk_memory
from analyzer.memory.ranks import rank_classes
from analyzer.modules.tree import Module
from analyzer.passes.stages import stage_models
from tests.job_of import job_of

S, H, HEADS = 2048, 1024, 16
HIDDEN = 2 * S * H
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
MIXTURE = "--num-experts 8 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --disable-bias-linear"
MLA = (
    "--multi-latent-attention --position-embedding-type rope --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 "
    "--v-head-dim 64"
)


def module(line: str, name: str) -> Module:
    return next(module for _, module in stage_models(job_of(line))[0].trees[0].walk() if module.name == name)


def left_after_a_step(line: str) -> int:
    return rank_classes(job_of(line))[0].memory.allocated_bytes


def test_layers_leave_their_input_and_its_gradient() -> None:
    dense = left_after_a_step(f"--num-layers 6 {FULL}") - left_after_a_step(f"--num-layers 6 --disable-bias-linear {FULL}")
    assert dense < HIDDEN  # biases, and nothing of a mixture
    sparse = "--num-layers 6 --moe-layer-freq [1,1,0,0,0,0]"
    fewer, more = (left_after_a_step(f"{sparse} {MIXTURE} {each}") for each in ("", FULL))
    assert more - fewer == 2 * 2 * HIDDEN


def test_what_a_layer_left_is_there_in_the_backward_of_those_before_it() -> None:
    """Its input instead of being freed; its gradient is the one that the layer before starts from, until that is summed up."""
    memory = chunk_memory(stage_models(job_of(f"--num-layers 2 {MIXTURE} {FULL}"))[0].trees[0])

    def runs(name: str) -> tuple[Point, Point]:
        """In backward proper, of the last layer and of the one before it."""
        found = [point for point in memory.points("backward") if point.path.endswith(name)]
        assert len(found) == 4  # each first runs again
        return found[1], found[3]

    last, before = runs("experts.activation_func")
    assert before.saved == last.saved
    last, before = runs("linear_qkv")
    assert before.saved == last.saved + HIDDEN


@pytest.mark.parametrize("backend", ["fused", "unfused"])
def test_latent_attention_under_a_checkpoint_keeps_queries_keys_and_values(backend: str) -> None:
    line = f"{MLA} --attention-backend {backend}"
    kept = module(f"{line} --recompute-activations", "core_attention_checkpoint")
    assert kept.recomputed
    assert kept.retained_bytes == 2 * S * HEADS * (96 + 96 + 64)
    assert not any(tensor.name.startswith("softmax") for tensor in kept.saved)
    assert module(line, "core_attention").retained_bytes > 0


@pytest.mark.parametrize(
    ("more", "parts"), [("", 1), ("--deterministic-mode", 9), ("--deterministic-mode --micro-batch-size 4", 3)]
)
def test_deterministic_flash_attention_sums_in_parts(more: str, parts: int) -> None:
    """`mha_bwd` of flash-attn 2: as many parts as let 132 multiprocessors work on 16 heads of each sample."""
    core = module(f"--attention-backend flash {more}", "core_attention")
    (summed,) = (tensor for tensor in core.backward_workspace if tensor.name == "query gradient in fp32")
    assert summed.bytes == parts * 4 * S * H * (4 if "micro" in more else 1)
