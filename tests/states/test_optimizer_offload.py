"""Optimizer CPU offload: states that stay on the GPU, and host memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.errors import InputError
from analyzer.memory.ranks import rank_classes
from analyzer.passes.stages import stage_models
from analyzer.predict import predict
from analyzer.specs import TrainingJob
from analyzer.states.buffers.of_stage import stage_buffers
from analyzer.states.cpu_offload import HostBytes, Piece, host_bytes, place
from analyzer.states.record import StartPeak, States
from tests.job_of import job_of, states_of

OFFLOAD = "--optimizer-cpu-offload --use-precision-aware-optimizer --use-distributed-optimizer"


def host_bytes_of(job: TrainingJob) -> HostBytes:
    stage = stage_models(job)[0]
    return host_bytes(job, stage, stage_buffers(job, stage))


def states_and_job(line: str, *, gpus: int = 8) -> tuple[States, TrainingJob]:
    job = job_of(line, gpus=gpus)
    return states_of(job, stage_models(job)[0]), job


def test_copies_of_the_first_optimizer_stay_allocated_until_garbage_collection() -> None:
    """`train` of megatron/training/training.py collects garbage with --manual-gc. Hooks of the optimizer reference it."""
    line = f"{OFFLOAD} --optimizer-offload-fraction 0"
    uncollected, collected = (rank_classes(job_of(f"{line} {more}"))[0].memory for more in ("", "--manual-gc"))
    assert uncollected.runtime_bytes - collected.runtime_bytes == 4 * numel(job_of(line))
    for name in ("peak_allocated_bytes", "peak_allocated_first_iteration_bytes", "allocated_bytes"):
        assert getattr(uncollected, name) - getattr(collected, name) == 4 * numel(job_of(line))
    assert uncollected.garbage_bytes == 4 * numel(job_of(line))
    assert collected.garbage_bytes == 0


def test_the_lower_bound_is_without_copies_that_python_may_free_before_the_peak() -> None:
    line = f"{OFFLOAD} --optimizer-offload-fraction 0"
    uncollected, collected = (predict(job_of(f"{line} {more}")).ranks[0].memory for more in ("", "--manual-gc"))
    for least, most in (uncollected.device_range_bytes, collected.device_range_bytes):
        assert least < most
    lower, least = (memory.device_range_bytes[0] for memory in (uncollected, collected))
    assert lower == pytest.approx(least, rel=0.01)
    assert uncollected.device_range_bytes[1] > collected.device_range_bytes[1]


def numel(job: TrainingJob) -> int:
    return sum(p.numel for tree in stage_models(job)[0].trees for _, module in tree.walk() for p in module.parameters)


def test_all_optimizer_states_are_offloaded_by_default() -> None:
    """--optimizer-offload-fraction is 1 by default: only weights and gradients stay on the GPU."""
    found, job = states_and_job(OFFLOAD)
    without, _ = states_and_job("--use-distributed-optimizer")
    assert (found.master_weights, found.moments, found.gradient_copies) == (0, 0, 0)
    assert (found.parameters, found.gradients) == (without.parameters, without.gradients)
    (rank,) = rank_classes(job)
    assert rank.memory.optimizer_bytes == 0


@pytest.mark.parametrize(("gradients", "bytes_each"), [("", 12), ("--grad-reduce-in-bf16", 16)])
def test_states_that_are_not_offloaded_have_the_usual_size(gradients: str, bytes_each: int) -> None:
    """fp32 weight and two fp32 moments; `_set_sub_optimizer_grads` stores an fp32 copy of 16-bit gradients."""
    found, job = states_and_job(f"{OFFLOAD} --optimizer-offload-fraction 0 {gradients}", gpus=1)
    assert found.master_weights + found.moments + found.permanent_gradient_copies == bytes_each * numel(job)


def test_dtypes_of_the_precision_aware_optimizer_are_ignored() -> None:
    """`optimizer_defaults` of `_get_megatron_optimizer_based_on_param_groups` does not include them."""
    line = f"{OFFLOAD} --optimizer-offload-fraction 0.5"
    assert states_and_job(f"{line} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16")[0] == states_and_job(line)[0]


def test_the_optimizer_is_first_created_for_the_unsharded_model() -> None:
    """`DistributedOptimizer.__init__` creates the hybrid optimizer again for shards, while the unsharded fp32 copies exist.

    It copies each parameter before it converts the copy to fp32 (`_get_sub_optimizer_param_groups`).
    """
    found, job = states_and_job(f"{OFFLOAD} --optimizer-offload-fraction 0")
    unsharded = found.parameters + found.gradients + 4 * numel(job)
    assert unsharded + found.master_weights <= found.at_start <= unsharded + 1.5 * found.master_weights
    assert found.start_peak is StartPeak.OPTIMIZER


pieces = st.builds(Piece, numel=st.integers(1, 100), dtype=st.sampled_from(["bf16", "fp32"]), decays=st.booleans())


@given(listed=st.lists(pieces), fraction=st.floats(0, 1))
def test_pieces_are_offloaded_until_the_fraction_is_reached(listed: list[Piece], fraction: float) -> None:
    placed = place(listed, fraction)
    assert sorted(map(repr, (*placed.host, *placed.gpu))) == sorted(map(repr, listed))
    offloaded, total = sum(piece.numel for piece in placed.host), sum(piece.numel for piece in listed)
    assert offloaded >= fraction * total
    if placed.host:
        assert offloaded - placed.host[-1].numel < fraction * total


@given(data=st.sampled_from([1, 2, 4, 8]), fraction=st.sampled_from([0.0, 0.3, 1.0]), overlap=st.booleans())
def test_no_gpu_has_more_than_its_share(data: int, fraction: float, overlap: bool) -> None:
    """The GPU has at most the rest of the fraction of a shard with its padding."""
    more = "--overlap-grad-reduce --ddp-bucket-size 5000000" if overlap else ""
    found, job = states_and_job(f"{OFFLOAD} --optimizer-offload-fraction {fraction} {more}", gpus=data)
    assert found.master_weights <= (1 - fraction) * found.gradients / data + 512 * 1000
    if fraction == 0:
        assert found.master_weights == pytest.approx(4 * numel(job) / data, rel=0.02)


def test_the_host_needs_sixteen_bytes_per_parameter() -> None:
    """fp32 weight, gradient and two moments; pinned allocations are powers of two."""
    job = job_of(OFFLOAD, gpus=1)
    need = host_bytes_of(job)
    assert need.pageable == 12 * numel(job)
    assert 4 * numel(job) <= need.pinned < 8 * numel(job)
    assert need.during_creation == 4 * numel(job)
    unpinned = job_of(f"{OFFLOAD} --no-pin-cpu-grads", gpus=1)
    need = host_bytes_of(unpinned)
    assert (need.pageable, need.pinned) == (16 * numel(unpinned), 0)


def test_the_report_gives_the_host_memory() -> None:
    (note,) = (each for each in predict(job_of(OFFLOAD)).assumptions if each.startswith("--optimizer-cpu-offload"))
    assert "per node" in note
    assert "pinned" in note


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("--optimizer-cpu-offload", "--optimizer-cpu-offload"),
        ("--optimizer-cpu-offload --use-precision-aware-optimizer", "--use-precision-aware-optimizer"),
        (f"{OFFLOAD} --optimizer-offload-fraction 1.5", "--optimizer-offload-fraction"),
        (f"{OFFLOAD} --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather", "--optimizer-cpu-offload"),
    ],
)
def test_options_that_megatron_rejects(line: str, option: str) -> None:
    with pytest.raises(InputError) as error:
        job_of(line)
    assert error.value.option == option


@pytest.mark.parametrize("grouped", ["", "--moe-grouped-gemm"])
def test_each_expert_is_a_separate_parameter(grouped: str) -> None:
    """Eight experts on one rank: with everything on the host, no fp32 weights and moments are on the GPU, whatever the padding."""
    line = f"{OFFLOAD} --num-experts 8 --disable-bias-linear --expert-model-parallel-size 2 {grouped}"
    states = states_of(job_of(line))
    assert (states.master_weights, states.moments) == (0, 0)
    half = states_of(job_of(f"{line} --optimizer-offload-fraction 0.5"))
    everything = states_of(job_of(f"{line} --optimizer-offload-fraction 0"))
    assert 0 < half.master_weights < everything.master_weights
    assert everything.moments == pytest.approx(2 * everything.master_weights, rel=1e-3)
