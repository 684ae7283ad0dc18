"""Linear attention and output gates: what is refused with them."""

from __future__ import annotations

import pytest

from analyzer.errors import InputError
from tests.job_of import job_of

NET = "--swiglu --experimental-attention-variant gated_delta_net --linear-attention-freq 4"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (f"{NET} --context-parallel-size 2", "is not exchanged between ranks"),
        (f"{NET} --deterministic-mode", "not modelled with linear attention"),
        (f"{NET} --optimizer muon", "not modelled with linear attention"),
        (f"{NET} --transformer-impl local", "needs layers of Transformer Engine"),
        (f"{NET} --linear-conv-kernel-dim 5", "2 to 4"),
        (NET.replace("--swiglu", ""), "add --swiglu"),
        (f"{NET} --linear-attention-freq [1,1]", "lists 2 layers"),
        (
            "--attention-output-gate --group-query-attention --num-query-groups 2 --tensor-model-parallel-size 4",
            "fails in this release",
        ),
    ],
)
def test_refused(options: str, part: str) -> None:
    with pytest.raises(InputError, match=part.replace("(", r"\(")):
        job_of(options, release="0.16.1")


def test_every_fourth_layer_has_full_attention() -> None:
    model = job_of(f"{NET} --num-layers 6", release="0.16.1").model
    kinds = [model.attention_of(layer) for layer in range(6)]
    assert kinds == ["gated_delta_net"] * 3 + ["plain"] + ["gated_delta_net"] * 2
