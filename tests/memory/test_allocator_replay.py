"""The allocator's blocks: what modules request and give back, and what stays larger than it was asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.buffers.gradient_buffers import shard_numel, shard_pieces
from analyzer.buffers.of_stage import stage_buffers
from analyzer.buffers.parameter_order import creation_order
from analyzer.memory.allocator.caching_allocator import SMALL_SIZE, AllocatorSettings
from analyzer.memory.allocator.replay import fragmentation
from analyzer.memory.allocator.script import TEMPORARY, Action, script
from analyzer.memory.iteration import order_of
from analyzer.memory.ranks import rank_classes, rank_classes_of_tensors
from analyzer.memory.workspaces import workspaces
from analyzer.modules.tree import Module, Tensor
from analyzer.passes.stages import stage_models
from analyzer.specs import TrainingJob
from analyzer.units import MIB
from tests.job_of import BASE, job_of

RECOMPUTE = (
    "",
    "--recompute-granularity selective",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
)


def large(module: Module) -> int:
    """Bytes of the large tensors that wait for the backward."""
    own = sum(tensor.bytes for tensor in module.saved if tensor.bytes // tensor.pieces > SMALL_SIZE)
    return own if module.recomputed else own + sum(map(large, module.children))


@given(recompute=st.sampled_from(RECOMPUTE), moe=st.booleans(), t=st.sampled_from([1, 2]))
def test_every_block_is_freed_once(recompute: str, moe: bool, t: int) -> None:
    line = f"{recompute} --tensor-model-parallel-size {t} --sequence-parallel"
    line += " --num-experts 4 --disable-bias-linear" if moe else ""
    [tree] = stage_models(job_of(line))[0].trees
    written = script(tree)
    held: dict[int, int] = {}

    def run(actions: tuple[Action, ...]) -> None:
        for size, slot, sizes in actions:
            if size:
                assert slot not in held
                assert size > SMALL_SIZE
                held[slot] = size
            elif slot == TEMPORARY:
                assert sizes
                assert min(sizes) > SMALL_SIZE
            else:
                del held[slot]

    run(written.forward)
    assert sum(held.values()) == large(tree)
    waiting = dict(held)
    run(written.release)
    assert not held
    held.update(waiting)
    run(written.backward)
    assert not held


@given(data=st.sampled_from([2, 4, 8]), overlap=st.booleans())
def test_pieces_of_a_shard_are_its_parameters(data: int, overlap: bool) -> None:
    """The first rank owns the front of every bucket; without the padding between parameters it is what they have there."""
    line = "--use-distributed-optimizer" + (" --overlap-grad-reduce --overlap-param-gather" if overlap else "")
    job = job_of(line, gpus=data)
    [stage] = stage_models(job)
    everything = sum(parameter.numel for parameter in creation_order(stage.trees[0]))
    for buffers in stage_buffers(job, stage):
        for buffer in buffers:
            pieces = shard_pieces(buffer, data)
            assert sum(shard_pieces(buffer, 1)) == everything
            assert 0 < sum(pieces) <= shard_numel(buffer, data)
            assert shard_numel(buffer, data) - sum(pieces) < 64 * (len(pieces) + 1) + 128 * data


def one_tensor(bytes: int, job: TrainingJob) -> tuple[int, int]:
    """Unsplit and unused bytes of a rank whose only activation has so many bytes."""
    [stage] = stage_models(job)
    tree = Module(name="gpt_model", saved=(Tensor(name="x", shape=(bytes,), dtype="uint8"),))
    order = order_of(job, 0, 1)
    buffers, scripts, kept = stage_buffers(job, stage), [script(tree)], workspaces(job, ())
    found = fragmentation(job, stage, buffers, scripts, kept, orders=(order, order), settings=AllocatorSettings())
    return found.unsplit, found.unused


def test_a_moment_takes_the_whole_of_a_block_that_is_little_larger() -> None:
    """The word embedding [5760, 512] has a master and moments of 11.25 MiB, fc1 and fc2 of 4 MiB, qkv of 3 MiB.

    By `get_allocation_size` and `should_split`: when masters are made, segments of 20 MiB have 16 and 1.875 MiB left. The
    first moment takes 11.25 of 16, the second a segment of 12 MiB, whole: 0.75 MiB too much. The others go to what is left
    and to a new segment of 20 MiB, where 3, 4, 4 and 4 leave 5 MiB to the last of 4: 1 MiB too much. A free block of 24 MiB
    takes the second and the next three, and leaves 1.75 MiB, and nothing is too large.
    """
    job = job_of(
        "--num-layers 1 --hidden-size 512 --num-attention-heads 8 --vocab-size 5759 --position-embedding-type none",
        base=BASE.replace("--vocab-size 32000", ""),
    )
    assert job.model.padded_vocab_size == 5760
    alone, _ = one_tensor(1, job)
    assert one_tensor(23 * MIB, job)[0] == alone - 7 * MIB // 4


def test_blocks_are_counted_between_iterations_and_at_the_peak() -> None:
    job = job_of("--use-distributed-optimizer --num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024")
    plain, [found] = rank_classes_of_tensors(job), rank_classes(job)
    memory, bare = found.memory, plain[0].memory
    unsplit = memory.allocated_bytes - bare.allocated_bytes
    assert unsplit >= 0
    assert memory.runtime_bytes - bare.runtime_bytes == unsplit
    assert memory.peak_reserved_bytes >= memory.peak_allocated_bytes
    parts = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes + memory.runtime_bytes
    assert parts + memory.activations_bytes + memory.transient_bytes == memory.peak_allocated_bytes


def test_settings_that_are_not_simulated_leave_the_estimate() -> None:
    job = job_of("", environ={"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"})
    ranks = rank_classes(job)
    assert ranks == rank_classes_of_tensors(job)
    assert not ranks[0].memory.replayed


def test_the_environment_of_the_launch_decides() -> None:
    """With segments that grow there are no holes at their ends, so fewer bytes are reserved."""
    plain = rank_classes(job_of("--micro-batch-size 4"))[0].memory
    growing = rank_classes(job_of("--micro-batch-size 4", environ={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}))[
        0
    ].memory
    assert growing.replayed
    assert growing.peak_reserved_bytes < plain.peak_reserved_bytes


@pytest.mark.parametrize("pipeline", [1, 4])
def test_the_highest_ranks_are_replayed_first_where_there_are_too_many(pipeline: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(f"--pipeline-model-parallel-size {pipeline} --global-batch-size 32")
    monkeypatch.setattr("analyzer.memory.ranks.MOST_REQUESTS", 1_500)
    ranks = rank_classes(job)
    bare = rank_classes_of_tensors(job)
    replayed = [rank.memory.replayed for rank in ranks]
    order = sorted(range(pipeline), key=lambda stage: -bare[stage].memory.device_bytes)
    assert [replayed[stage] for stage in order] == sorted(replayed, reverse=True)
