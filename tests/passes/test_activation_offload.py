"""Activation offload and overlapped microbatches: memory on the GPU, and options that Megatron rejects."""

from __future__ import annotations

import pytest

from analyzer.errors import InputError
from analyzer.memory.block_memory import block_memory, explained
from analyzer.memory.chunk_memory import BACKWARD, FORWARD, chunk_memory
from analyzer.memory.overlapped.microbatches import GradientRules, overlapped_peak
from analyzer.memory.ranks import rank_classes, rank_classes_of_tensors
from analyzer.modules.kinds import ModuleKind
from analyzer.passes.stages import offload_trees_of, stage_models
from analyzer.program.schedule.pipeline import Step, steps
from tests.job_of import job_of

S, H, LAYERS = 2048, 1024, 8
DENSE = "--attention-backend flash --attention-dropout 0 --hidden-dropout 0"
OFFLOAD = f"{DENSE} --fine-grained-activation-offloading --offload-modules"
MOE = (
    f"{DENSE} --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --disable-bias-linear "
    "--expert-model-parallel-size 4"
)
COMBINED = f"{MOE} --overlap-moe-expert-parallel-comm"


def retained(line: str) -> int:
    return sum(chunk_memory(tree).retained for tree in stage_models(job_of(line))[0].trees)


def test_attention_is_offloaded_except_for_the_last_layer_and_small_statistics() -> None:
    """q, k, v and the output of [s, b, h] in bf16; the 4·a·s bytes of softmax statistics have fewer elements than 2**20."""
    offloaded = retained(DENSE) - retained(f"{OFFLOAD} core_attn attn_proj")
    assert offloaded == (LAYERS - 1) * 4 * 2 * S * H


def test_norms_fused_into_projections_are_not_offloaded() -> None:
    """`TransformerLayer`: attn_norm and mlp_norm are separate norms, which dense layers of Transformer Engine do not have."""
    assert retained(f"{OFFLOAD} attn_norm mlp_norm") == retained(DENSE)


def test_tensors_below_the_minimum_size_are_not_offloaded() -> None:
    assert retained(f"{OFFLOAD} core_attn --min-offloaded-tensor-size {2 * S * H}") == retained(DENSE)


def test_the_input_of_experts_is_offloaded() -> None:
    """With top-2 routing: rows of the local experts [2·s, h] in bf16."""
    offloaded = retained(MOE) - retained(f"{MOE} {OFFLOAD.removeprefix(DENSE)} expert_fc1")
    assert offloaded == (LAYERS - 1) * 2 * (2 * S) * H


def test_experts_that_run_sequentially_are_not_offloaded() -> None:
    """`SequentialMLP` opens no groups; `TEGroupedMLP` does."""
    sequential = MOE.replace("--moe-grouped-gemm", "")
    assert sequential != MOE
    assert retained(f"{sequential} {OFFLOAD.removeprefix(DENSE)} expert_fc1 moe_act") == retained(sequential)


def test_the_embedding_runs_beside_groups_of_the_next_microbatch() -> None:
    """`ChunkOffloadHandler.bulk_reload`: the groups of the first layer copy back those of the last layer for the next backward.

    These are q, k, v and the output of core attention, and the input of the projection, of which its group has a copy of its own.
    """
    job = job_of(f"{OFFLOAD} core_attn attn_proj --pipeline-model-parallel-size 2")
    stage = stage_models(job)[0]
    embedding = []
    for tree in offload_trees_of(job, stage.trees[0], stage.chunks[0]):
        module = next(module for _, module in tree.walk() if module.kind is ModuleKind.EMBEDDING)
        embedding.append(block_memory(module).backward[0].bytes)
    first, later = embedding
    assert later - first == 5 * 2 * S * H


def test_cached_fp8_weights_come_back_from_the_host_in_16_bit() -> None:
    """In 0.16 a weight of h² elements that is cached in FP8 is offloaded with its group; one stored in FP8 is not."""
    fp8 = f"{OFFLOAD} core_attn attn_proj --fp8-format e4m3 --fp8-recipe tensorwise --pipeline-model-parallel-size 2"

    def copied(line: str) -> int:
        stage = stage_models(job_of(line))[0]
        first, _ = offload_trees_of(job_of(line), stage.trees[0], stage.chunks[0])
        projection = next(module for _, module in first.walk() if module.kind is ModuleKind.ATTENTION_OUTPUT)
        return sum(tensor.bytes for tensor in projection.copied_back)

    cached = copied(f"{fp8} --min-offloaded-tensor-size {H * H}")
    assert cached - copied(f"{fp8} --min-offloaded-tensor-size {H * H + 1}") == 2 * H * H
    assert cached - copied(f"{fp8} --min-offloaded-tensor-size {H * H} --fp8-param-gather --use-distributed-optimizer") == 2 * H * H


