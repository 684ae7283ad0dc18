"""Gated delta nets: what releases of megatron-core save for the delta rule and its gates."""

from __future__ import annotations

from dataclasses import replace

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module
from analyzer.passes.stages import stage_models
from tests.job_of import job_of

HEADS = 8
TOKENS = 2048
NET = (
    "--swiglu --experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-num-key-heads 4 "
    f"--linear-num-value-heads {HEADS} --linear-key-head-dim 64 --linear-value-head-dim 64"
)


def prepared(megatron: str) -> dict[str, int]:
    """Bytes of the tensors that the first layer saves before its delta rule, in a release."""
    job = replace(job_of(NET, release="0.18.2"), megatron=megatron)
    tree = stage_models(job)[0].trees[0]
    module = next(each for each in _all(tree) if each.kind is ModuleKind.DELTA_RULE_INPUTS)
    return {tensor.name: tensor.bytes for tensor in module.saved}


def _all(tree: Module) -> list[Module]:
    return [tree, *(found for child in tree.children for found in _all(child))]


def test_from_0_20_on_the_gates_read_slices_of_the_projection() -> None:
    """Before, `_prepare_input_for_gated_delta_rule` returned contiguous copies of both gates, which the next function saved."""
    copies = {"alpha": 2 * TOKENS * HEADS, "beta before its sigmoid": 2 * TOKENS * HEADS}
    before, later = prepared("0.19.0"), prepared("0.20.0")
    assert before == later | copies
    assert not copies.keys() & later.keys()
