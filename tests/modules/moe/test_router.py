"""The router: what its losses save for backward."""

from __future__ import annotations

import pytest

from analyzer.passes.stages import stage_models
from tests.job_of import job_of

S, B, E, LAYERS = 2048, 1, 8, 8
MOE = f"--num-experts {E} --moe-router-topk 2 --moe-grouped-gemm --disable-bias-linear --moe-token-dispatcher-type alltoall"


def saved_by_routers(line: str) -> int:
    [tree] = stage_models(job_of(f"{MOE} {line}"))[0].trees
    return sum(tensor.bytes for _, module in tree.walk() if module.name == "router" for tensor in module.saved)


@pytest.mark.parametrize(("router", "element"), [("", 2), ("--moe-router-dtype fp32", 4), ("--moe-router-dtype fp64", 8)])
@pytest.mark.parametrize(("layout", "tokens"), [("", S * B), ("--tensor-model-parallel-size 2 --sequence-parallel", S * B // 2)])
def test_the_z_loss_saves_the_logits_of_all_experts(router: str, element: int, layout: str, tokens: int) -> None:
    """core/transformer/moe/moe_utils.py `z_loss_func` (0.16.1): `torch.logsumexp` saves the logits [s·b, E] and its result [s·b].

    `Router.gating` returns them in `--moe-router-dtype`, else in the dtype of the input. With sequence parallelism a rank has s/t
    tokens.
    """
    logits = element * tokens * (E + 1)
    assert (
        saved_by_routers(f"{router} {layout} --moe-z-loss-coeff 1e-3") - saved_by_routers(f"{router} {layout}") == LAYERS * logits
    )


@pytest.mark.parametrize(
    ("kind", "samples", "group"), [("aux_loss", 1, "tp_cp"), ("seq_aux_loss", 2, "tp_cp"), ("global_aux_loss", 1, "tp_dp_cp")]
)
def test_tokens_per_expert_are_summed_over_the_ranks_of_the_loss(kind: str, samples: int, group: str) -> None:
    """`TopKRouter`: `_apply_aux_loss` and `_apply_seq_aux_loss` reduce over `tp_cp_group`, `_apply_global_aux_loss` over
    `tp_dp_cp_group` (core/transformer/moe/router.py, 0.16.1). The loss of each sequence counts the tokens of each sample.
    """
    loss = f"--moe-router-load-balancing-type {kind} --moe-aux-loss-coeff 1e-2 --micro-batch-size 2"
    [tree] = stage_models(job_of(f"{MOE} {loss} --tensor-model-parallel-size 2 --sequence-parallel"))[0].trees
    calls = {call for _, module in tree.walk() if module.name == "router" for call in module.collectives}
    assert {(call.kind, call.group, call.shape) for call in calls} == {("all_reduce", group, (samples * E,))}
