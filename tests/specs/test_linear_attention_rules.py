"""Linear attention and output gates: what is refused with them."""

from __future__ import annotations

import pytest

from analyzer.errors import InputError
from analyzer.modules.inputs import module_inputs
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.layer import LayerKind, one_layer
from analyzer.modules.models.gpt import chunk_tree
from analyzer.modules.models.parts import ChunkKind
from tests.job_of import job_of

NET = "--swiglu --experimental-attention-variant gated_delta_net --linear-attention-freq 4"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (f"{NET} --context-parallel-size 2", "is not exchanged between ranks"),
        (f"{NET} --deterministic-mode", "not modelled with linear attention"),
        (f"{NET} --bf16 --cuda-graph-impl transformer_engine --cuda-graph-scope attn", "not modelled with linear attention"),
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


@pytest.mark.parametrize(("release", "kinds"), [("0.18.2", ["plain"]), ("0.19.0", ["gated_delta_net"])])
def test_mtp_layers_are_like_the_last_layer_from_0_19_on(release: str, kinds: list[str]) -> None:
    """`gpt_builder` takes the last of `get_gpt_decoder_layer_specs` before, which has full attention."""
    job = job_of(f"{NET} --num-layers 2 --mtp-num-layers 1 --position-embedding-type rope", release=release)
    chunk = chunk_tree(module_inputs(job), ChunkKind(layers=((LayerKind(), 1),), mtp_layers=1))
    depth = next(module for _, module in chunk.walk() if module.kind is ModuleKind.MTP)
    parts = [module for _, module in depth.walk() if module.kind is ModuleKind.ATTENTION]
    assert ["gated_delta_net" if part.source == "GatedDeltaNet" else "plain" for part in parts] == kinds


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
