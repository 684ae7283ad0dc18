"""Layout rules: compared with layouts that Megatron 0.16.1 refused (tests/data/truth/groups.json), and cases from its source."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from analyzer.errors import InputError
from analyzer.specs import BatchSpec, ParallelSpec, PipelineSpec
from analyzer.specs.rules import check_job, first_violation, violations
from analyzer.specs.rules.features import schedule_violations
from analyzer.specs.rules.sizes import parallel_violations
from analyzer.specs.rules.stages import stage_violations
from tests.data_files import truth
from tests.job_of import BLACKWELL, job_of
from tests.parallel_spec import spec, spec_of_argv


def refused_options(parallel: ParallelSpec, *, megatron: str = "0.16.1") -> list[str]:
    return [dest for found in parallel_violations(parallel, megatron=megatron) for dest in found.options]


@pytest.mark.parametrize("index", range(5))
def test_layouts_that_megatron_refused_are_refused(index: int) -> None:
    record = truth("groups.json")["refused"][index]
    options = refused_options(spec_of_argv(record["argv"], record["world_size"]))
    assert options
    assert "--" + options[0].replace("_", "-") in record["argv"]


@pytest.mark.parametrize(
    ("parallel", "dest"),
    [
        (spec(8, tensor=0), "tensor_model_parallel_size"),
        (spec(8, pipeline=-1), "pipeline_model_parallel_size"),
        (spec(12, expert=8), "expert_model_parallel_size"),
        (spec(8, virtual_pipeline=2), "pipeline_model_parallel_size"),
        (spec(8, pipeline=2, virtual_pipeline=2, overlap_p2p=False), "pipeline_model_parallel_size"),
        (spec(8, distributed_optimizer_instances=3), "num_distributed_optimizer_instances"),
        (spec(8, expert=4, distributed_optimizer_instances=4), "num_distributed_optimizer_instances"),
        (spec(12, tensor=2, pipeline=2, expert=3, expert_tensor=1, order="tp-cp-ep-pp-dp"), "use_tp_pp_dp_mapping"),
    ],
)
def test_sizes_that_contradict_each_other(parallel: ParallelSpec, dest: str) -> None:
    assert dest in refused_options(parallel)


def test_two_pipeline_ranks_interleave_with_overlapped_communication_only() -> None:
    two = spec(8, pipeline=2, virtual_pipeline=2)
    assert refused_options(two) == []
    assert refused_options(two, megatron="2023") == ["pipeline_model_parallel_size"]


def split(pipeline: int, virtual: int | None = None, **layout: Any) -> ParallelSpec:
    return spec(pipeline, pipeline=pipeline, virtual_pipeline=virtual, pipeline_layout=PipelineSpec(**layout))


FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
LAYOUT = "pipeline_model_parallel_layout"


@pytest.mark.parametrize(
    ("layers", "parallel", "dest"),
    [
        (30, split(4), "pipeline_model_parallel_size"),
        (7, split(4, account_for_loss=True, account_for_embedding=True), "pipeline_model_parallel_size"),
        (12, split(4, 2), "num_virtual_stages_per_pipeline_rank"),
        (12, split(4, num_layers_in_first=0), FIRST),
        (12, split(4, num_layers_in_last=4), LAST),
        (12, split(4, num_layers_in_last=12), LAST),
        (12, split(2, num_layers_in_first=4, num_layers_in_last=4), FIRST),
        (8, split(2, 2, num_layers_in_first=4, num_layers_in_last=4), FIRST),
        (12, split(1, num_layers_in_first=4, num_layers_in_last=8), FIRST),
        (12, split(4, num_layers_in_last=3, account_for_loss=True), LAST),
        (4, split(2, layout=("Ett", "ttL"), num_layers_in_first=2), LAYOUT),
        (4, split(2, layout=("Etttt", "", "L")), LAYOUT),
        (4, split(2, layout=("Ett", "tL")), LAYOUT),
        (4, split(2, layout=("tEt", "ttL")), LAYOUT),
        (4, split(2, layout=("Ett", "tt")), LAYOUT),
        (4, split(2, layout=("EttL", "ttL")), LAYOUT),
    ],
)
def test_layers_that_cannot_be_distributed(layers: int, parallel: ParallelSpec, dest: str) -> None:
    assert [found.options for found in stage_violations(layers, parallel)] == [(dest,)]


@pytest.mark.parametrize(
    ("layout", "mtp_layers", "fault"),
    [
        ("Ett|tL", 1, "has 0 m"),
        ("Ett|tmL", 2, "has 1 m"),
        ("Ett|tmL", 0, "--mtp-num-layers is 0"),
        ("Etm|ttL", 1, "decoder layer after"),
        ("Ettt|m|m|L", 2, "m in 2 stages"),
        ("Ettt|m||L", 1, "before the last 2"),
    ],
)
def test_layouts_with_mtp_layers_in_an_invalid_stage_are_refused(layout: str, mtp_layers: int, fault: str) -> None:
    stages = tuple(layout.split("|"))
    found = list(stage_violations(3, split(2, len(stages) // 2, layout=stages), mtp_layers=mtp_layers))
    assert [fault in each.fault for each in found] == [True]


def test_layouts_with_mtp_layers_in_a_valid_stage_are_accepted() -> None:
    assert not list(stage_violations(2, split(4, layout=("Et", "t", "mm", "L")), mtp_layers=2))
    assert not list(stage_violations(3, split(2, 2, layout=("Et", "t", "t", "mmL")), mtp_layers=2))


@pytest.mark.parametrize(
    ("microbatches", "group_size", "dest"),
    [
        (3, None, "global_batch_size"),
        (6, None, "global_batch_size"),
        (8, 3, "microbatch_group_size_per_vp_stage"),
        (8, 9, "microbatch_group_size_per_vp_stage"),
        (13, 5, "microbatch_group_size_per_vp_stage"),
        (8, None, None),
        (14, 5, None),  # the last group of 4 microbatches equals the pipeline size
    ],
)
def test_microbatches_of_an_interleaved_schedule(microbatches: int, group_size: int | None, dest: str | None) -> None:
    """Four pipeline ranks with two chunks each (`forward_backward_pipelining_with_interleaving`)."""
    batch = BatchSpec(
        micro_batch_size=1,
        global_batch_size=microbatches,
        seq_length=8,
        microbatches=microbatches,
        first_microbatches=microbatches,
    )
    parallel = spec(4, pipeline=4, virtual_pipeline=2, microbatch_group_size=group_size)
    assert [found.options[0] for found in schedule_violations(batch, parallel)] == ([dest] if dest else [])


@pytest.mark.parametrize(
    ("change", "dest"),
    [
        ({"tensor": 3}, "tensor_model_parallel_size"),
        ({"context": 3}, "seq_length"),
        ({"tensor": 2, "sequence_parallel": False}, "num_experts"),
        ({"expert": 3}, "num_experts"),
        ({"expert_tensor": 5}, "moe_ffn_hidden_size"),
    ],
)
def test_sizes_of_a_moe_model(change: dict[str, Any], dest: str) -> None:
    job = job_of("--num-experts 8 --disable-bias-linear --moe-grouped-gemm --moe-ffn-hidden-size 512")
    assert first_violation(job) is None
    changed = replace(job, parallel=replace(job.parallel, **{"world_size": 120, **change}))
    assert dest in {found.options[0] for found in violations(changed)}
    with pytest.raises(InputError):
        check_job(changed)


@pytest.mark.parametrize(
    ("release", "tensor", "legal"), [("0.16.1", 8, True), ("0.15.3", 8, False), ("0.15.3", 4, True), ("0.16.1", 16, True)]
)
def test_fewer_query_groups_than_tensor_parallel_ranks(release: str, tensor: int, legal: bool) -> None:
    """`TransformerConfig.__post_init__`: from 0.16 on, groups may also divide the tensor-parallel size."""
    job = job_of("--group-query-attention --num-query-groups 4", release=release, gpus=16)
    changed = replace(job, parallel=replace(job.parallel, tensor=tensor, expert_tensor=tensor))
    assert (first_violation(changed) is None) == legal


@pytest.mark.parametrize(("release", "legal"), [("0.16.1", False), ("0.17.1", True)])
def test_userbuffers_of_mtp_layers(release: str, legal: bool) -> None:
    """`TEColumnParallelLinear` needs a buffer name. That of the projection of MTP layers exists since 0.17."""
    line = "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --mtp-num-layers 1 --position-embedding-type rope"
    job = replace(job_of(line, release="0.17.1"), megatron=release)
    assert (first_violation(job) is None) == legal


@pytest.mark.parametrize(
    ("te", "granularity", "legal"), [("2.11.0", "full", False), ("2.11.0", "selective", True), ("2.12.0", "full", True)]
)
def test_full_recomputation_in_fp4_fails_in_transformer_engine(te: str, granularity: str, legal: bool) -> None:
    """A run of megatron-core 0.16.1 with TE 2.11: NVFP4Tensor is missing column-scaled data in the first backward."""
    method = "--recompute-method uniform --recompute-num-layers 1" if granularity == "full" else ""
    recompute = job_of(f"--recompute-granularity {granularity} {method}").recompute
    job = job_of("--bf16 --fp4-format e2m1", gpu=BLACKWELL)
    job = replace(job, recompute=recompute, software=replace(job.software, te=te))
    assert (not list(violations(job))) == legal
    assert first_violation(job) is None  # a rule of a library


@pytest.mark.parametrize(
    ("line", "parallel", "dest"),
    [
        ("--cpu-offloading-num-layers 2", {"pipeline": 2}, "cpu_offloading_num_layers"),
        ("--defer-embedding-wgrad-compute --pipeline-model-parallel-size 2", {"pipeline": 1}, "defer_embedding_wgrad_compute"),
        (
            "--tensor-model-parallel-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
            "--distribute-saved-activations",
            {"sequence_parallel": True},
            "distribute_saved_activations",
        ),
    ],
)
def test_features_that_exclude_a_layout(line: str, parallel: dict[str, Any], dest: str) -> None:
    job = job_of(line)
    changed = replace(job, parallel=replace(job.parallel, **parallel))
    found = first_violation(changed)
    assert found is not None
    assert found.options == (dest,)


def test_the_command_line_names_options_as_they_were_written() -> None:
    with pytest.raises(InputError, match=r"^--tensor-model-parallel-size: 16 heads .*; use a divisor of 16, for example .* 2$"):
        job_of("--tensor-model-parallel-size 3", gpus=3)
