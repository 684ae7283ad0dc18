"""The all-gather dispatcher, experts that run in turn, and what deterministic sums keep."""

from __future__ import annotations

import pytest

from analyzer.memory.ranks import rank_classes
from analyzer.memory.workspaces import workspaces
from analyzer.modules.tree import Module
from analyzer.passes.stages import stage_models
from analyzer.specs import TrainingJob
from tests.job_of import job_of

H, S, EXPERTS = 1024, 2048, 8
SINKHORN = (
    "--num-experts 8 --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn --moe-ffn-hidden-size 1024 "
    "--disable-bias-linear --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
)
"""As Megatron's own CI runs it: expert-tensor size 2, so four ranks of S/2 tokens that share eight experts."""
TOKENS, WORLD = S // 2, 2 * S
ROWS = 2 * TOKENS
"""Of one expert for each token, over two ranks that split each expert."""


def modules(job: TrainingJob, name: str) -> list[Module]:
    return [module for _, module in rank_classes(job)[0].trees[0].walk() if module.name == name]


def retained(line: str, release: str = "0.16.1") -> int:
    return rank_classes(job_of(line, release=release))[0].trees[0].retained_bytes


@pytest.mark.parametrize(("more", "release", "kept"), [("", "0.16.1", 1), ("", "0.14.0", 0), ("--moe-permute-fusion", "0.16.1", 0)])
def test_deterministic_sums_keep_their_rows(more: str, release: str, kept: int) -> None:
    """torch's derivatives.yaml: `index_add` saves its source, `scatter_add` its index; Megatron adds by index from 0.15 on."""
    line = f"{SINKHORN} {more}"
    assert retained(f"{line} --deterministic-mode", release) - retained(line, release) == kept * 8 * 2 * ROWS * H


@pytest.mark.parametrize("vocabulary", ["", "--untie-embeddings-and-output-weights"])
def test_gathered_tokens_lie_in_a_buffer_that_stays(vocabulary: str) -> None:
    """`gather_from_sequence_parallel_region` with `use_global_buffer`: tokens of four ranks, more than the output layer gathers."""
    job = job_of(f"{SINKHORN} {vocabulary}")
    [buffer] = [item for item in workspaces(job, stage_models(job)[0].trees) if "global memory buffer" in item.name]
    assert buffer.bytes == 2 * WORLD * H
    alone = job_of(f"--num-experts 8 --disable-bias-linear {vocabulary}")
    assert not any("global memory buffer" in item.name for item in workspaces(alone, stage_models(alone)[0].trees))


def test_what_the_dispatcher_keeps() -> None:
    """`dispatch_postprocess`: indices of the rows, and of 4·E/2 the map and the probabilities that were selected from."""
    [dispatch, *_] = modules(job_of(SINKHORN), "dispatch")
    here = EXPERTS // 2
    assert sum(tensor.bytes for tensor in dispatch.saved) == 8 * ROWS + WORLD * here + 2 * WORLD * here + 2 * ROWS
    assert [tensor.shape for tensor in dispatch.named] == [(WORLD, here)]


def test_sinkhorn_keeps_scores_and_the_map_they_are_multiplied_with() -> None:
    """`sinkhorn_load_balancing`: sigmoid's output in 16 bit, and a map of one byte each; the choice itself needs no gradient."""
    [router, *_] = modules(job_of(SINKHORN), "router")
    own = [tensor for tensor in router.saved if tensor.name != "input"]
    assert sum(tensor.bytes for tensor in own) == 3 * TOKENS * EXPERTS


def test_experts_in_turn_need_one_share_of_room() -> None:
    """`SequentialMLP`: in backward the gradients inside an expert are of its rows alone, a quarter of them here."""
    in_turn, at_once = (modules(job_of(f"{SINKHORN} {more}"), "activation_func")[0] for more in ("", "--moe-grouped-gemm"))
    each = [sum(tensor.bytes for tensor in module.backward_workspace) for module in (in_turn, at_once)]
    assert 4 * each[0] == each[1]
    assert {tensor.pieces for tensor in in_turn.saved} == {4}
    assert {tensor.pieces for tensor in at_once.saved} == {1}


def test_what_the_step_makes_for_an_expert_is_its_own() -> None:
    """Each expert has parameters of its own, which the optimizer sees one by one."""
    parameters = [parameter for module in modules(job_of(SINKHORN), "linear_fc1") for parameter in module.parameters]
    assert {parameter.pieces for parameter in parameters if parameter.sharding == "expert"} == {4}
