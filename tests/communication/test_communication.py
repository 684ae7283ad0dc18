"""Communication in closed form, compared with a simulation of all ranks and steps, and with papers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.communication.table import communication_rows, totals
from analyzer.layout.groups import coordinates, group_of
from analyzer.layout.job_groups import gradient_statistics_group
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Collective, Module, Parameter
from analyzer.passes.stages import stage_models
from analyzer.program.schedule.pipeline import steps
from analyzer.results import CommunicationRow
from analyzer.specs import TrainingJob
from tests.communication_job import BATCH, HIDDEN, SEQUENCE, make_job, make_stages
from tests.examples import examples
from tests.job_of import BASE, job_of

MIB = 2**20
HIDDEN_STATES = SEQUENCE * BATCH * HIDDEN * 2


def rows_of(job: TrainingJob, **values: Any) -> list[CommunicationRow]:
    """Rows of the test model with these values of fields."""
    found = communication_rows(job, make_stages(job))
    return [row for row in found if all(getattr(row, field) == value for field, value in values.items())]


def simulate(job: TrainingJob) -> dict[str, tuple[int, int]]:
    """(calls, bytes) of tp and pp over all ranks, from the schedule of every rank."""
    parallel = job.parallel
    stages = make_stages(job)
    sent: dict[str, list[int]] = {"tp": [], "pp": []}
    for rank in range(parallel.world_size):
        pipeline_rank = coordinates(parallel, rank).pipeline
        stage = stages[pipeline_rank]
        pipeline = group_of(parallel, "pp", rank)
        assert pipeline[pipeline_rank] == rank
        for step in steps(
            pipeline=parallel.pipeline,
            pipeline_rank=pipeline_rank,
            chunks=parallel.chunks,
            microbatches=job.batch.microbatches,
        ):
            calls = [call for _, module in stage.trees[step.chunk].walk() for call in module.collectives]
            if parallel.tensor > 1:
                sent["tp"] += [call.message_bytes for call in calls if call.phase == step.kind]
            virtual_stage = step.chunk * parallel.pipeline + pipeline_rank
            edge = parallel.pipeline * parallel.chunks - 1 if step.kind == "forward" else 0
            if virtual_stage != edge:
                shard = parallel.context * (parallel.tensor if parallel.sequence_parallel else 1)
                sent["pp"].append(HIDDEN_STATES // shard)
    return {group: (len(sizes), sum(sizes)) for group, sizes in sent.items() if sizes}


@settings(max_examples=examples(60))
@given(
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 4]),
    virtual=st.sampled_from([None, 2]),
    context=st.sampled_from([1, 2]),
    data=st.sampled_from([1, 3]),
    microbatches=st.sampled_from([4, 8]),
    sequence_parallel=st.booleans(),
    order=st.sampled_from(["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]),
)
def test_the_closed_form_equals_the_sum_over_all_ranks(
    tensor: int,
    pipeline: int,
    virtual: int | None,
    context: int,
    data: int,
    microbatches: int,
    sequence_parallel: bool,
    order: str,
) -> None:
    job = make_job(
        world_size=tensor * pipeline * context * data,
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=virtual if pipeline > 1 else None,
        context=context,
        expert_tensor=tensor,
        sequence_parallel=sequence_parallel and tensor > 1,
        order=order,
        microbatches=microbatches,
    )
    rows = [row for row in communication_rows(job, make_stages(job)) if row.module.startswith(("decoder", "pipeline"))]
    found = totals(job, rows)
    closed = {group: (total.cluster_calls_per_iteration, total.cluster_bytes_per_iteration) for group, total in found.items()}
    assert closed == simulate(job)


def test_the_layout_of_the_2023_proposal() -> None:
    """2 nodes of 8, TP2 PP2 DP4, b 4, s 2048, h 4096: messages of 64 MiB, four tensor-parallel messages per layer."""
    job = make_job(
        world_size=16,
        tensor=2,
        pipeline=2,
        expert_tensor=2,
        num_layers=32,
        hidden_size=4096,
        micro_batch_size=4,
        global_batch_size=512,
        seq_length=2048,
        microbatches=32,
        megatron="2023",
    )
    layers = rows_of(job, group="tp", pipeline_rank=1, kind="all_reduce")
    assert {row.module for row in layers} == {
        "decoder.layers.self_attention.linear_qkv",
        "decoder.layers.self_attention.linear_proj",
        "decoder.layers.mlp.linear_fc1",
        "decoder.layers.mlp.linear_fc2",
    }
    assert {row.message_bytes for row in layers} == {64 * MIB}
    assert sum(row.calls_per_microbatch for row in layers) == 4 * 16
    assert sum(row.calls_per_iteration for row in layers) == 2048
    (sent,) = rows_of(job, group="pp", pipeline_rank=0)
    assert (sent.message_bytes, sent.calls_per_iteration, sent.peer, sent.batched) == (64 * MIB, 32, "next", True)
    cluster = totals(job, communication_rows(job, make_stages(job)))["pp"]
    # the proposal gives 2048 calls and 128 GiB: it counts four calls per microbatch and GPU, and a GPU sends one
    assert (cluster.cluster_calls_per_iteration, cluster.cluster_bytes_per_iteration) == (2048 // 4, 128 * 1024 * MIB // 4)


def test_interleaving_multiplies_the_messages_between_stages() -> None:
    """Narayanan et al. 2021 (arXiv:2104.04473): b·s·h elements between devices; v chunks send v times as many messages."""
    plain = make_job(world_size=4, pipeline=4)
    (forward,) = rows_of(plain, group="pp", pipeline_rank=1, phase="forward")
    assert forward.message_bytes == HIDDEN_STATES
    assert forward.calls_per_microbatch == 1
    interleaved = make_job(world_size=4, pipeline=4, virtual_pipeline=2, overlap_p2p=True)
    crossed = Counter[str]()
    for row in rows_of(interleaved, group="pp"):
        assert row.batched is False
        crossed[row.phase] += row.calls_per_microbatch
    assert crossed == {"forward": 2 * 4 - 1, "backward": 2 * 4 - 1}
    wrap = [(row.pipeline_rank, row.peer) for row in rows_of(interleaved, group="pp", calls_per_microbatch=1)]
    assert wrap == [(0, "previous"), (3, "next")]


def test_sequence_parallel_ranks_send_a_shard_each() -> None:
    """Korthikanti et al. 2022 (arXiv:2205.05198): messages between stages are split along the sequence."""
    job = make_job(world_size=8, tensor=4, expert_tensor=4, pipeline=2, sequence_parallel=True)
    (sent,) = rows_of(job, group="pp", pipeline_rank=0)
    assert sent.shape == (SEQUENCE // 4, BATCH, HIDDEN)
    assert sent.message_bytes * 4 == HIDDEN_STATES


def test_gradients_and_parameters_of_the_distributed_optimizer() -> None:
    """Reduce-scatter of 4 and all-gather of 2 bytes per parameter; without it, all-reduce of 4 bytes."""
    stage = make_stages(make_job(world_size=8))[0]
    numel = sum(parameter.numel for _, module in stage.trees[0].walk() for parameter in module.parameters)
    (reduced,) = rows_of(make_job(world_size=8), module="data_parallel.gradients")
    assert (reduced.kind, reduced.group, reduced.message_bytes, reduced.calls_per_microbatch) == (
        "all_reduce",
        "dp_cp",
        4 * numel,
        0,
    )
    sharded = make_job(world_size=8, distributed=True)
    (scattered,) = rows_of(sharded, module="data_parallel.gradients")
    (gathered,) = rows_of(sharded, module="data_parallel.parameters")
    assert (scattered.kind, gathered.kind) == ("reduce_scatter", "all_gather")
    assert (scattered.dtype, gathered.dtype) == ("fp32", "bf16")
    assert scattered.message_bytes == 2 * gathered.message_bytes
    assert 0 <= scattered.message_bytes - 4 * numel < 4 * (128 + 8 * 5 * 64)
    (exchanged,) = rows_of(
        make_job(world_size=8, distributed=True, reduce_scatter_with_fp32_accumulation=True),
        phase="gradient",
        module="data_parallel.gradients",
    )
    assert (exchanged.kind, exchanged.shape) == ("all_to_all", scattered.shape)


def test_each_bucket_is_a_call_and_their_sizes_sum_to_the_buffer() -> None:
    unsplit = make_job(world_size=8, distributed=True)
    bucketed = make_job(world_size=8, distributed=True, overlap_grad_reduce=True, ddp_bucket_size=4000)
    (one,) = rows_of(unsplit, module="data_parallel.gradients")
    many = rows_of(bucketed, module="data_parallel.gradients")
    assert one.calls_per_iteration == 1
    assert sum(row.calls_per_iteration for row in many) > 8
    assert 0 <= sum(row.bytes_per_iteration for row in many) - one.bytes_per_iteration < 4 * 128 * 30


def test_gradients_are_reduced_within_and_then_between_optimizer_instances() -> None:
    job = make_job(world_size=8, distributed=True, distributed_optimizer_instances=2)
    inside, across = rows_of(job, phase="gradient", dtype="fp32")[:2]
    assert (inside.group, inside.kind) == ("intra_dp_cp", "reduce_scatter")
    assert (across.group, across.kind) == ("inter_dist_opt", "all_reduce")
    assert across.shape[0] * 4 == inside.shape[0]
    assert [row.group for row in rows_of(job, kind="all_gather")] == ["intra_dp_cp"]


@pytest.mark.parametrize(
    ("changes", "calls"),
    [
        ({}, [1, 2]),
        ({"virtual_pipeline": 2}, [4, 4]),
        ({"aligned_grad_reduce": False}, [1, 1]),
        ({"overlap_grad_reduce": False}, [1, 1]),
        ({"distributed_optimizer_instances": 1}, [1, 1]),
        ({"megatron": "0.15.3"}, [1, 1]),
    ],
)
def test_stages_that_reduce_after_their_last_backward_do_so_twice(changes: dict[str, Any], calls: list[int]) -> None:
    """`finish_grad_sync` starts the reduction again if no gradient was registered and nothing waits for the first one."""
    options = {"overlap_grad_reduce": True, "distributed_optimizer_instances": 2} | changes
    job = make_job(world_size=8, pipeline=2, distributed=True, tied_embeddings=False, **options)
    rows = rows_of(job, module="data_parallel.gradients")
    assert [sum(row.calls_per_iteration for row in rows if row.pipeline_rank == rank) for rank in (0, 1)] == calls
    gathered = rows_of(job, module="data_parallel.parameters")
    assert sum(row.calls_per_iteration for row in gathered) == job.parallel.pipeline * job.parallel.chunks


@pytest.mark.parametrize(("tied", "stages"), [(True, [0, 3]), (False, [])])
def test_tied_embeddings_are_reduced_between_first_and_last_stage(tied: bool, stages: list[int]) -> None:
    job = make_job(world_size=8, tensor=2, expert_tensor=2, pipeline=4, tied_embeddings=tied, distributed=True)
    rows = rows_of(job, group="embd")
    assert [row.pipeline_rank for row in rows] == stages
    assert all(row.shape == (128 // 2, HIDDEN) and row.dtype == "fp32" and row.calls_per_iteration == 1 for row in rows)


def test_replicated_gradients_are_reduced_in_one_flat_message() -> None:
    job = make_job(world_size=2, tensor=2, expert_tensor=2)
    (stage,) = make_stages(job)
    norm = Parameter(name="weight", shape=(HIDDEN,), dtype="bf16", sequence_parallel=True)
    norms = tuple(Module(name=f"norm_{index}", parameters=(norm,)) for index in range(3))
    tree = Module(name="GPTModel", children=(*norms, *stage.trees[0].children))
    found = communication_rows(job, [StageModel(pipeline_rank=0, chunks=stage.chunks, trees=(tree,))])
    (flat,) = [row for row in found if row.module == "replicated_gradients"]
    assert (flat.group, flat.kind, flat.shape, flat.dtype, flat.calls_per_iteration) == (
        "tp",
        "all_reduce",
        (3 * HIDDEN,),
        "fp32",
        1,
    )


def test_counts_recompute_and_once_per_iteration_of_modules() -> None:
    job = make_job(world_size=2, tensor=2, expert_tensor=2, microbatches=8)
    (stage,) = make_stages(job)
    calls = (
        Collective(kind="all_reduce", group="tp", shape=(4,), dtype="fp32", phase="recompute", count=3),
        Collective(kind="all_reduce", group="tp", shape=(4,), dtype="fp32", phase="recompute"),
        Collective(kind="all_reduce", group="tp", shape=(5,), dtype="fp32", phase="gradient"),
        Collective(kind="all_gather", group="cp", shape=(5,), dtype="fp32", phase="forward"),
    )
    tree = Module(name="GPTModel", children=(Module(name="a.0", collectives=calls), Module(name="a.1", collectives=calls)))
    found = communication_rows(job, [StageModel(pipeline_rank=0, chunks=stage.chunks, trees=(tree,))])
    assert [
        (row.phase, row.calls_per_microbatch, row.calls_per_iteration, row.bytes_per_iteration)
        for row in found
        if row.module == "a"
    ] == [
        ("recompute", 8, 64, 64 * 16),
        ("gradient", 0, 2, 40),
    ]


@pytest.mark.parametrize(
    ("pipeline", "fields"),
    [
        (1, [{"tokens", "labels", "loss_mask", "attention_mask", "position_ids", "cu_seqlens_size", "cu_seqlens"}]),
        (
            4,
            [
                {"tokens", "attention_mask", "position_ids", "cu_seqlens_size", "cu_seqlens"},
                set(),
                set(),
                {"labels", "loss_mask", "attention_mask"},
            ],
        ),
    ],
)
def test_stages_receive_the_fields_of_the_batch_that_they_need(pipeline: int, fields: list[set[str]]) -> None:
    job = make_job(world_size=4 * pipeline, tensor=2, expert_tensor=2, pipeline=pipeline, context=2)
    for rank, expected in enumerate(fields):
        rows = rows_of(job, kind="broadcast", pipeline_rank=rank)
        assert {row.module.removeprefix("batch.") for row in rows} == expected
        assert all(row.calls_per_microbatch == 1 for row in rows)
        sizes = {row.module.removeprefix("batch."): row.message_bytes for row in rows}
        assert sizes.get("attention_mask", BATCH * SEQUENCE * SEQUENCE) == BATCH * SEQUENCE * SEQUENCE
        assert sizes.get("tokens", 8 * BATCH * SEQUENCE) == 8 * BATCH * SEQUENCE
    without = make_job(world_size=2, tensor=2, expert_tensor=2, attention_mask_in_dataloader=False)
    assert not rows_of(without, module="batch.attention_mask")


def scalars(job: TrainingJob, pipeline_rank: int) -> dict[str, str]:
    """Module and group of messages of at most 8 bytes that are sent once per iteration."""
    rows = rows_of(job, pipeline_rank=pipeline_rank)
    return {row.module: row.group for row in rows if row.message_bytes <= 8 and row.calls_per_microbatch == 0}


def test_scalars_of_a_step() -> None:
    plain = make_job(world_size=4, pipeline=2, tied_embeddings=False)
    always = {"optimizer.grad_norm": "mp", "train_step.update_successful": "mp", "train_step.grad_norm": "mp"}
    assert scalars(plain, 0) == always
    assert scalars(plain, 1) == {**always, "loss.average": "dp_cp"}
    logged = make_job(
        world_size=4,
        pipeline=2,
        tied_embeddings=False,
        parameters="fp16",
        distributed=True,
        clip_grad=0.0,
        log_num_zeros_in_grad=True,
        log_params_norm=True,
        calculate_per_token_loss=True,
    )
    assert scalars(logged, 0) == {
        **always,
        "optimizer.grad_norm": "intra_dist_opt",
        "optimizer.found_inf": "intra_dist_opt",
        "optimizer.num_zeros_in_grad": "intra_dist_opt",
        "train_step.num_zeros_in_grad": "mp",
        "params_norm.shards": "dp_cp",
        "params_norm": "mp",
        "loss.num_tokens": "dp_cp",
    }
    assert {row.group for row in rows_of(logged, module="loss.num_tokens")} == {"pp", "dp_cp"}


@pytest.mark.parametrize(("release", "group"), [("2023", "world"), ("0.12.3", "world"), ("0.13.0", "intra_dist_opt")])
def test_gradient_statistics_are_those_of_all_ranks_before_core_0_13(release: str, group: str) -> None:
    """`DistributedOptimizer.get_grad_stats_parallel_group` of 0.12.3 returns None, which is the default group."""
    assert gradient_statistics_group(make_job(megatron=release, distributed=True)) == group


@pytest.mark.parametrize(("distributed", "group"), [(False, "tp_ep_pp"), (True, "intra_dist_opt")])
def test_experts_have_a_separate_optimizer(distributed: bool, group: str) -> None:
    """`get_megatron_optimizer` chains two optimizers: both check for overflow; different groups have separate norms."""
    job = job_of(
        "--fp16 --pipeline-model-parallel-size 2 --num-experts 8 --disable-bias-linear --expert-model-parallel-size 2 "
        f"--log-num-zeros-in-grad{' --use-distributed-optimizer' * distributed}",
        base=BASE.replace("--bf16", ""),
    )
    rows = [
        row for row in communication_rows(job, stage_models(job)) if row.module.startswith("optimizer.") and not row.pipeline_rank
    ]
    found = {row.module: row.group for row in rows if row.message_bytes == 4}
    dense = "intra_dist_opt" if distributed else "mp"
    separate = {} if distributed else {"optimizer.experts.grad_norm": group, "optimizer.experts.num_zeros_in_grad": group}
    assert found == {
        "optimizer.found_inf": dense,
        "optimizer.experts.found_inf": group,
        "optimizer.grad_norm": dense,
        "optimizer.num_zeros_in_grad": dense,
        **separate,
    }


def test_differences_in_the_code_of_2023() -> None:
    job = make_job(megatron="2023", world_size=16, tensor=2, expert_tensor=2, pipeline=2, virtual_pipeline=2, tied_embeddings=False)
    for rank in (0, 1):
        text, sizes = (rows_of(job, module=f"batch.{name}", pipeline_rank=rank)[0] for name in ("text", "sizes"))
        assert (text.shape, text.dtype, text.calls_per_microbatch) == ((BATCH * (SEQUENCE + 1),), "int64", 2)
        assert (sizes.shape, sizes.calls_per_microbatch) == ((5,), 2)
    assert scalars(job, 0) == {"optimizer.grad_norm": "mp"}
    (loss,) = rows_of(job, module="loss.average")
    assert (loss.pipeline_rank, loss.group, loss.shape, loss.calls_per_microbatch) == (1, "dp", (1,), 1)
    unclipped = make_job(megatron="2023", world_size=2, tensor=2, expert_tensor=2, clip_grad=0.0)
    assert scalars(unclipped, 0) == {}


def test_a_single_rank_sends_nothing() -> None:
    job = make_job(calculate_per_token_loss=True, distributed=True, log_params_norm=True)
    assert communication_rows(job, make_stages(job)) == ()


def test_busiest_rank_and_cluster() -> None:
    """The stage with more layers is the busiest. The sum over the cluster counts every rank of each stage."""
    job = make_job(world_size=16, tensor=2, expert_tensor=2, pipeline=2, tied_embeddings=False)
    first, last = make_stages(job)
    rows = [row for row in communication_rows(job, [first, last]) if row.module.startswith("decoder")]
    fewer = [row for row in rows if row.pipeline_rank == 0 or "mlp" in row.module]
    total = totals(job, fewer)["tp"]
    assert total.calls_per_iteration == 4 * 4 * 8
    assert total.bytes_per_iteration == 4 * 4 * 8 * HIDDEN_STATES
    assert total.cluster_calls_per_iteration == 8 * (4 * 4 * 8 + 2 * 4 * 8)


def test_the_number_of_rows_does_not_depend_on_the_world_or_batch_size() -> None:
    small = make_job(world_size=8, tensor=2, expert_tensor=2, pipeline=2, distributed=True)
    large = make_job(world_size=2**17, tensor=2, expert_tensor=2, pipeline=2, distributed=True, microbatches=4096)
    assert len(rows_of(small)) == len(rows_of(large))
