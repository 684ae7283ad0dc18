"""`--delay-wgrad-compute`: what waits beside the backward of a branch; and attention that goes backward early."""

from __future__ import annotations

import pytest

from analyzer.errors import InputError
from analyzer.memory.overlapped_microbatches import overlapped_peak
from analyzer.memory.ranks import rank_classes
from analyzer.modules.tree import Module
from tests.job_of import job_of

MIXTURE = (
    "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 512 --swiglu --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 4 --global-batch-size 64 --overlap-moe-expert-parallel-comm"
)
ROWS = 2 * 2048
H, F = 1024, 512


def tree(more: str = "") -> Module:
    return rank_classes(job_of(f"{MIXTURE} {more}"))[0].trees[0]


def backward_bytes(path: str, more: str = "") -> int:
    module = next(module for where, module in tree(more).walk() if where.endswith(path))
    return sum(tensor.bytes for tensor in module.backward_workspace)


def test_both_operands_wait_until_the_experts_are_through() -> None:
    """In 16 bit: beside fc1 the input [rows, f] of fc2 and the gradient [rows, h] of its output; in dispatch those of fc1 too."""
    waits = 2 * ROWS * (F + H)
    more = "--delay-wgrad-compute"
    assert backward_bytes("experts.linear_fc2", more) == backward_bytes("experts.linear_fc2")
    assert backward_bytes("experts.activation_func", more) - backward_bytes("experts.activation_func") == waits
    assert backward_bytes("experts.linear_fc1", more) - backward_bytes("experts.linear_fc1") == waits
    assert backward_bytes("mlp.dispatch", more) - backward_bytes("mlp.dispatch") == waits + 2 * ROWS * (H + 2 * F)


def test_gathered_inputs_wait_whole() -> None:
    """Under sequence parallelism `WeightGradStore` is given the gathered input: [s, b, h] of the projection before attention."""
    more = "--delay-wgrad-compute --tensor-model-parallel-size 2 --sequence-parallel --multi-latent-attention"
    more += " --expert-model-parallel-size 2"
    [last] = {module for where, module in tree(more).walk() if where.endswith("self_attention.linear_q_proj")}
    waiting = [tensor for tensor in last.backward_workspace if "linear_kv_up_proj, delayed" in tensor.name]
    assert any(tensor.shape[0] == 2048 for tensor in waiting if "input" in tensor.name)


def test_attention_does_not_wait_for_the_experts() -> None:
    more = "--delay-wgrad-compute"
    assert backward_bytes("self_attention.linear_proj", more) == backward_bytes("self_attention.linear_proj")
    assert backward_bytes("core_attention", more) - backward_bytes("core_attention") == 2 * 2048 * H


def test_the_peak_is_higher() -> None:
    small = f"{MIXTURE} --vocab-size 1024"  # with a peak in the layers
    plain, waiting = (rank_classes(job_of(f"{small} {more}"))[0].memory for more in ("", "--delay-wgrad-compute"))
    assert waiting.peak_allocated_bytes > plain.peak_allocated_bytes
    assert waiting.allocated_bytes == plain.allocated_bytes


def test_early_attention_makes_room_for_the_other_ones_experts() -> None:
    """What attention kept is gone when the experts of the other microbatch run: their instants are that much lower."""
    one = tree()
    late, early = overlapped_peak(one, one), overlapped_peak(one, one, early=True)
    assert early.bytes <= late.bytes
    job = job_of(f"{MIXTURE} --ep-overlap-early-attn-memory-release", release="0.16.1")
    assert job.flags.early_attention_backward


@pytest.mark.parametrize("flag", ["--delay-wgrad-compute", "--ep-overlap-early-attn-memory-release"])
def test_alone_they_are_refused(flag: str) -> None:
    with pytest.raises(InputError) as refused:
        job_of(f"{MIXTURE.replace(' --overlap-moe-expert-parallel-comm', '')} {flag}")
    assert str(refused.value).startswith(flag)
    assert "--overlap-moe-expert-parallel-comm" in str(refused.value)
