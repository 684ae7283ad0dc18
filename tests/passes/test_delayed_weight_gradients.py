"""`--delay-wgrad-compute`: operands that stay allocated during the backward of a branch; and early backward of attention."""

from __future__ import annotations

import pytest

from analyzer.errors import InputError, UnsupportedError
from analyzer.memory.overlapped.microbatches import GradientRules, overlapped_peak
from analyzer.memory.ranks import rank_classes
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module
from analyzer.passes.delayed_weight_gradients import DELAYED
from tests.job_of import job_of

MOE = (
    "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 512 --swiglu --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 4 --global-batch-size 64 --overlap-moe-expert-parallel-comm"
)
ROWS = 2 * 2048
H, F = 1024, 512


def tree(more: str = "") -> Module:
    return rank_classes(job_of(f"{MOE} {more}"))[0].trees[0]


def backward_bytes(path: str, more: str = "") -> int:
    module = next(module for where, module in tree(more).walk() if where.endswith(path))
    return sum(tensor.bytes for tensor in module.backward_workspace)


def test_both_operands_stay_allocated_until_the_backward_of_the_experts_ends() -> None:
    """In 16 bit: during fc1 the input [rows, f] and output gradient [rows, h] of fc2. `TransformerLayerSchedulePlan.run` computes
    the weight gradients of the experts before the backward of the dispatch."""
    operands = 2 * ROWS * (F + H)
    more = "--delay-wgrad-compute"
    assert backward_bytes("experts.linear_fc2", more) == backward_bytes("experts.linear_fc2")
    assert backward_bytes("experts.activation_func", more) - backward_bytes("experts.activation_func") == operands
    assert backward_bytes("experts.linear_fc1", more) - backward_bytes("experts.linear_fc1") == operands
    assert backward_bytes("mlp.dispatch", more) == backward_bytes("mlp.dispatch")


def test_gradients_of_grouped_experts_that_are_not_fused_exist_twice() -> None:
    """`_GroupedLinear.backward` allocates the gradients, and autograd copies them, because `WeightGradStore` references them:
    2·[E/ep, h, f] in bf16 with two local experts. `backward_dw` frees them with the operands."""
    more = "--delay-wgrad-compute --no-gradient-accumulation-fusion"
    added = backward_bytes("experts.activation_func", more) - backward_bytes("experts.activation_func")
    assert added == 2 * ROWS * (F + H) + 2 * 2 * (2 * H * F)
    assert backward_bytes("mlp.dispatch", more) == backward_bytes("mlp.dispatch")


def test_gradients_of_attention_that_are_not_fused_are_allocated_when_they_are_computed() -> None:
    """`backward_dw` of `TransformerEngineBaseModule`, for qkv first: [3·h, h] in bf16, with the operands of both layers.

    Attention has freed the input of the second layer, which it saved."""
    more = "--delay-wgrad-compute --no-gradient-accumulation-fusion"
    assert backward_bytes("self_attention.linear_proj", more) == backward_bytes("self_attention.linear_proj")
    operands = 2 * 2048 * (H + H) + 2 * 2048 * (H + 3 * H)
    assert backward_bytes("linear_qkv, weight gradient", more) == operands + 2 * 3 * H * H
    assert backward_bytes("linear_proj, weight gradient", more) == 2 * 2048 * (H + H) + 2 * H * H


def test_sequential_experts_keep_the_operands_of_all_experts() -> None:
    """During the activation of the last expert: the inputs of fc2 of both experts, and the input gradient of the other's fc1. What
    the activation saved is replaced by an output gradient of the same size. The gradient of fc2's output is counted around all."""
    sequential = MOE.replace("--moe-grouped-gemm ", "")
    sizes = []
    for more in ("", "--delay-wgrad-compute"):
        walked = rank_classes(job_of(f"{sequential} {more}"))[0].trees[0].walk()
        module = next(module for where, module in walked if where.endswith("experts.activation_func"))
        sizes.append(sum(tensor.bytes for tensor in module.backward_workspace))
    saved_by_other = ROWS * F
    assert sizes[1] - sizes[0] == 2 * ROWS * F - saved_by_other + ROWS * H


def test_operands_of_shared_experts_stay_allocated_until_the_backward_of_attention_ends() -> None:
    """`_BackwardDWWrapper` computes the weight gradients of shared experts with those of attention. Operands of the shared experts
    with f = 512: [s·b, h] and [s·b, 2·f] of fc1, [s·b, f] of fc2. The output gradient of fc2 is that of the layer."""
    shared, delayed = "--moe-shared-expert-intermediate-size 512", "--delay-wgrad-compute"
    operands = 2 * 2048 * (H + 2 * F + F)
    without = backward_bytes("self_attention.linear_proj", delayed)
    assert backward_bytes("self_attention.linear_proj", f"{shared} {delayed}") - without == operands


