"""CUDA graphs: memory inside and outside the graph pool, and captures that Megatron does not support."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.errors import InputError
from analyzer.memory.ranks import rank_classes, rank_classes_of_tensors
from analyzer.modules.tree import Module
from analyzer.passes.graph_scopes import without_tensors
from analyzer.results import RankMemory
from analyzer.specs import HardwareSpec, TrainingJob
from analyzer.specs.freezing import FreezeSpec
from analyzer.units import KIB, MIB
from tests.job_of import BLACKWELL, HOPPER, job_of

S, H, LAYERS = 2048, 1024, 8
HIDDEN = 2 * S * H
MASK = S * S
TE = "--cuda-graph-impl transformer_engine --te-rng-tracker --attention-backend flash --attention-dropout 0 --hidden-dropout 0"
FULL = "--cuda-graph-impl local --cuda-graph-scope full_iteration --no-check-for-nan-in-loss-and-grad"
MOE = "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --disable-bias-linear"
PADDED = f"{MOE} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"


def memory(job: TrainingJob, *, rank: int = 0) -> RankMemory:
    return rank_classes(job)[rank].memory


NOW = f"{TE} --cuda-graph-warmup-steps 0"
"""Graphs are captured before the first iteration, so its peak includes the static inputs."""


def static(job: TrainingJob, *, rank: int = 0) -> int:
    return next(part.bytes for part in memory(job, rank=rank).runtime_parts if part.name == "static inputs of CUDA graphs")


def test_without_pipeline_parallelism_each_layer_has_one_set_of_static_inputs() -> None:
    """`_get_cuda_graph_input_data`: without pipeline parallelism one microbatch is captured. `get_layer_static_inputs`: hidden
    states in bf16, and an attention mask of one byte per pair of positions."""
    assert static(job_of(f"{NOW} --global-batch-size 64")) == LAYERS * (HIDDEN + MASK)


def test_with_pipeline_parallelism_each_microbatch_in_flight_has_static_inputs() -> None:
    """With 1F1B on four stages, the first stage has four microbatches in flight and the last has one; each has two layers."""
    job = job_of(f"{NOW} --pipeline-model-parallel-size 4 --global-batch-size 64")
    assert static(job) == 4 * 2 * (HIDDEN + MASK)
    assert static(job, rank=3) == 1 * 2 * (HIDDEN + MASK)


def test_only_attention_has_an_attention_mask_as_static_input() -> None:
    assert static(job_of(f"{NOW} --cuda-graph-scope mlp")) == LAYERS * HIDDEN


def test_the_graph_pool_contains_the_layers_but_not_embedding_and_head() -> None:
    """Memory outside the pool during replays does not depend on the number of layers, except for static inputs.

    The simulated pool consists of segments, of which the last may have 20 MiB.
    """
    few, many = (memory(job_of(f"{NOW} --num-layers {layers}")) for layers in (8, 16))
    pool_growth = many.graph_pool_bytes - few.graph_pool_bytes
    eager_few, eager_many = (memory(job_of(f"--attention-backend flash --attention-dropout 0 --hidden-dropout 0 {more}"))
                             for more in ("--num-layers 8", "--num-layers 16"))  # fmt: skip
    activations = eager_many.activations_bytes - eager_few.activations_bytes
    assert pool_growth == pytest.approx(activations, abs=2 * MIB)
    outside = [each.peak_reserved_bytes - each.graph_pool_bytes - each.allocated_bytes for each in (few, many)]
    assert outside[0] == pytest.approx(outside[1], abs=20 * MIB)


def test_reserved_memory_includes_the_graph_pool() -> None:
    with_graphs = memory(job_of(TE))
    assert with_graphs.graph_pool_bytes > 0
    assert with_graphs.peak_reserved_bytes >= with_graphs.allocated_bytes + with_graphs.graph_pool_bytes


def test_warm_up_iterations_run_without_graphs() -> None:
    """By default three iterations run before the capture. Their peak is that of a run without graphs."""
    job = job_of("--attention-backend flash --attention-dropout 0 --hidden-dropout 0")
    eager = rank_classes_of_tensors(job)[0].memory
    graphs = memory(job_of(TE))
    assert graphs.peak_allocated_first_iteration_bytes == eager.peak_allocated_first_iteration_bytes
    assert graphs.peak_allocated_bytes >= eager.peak_allocated_bytes


def test_the_streams_of_a_capture_have_cublas_workspaces() -> None:
    """Unfused attention uses PyTorch's GEMMs: 2 streams, 2 threads, 32 MiB on Hopper (`getChosenWorkspaceSize`)."""
    parts = memory(job_of(NOW.replace("flash", "unfused"))).runtime_parts
    assert {part.name: part.bytes for part in parts}["cuBLAS workspaces of the capture streams"] == 4 * 4096 * 8 * KIB


