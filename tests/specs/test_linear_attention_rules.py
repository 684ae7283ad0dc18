"""Linear attention and output gates: what is refused with them."""

from __future__ import annotations

import pytest

from analyzer.errors import InputError
from analyzer.modules.inputs import module_inputs
from analyzer.modules.layer import LayerKind, one_layer
from tests.job_of import job_of

NET = "--swiglu --experimental-attention-variant gated_delta_net --linear-attention-freq 4"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (f"{NET} --context-parallel-size 2", "is not exchanged between ranks"),
        (f"{NET} --deterministic-mode", "not modelled with linear attention"),
        (
            f"{NET} --bf16 --fp8-format e4m3 --fp8-recipe tensorwise --tensor-model-parallel-size 4 --linear-num-key-heads 4 "
            "--linear-num-value-heads 8 --linear-key-head-dim 64 --linear-value-head-dim 64",
            "388 outputs",  # (2 · 256 + 2 · 512 + 2 · 8) / 4; Transformer Engine: "FP8 execution requires ..."
        ),
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


@pytest.mark.parametrize(
    ("options", "release", "part"),
    [
        ("--context-parallel-size 2", "0.18.2", "does not accept cp_comm_type"),
        ("--context-parallel-size 4 --linear-num-key-heads 6 --linear-num-value-heads 12", "0.19.0", "6 key heads"),
        (
            "--tensor-model-parallel-size 2 --context-parallel-size 4 --linear-num-key-heads 4 --linear-num-value-heads 8",
            "0.19.0",
            "tensor 2 × context 4",
        ),
    ],
)
def test_context_parallelism_needs_a_release_and_heads_for_all_ranks(options: str, release: str, part: str) -> None:
    """`TransformerConfig.__post_init__`: heads are a multiple of the product. That of `GatedDeltaNet` lacks an argument in 0.18."""
    with pytest.raises(InputError, match=part):
        job_of(f"{NET} {options}", release=release)


def test_mtp_layers_like_a_linear_last_layer_fail_from_0_19_on() -> None:
    """`gpt_builder` builds them like it, and `MultiTokenPredictionLayer.__init__` stops. Before, they have full attention."""
    options = f"{NET} --num-layers 2 --mtp-num-layers 1 --position-embedding-type rope"
    assert job_of(options, release="0.18.2").model.mtp_num_layers == 1
    with pytest.raises(InputError, match="the last layer has linear attention"):
        job_of(options, release="0.19.0")


def test_context_parallel_ranks_exchange_tokens_for_heads() -> None:
    """In 0.19, one all-to-all of all projected columns, and one of the values of all heads, in each pass."""
    job = job_of(
        f"{NET} --linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 32 --linear-value-head-dim 64 "
        "--context-parallel-size 2 --seq-length 256 --micro-batch-size 3",
        release="0.19.0",
    )
    layer = one_layer(module_inputs(job), LayerKind(attention="gated_delta_net"))
    calls = [(call.phase, call.shape) for _, module in layer.walk() for call in module.collectives if call.kind == "all_to_all"]
    projected, values = 2 * 4 * 32 + 2 * 8 * 64 + 2 * 8, 8 * 64
    assert sorted(calls) == sorted((phase, (128, 3, width)) for phase in ("forward", "backward") for width in (projected, values))


def test_every_fourth_layer_has_full_attention() -> None:
    model = job_of(f"{NET} --num-layers 6", release="0.16.1").model
    kinds = [model.attention_of(layer) for layer in range(6)]
    assert kinds == ["gated_delta_net"] * 3 + ["plain"] + ["gated_delta_net"] * 2