def test_gathered_inputs_stay_allocated_unsharded() -> None:
    """Under sequence parallelism `WeightGradStore` stores the gathered input: [s, b, h] of the projection before attention."""
    more = "--delay-wgrad-compute --tensor-model-parallel-size 2 --sequence-parallel --multi-latent-attention"
    more += " --expert-model-parallel-size 2"
    [last] = {module for where, module in tree(more).walk() if where.endswith("self_attention.linear_q_proj")}
    pending = [tensor for tensor in last.backward_workspace if "linear_kv_up_proj, delayed" in tensor.name]
    assert any(tensor.shape[0] == 2048 for tensor in pending if "input" in tensor.name)


def test_operands_of_experts_are_freed_before_the_backward_of_attention() -> None:
    more = "--delay-wgrad-compute"
    assert backward_bytes("self_attention.linear_proj", more) == backward_bytes("self_attention.linear_proj")
    assert backward_bytes("core_attention", more) - backward_bytes("core_attention") == 2 * 2048 * H


def test_the_dispatch_has_the_operands_of_experts_whose_gradients_overlap_with_it() -> None:
    """In 16 bit: the input [rows, h] and output gradient [rows, 2f] of fc1, and those of fc2 ([rows, f] and [rows, h])."""
    line = MOE.replace("--overlap-moe-expert-parallel-comm", "--moe-shared-expert-intermediate-size 512")

    def dispatch_bytes(more: str) -> int:
        module = next(
            each
            for where, each in rank_classes(job_of(f"{line} {more}", release="0.19.0"))[0].trees[0].walk()
            if where.endswith("mlp.dispatch")
        )
        return sum(tensor.bytes for tensor in module.backward_workspace)

    overlapped = dispatch_bytes("--overlap-dispatch-backward-with-experts-wgrad")
    assert overlapped - dispatch_bytes("") == 2 * ROWS * (2 * H + 3 * F)


@pytest.mark.parametrize(
    "more", ["--no-gradient-accumulation-fusion", "--use-megatron-fsdp --ckpt-format fsdp_dtensor --use-distributed-optimizer"]
)
def test_overlapped_gradients_of_experts_are_refused_where_they_are_not_modelled(more: str) -> None:
    line = MOE.replace("--overlap-moe-expert-parallel-comm", "--overlap-dispatch-backward-with-experts-wgrad")
    with pytest.raises(UnsupportedError, match="is not modelled with"):
        job_of(f"{line} {more}", release="0.19.0")


def test_delayed_weight_gradients_raise_the_peak() -> None:
    small = f"{MOE} --vocab-size 1024 --moe-ffn-hidden-size 4096"  # so that the peak is in the backward of the experts
    plain, pending = (rank_classes(job_of(f"{small} {more}"))[0].memory for more in ("", "--delay-wgrad-compute"))
    assert pending.peak_allocated_bytes > plain.peak_allocated_bytes
    assert pending.allocated_bytes == plain.allocated_bytes


def test_early_backward_of_attention_does_not_raise_the_peak() -> None:
    """Tensors that attention saved are freed before the experts of the other microbatch run."""
    one = tree()
    late, early = (overlapped_peak(one, one, GradientRules(first, keeps_dispatched=True)) for first in (False, True))
    assert early.bytes <= late.bytes
    job = job_of(f"{MOE} --ep-overlap-early-attn-memory-release", release="0.16.1")
    assert job.flags.early_attention_backward


def test_before_0_18_the_dispatch_keeps_the_gradients_that_it_has_read() -> None:
    """`ScheduleNode.delay_grads_release` (0.16): rows [T·k, h] during the backward of attention. The peak is in the delta rule."""
    net = (
        "--vocab-size 1024 --normalization RMSNorm --experimental-attention-variant gated_delta_net --linear-attention-freq [1]*8 "
        "--linear-num-key-heads 8 --linear-num-value-heads 16 --linear-key-head-dim 64 --linear-value-head-dim 128"
    )
    one = rank_classes(job_of(f"{MOE} {net} --delay-wgrad-compute", release="0.18.2"))[0].trees[0]
    kept, freed = (
        overlapped_peak(one, one, GradientRules(early_attention=False, keeps_dispatched=keeps)) for keeps in (True, False)
    )
    assert kept.block.kind is ModuleKind.LAYER
    assert kept.bytes - freed.bytes == 2 * ROWS * H


def test_the_convolution_of_a_delta_net_has_no_delayed_weight_gradient() -> None:
    net = "--normalization RMSNorm --experimental-attention-variant gated_delta_net --linear-attention-freq 4"
    one = rank_classes(job_of(f"{MOE} {net} --delay-wgrad-compute", release="0.18.2"))[0].trees[0]
    delayed = {
        tensor.name.partition(",")[0].rpartition(" of ")[2]
        for where, module in one.walk()
        for tensor in module.backward_workspace
        if tensor.name.endswith(DELAYED) and "self_attention" in where
    }
    assert "out_proj" in delayed
    assert "conv1d" not in delayed


@pytest.mark.parametrize("flag", ["--delay-wgrad-compute", "--ep-overlap-early-attn-memory-release"])
def test_options_without_overlapped_communication_are_rejected(flag: str) -> None:
    with pytest.raises(InputError) as rejected:
        job_of(f"{MOE.replace(' --overlap-moe-expert-parallel-comm', '')} {flag}")
    assert str(rejected.value).startswith(flag)
    assert "--overlap-moe-expert-parallel-comm" in str(rejected.value)
