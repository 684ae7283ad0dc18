"""The all-gather dispatcher, sequential experts, and the tensors that deterministic sums save."""

from __future__ import annotations

import pytest

from analyzer.memory.ranks import rank_classes
from analyzer.memory.workspaces import workspaces
from analyzer.modules.moe.routing import LATENT_ROWS
from analyzer.modules.tree import Module
from analyzer.passes.stages import stage_models
from analyzer.specs import TrainingJob
from tests.job_of import job_of

H, S, EXPERTS = 1024, 2048, 8
SINKHORN = (
    "--num-experts 8 --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn --moe-ffn-hidden-size 1024 "
    "--disable-bias-linear --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
)
"""As in Megatron's CI: expert-tensor size 2, so four ranks with S/2 tokens each share eight experts."""
TOKENS, WORLD = S // 2, 2 * S
ROWS = 2 * TOKENS
"""Rows for one expert per token, with each expert split over two ranks."""


def modules(job: TrainingJob, name: str) -> list[Module]:
    return [module for _, module in rank_classes(job)[0].trees[0].walk() if module.name == name]


def retained(line: str, release: str = "0.16.1") -> int:
    return rank_classes(job_of(line, release=release))[0].trees[0].retained_bytes


@pytest.mark.parametrize(
    ("more", "release", "saved"), [("", "0.16.1", 1), ("", "0.14.0", 0), ("--moe-permute-fusion", "0.16.1", 0)]
)
def test_deterministic_sums_save_their_rows(more: str, release: str, saved: int) -> None:
    """torch's derivatives.yaml: `index_add` saves its source, `scatter_add` its index; Megatron adds by index from 0.15 on."""
    line = f"{SINKHORN} {more}"
    assert retained(f"{line} --deterministic-mode", release) - retained(line, release) == saved * 8 * 2 * ROWS * H


@pytest.mark.parametrize("vocabulary", ["", "--untie-embeddings-and-output-weights"])
def test_gathered_tokens_are_in_the_global_memory_buffer(vocabulary: str) -> None:
    """`gather_from_sequence_parallel_region` with `use_global_buffer`: tokens of four ranks."""
    job = job_of(f"{SINKHORN} {vocabulary}")
    [buffer] = [item for item in workspaces(job, stage_models(job)[0].trees) if "global memory buffer" in item.name]
    assert buffer.bytes == 2 * WORLD * H
    single_rank = job_of(f"--num-experts 8 --disable-bias-linear {vocabulary}")
    assert not any("global memory buffer" in item.name for item in workspaces(single_rank, stage_models(single_rank)[0].trees))


def test_tensors_that_the_dispatcher_saves() -> None:
    """`dispatch_postprocess`: row indices, and the routing map and probabilities of the E/2 local experts and all tokens."""
    [dispatch, *_] = modules(job_of(SINKHORN), "dispatch")
    local = EXPERTS // 2
    assert sum(tensor.bytes for tensor in dispatch.saved) == 8 * ROWS + WORLD * local + 2 * WORLD * local + 2 * ROWS
    assert [tensor.shape for tensor in dispatch.referenced] == [(WORLD, local)]


def test_sinkhorn_saves_the_scores_and_the_map_that_multiplies_them() -> None:
    """`sinkhorn_load_balancing`: the sigmoid output in 16 bit and a map of one byte per element. The choice has no gradient."""
    [router, *_] = modules(job_of(SINKHORN), "router")
    own = [tensor for tensor in router.saved if tensor.name != "input"]
    assert sum(tensor.bytes for tensor in own) == 3 * TOKENS * EXPERTS


def test_sequential_experts_need_the_workspace_of_one_expert() -> None:
    """`SequentialMLP`: in backward the gradients inside an expert have only its rows, a quarter of all rows."""
    sequential, grouped = (modules(job_of(f"{SINKHORN} {more}"), "activation_func")[0] for more in ("", "--moe-grouped-gemm"))
    other = "saved by other experts"  # whose backward runs later: three of the four inputs of fc2
    each = [sum(tensor.bytes for tensor in module.backward_workspace if tensor.name != other) for module in (sequential, grouped)]
    assert 4 * each[0] == each[1]
    [fc2, *_] = modules(job_of(SINKHORN), "linear_fc2")
    [later] = [tensor.bytes for tensor in sequential.backward_workspace if tensor.name == other]
    assert 4 * later == 3 * sum(tensor.bytes for tensor in fc2.saved)
    assert {tensor.pieces for tensor in sequential.saved} == {4}
    assert {tensor.pieces for tensor in grouped.saved} == {1}


def test_sequential_experts_have_separate_parameters() -> None:
    """The optimizer has one parameter per expert."""
    parameters = [parameter for module in modules(job_of(SINKHORN), "linear_fc1") for parameter in module.parameters]
    assert {parameter.pieces for parameter in parameters if parameter.sharding == "expert"} == {4}


def test_unfused_permutation_saves_sorted_positions_from_017_on() -> None:
    """`permute`: `argsort` of the flattened routing map gives int64 positions, before it `masked_select` saved both its inputs."""
    line = (
        "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024 --disable-bias-linear --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall --moe-grouped-gemm"
    )
    before, after = (modules(job_of(line, release=each), "dispatch")[0] for each in ("0.16.1", "0.17.1"))
    sizes = [{tensor.dtype: tensor.bytes for tensor in each.saved if tensor.formula.endswith("E·T")} for each in (before, after)]
    assert sizes == [{"bf16": 2 * EXPERTS * S, "bool": EXPERTS * S}, {"int64": 8 * EXPERTS * S}]


@pytest.mark.parametrize(("dispatcher", "references"), [("allgather", 1), ("alltoall", 0)])
def test_projected_tokens_are_referenced_until_the_layer_returns(dispatcher: str, references: int) -> None:
    """`custom_forward` of `MoELayer`: `hidden_states` is the output of `fc1_latent_proj`, unless `dispatch_preprocess` permutes."""
    line = (
        "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024 --disable-bias-linear --expert-model-parallel-size 2 "
        f"--moe-token-dispatcher-type {dispatcher} --moe-grouped-gemm --moe-latent-size 256"
    )
    for name in ("dispatch", "experts", "combine", "fc2_latent_proj"):
        [module, *_] = modules(job_of(line), name)
        found = [tensor.bytes for tensor in module.forward_workspace if tensor.name == LATENT_ROWS]
        assert found == [2 * S * 256] * references


@pytest.mark.parametrize(("factor", "tokens"), [(0.7, 180), (1, 256), (4, 1024), (6, 1024)])
def test_an_expert_gets_its_capacity_but_no_token_twice(factor: float, tokens: int) -> None:
    """`get_capacity` and `apply_router_token_dropping`: the capacity is the mean of 256 tokens times the factor, at most T = 1,024.

    The experts are split over two tensor-parallel ranks, which gather their tokens.
    """
    job = job_of(
        "--num-experts 8 --moe-router-topk 2 --disable-bias-linear --tensor-model-parallel-size 2 --sequence-parallel "
        "--moe-token-dispatcher-type allgather --moe-router-load-balancing-type none --moe-pad-expert-input-to-capacity "
        f"--moe-grouped-gemm --moe-ffn-hidden-size 512 --moe-expert-capacity-factor {factor}"
    )
    read = {tensor.shape[0] for module in modules(job, "experts") for _, each in module.walk() for tensor in each.saved}
    assert read == {2 * tokens * EXPERTS}
