"""Gradient buffers compared with megatron-core: CASES are results of its `_ParamAndGradBuffer` (0.16.1)."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Parameter
from analyzer.passes.stages import stage_models
from analyzer.states.buffers.gradient_buffers import bucket_size, chunk_buffers, shard_numel
from analyzer.states.buffers.of_stage import stage_buffers
from analyzer.states.buffers.parameter_order import ParameterRun, creation_order, modules_in_order
from tests.communication_job import make_job, make_stages
from tests.job_of import job_of


@dataclass(frozen=True)
class Case:
    """Parameters in order of creation, and (parameters, unpadded, padded) of each bucket."""

    numels: tuple[int, ...]
    buckets: tuple[tuple[int, int, int], ...]
    group: int = 6
    distributed: bool = True
    bucket_size: int | None = None
    shared_embedding: int | None = None
    busbw: bool = False


CASES = {
    "bucketed": Case((5000, 100, 3000, 64, 2000), ((3, 5112, 5376), (2, 5128, 5376)), bucket_size=3000),
    "no padding": Case((5000, 100, 3000, 64, 2000), ((3, 5064, 5064), (2, 5100, 5100)), bucket_size=3000, distributed=False),
    "embedding first": Case((5000, 100, 3000, 65, 2000), ((4, 5312, 5376), (1, 5000, 5376)), shared_embedding=0),
    "output layer last": Case((100, 3000, 65, 5000), ((1, 5000, 5120), (3, 3236, 3328)), shared_embedding=3, group=8),
    "embedding, all-reduced": Case((5000, 100, 3000, 65, 2000), ((5, 10165, 10165),), shared_embedding=0, distributed=False),
    "high busbw": Case((5000, 100, 70000), ((1, 70000, 196608), (2, 5128, 196608)), bucket_size=60000, busbw=True),
}


def parameters_of(numels: tuple[int, ...], *, shared_embedding: int | None = None, **fields: Any) -> list[Parameter]:
    return [
        Parameter(name=str(index), shape=(numel,), **{"dtype": "bf16", "shared_embedding": index == shared_embedding, **fields})
        for index, numel in enumerate(numels)
    ]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_buckets_match_megatron(case: Case) -> None:
    job = make_job(world_size=case.group, distributed=case.distributed, pad_buckets_for_high_nccl_busbw=case.busbw)
    parameters = parameters_of(case.numels, shared_embedding=case.shared_embedding)
    (buffer,) = chunk_buffers(job, [ParameterRun(tuple(parameters))], bucket_size=case.bucket_size)
    assert [(len(each.sizes), each.numel_unpadded, each.numel) for each in buffer.buckets] == list(case.buckets)
    assert (buffer.parameter_dtype, buffer.gradient_dtype, buffer.group) == ("bf16", "fp32", "dp_cp")


@given(
    numels=st.lists(st.integers(1, 9000), min_size=1, max_size=20),
    group=st.integers(1, 40),
    size=st.one_of(st.none(), st.integers(0, 20000)),
    distributed=st.booleans(),
    busbw=st.booleans(),
)
def test_buckets_contain_each_parameter_once(
    numels: list[int], group: int, size: int | None, distributed: bool, busbw: bool
) -> None:
    job = make_job(world_size=group, distributed=distributed, pad_buckets_for_high_nccl_busbw=busbw)
    (buffer,) = chunk_buffers(job, [ParameterRun(tuple(parameters_of(tuple(numels))))], bucket_size=size)
    assert sum(len(bucket.sizes) for bucket in buffer.buckets) == len(numels)
    last_created = list(reversed(numels))
    for bucket in buffer.buckets:
        members, last_created = last_created[: len(bucket.sizes)], last_created[len(bucket.sizes) :]
        aligned = sum(-(-numel // 64) * 64 for numel in members[:-1]) if distributed else sum(members[:-1])
        assert bucket.numel_unpadded == aligned + members[-1]
        divisor = lcm(group, 128, 2**16 if busbw else 1) if distributed else 1
        assert bucket.numel % divisor == 0
        assert 0 <= bucket.numel - bucket.numel_unpadded < divisor
    if size is not None:
        assert all(bucket.numel_unpadded >= size for bucket in buffer.buckets[:-1])
    if distributed:
        assert shard_numel(buffer, group) * group == buffer.numel


@pytest.mark.parametrize(
    ("changes", "where", "expected"),
    [
        ({}, (0, 0), None),
        ({"overlap_grad_reduce": True}, (0, 0), 40_000_000),
        ({"overlap_grad_reduce": True, "world_size": 64}, (0, 0), 64_000_000),
        ({"overlap_grad_reduce": True, "world_size": 128, "context": 2, "tensor": 2}, (0, 0), 64_000_000),
        ({"overlap_grad_reduce": True, "ddp_bucket_size": 7}, (0, 0), 7),
        ({"overlap_grad_reduce": True, "ddp_num_buckets": 3}, (0, 0), 333),
        ({"overlap_grad_reduce": True}, (1, 0), None),
        ({"overlap_grad_reduce": True}, (0, 1), None),
        ({"overlap_grad_reduce": True, "overlap_param_gather_with_optimizer_step": True}, (0, 0), None),
        ({"ddp_bucket_size": 7}, (0, 0), None),
    ],
)
def test_bucket_size(changes: dict[str, Any], where: tuple[int, int], expected: int | None) -> None:
    assert bucket_size(make_job(**changes), pipeline_rank=where[0], chunk=where[1], rank_numel=1000) == expected


def test_only_the_first_chunk_of_the_first_stage_is_bucketed() -> None:
    job = make_job(world_size=2, pipeline=2, virtual_pipeline=2, overlap_grad_reduce=True, ddp_bucket_size=5000)
    first, last = make_stages(job)
    (bucketed,), (unbucketed,) = stage_buffers(job, first)
    # from the end: fc2 + fc1 | qkv + proj + fc2 of the previous layer | fc1 + qkv | proj + embedding
    assert [bucket.numel for bucket in bucketed.buckets] == [4100 + 4000, 3000 + 1000 + 4100, 4000 + 3000, 1000 + 4096]
    assert len(unbucketed.buckets) == 1
    assert [len(buffer.buckets) for (buffer,) in stage_buffers(job, last)] == [1, 1]


def test_dtypes_and_experts_have_separate_buffers() -> None:
    job = make_job(world_size=8, expert=4, distributed=True, gradients="bf16")
    parameters = [
        Parameter(name="expert", shape=(1000,), dtype="bf16", sharding="expert"),
        *parameters_of((100,)),
        Parameter(name="router", shape=(10,), dtype="fp32"),
    ]
    found = chunk_buffers(job, [ParameterRun(tuple(parameters))], bucket_size=None)
    assert [(b.group, b.parameter_dtype, b.gradient_dtype, b.numel) for b in found] == [
        ("dp_cp", "bf16", "bf16", 128),
        ("dp_cp", "fp32", "fp32", 128),
        ("edp", "bf16", "bf16", 1024),
    ]
    assert [b.group for b in chunk_buffers(make_job(world_size=8), [ParameterRun(tuple(parameters))], bucket_size=None)] == [
        "dp_cp",
        "dp_cp",
    ]


def test_padding_depends_on_the_ranks_of_one_optimizer_instance() -> None:
    one = make_job(world_size=12, distributed=True)
    halves = make_job(world_size=12, distributed=True, distributed_optimizer_instances=4)
    sizes = [chunk_buffers(job, [ParameterRun(tuple(parameters_of((1,))))], bucket_size=None)[0].numel for job in (one, halves)]
    assert sizes == [lcm(12, 128), lcm(3, 128)]


def test_the_output_projection_is_created_first() -> None:
    """`named_parameters` of megatron-core's SelfAttention lists linear_proj before linear_qkv."""

    def leaf(name: str, kind: ModuleKind = ModuleKind.OTHER) -> Module:
        return Module(name=name, kind=kind, parameters=(Parameter(name=name, shape=(1,), dtype="bf16"),))

    projection = leaf("linear_proj", ModuleKind.ATTENTION_OUTPUT)
    children = (leaf("linear_qkv", ModuleKind.QKV), leaf("k_layernorm"), projection)
    attention = Module(name="self_attention", kind=ModuleKind.ATTENTION, children=children)
    layer = Module(name="0", children=(leaf("input_layernorm"), attention, leaf("mlp")))
    names = [parameter.name for parameter in creation_order(layer)]
    assert names == ["input_layernorm", "linear_proj", "linear_qkv", "k_layernorm", "mlp"]