def test_fully_offloaded_layers_leave_the_memory_of_the_others() -> None:
    """`DefaultOffloadSynchronizer`: with N of L layers offloaded, at most L - N layers are on the GPU."""
    plain, half = retained(DENSE), retained(f"{DENSE} --cpu-offloading-num-layers 4")
    none = retained(f"{DENSE} --num-layers 4")
    assert plain - half == plain - none > 0


def test_offloaded_tensors_are_on_the_gpu_while_their_module_runs() -> None:
    """The peak within the attention of one layer does not change.

    Without attn_proj, the backward of the projection frees the output that it kept, before core attention reads its copy.
    """
    plain, offloading = (rank_classes(job_of(line))[0].memory for line in (DENSE, f"{OFFLOAD} core_attn attn_proj"))
    assert offloading.peak_allocated_bytes < plain.peak_allocated_bytes
    peaks = []
    for line in (DENSE, f"{OFFLOAD} core_attn attn_proj", f"{OFFLOAD} core_attn"):
        job = job_of(line)
        tree = stage_models(job)[0].trees[0]
        first_layer = next(module for _, module in tree.walk() if module.kind is ModuleKind.LAYER)
        backward = block_memory(first_layer).backward
        peaks.append(max(each.bytes for each in backward if "core_attention" in explained(first_layer, each)[0]))
    assert peaks[0] == peaks[1] == peaks[2]


def test_without_a_pipeline_each_backward_overlaps_the_next_forward() -> None:
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
def test_a_pipeline_has_one_more_warmup_forward(rank: int) -> None:
    """`get_pp_rank_microbatches`: num_warmup_microbatches + 1."""
    plain, combined = (steps(pipeline=2, pipeline_rank=rank, chunks=2, microbatches=4, combined=each) for each in (False, True))
    first = [[step.kind for step in order].index("backward") for order in (plain, combined)]
    assert first[1] == first[0] + 1
    assert sorted(map(repr, plain)) == sorted(repr(step).replace("paired=True", "paired=False") for step in combined)


def test_overlapped_microbatches_need_little_more_than_one_microbatch() -> None:
    """Layer by layer, the forward saves tensors while the backward of the other microbatch frees its own."""
    job = job_of(COMBINED)
    [stage] = stage_models(job)
    [tree] = stage.trees
    single = chunk_memory(tree)
    pair = overlapped_peak(tree, tree, GradientRules.of(job))
    assert max(single.peak(FORWARD), single.peak(BACKWARD)) <= pair.bytes
    assert pair.bytes < single.retained + single.peak(FORWARD)


def test_overlapped_microbatches_need_more_than_sequential_ones() -> None:
    plain, combined = (
        rank_classes_of_tensors(job_of(f"{line} --global-batch-size 64"))[0].memory.peak_allocated_bytes for line in (MOE, COMBINED)
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
def test_options_that_megatron_rejects(line: str, option: str, remedy: str) -> None:
    with pytest.raises(InputError) as rejected:
        job_of(line)
    assert option in str(rejected.value)
    assert remedy in str(rejected.value)


def test_quantized_weights_of_offloaded_projections_are_refused_with_block_scales() -> None:
    """`general_gemm` of Transformer Engine: the weight [h, h] was copied back in 16 bit."""
    options = f"--bf16 --fp8-format e4m3 --fp8-recipe blockwise {OFFLOAD} core_attn attn_proj"
    with pytest.raises(InputError, match=r"--offload-modules: the backward of attn_proj fails .*1,048,576 elements"):
        job_of(options)
    assert job_of(f"{options} --min-offloaded-tensor-size {H * H + 1}")


def test_offloaded_input_of_experts_is_refused_with_the_delayed_recipe() -> None:
    """Transformer Engine: DelayedScaling recipe is not supported with save_original_input."""
    options = f"{MOE} {OFFLOAD.removeprefix(DENSE)} moe_act {{}} --bf16 --fp8-format hybrid --fp8-recipe {{}}"
    with pytest.raises(InputError, match="--offload-modules: expert_fc1 offloads the 16-bit input of the experts"):
        job_of(options.format("expert_fc1", "delayed"))
    assert job_of(options.format("expert_fc1", "tensorwise"))
    assert job_of(options.format("", "delayed"))


def test_offloaded_input_of_experts_is_saved_in_16_bit() -> None:
    """`TEGroupedMLP.__init__` sets `save_original_input`: in bf16 with FP8 as without, for the [2·s, h] rows of a microbatch."""
    line = f"{MOE} {OFFLOAD.removeprefix(DENSE)} expert_fc1 --bf16 --fp8-format e4m3 --fp8-recipe tensorwise"
    layer = next(each for _, each in stage_models(job_of(line))[0].trees[0].walk() if each.kind is ModuleKind.EXPERTS)
    assert [(tensor.dtype, tensor.shape[-1]) for tensor in layer.children[0].offloaded if tensor.name == "input"] == [("bf16", H)]
