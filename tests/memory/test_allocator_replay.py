"""Allocator blocks in a replay: allocations and frees of modules, and fragmentation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.memory.allocator.caching_allocator import SMALL_SIZE
from analyzer.memory.allocator.iterations import ReplayedIteration
from analyzer.memory.allocator.model_states import ModelStates
from analyzer.memory.allocator.replay import MOST_BYTES, fragmentation
from analyzer.memory.allocator.replicas import FIRST
from analyzer.memory.allocator.script import NONE, TEMPORARY, Action, script
from analyzer.memory.allocator.settings import AllocatorSettings
from analyzer.memory.order import iteration_of
from analyzer.memory.ranks import rank_classes, rank_classes_of_tensors
from analyzer.memory.verdict import highest
from analyzer.memory.workspaces import workspaces
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Tensor
from analyzer.passes.stages import stage_models
from analyzer.predict import predict
from analyzer.specs import TrainingJob
from analyzer.states.buffers.gradient_buffers import Buffer, shard_numel, shard_pieces
from analyzer.states.buffers.of_stage import stage_buffers
from analyzer.states.buffers.parameter_order import creation_order
from analyzer.units import MIB
from tests.job_of import BASE, HOPPER, job_of

RECOMPUTE = (
    "",
    "--recompute-granularity selective",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
)


def large(module: Module) -> int:
    """Return the bytes of the large tensors saved for backward."""
    own = sum(tensor.bytes for tensor in module.saved if tensor.bytes // tensor.pieces > SMALL_SIZE)
    return own if module.recomputed else own + sum(map(large, module.children))


@given(recompute=st.sampled_from(RECOMPUTE), moe=st.booleans(), t=st.sampled_from([1, 2]), exchange=st.sampled_from(["p2p", "a2a"]))
def test_every_allocated_block_is_freed_once(recompute: str, moe: bool, t: int, exchange: str) -> None:
    line = f"{recompute} --tensor-model-parallel-size {t} --sequence-parallel"
    line += f" --context-parallel-size 4 --cp-comm-type {exchange} --micro-batch-size 8"
    line += " --num-experts 4 --disable-bias-linear" if moe else ""
    [tree] = stage_models(job_of(line))[0].trees
    written = script(tree)
    held: dict[int, int] = {}

    def run(actions: tuple[Action, ...]) -> None:
        for size, slot, temporaries in actions:
            if size:
                assert slot not in held
                assert abs(size) > SMALL_SIZE
                held[slot] = abs(size)
            elif slot == TEMPORARY:
                assert temporaries.sizes or temporaries.aside
                assert min((*temporaries.sizes, *temporaries.aside)) > SMALL_SIZE
            else:
                del held[slot]

    run(written.forward)
    assert sum(held.values()) == large(tree)
    saved = dict(held)
    run(tuple((0, slot, NONE) for slot in written.saved))
    assert not held
    held.update(saved)
    run(written.backward)
    run(written.leftover)
    assert not held


def aside(line: str) -> tuple[list[int], list[int]]:
    """Return the requests on the second stream, in KiB, in the forward and the backward of one layer."""
    [tree] = stage_models(job_of(f"--num-layers 1 --micro-batch-size 8 --context-parallel-size 4 {line}"))[0].trees
    written = script(tree)
    forward, backward = (
        [size // 1024 for each, _, temporaries in actions for size in ((-each,) if each < 0 else temporaries.aside)]
        for actions in (written.forward, written.backward)
    )
    return forward, backward


def test_tensors_restored_after_an_all_to_all_are_on_the_second_stream() -> None:
    """`flash_attn_a2a_communicate` (context_parallel.py, TE 2.11) restores queries, keys, values and the output on `cp_stream`.

    Each has 512 tokens of this rank, 8 sequences and hidden size 1024 in bf16.
    """
    each = 512 * 8 * 1024 * 2 // 1024
    assert aside("--cp-comm-type a2a") == ([each] * 4, [each])


def test_every_second_step_of_a_ring_is_on_the_second_stream() -> None:
    """Steps 1 and 3 of four: their outputs, and the keys and values received while step 1 runs (`AttnFuncWithCPAndKVP2P`)."""
    each = 512 * 8 * 1024 * 2 // 1024
    forward, backward = aside("--cp-comm-type p2p")
    assert forward == [2 * each, 2 * each]
    assert not backward


def test_workspaces_are_allocated_before_the_modules_that_need_them() -> None:
    """The backward starts with the output layer, whose dummy weight gradient is allocated while all activations exist."""
    [tree] = stage_models(job_of("--num-layers 2"))[0].trees
    written = script(tree)
    kinds = [kind for _, kind in written.backward_places]
    used = [ModuleKind.OUTPUT_LAYER, ModuleKind.FC2, ModuleKind.FC1, ModuleKind.QKV]
    assert [kind for kind in kinds if kind in used] == used
    for places, actions in ((written.forward_places, written.forward), (written.backward_places, written.backward)):
        assert [index for index, _ in places] == sorted(index for index, _ in places)
        assert places[-1][0] <= len(actions)


def sharded(data: int, overlap: bool) -> tuple[list[int], tuple[tuple[Buffer, ...], ...]]:
    """With a distributed optimizer over `data` ranks: elements of each parameter in the order of creation, and the buffers."""
    line = "--use-distributed-optimizer" + (" --overlap-grad-reduce --overlap-param-gather" if overlap else "")
    job = job_of(line, gpus=data)
    [stage] = stage_models(job)
    return [parameter.numel for parameter in creation_order(stage.trees[0])], stage_buffers(job, stage)


@given(data=st.sampled_from([2, 4, 8]), overlap=st.booleans())
def test_every_parameter_is_owned_once(data: int, overlap: bool) -> None:
    """The parts of all ranks add up to the parameters. The first rank begins with the parameter that is created last.

    `_ParamAndGradBuffer` lays out `params[::-1]` (core/distributed/param_and_grad_buffer.py, 0.16.1).
    """
    parameters, buffers_of_chunks = sharded(data, overlap)
    for buffers in buffers_of_chunks:
        for buffer in buffers:
            assert sum(sum(shard_pieces(buffer, data, member=member)) for member in range(data)) == sum(parameters)
            assert shard_pieces(buffer, 1)[0] == parameters[-1]


@given(data=st.sampled_from([2, 4, 8]), overlap=st.booleans())
def test_shard_pieces_are_the_parameters_in_the_shard_without_padding(data: int, overlap: bool) -> None:
    """The first rank owns the beginning of every bucket. Its pieces are the parameters there, without the padding between them."""
    parameters, buffers_of_chunks = sharded(data, overlap)
    for buffers in buffers_of_chunks:
        for buffer in buffers:
            pieces = shard_pieces(buffer, data)
            assert sum(shard_pieces(buffer, 1)) == sum(parameters)
            assert 0 < sum(pieces) <= shard_numel(buffer, data)
            assert shard_numel(buffer, data) - sum(pieces) < 64 * (len(pieces) + 1) + 128 * data


def one_tensor(bytes: int, job: TrainingJob) -> tuple[int, int]:
    """Return the unsplit and unused bytes of a rank whose only activation has the given size."""
    [stage] = stage_models(job)
    tree = Module(name="gpt_model", saved=(Tensor(name="x", shape=(bytes,), dtype="uint8"),))
    order = iteration_of(job, 0, 1, stage.chunks).order
    states, iteration = ModelStates(job, stage, stage_buffers(job, stage), FIRST), ReplayedIteration((script(tree),), order)
    found = fragmentation(states, (iteration, None, iteration), workspaces(job, ()), settings=AllocatorSettings())
    return found.unsplit, found.unused


def test_a_slightly_larger_block_is_not_split() -> None:
    """Fragmentation of the fp32 master weights and moments, following `get_allocation_size` and `should_split`.

    Master weights and moments have 11.25 MiB for the word embedding [5760, 512], 4 MiB for fc1 and fc2, and 3 MiB for qkv. After
    the master weights are allocated, segments of 20 MiB have 16 and 1.875 MiB left. The first moment uses 11.25 of the 16 MiB. The
    second gets a segment of 12 MiB that is not split: 0.75 MiB of fragmentation. The others use the remaining memory and a new
    segment of 20 MiB, where 3, 4, 4 and 4 MiB leave 5 MiB for the last 4 MiB: 1 MiB of fragmentation. With a free block of 24 MiB,
    the second moment and the next three fit into it and leave 1.75 MiB, without fragmentation.
    """
    job = job_of(
        "--num-layers 1 --hidden-size 512 --num-attention-heads 8 --vocab-size 5759 --position-embedding-type none",
        base=BASE.replace("--vocab-size 32000", ""),
    )
    assert job.model.padded_vocab_size == 5760
    without_block, _ = one_tensor(1, job)
    assert one_tensor(23 * MIB, job)[0] == without_block - 7 * MIB // 4


def test_fragmentation_is_counted_between_iterations_and_at_the_peak() -> None:
    job = job_of("--use-distributed-optimizer --num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024")
    tensors, [found] = rank_classes_of_tensors(job), rank_classes(job)
    memory, unfragmented = found.memory, tensors[0].memory
    unsplit = memory.allocated_bytes - unfragmented.allocated_bytes
    assert unsplit >= 0
    assert memory.runtime_bytes - unfragmented.runtime_bytes == unsplit
    assert memory.peak_reserved_bytes >= memory.peak_allocated_bytes
    parts = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes + memory.runtime_bytes
    assert parts + memory.activations_bytes + memory.transient_bytes == memory.peak_allocated_bytes


def test_unsupported_allocator_settings_disable_the_replay() -> None:
    job = job_of("", environ={"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"})
    ranks = rank_classes(job)
    assert ranks == rank_classes_of_tensors(job)
    assert not ranks[0].memory.replayed


def test_expandable_segments_in_the_environment_reduce_reserved_memory() -> None:
    """Expandable segments have no unused memory at their ends."""
    default = rank_classes(job_of("--micro-batch-size 4"))[0].memory
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    expandable = rank_classes(job_of("--micro-batch-size 4", environ=environ))[0].memory
    assert expandable.replayed
    assert expandable.peak_reserved_bytes < default.peak_reserved_bytes


@pytest.mark.parametrize("pipeline", [1, 4])
def test_the_highest_memory_ranks_are_replayed_first_if_there_are_too_many(pipeline: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(f"--pipeline-model-parallel-size {pipeline} --global-batch-size 32")
    monkeypatch.setattr("analyzer.memory.ranks.MAX_REQUESTS", 1_500)
    ranks = rank_classes(job)
    tensors = rank_classes_of_tensors(job)
    replayed = [rank.memory.replayed for rank in ranks]
    order = sorted(range(pipeline), key=lambda stage: -tensors[stage].memory.device_bytes)
    assert [replayed[stage] for stage in order] == sorted(replayed, reverse=True)


LLAMA_70B = (
    "--num-layers 12 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --disable-bias-linear --swiglu --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --pipeline-model-parallel-size 2 --use-distributed-optimizer --global-batch-size 16"
)


def test_segments_are_freed_where_they_would_exceed_the_memory_of_the_gpu() -> None:
    """A GPU with 200 MiB less than needed: the segment of the word embedding, which moved to the buffer of weights, is freed."""
    memory = highest(rank_classes(job_of(LLAMA_70B))).memory
    smaller = replace(HOPPER, capacity_bytes=memory.device_bytes - 200 * MIB)
    report = predict(job_of(LLAMA_70B, gpu=smaller))
    found = highest(report.ranks)
    assert found.memory.released_bytes >= 200 * MIB
    assert found.memory.peak_reserved_bytes == memory.peak_reserved_bytes - found.memory.released_bytes
    assert found.memory.peak_allocated_bytes <= found.memory.peak_reserved_bytes
    assert (report.verdict.fits, report.verdict.state) == (True, "tight")
    assert any("unused segments" in each for each in report.assumptions)


def test_a_peak_above_the_memory_of_the_gpu_is_not_limited() -> None:
    memory = rank_classes(job_of(""))[0].memory
    [found] = rank_classes(job_of("", gpu=replace(HOPPER, capacity_bytes=memory.peak_allocated_bytes)))
    assert found.memory == memory


SMALL = BASE.replace("1024", "512").replace("2048", "1024").replace("--num-attention-heads 16", "--num-attention-heads 8")
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 512 --global-batch-size 32"
)
FIRST_IS_HIGHEST = (
    "--pipeline-model-parallel-size 4 --context-parallel-size 2 --multi-latent-attention --kv-lora-rank 64 --qk-head-dim 64 "
    "--qk-pos-emb-head-dim 32 --v-head-dim 64 --q-lora-rank 192 --qk-layernorm --swiglu --disable-bias-linear "
    f"--normalization RMSNorm --no-bias-gelu-fusion --cross-entropy-loss-fusion --grad-reduce-in-bf16 {EXPERTS} "
    "--moe-grouped-gemm --moe-z-loss-coeff 1e-3"
)


def test_the_first_iteration_is_part_of_the_run() -> None:
    """With their blocks, the tensors of the first iteration can need more than those at the peak of all tensors."""
    for each in rank_classes(job_of(FIRST_IS_HIGHEST, base=SMALL)):
        memory = each.memory
        assert memory.replayed
        assert memory.peak_allocated_first_iteration_bytes <= memory.peak_allocated_bytes
        static = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes + memory.runtime_bytes
        assert memory.peak_allocated_bytes == static + memory.activations_bytes + memory.transient_bytes
        assert memory.transient_bytes == sum(part.bytes for part in memory.transient_parts)


def test_more_memory_than_the_addresses_of_a_pool_is_estimated() -> None:
    """No GPU has it: the sizes of such a launch are a mistake, and the report says how much it would need."""
    line = "--hidden-size 10000000 --num-attention-heads 8 --seq-length 1000000 --max-position-embeddings 1000000"
    memory = rank_classes(job_of(line))[0].memory
    assert memory.peak_allocated_bytes > MOST_BYTES
    assert not memory.replayed
