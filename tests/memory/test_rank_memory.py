"""Memory of ranks: model states compared with Megatron's table, activations in flight, workspaces, and sums of parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.api import analyze
from analyzer.memory.ranks import rank_classes
from analyzer.memory.workspaces import cublas_workspace_bytes, te_workspace_bytes, workspaces
from analyzer.passes.stages import stage_models
from analyzer.results import PeakEvent
from analyzer.specs import HardwareSpec, OptimizerSpec, PrecisionSpec, RecomputeSpec, SoftwareSpec, TrainingJob
from analyzer.units import MIB
from tests.job_of import AMPERE, BLACKWELL, HOPPER, states_of
from tests.small_job import job


def on_ranks(base: TrainingJob, *, world: int, pipeline: int = 1, microbatches: int = 1, **parallel: Any) -> TrainingJob:
    """Return the job on `world` ranks with the given number of microbatches per data-parallel rank."""
    batch = replace(base.batch, microbatches=microbatches, first_microbatches=microbatches)
    sizes = replace(base.parallel, world_size=world, gpus_per_node=world, pipeline=pipeline, **parallel)
    return replace(base, batch=batch, parallel=sizes)


@pytest.mark.parametrize(
    ("parameters", "gradients", "unsharded", "fixed", "sharded"),
    [("fp16", "fp16", 20, 4, 16), ("bf16", "fp32", 18, 6, 12), ("fp32", "fp32", 16, 8, 8)],
)
@pytest.mark.parametrize("data", [1, 8])
def test_model_states_have_the_bytes_per_parameter_of_megatrons_table(
    parameters: Any, gradients: Any, unsharded: int, fixed: int, sharded: int, data: int
) -> None:
    """Source: Megatron-LM docs, "Distributed Optimizer", table of bytes per parameter; d is the data-parallel size."""
    base = replace(on_ranks(job(), world=data), precision=PrecisionSpec(parameters=parameters, gradients=gradients))
    for distributed, expected in ((False, float(unsharded)), (True, fixed + sharded / data)):
        configured = replace(base, optimizer=OptimizerSpec(distributed=distributed))
        stage = stage_models(configured)[0]
        numel = sum(p.numel for tree in stage.trees for _, module in tree.walk() for p in module.parameters)
        found = states_of(configured, stage)
        assert (found.steady + found.gradient_copies) / numel == pytest.approx(expected, rel=1e-4)


def test_sgd_has_only_momentum() -> None:
    for momentum, expected in ((0.9, 4), (0.0, 0)):
        training_job = replace(job(), optimizer=OptimizerSpec(name="sgd", sgd_momentum=momentum))
        stage = stage_models(training_job)[0]
        assert states_of(training_job, stage).moments == expected * states_of(training_job, stage).master_weights // 4


def test_the_precision_aware_optimizer_uses_the_given_dtypes() -> None:
    """TE FusedAdam: moments in bf16, and of each fp32 master weight only the low 16 bits, next to its bf16 parameter."""
    training_job = replace(
        job(), optimizer=OptimizerSpec(distributed=True, precision_aware=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    )
    found = states_of(training_job, stage_models(training_job)[0])
    assert found.master_weights == 0
    assert found.moments * 4 == found.gradients * (2 + 2 + 2)


@given(pipeline=st.sampled_from([1, 2, 4]), microbatches=st.integers(1, 12))
def test_stages_have_the_microbatches_in_flight_of_1f1b(pipeline: int, microbatches: int) -> None:
    """Narayanan et al. 2021, section 2.2: pipeline rank r has min(p - r, m) of m microbatches in flight."""
    ranks = rank_classes(on_ranks(job(num_layers=4), world=pipeline, pipeline=pipeline, microbatches=microbatches))
    for each in ranks:
        assert each.memory.microbatches_in_flight == (min(pipeline - each.pipeline_rank, microbatches),)
        assert each.memory.activations_bytes <= min(pipeline - each.pipeline_rank, microbatches) * each.trees[0].retained_bytes


def test_more_microbatches_do_not_increase_the_peak_of_a_full_pipeline() -> None:
    few, many = (rank_classes(on_ranks(job(), world=4, pipeline=4, microbatches=m)) for m in (8, 5000))
    assert [each.memory.peak_allocated_bytes for each in few] == [each.memory.peak_allocated_bytes for each in many]


@given(
    t=st.sampled_from([1, 2]),
    pipeline=st.sampled_from([1, 2, 4]),
    virtual=st.sampled_from([None, 2]),
    distributed=st.booleans(),
    fusion=st.booleans(),
    recompute=st.sampled_from([RecomputeSpec(), RecomputeSpec(granularity="full", method="uniform", num_layers=1)]),
)
def test_memory_parts_add_up(
    t: int, pipeline: int, virtual: int | None, distributed: bool, fusion: bool, recompute: RecomputeSpec
) -> None:
    training_job = on_ranks(
        job(t=t, num_layers=8),
        world=2 * t * pipeline,
        pipeline=pipeline,
        microbatches=8,
        virtual_pipeline=virtual if pipeline > 1 else None,
    )
    training_job = replace(
        training_job,
        optimizer=OptimizerSpec(distributed=distributed),
        recompute=recompute,
        flags=replace(training_job.flags, gradient_accumulation_fusion=fusion),
    )
    for each in rank_classes(training_job):
        memory = each.memory
        static = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes + memory.runtime_bytes
        received = sum(not chunk.pre_process for chunk in each.chunks)
        assert memory.allocated_bytes == static + received * 2 * (2 * 1024 * 2 * 1024)  # last inputs and their gradients, [s, b, h]
        assert memory.peak_allocated_bytes == static + memory.activations_bytes + memory.transient_bytes
        assert memory.runtime_bytes == sum(part.bytes for part in memory.runtime_parts)
        assert memory.transient_bytes == sum(part.bytes for part in memory.transient_parts)
        assert memory.peak_allocated_first_iteration_bytes <= memory.peak_allocated_bytes
        assert memory.peak_allocated_bytes <= memory.peak_reserved_bytes <= memory.device_bytes


def test_the_peak_of_the_first_iteration_has_no_moments() -> None:
    [only] = rank_classes(job())
    stage = stage_models(job())[0]
    moments = states_of(job(), stage).moments
    # with one microbatch the peak is at the loss, before the workspaces of the autograd thread are allocated
    late = [part.bytes for part in only.memory.runtime_parts if "autograd" in part.name or "dummy" in part.name]
    assert only.memory.peak_at.startswith("forward of microbatch 0, cross_entropy")
    assert only.memory.peak_allocated_bytes - only.memory.peak_allocated_first_iteration_bytes == moments + sum(late)


@pytest.mark.parametrize(
    ("config", "gpu", "torch", "expected"),
    [
        (":4096:8", AMPERE, "2.10", 32 * MIB),
        (":16:8", HOPPER, "2.10", 128 * 1024),
        (":4096:2:16:8", HOPPER, "2.10", 8519680),
        (None, AMPERE, "2.12", 8519680),
        (None, HOPPER, "2.1", 32 * MIB),
        (":4096:8", BLACKWELL, "2.11", 32 * MIB),
        (None, BLACKWELL, "2.11.0a0+eb65b36914.nv26.02", 8519680),  # NGC container 26.02: before pull request 175344
        (None, BLACKWELL, "2.12.0a0+0291f960b6.nv26.04", 32 * MIB),  # NGC container 26.04: with it
        (None, HardwareSpec(name="MI300X-192GB", compute_capability=(9, 4)), "2.8", 76 * MIB),
    ],
)
def test_cublas_workspaces_have_the_size_of_pytorch(config: str | None, gpu: HardwareSpec, torch: str, expected: int) -> None:
    """Source: PyTorch's CublasHandlePool.cpp. `:SIZE:COUNT` in KiB; default :4096:2:16:8, on Hopper and Blackwell :4096:8."""
    training_job = replace(
        job(),
        hardware=gpu,
        software=SoftwareSpec(te="2.11", torch=torch),
        flags=replace(job().flags, cublas_workspace_config=config),
    )
    assert cublas_workspace_bytes(training_job) == expected


