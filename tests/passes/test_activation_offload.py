"""Activations on the host, and two microbatches side by side: what stays on the GPU, and what Megatron refuses."""

from __future__ import annotations

import pytest

from analyzer.errors import InputError
from analyzer.memory.block_memory import block_memory, explained
from analyzer.memory.chunk_memory import chunk_memory
from analyzer.memory.overlapped_microbatches import overlapped_peak
from analyzer.memory.ranks import rank_classes
from analyzer.modules.kinds import ModuleKind
from analyzer.passes.stages import stage_models
from analyzer.schedule.pipeline import Step, steps
from tests.job_of import job_of

S, H, HEADS, LAYERS = 2048, 1024, 16, 8
DENSE = "--attention-backend flash --attention-dropout 0 --hidden-dropout 0"
OFFLOAD = f"{DENSE} --fine-grained-activation-offloading --offload-modules"
MIXTURE = (
    f"{DENSE} --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --disable-bias-linear "
    "--expert-model-parallel-size 4"
)
COMBINED = f"{MIXTURE} --overlap-moe-expert-parallel-comm"


def retained(line: str) -> int:
    return sum(chunk_memory(tree).retained for tree in stage_models(job_of(line))[0].trees)


def test_attention_goes_to_the_host_but_for_the_last_layer_and_small_statistics() -> None:
    """q, k, v and the output of [s, b, h] in bf16; the 4·a·s bytes of softmax statistics have fewer elements than 2**20."""
    gone = retained(DENSE) - retained(f"{OFFLOAD} core_attn attn_proj")
    assert gone == (LAYERS - 1) * 4 * 2 * S * H


def test_norms_fused_into_projections_are_not_offloaded_alone() -> None:
    """`TransformerLayer`: attn_norm and mlp_norm are norms in modules of their own; Transformer Engine's dense layers have none."""
    assert retained(f"{OFFLOAD} attn_norm mlp_norm") == retained(DENSE)


def test_tensors_below_the_least_size_stay() -> None:
    assert retained(f"{OFFLOAD} core_attn --min-offloaded-tensor-size {2 * S * H}") == retained(DENSE)


def test_experts_keep_neither_their_input_nor_their_activation() -> None:
    """With top-2 routing, rows of the local experts [2·s, h] and the output of fc1 [2·s, 4·h], both in bf16."""
    gone = retained(MIXTURE) - retained(f"{MIXTURE} {OFFLOAD.removeprefix(DENSE)} expert_fc1")
    assert gone == (LAYERS - 1) * 2 * (2 * S) * H


def test_whole_layers_on_the_host_leave_the_others() -> None:
    """`DefaultOffloadSynchronizer`: of L layers of footprint T, N of them offloaded, (L - N)·T is there at most."""
    plain, half = retained(DENSE), retained(f"{DENSE} --cpu-offloading-num-layers 4")
    none = retained(f"{DENSE} --num-layers 4")
    assert plain - half == plain - none > 0


def test_what_is_offloaded_is_there_while_its_module_runs() -> None:
    """The peak of one layer's attention is the same; only what waits is less."""
    plain, offloading = (rank_classes(job_of(line))[0].memory for line in (DENSE, f"{OFFLOAD} core_attn"))
    assert offloading.peak_allocated_bytes < plain.peak_allocated_bytes
    worst = []
    for line in (DENSE, f"{OFFLOAD} core_attn"):
        job = job_of(line)
        tree = stage_models(job)[0].trees[0]
        first_layer = next(module for _, module in tree.walk() if module.kind is ModuleKind.LAYER)
        backward = block_memory(first_layer).backward
        worst.append(max(each.bytes for each in backward if "core_attention" in explained(first_layer, each)[0]))
    assert worst[0] == worst[1]


def test_without_a_pipeline_each_backward_runs_beside_the_next_forward() -> None:
    """`combined_1f1b_schedule_for_no_pipelining`: forward 0; forward 1 with backward 0; …; the last backward."""
    order = steps(pipeline=1, pipeline_rank=0, chunks=1, microbatches=3, combined=True)
    assert order == (
        Step("forward", 0, 0),
        Step("forward", 1, 0, paired=True),
        Step("backward", 0, 0),
        Step("forward", 2, 0, paired=True),
        Step("backward", 1, 0),
        Step("backward", 2, 0),
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_in_a_pipeline_one_forward_more_comes_first(rank: int) -> None:
    """`get_pp_rank_microbatches`: num_warmup_microbatches + 1."""
    plain, combined = (steps(pipeline=2, pipeline_rank=rank, chunks=2, microbatches=4, combined=each) for each in (False, True))
    first = [[step.kind for step in order].index("backward") for order in (plain, combined)]
    assert first[1] == first[0] + 1
    assert sorted(map(repr, plain)) == sorted(repr(step).replace("paired=True", "paired=False") for step in combined)


def test_a_pair_keeps_what_one_microbatch_keeps_and_a_little() -> None:
    """What the forward keeps grows as what the backward has kept shrinks, a layer at a time."""
    [stage] = stage_models(job_of(COMBINED))
    [tree] = stage.trees
    alone = chunk_memory(tree)
    pair = overlapped_peak(tree, tree)
    assert max(alone.forward_peak.bytes, alone.backward_peak.bytes) <= pair.bytes
    assert pair.bytes < alone.retained + alone.forward_peak.bytes


def test_overlapped_microbatches_need_more_than_one_after_the_other() -> None:
    plain, combined = (
        rank_classes(job_of(f"{line} --global-batch-size 64"))[0].memory.peak_allocated_bytes for line in (MIXTURE, COMBINED)
    )
    assert combined > plain


@pytest.mark.parametrize(
    ("line", "option", "remedy"),
    [
        ("--fine-grained-activation-offloading", "--fine-grained-activation-offloading", "--offload-modules"),
        ("--cpu-offloading-num-layers 8", "--cpu-offloading-num-layers", "1 to 7"),
        ("--cpu-offloading-num-layers 2 --pipeline-model-parallel-size 2", "--cpu-offloading-num-layers", "size 1"),
        ("--cpu-offloading-num-layers 2 --recompute-granularity selective", "--cpu-offloading-num-layers", "leave"),
        ("--cpu-offloading-num-layers 2 --cuda-graph-impl local", "--cpu-offloading-num-layers", "leave"),
        (f"{OFFLOAD} core_attn --cpu-offloading-num-layers 2", "--cpu-offloading-num-layers", "keep one"),
        (f"{OFFLOAD} heads", "--offload-modules", "core_attn"),
        (f"{OFFLOAD} attn_proj", "--offload-modules", "add core_attn"),
        (f"{OFFLOAD} core_attn --transformer-impl local", "--fine-grained-activation-offloading", "transformer_engine"),
        ("--overlap-moe-expert-parallel-comm", "--overlap-moe-expert-parallel-comm", "--expert-model-parallel-size"),
        (f"{COMBINED} --pipeline-model-parallel-size 2", "--overlap-moe-expert-parallel-comm", "virtual"),
        (
            f"{COMBINED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "--overlap-moe-expert-parallel-comm",
            "selective",
        ),
        (COMBINED.replace("alltoall", "allgather"), "--overlap-moe-expert-parallel-comm", "alltoall"),
    ],
)
def test_what_megatron_refuses(line: str, option: str, remedy: str) -> None:
    with pytest.raises(InputError) as refused:
        job_of(line)
    assert option in str(refused.value)
    assert remedy in str(refused.value)