def test_captured_routers_use_the_gemms_of_torch() -> None:
    """Until 0.17 the router's GEMM is PyTorch's with Transformer Engine 2.10 and later (`te_general_gemm`)."""
    line = f"{MOE} {NOW} --cuda-graph-scope attn moe_router"
    parts = {part.name: part.bytes for part in memory(job_of(line, release="0.16.1")).runtime_parts}
    assert parts["cuBLAS workspaces of the capture streams"] == 4 * 4096 * 8 * KIB


def test_a_captured_gate_of_shared_experts_uses_the_gemms_of_torch() -> None:
    """`SharedExpertMLP.forward` multiplies by a gate of `torch.nn.functional.linear`, wherever the router is computed."""
    line = f"{MOE} {NOW} --cuda-graph-scope attn moe_router --moe-shared-expert-intermediate-size 512"
    name = "cuBLAS workspaces of the capture streams"
    parts = [{part.name: part.bytes for part in memory(job_of(each, release="0.18.2")).runtime_parts} for each in
             (line, f"{line} --moe-shared-expert-gate")]  # fmt: skip
    assert [each.get(name, 0) for each in parts] == [0, 4 * 4096 * 8 * KIB]


def test_all_layers_share_one_static_output_gradient() -> None:
    """`_make_graphed_callables` with `_reuse_graph_input_output_buffers`, and the input gradient of the last captured backward."""
    parts = {part.name: part.bytes for part in memory(job_of(NOW)).runtime_parts}
    assert parts["static output gradients of CUDA graphs"] == HIDDEN
    assert parts["gradients of the last captured backward"] == HIDDEN


def test_frozen_weights_of_the_first_captured_layer_have_no_gradients() -> None:
    """The backward of a graph returns gradients that are not fused with the accumulation: here 8h² of them in bf16."""
    job = job_of(f"{NOW} --no-gradient-accumulation-fusion")
    frozen = replace(job, model=replace(job.model, frozen_parameters=FreezeSpec(pattern=r"linear_fc.\.weight")))
    name = "gradients of the last captured backward"
    trained, left = ({part.name: part.bytes for part in memory(each).runtime_parts}[name] for each in (job, frozen))
    assert trained - left == 2 * 2 * 4 * H**2


@pytest.mark.parametrize("part", ["attn", "mlp"])
def test_local_graphs_of_a_part_contain_whole_layers(part: str) -> None:
    """`TransformerLayer.create_mcore_cudagraph_manager` creates one manager for the layer."""
    whole, partly = (memory(job_of(f"--cuda-graph-impl local {scope}")) for scope in ("", f"--cuda-graph-scope {part}"))
    assert partly == whole


def test_local_graphs_keep_the_outputs_of_their_layers() -> None:
    """`_CudaGraphRunner.fwd_graph_outputs` references them."""
    parts = {part.name: part.bytes for part in memory(job_of("--cuda-graph-impl local")).runtime_parts}
    assert parts["outputs of captured layers"] == LAYERS * HIDDEN


def test_a_full_iteration_graph_has_static_batches() -> None:
    """`StaticBufferLoader`: three int64 fields, one fp32 field and the mask bool[b, 1, s, s] of each microbatch."""
    job = job_of(f"{FULL} --global-batch-size 64")
    parts = {part.name: part.bytes for part in memory(job).runtime_parts}
    assert parts["static batches of CUDA graphs"] == job.batch.microbatches * (28 * S + MASK)


def test_a_full_iteration_graph_has_no_static_inputs_of_layers() -> None:
    names = [part.name for part in memory(job_of(FULL)).runtime_parts]
    assert names
    assert "static inputs of CUDA graphs" not in names


@pytest.mark.parametrize(
    ("line", "release"),
    [
        ("--external-cuda-graph --te-rng-tracker", "0.14.0"),
        ("--external-cuda-graph --te-rng-tracker --cuda-graph-scope attn", "0.15.3"),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules attn", "0.18.2"),
        ("--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad", "0.19.0"),
        (f"{MOE} --cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router moe_preprocess", "0.16.1"),
        (f"{PADDED} --cuda-graph-impl transformer_engine --cuda-graph-scope attn moe", "0.16.1"),
    ],
)
def test_the_options_of_every_release_are_supported(line: str, release: str) -> None:
    assert memory(job_of(line, release=release)).graph_pool_bytes > 0