def test_transformer_engine_workspaces_have_the_size_of_te() -> None:
    """Source: get_cublas_workspace_size_bytes in transformer_engine/pytorch/cpp_extensions/gemm.py, TE 2.11."""
    sizes = [te_workspace_bytes(replace(job(), hardware=HardwareSpec(compute_capability=(major, 0)))) for major in (8, 9, 10)]
    assert sizes == [4 * MIB, 32 * MIB + 1024, 32 * MIB + 1024]


def test_there_is_one_dummy_weight_gradient_per_shape() -> None:
    """Source: get_dummy_wgrad in transformer_engine/pytorch/module/base.py, which caches by shape and dtype."""
    training_job = job(h=1024)
    names = {
        item.name: item.bytes for item in workspaces(training_job, stage_models(training_job)[0].trees) if "dummy" in item.name
    }
    shapes = [(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096), (51200, 1024)]
    assert names == {f"dummy weight gradient {list(shape)}": 2 * shape[0] * shape[1] for shape in shapes}
    unfused = replace(training_job, flags=replace(training_job.flags, gradient_accumulation_fusion=False))
    assert not [item for item in workspaces(unfused, stage_models(unfused)[0].trees) if "dummy" in item.name]


def test_the_copies_of_gradients_are_not_larger_than_the_memory_that_is_allocated() -> None:
    """Their size is not a multiple of an allocator block here, and no part of the peak in the optimizer step is negative."""
    line = (
        "--nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --fp16 "
        "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 32 --train-iters 10 --lr 1e-4 --swiglu "
        "--tokenizer-type NullTokenizer --vocab-size 9999 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "
        "--sequence-parallel --multi-latent-attention --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 "
        "--position-embedding-type rope --disable-bias-linear --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1"
    )
    memory = analyze(line, gpu="H100-80GB", environ={}).ranks[0].memory
    assert memory.peak_event is PeakEvent.OPTIMIZER_STEP
    assert all(part.bytes > 0 for part in memory.transient_parts)
