"""The allocator requests of rare features: their states, their streams, and what outlives a pass.

Sizes are worked out by hand from the options. What Megatron-LM's own code requests is compared in the tests of the shadow engine.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from analyzer.memory.allocator.caching_allocator import CachingAllocator
from analyzer.memory.allocator.fsdp_states import GATHER_STREAM, REDUCE_STREAM
from analyzer.memory.allocator.iterations import RELOAD_STREAM, ReplayedIteration
from analyzer.memory.allocator.of_rank import phases_of, states_of
from analyzer.memory.allocator.replay import fragmentation
from analyzer.memory.allocator.script import STREAM_BITS, Action, ChunkScript, script
from analyzer.memory.allocator.settings import AllocatorSettings
from analyzer.memory.device_overhead import FRAGMENTATION, RARE_FRAGMENTATION, REPLAYED, SIMULATED, reserved_range
from analyzer.memory.ranks import rank_classes, rank_classes_of_tensors
from analyzer.memory.stages import StageAnalysis, analysed_stages
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import SIDE_STREAM, Module, Tensor
from analyzer.specs import TrainingJob
from analyzer.units import MIB
from tests.job_of import job_of

FLASH = "--micro-batch-size 8 --attention-backend flash"
"""Without an attention mask."""
EXPERTS = (
    "--micro-batch-size 8 --num-experts 8 --moe-router-topk 2 --disable-bias-linear --expert-model-parallel-size 4 "
    "--moe-token-dispatcher-type alltoall --moe-grouped-gemm"
)
MEGATRON_FSDP = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor "
    "--use-distributed-optimizer --no-gradient-accumulation-fusion"
)
TORCH_FSDP = "--use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights"
OFFLOAD = "--use-distributed-optimizer --use-precision-aware-optimizer --optimizer-cpu-offload"
GRAPHS = "--te-rng-tracker --cuda-graph-impl transformer_engine --cuda-graph-scope attn"
FEATURES = {
    "Muon": "--optimizer muon",
    "layer-wise Muon": "--optimizer dist_muon",
    "CPU offload": f"{OFFLOAD} --optimizer-offload-fraction 0.5",
    "Megatron-FSDP": MEGATRON_FSDP,
    "FSDP2": TORCH_FSDP,
    "fine-grained offloading": "--fine-grained-activation-offloading --offload-modules core_attn attn_proj",
    "layer offloading": "--cpu-offloading-num-layers 2",
    "deferral": "--defer-embedding-wgrad-compute --pipeline-model-parallel-size 2 --global-batch-size 256",
    "TE graphs": GRAPHS,
    "local graphs": "--te-rng-tracker --cuda-graph-impl local",
    "overlap": f"{EXPERTS} --overlap-moe-expert-parallel-comm --global-batch-size 128",
}


class Recorded(CachingAllocator):
    """The requests, as (stream, bytes) of each allocation, and the bytes that are allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.requested: list[tuple[int, int]] = []
        self.held: dict[int, int] = {}
        self._combines = False  # every request is a call of `malloc`

    def malloc(self, bytes: int, *, stream: int = 0) -> int:
        address = super().malloc(bytes, stream=stream)
        self.requested.append((stream, bytes))
        self.held[address] = bytes
        return address

    def free(self, address: int) -> None:
        del self.held[address]
        super().free(address)

    def free_all(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            self.free(address)


def on_streams(actions: tuple[Action, ...]) -> set[int]:
    """Return the streams of the allocations, except the first one."""
    found = {SIDE_STREAM + (-size >> STREAM_BITS) for size, _, _ in actions if size < 0}
    return found | ({SIDE_STREAM} if any(temporaries.aside for _, _, temporaries in actions) else set())


def first_stage(job: TrainingJob) -> StageAnalysis:
    return analysed_stages(job)[0]


def iterations(job: TrainingJob, stage: int = 0) -> list[ReplayedIteration]:
    """Return the iterations of a stage."""
    return [phase for phase in phases_of(job, analysed_stages(job)[stage]) if phase is not None]


@pytest.mark.parametrize("feature", FEATURES)
def test_reserved_memory_is_simulated_with_every_feature(feature: str) -> None:
    """Allocated memory is that of the tensors. Reserved memory is not below it."""
    job = job_of(f"{FLASH} {FEATURES[feature]}")
    found, tensors = rank_classes(job), rank_classes_of_tensors(job)
    assert len(found) == len(tensors)
    for each, of_tensors in zip(found, tensors, strict=True):
        assert each.memory.replayed
        assert not of_tensors.memory.replayed
        assert each.memory.peak_allocated_bytes == of_tensors.memory.peak_allocated_bytes
        assert each.memory.allocated_bytes == of_tensors.memory.allocated_bytes
        assert each.memory.peak_reserved_bytes >= each.memory.peak_allocated_bytes


@pytest.mark.parametrize("feature", FEATURES)
def test_every_tensor_of_a_complete_iteration_is_freed(feature: str) -> None:
    """Only the states, and what is left of the last backward, remain."""
    job = job_of(f"{FLASH} {FEATURES[feature]}")
    for iteration in iterations(job):
        for written in iteration.scripts:
            held: set[int] = set()
            for actions in (written.forward, written.backward, written.leftover):
                for size, slot, _ in actions:
                    if size:
                        assert slot not in held
                        held.add(slot)
                    elif slot >= 0:
                        held.remove(slot)
            assert not held


def test_what_a_checkpoint_leaves_is_freed_by_the_next_forward() -> None:
    """A checkpoint around a layer whose attribute references a tensor of 3 MiB after its backward."""
    left = Tensor(name="held", shape=(3 * MIB,), dtype="uint8")
    layer = Module(name="layer", kind=ModuleKind.LAYER, outlives=(left,), children=(Module(name="x"),))
    checkpoint = Module(name="checkpoint", kind=ModuleKind.CHECKPOINT, recomputed=True, outlives=(left,), children=(layer,))
    written = script(checkpoint)
    assert [size for size, _, _ in written.backward if size] == [3 * MIB]
    assert len(written.leftover) == 1


def created(job: TrainingJob) -> Recorded:
    """Return the allocator after the creation of the states."""
    stage, allocator = first_stage(job), Recorded()
    states_of(job, stage.model, stage.buffers, (0, 0)).create(allocator)
    return allocator


def test_muon_creates_all_momenta_before_the_first_update() -> None:
    """8 layers of h = 1024: fc1 and fc2 have 4,194,304 elements, qkv 3,145,728, the projection 1,048,576; all in fp32.

    The position table [2048, 1024] is a matrix like these.
    """
    job = job_of("--optimizer muon --global-batch-size 16")
    stage, allocator = first_stage(job), Recorded()
    states = states_of(job, stage.model, stage.buffers, (0, 0))
    states.create(allocator)
    before = len(allocator.requested)
    states.update(allocator, first=True)
    momenta = [size // MIB for _, size in allocator.requested[before : before + 33]]
    assert sorted(momenta) == [4] * 8 + [8] + [12] * 8 + [16] * 16
    held = sum(allocator.held.values())
    states.update(allocator, first=False)
    assert sum(allocator.held.values()) == held


def test_the_layer_wise_optimizer_receives_all_parameters_at_once() -> None:
    """The parameters in bf16, sent by each of eight replicas, beside a flat copy of those of this one."""
    job = job_of("--optimizer dist_muon --global-batch-size 16")
    stage, allocator = first_stage(job), Recorded()
    states = states_of(job, stage.model, stage.buffers, (0, 0))
    states.create(allocator)
    states.update(allocator, first=True)
    held = sum(allocator.held.values())
    allocator.peak_allocated_bytes = 0
    states.update(allocator, first=False)
    assert allocator.peak_allocated_bytes >= held + 2 * stage.parameters * 0.98
    assert sum(allocator.held.values()) == held


def test_states_on_the_host_are_not_requested() -> None:
    """Weights in bf16 and gradients in fp32 are on the GPU; master weights and moments are not."""
    job = job_of(f"{OFFLOAD} --global-batch-size 16")
    stage, allocator = first_stage(job), Recorded()
    states = states_of(job, stage.model, stage.buffers, (0, 0))
    states.create(allocator)
    states.update(allocator, first=True)
    assert sum(allocator.held.values()) == pytest.approx(6 * stage.parameters, rel=0.01)


def test_megatron_fsdp_shards_bucket_by_bucket() -> None:
    """The unsharded model in bf16, then an eighth of it with gradients and master weights in fp32."""
    allocator = created(job_of(f"{MEGATRON_FSDP} --global-batch-size 16"))
    parameters = first_stage(job_of("")).parameters
    assert sum(allocator.held.values()) == pytest.approx((2 + 4 + 4) / 8 * parameters, rel=0.02)
    assert allocator.peak_allocated_bytes > 2 * parameters
    assert {stream for stream, _ in allocator.requested} == {0, REDUCE_STREAM}


def test_fsdp2_shards_unit_by_unit() -> None:
    """An eighth of the model: weights and gradients in bf16, master weights in fp32. Gradients are on another stream."""
    job = job_of(f"{TORCH_FSDP} --hidden-size 4096 --global-batch-size 16")
    allocator = created(job)
    assert sum(allocator.held.values()) == pytest.approx((2 + 2 + 4) / 8 * first_stage(job).parameters, rel=0.02)
    assert {stream for stream, _ in allocator.requested} == {0, GATHER_STREAM, REDUCE_STREAM}


@pytest.mark.parametrize(
    ("line", "streams"),
    [
        ("", set()),
        (MEGATRON_FSDP, {GATHER_STREAM}),
        (TORCH_FSDP, {GATHER_STREAM}),
        ("--fine-grained-activation-offloading --offload-modules core_attn", {RELOAD_STREAM}),
        (f"{EXPERTS} --overlap-moe-expert-parallel-comm --global-batch-size 128", {SIDE_STREAM}),
    ],
)
def test_streams(line: str, streams: set[int]) -> None:
    """Gathered parameters, tensors copied back from the host, and exchanged tokens are not on the stream of the computation."""
    written: list[ChunkScript] = [each for iteration in iterations(job_of(f"{FLASH} {line}")) for each in iteration.scripts]
    assert set().union(*(on_streams(each.forward) | on_streams(each.backward) for each in written)) == streams


def test_gathered_buckets_are_separate_requests() -> None:
    """A layer of h = 1024 has 12,596,224 elements with biases and norms: 24 MiB in bf16, padded to eight ranks.

    The embedding has 32,128 words and 2,048 positions: 67 MiB.
    """
    [written] = iterations(job_of(f"{FLASH} {MEGATRON_FSDP}"))[1].scripts
    gathered = [-size & (1 << STREAM_BITS) - 1 for size, _, _ in written.forward if size < 0]
    assert {round(size / MIB) for size in gathered} <= {24, 67}


def test_operands_of_deferred_gradients_are_kept_until_the_end_of_the_iteration() -> None:
    """The gradients of the logits [2048, 8, 32128] of all microbatches but the last are allocated after the first backward."""
    job = job_of(f"{FLASH} {FEATURES['deferral']}")
    last = analysed_stages(job)[-1]
    [first, later] = iterations(job, stage=1)
    deferral = later.deferral
    assert deferral is not None
    assert deferral.operands == (2048 * 8 * 32128 * 2, 2048 * 8 * 1024 * 2)
    assert sum(step.kind == "backward" for step in first.order) == 2
    plain = ReplayedIteration(later.scripts, later.order)
    states = states_of(job, last.model, last.buffers, (0, 0))
    kept, without = (
        fragmentation(states, (each, None, each), last.workspaces, settings=AllocatorSettings()).reserved for each in (later, plain)
    )
    assert kept - without >= (deferral.calls - 1) * deferral.operands[0]


def test_captures_have_a_pool_of_their_own() -> None:
    """All tensors of captured modules are on one other stream, and stay reserved while graphs are replayed."""
    job = job_of(f"{FLASH} {GRAPHS}")
    eager, later, capture, replay = iterations(job)
    assert capture.captured
    [captured], [outside] = capture.scripts, replay.scripts
    assert not any(size > 0 for size, _, _ in (*captured.forward, *captured.backward))
    assert not on_streams(outside.forward)
    assert outside.slots < later.scripts[0].slots == eager.scripts[0].slots


def test_local_graphs_replay_on_another_stream() -> None:
    """Blocks that were freed before the capture are not used again."""
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(64 * MIB))
    allocator.switch_stream()
    allocator.malloc(64 * MIB)
    assert allocator.reserved_bytes == 128 * MIB
    capture = iterations(job_of(f"{FLASH} {FEATURES['local graphs']}"))[1]
    assert capture.switches


def test_an_overlapped_step_runs_all_requests_of_both_microbatches() -> None:
    """In the order of nodes instead of one after the other."""
    from analyzer.memory.allocator.overlapped_script import BACKWARD, FORWARD

    for iteration in iterations(job_of(f"{FLASH} {FEATURES['overlap']}")):
        [written] = iteration.scripts
        for parts in iteration.overlapped.values():
            sides = [which for which, _, _ in parts if which in (FORWARD, BACKWARD)]
            assert sides != sorted(sides)
            for which, actions in ((FORWARD, written.forward), (BACKWARD, written.backward)):
                ran = [slot for side, some, _ in parts if side == which for size, slot, _ in some if size]
                listed = {slot for size, slot, _ in actions if size and slot >= 0}
                assert len(set(ran)) == len(ran)
                assert listed <= set(ran)


def test_the_range_is_wider_where_no_measured_run_confirms_the_replay() -> None:
    bounds = {
        (replayed, rare): reserved_range(peak=100 * 2**30, reserved=110 * 2**30, replayed=replayed, rare=rare)
        for replayed in (True, False)
        for rare in (True, False)
    }
    for rare, (below, above) in ((False, REPLAYED), (True, SIMULATED)):
        least, most = bounds[True, rare]
        assert least == pytest.approx(110 * 2**30 * (1 - below), abs=2 * MIB)
        assert most == pytest.approx(110 * 2**30 * (1 + above), abs=2 * MIB)
    assert bounds[False, True][1] == pytest.approx(100 * 2**30 * (1 + RARE_FRAGMENTATION), abs=2 * MIB)
    assert bounds[False, False][1] == pytest.approx(max(110, 100 * (1 + FRAGMENTATION)) * 2**30, abs=2 * MIB)