@pytest.mark.parametrize(
    ("line", "option", "remedy"),
    [
        ("--cuda-graph-impl transformer_engine --cuda-graph-scope full_iteration", "--cuda-graph-impl", "local"),
        ("--cuda-graph-impl transformer_engine --cuda-graph-scope moe", "--cuda-graph-scope", "leave moe"),
        (f"{MOE} --cuda-graph-impl transformer_engine --cuda-graph-scope moe", "--cuda-graph-scope", "capacity"),
        (f"{MOE} --cuda-graph-impl transformer_engine --cuda-graph-scope mlp", "--cuda-graph-scope", "leave mlp"),
        (f"{MOE} --cuda-graph-impl transformer_engine --cuda-graph-scope moe_preprocess", "--cuda-graph-scope", "moe_router"),
        (f"{MOE} --cuda-graph-impl transformer_engine", "--cuda-graph-impl", "attn moe_router"),
        ("--cuda-graph-impl transformer_engine --cuda-graph-scope heads", "--cuda-graph-scope", "attn"),
        ("--enable-cuda-graph --external-cuda-graph", "--enable-cuda-graph", "keep one"),
        (
            "--cuda-graph-impl transformer_engine --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "--cuda-graph-impl",
            "selective",
        ),
    ],
)
def test_captures_that_megatron_rejects_are_errors(line: str, option: str, remedy: str) -> None:
    with pytest.raises(InputError) as error:
        job_of(line)
    assert option in str(error.value)
    assert remedy in str(error.value)


def test_expandable_segments_need_nccl_graph_register_0() -> None:
    """`TECudaGraphHelper.__init__` asserts this. Megatron's own graphs require it before Blackwell."""
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for line, gpu in ((TE, HOPPER), (TE, BLACKWELL), ("--cuda-graph-impl local", HOPPER)):
        with pytest.raises(InputError, match="NCCL_GRAPH_REGISTER=0"):
            job_of(line, environ=expandable, gpu=gpu)
        job_of(line, environ={**expandable, "NCCL_GRAPH_REGISTER": "0"}, gpu=gpu)
    job_of("--cuda-graph-impl local", environ=expandable, gpu=BLACKWELL)


def test_removing_the_tensors_of_a_tree_does_not_change_its_parameters() -> None:
    tree: Module = rank_classes(job_of(""))[0].trees[0]
    bare = without_tensors(tree)
    assert bare.retained_bytes == 0
    assert [module.parameters for _, module in bare.walk()] == [module.parameters for _, module in tree.walk()]


OVERLAPPED = (
    "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --kv-channels 128 "
    "--group-query-attention --num-query-groups 4 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 8 "
    "--global-batch-size 512 --tokenizer-type NullTokenizer --vocab-size 151936 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear --qk-layernorm --num-experts 128 "
    "--moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm --expert-model-parallel-size 8 --bf16 --fp8-format e4m3 "
    "--fp8-recipe mxfp8 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--overlap-moe-expert-parallel-comm --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep "
    "--moe-router-force-load-balancing --grad-reduce-in-bf16 --cross-entropy-loss-fusion --cross-entropy-fusion-impl te "
    "--fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag"
)
"""Qwen3-30B-A3B as NVIDIA trained it on 8 GB300 GPUs (Megatron-Bridge 26.06, performance summary)."""
GB300 = HardwareSpec(name="GB300-288GB", compute_capability=(10, 3))
CAPACITY = 276 * 2**30
"""Less than the capacity of a GB300."""


@pytest.mark.slow
def test_a_published_launch_with_overlapped_microbatches_in_one_graph_fits() -> None:
    """In core 0.18, whose `validate_args` refuses the cross entropy of Transformer Engine."""
    base = OVERLAPPED.replace("--cross-entropy-fusion-impl te", "--no-check-for-nan-in-loss-and-grad")
    graphs = memory(job_of("--cuda-graph-impl full_iteration --te-rng-tracker", base=base, gpu=GB300, release="0.18.2"))
    assert graphs.graph_pool_bytes > 0
    assert graphs.device_bytes < CAPACITY
    assert memory(job_of("", base=base, gpu=GB300, release="0.18.2")).device_bytes < CAPACITY


@pytest.mark.parametrize("scope", ["attn", "moe_router", "attn moe_router"])
def test_parts_of_overlapped_microbatches_can_be_captured(scope: str) -> None:
    line = f"{MOE} --overlap-moe-expert-parallel-comm --expert-model-parallel-size 4 --global-batch-size 64 --swiglu "
    partly = memory(job_of(f"{line} {TE} --cuda-graph-scope {scope}", gpu=BLACKWELL))
    eager = memory(job_of(f"{line} --attention-backend flash --attention-dropout 0 --hidden-dropout 0", gpu=BLACKWELL))
    assert 0 < partly.graph_pool_bytes < eager.peak_allocated_bytes