def test_parameters_of_latent_attention_and_moe_layers_are_in_the_order_of_megatron() -> None:
    """`named_parameters` of a GPTModel of megatron-core 0.16.1 with these options."""
    job = job_of(
        "--num-layers 1 --position-embedding-type rope --disable-bias-linear --normalization RMSNorm --multi-latent-attention "
        "--q-lora-rank 64 --qk-layernorm --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-latent-size 256 "
        "--moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate"
    )
    (model,) = stage_models(job)
    listed = [f"{module.name}.{each.name}" for module in modules_in_order(model.trees[0]) for each in module.parameters]
    assert listed == [
        "word_embeddings.weight",
        "input_layernorm.weight",
        "linear_proj.weight",
        "linear_q_down_proj.weight",
        "linear_q_up_proj.layer_norm_weight",
        "linear_q_up_proj.weight",
        "linear_kv_down_proj.weight",
        "linear_kv_up_proj.layer_norm_weight",
        "linear_kv_up_proj.weight",
        "pre_mlp_layernorm.weight",
        "router.weight",
        "fc1_latent_proj.weight",
        "fc2_latent_proj.weight",
        "linear_fc1.weight",
        "linear_fc2.weight",
        "shared_experts.gate_weight",
        "linear_fc1.weight",
        "linear_fc2.weight",
        "final_layernorm.weight",
    ]


@pytest.mark.parametrize("distributed", [False, True])
def test_the_code_of_2023_pads_to_the_data_parallel_size_and_has_no_buckets(distributed: bool) -> None:
    job = make_job(megatron="2023", world_size=6, distributed=distributed, overlap_grad_reduce=True, ddp_bucket_size=10)
    (buffer,) = chunk_buffers(job, [ParameterRun(tuple(parameters_of((100, 3, 50), shared_embedding=0)))], bucket_size=10)
    assert [(each.sizes, each.numel_unpadded, each.numel) for each in buffer.buckets] == [((50, 3, 100), 153, 156)]


@given(
    numels=st.lists(st.integers(1, 900), min_size=1, max_size=6),
    times=st.integers(1, 7),
    size=st.one_of(st.none(), st.integers(1, 5000)),
    distributed=st.booleans(),
)
def test_a_run_of_equal_layers_gives_the_same_buckets_as_separate_layers(
    numels: list[int], times: int, size: int | None, distributed: bool
) -> None:
    job = make_job(world_size=4, distributed=distributed)
    layer, head = tuple(parameters_of(tuple(numels))), tuple(parameters_of((77,)))
    run = chunk_buffers(job, [ParameterRun(layer, times), ParameterRun(head)], bucket_size=size)
    written_out = chunk_buffers(job, [ParameterRun(layer * times + head)], bucket_size=size)
    assert run == written_out
