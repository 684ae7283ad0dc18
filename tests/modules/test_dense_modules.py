"""Bytes that a layer saves for backward, compared with published formulas.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equations 1, 2, 4 and table 2:
a layer with dropout, GELU and unfused attention saves s·b·h·(34 + 5·a·s/h) bytes in 16 bit; with tensor parallelism
s·b·h·(10 + 24/t + 5·a·s/(h·t)); with sequence parallelism everything divided by t; selective recompute removes the
attention term and full recompute leaves 2·s·b·h.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.memory.chunk_memory import BACKWARD, FORWARD, chunk_memory
from analyzer.modules.inputs import module_inputs
from analyzer.modules.layer import LayerKind, checkpointed, layer_runs, transformer_layer
from analyzer.modules.models.gpt import chunk_tree, full_model
from analyzer.modules.models.parts import ChunkKind
from analyzer.modules.shapes import shapes_of
from analyzer.modules.tree import Module, parameters
from analyzer.specs import (
    RecomputeSpec,
)
from tests.job_of import job_of
from tests.small_job import job

STATISTICS = ("mu", "rsigma", "softmax statistics", "random state")


def saved_bytes(module: Module) -> int:
    """Saved bytes without the statistics of norms and softmax, which the papers omit."""
    own = sum(tensor.bytes for tensor in module.saved if not tensor.name.startswith(STATISTICS))
    return own + (0 if module.recomputed else sum(saved_bytes(child) for child in module.children))


shapes_of_layers = st.fixed_dictionaries(
    {
        "s": st.sampled_from([512, 1024, 2048]),
        "b": st.sampled_from([1, 2, 4]),
        "h": st.sampled_from([1024, 2048, 4096]),
        "a": st.sampled_from([32, 64]),
    }
)


@pytest.mark.parametrize("implementation", ["transformer_engine", "local"])
@given(sizes=shapes_of_layers)
def test_a_layer_saves_34_sbh_and_its_scores(implementation: str, sizes: dict[str, Any]) -> None:
    s, b, h, a = sizes["s"], sizes["b"], sizes["h"], sizes["a"]
    layer = transformer_layer(shapes_of(job(**sizes, implementation=implementation)))
    assert saved_bytes(layer) == 34 * s * b * h + 5 * a * s * s * b


@given(sizes=shapes_of_layers, t=st.sampled_from([2, 4, 8]))
def test_tensor_parallelism_leaves_ten_sbh_unsharded(sizes: dict[str, Any], t: int) -> None:
    s, b, h, a = sizes["s"], sizes["b"], sizes["h"], sizes["a"]
    assert (
        saved_bytes(transformer_layer(shapes_of(job(**sizes, t=t)))) == 10 * s * b * h + (24 * s * b * h + 5 * a * s * s * b) // t
    )


@given(sizes=shapes_of_layers, t=st.sampled_from([2, 4, 8]))
def test_sequence_parallelism_divides_everything(sizes: dict[str, Any], t: int) -> None:
    s, b, h, a = sizes["s"], sizes["b"], sizes["h"], sizes["a"]
    assert saved_bytes(transformer_layer(shapes_of(job(**sizes, t=t, sp=True)))) == (34 * s * b * h + 5 * a * s * s * b) // t


@pytest.mark.parametrize(("b", "t"), [(1, 8), (2, 8), (1, 4), (2, 1)])
def test_the_softmax_kernel_needs_a_multiple_of_four_heads(b: int, t: int) -> None:
    """`FusedScaleMaskSoftmax.is_kernel_available`; without it Transformer Engine computes in fp32 and saves a causal mask."""
    s, h, a = 1024, 1024, 16
    more = 0 if a // t * b % 4 == 0 else 2 * a * s * s * b // t + s * s
    expected = 10 * s * b * h + (24 * s * b * h + 5 * a * s * s * b) // t + more
    assert saved_bytes(transformer_layer(shapes_of(job(s=s, b=b, h=h, a=a, t=t)))) == expected


@given(sizes=shapes_of_layers)
def test_selective_recompute_does_not_save_the_scores(sizes: dict[str, Any]) -> None:
    s, b, h = sizes["s"], sizes["b"], sizes["h"]
    recomputing = replace(job(**sizes), recompute=RecomputeSpec(granularity="selective", modules=("core_attn",)))
    assert saved_bytes(transformer_layer(shapes_of(recomputing))) == 34 * s * b * h


@given(sizes=shapes_of_layers)
def test_full_recompute_saves_only_the_input_of_each_group(sizes: dict[str, Any]) -> None:
    s, b, h = sizes["s"], sizes["b"], sizes["h"]
    assert checkpointed(shapes_of(job(**sizes)), kinds=(LayerKind(),) * 3).retained_bytes == 2 * s * b * h


def test_distributed_saved_activations_are_sharded_over_ranks() -> None:
    recomputing = replace(
        job(t=4), recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1, distribute_saved_activations=True)
    )
    assert checkpointed(shapes_of(recomputing), kinds=(LayerKind(),)).retained_bytes == 2 * 1024 * 2 * 1024 // 4


@pytest.mark.parametrize("backend", ["flash", "fused"])
def test_a_fused_kernel_saves_its_output_and_no_scores(backend: str) -> None:
    """TE 2.11: q, k, v and the output; FlashAttention's output is copied to the layout of the projection."""
    s, b, h, a = 1024, 2, 1024, 16
    layer = transformer_layer(shapes_of(job(attention_backend=backend)))
    statistics = 4 * b * a * s + 4 * 4 * s * b + 512
    assert layer.retained_bytes == (36 if backend == "flash" else 34) * s * b * h + statistics


def test_flash_attention_does_not_copy_its_output_for_one_sample() -> None:
    """With b = 1 the layouts [s, b, h] and [b, s, h] are equal."""
    flash, fused = (transformer_layer(shapes_of(job(b=1, attention_backend=kind))).retained_bytes for kind in ("flash", "fused"))
    assert flash == fused


def test_no_masks_are_saved_without_dropout() -> None:
    s, b, h = 1024, 2, 1024
    layer = transformer_layer(shapes_of(job(hidden_dropout=0.0, attention_backend="fused")))
    assert saved_bytes(layer) == 32 * s * b * h


def test_a_llama_layer_saves_its_gated_activation() -> None:
    """RMSNorm, SwiGLU and no biases: 2·(2 + 2) + (4 + 4g/a) + 2 + 2·3·f/h per s·b·h. Three tensors of width f are saved."""
    s, b, h, a, g, f = 2048, 1, 4096, 32, 8, 14336
    llama = job(
        s=s,
        b=b,
        h=h,
        a=a,
        num_query_groups=g,
        ffn_hidden_size=f,
        normalization="RMSNorm",
        activation="swiglu",
        bias_linear=False,
        bias_qkv=False,
        hidden_dropout=0.0,
        position_embedding="rope",
        rope_fusion=True,
        attention_backend="fused",
    )
    expected = s * b * (2 * h * 4 + 2 * (h + 2 * h * g // a) + 2 * h + 2 * 3 * f)
    assert saved_bytes(transformer_layer(shapes_of(llama))) == expected


def test_block_recompute_covers_the_first_layers_of_the_chunk() -> None:
    asked = replace(job(), recompute=RecomputeSpec(granularity="full", method="block", num_layers=3))
    runs = layer_runs(module_inputs(asked), ((LayerKind(), 5),))
    assert [(module.name, times) for module, times in runs] == [("checkpoint", 3), ("layers", 2)]
    nothing = replace(job(), recompute=RecomputeSpec(granularity="full", method="block", num_layers=0))
    assert [module.name for module, _ in layer_runs(module_inputs(nothing), ((LayerKind(), 2),))] == ["layers"]


@pytest.mark.parametrize(
    ("size", "expected"), [(1, [(1, 5)]), (2, [(2, 2), (1, 1)]), (3, [(3, 1), (2, 1)]), (9, [(5, 1)])], ids=str
)
def test_uniform_recompute_has_checkpoints_around_so_many_layers(size: int, expected: list[tuple[int, int]]) -> None:
    """Layers in each checkpoint, and equal checkpoints in a row, of a chunk of five layers."""
    asked = replace(job(), recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=size))
    runs = layer_runs(module_inputs(asked), ((LayerKind(), 2), (LayerKind(), 3)))
    found: dict[int, int] = {}
    for module, times in runs:
        found[len(module.children)] = found.get(len(module.children), 0) + times
    assert list(found.items()) == expected


def test_parameters_of_gpt3_175b() -> None:
    """Narayanan et al. 2021, equation 2: 12·l·h²·(1 + 13/(12·h) + (V + s)/(12·l·h)), and the final norm's 2·h."""
    layers, h, s, v = 96, 12288, 2048, 51200
    gpt3 = job(s=s, h=h, a=96, num_layers=layers, padded_vocab_size=v)
    formula = 12 * layers * h * h + 13 * layers * h + (v + s) * h + 2 * h
    assert sum(parameter.numel for parameter in parameters(full_model(module_inputs(gpt3)))) == formula


@pytest.mark.parametrize("precision", ["--bf16", "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"])
def test_recomputed_norms_do_not_save_their_outputs_and_statistics(precision: str) -> None:
    """Before latent attention and a MoE layer the norm is a separate module. All modules that read its output share one tensor.

    `TransformerLayer`, 0.16.1, frees and recomputes it. In FP8 without recompute, each of the two projections that read it
    in attention saves a copy of one byte per element, with scales. That of queries keeps its copy: `save_original_input` is set for
    down projections only.
    """
    line = (
        f"{precision} --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
        "--multi-latent-attention --num-experts 8 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
    )
    plain, recomputed = (
        transformer_layer(shapes_of(job_of(f"{line} {more}")), moe=True).retained_bytes
        for more in ("", "--recompute-granularity selective --recompute-modules layernorm")
    )
    s, h = 2048, 1024
    output, statistics = 2 * s * h, 4 * s
    before_attention = output if "fp8" not in precision else s * h + 512
    assert plain - recomputed == before_attention + output + 2 * statistics


def test_shards_add_up_to_the_full_parameter() -> None:
    for t in (2, 8):
        tree = chunk_tree(module_inputs(job(t=t)), ChunkKind(layers=((LayerKind(), 4),)))
        split = [parameter for parameter in parameters(tree) if parameter.sharding == "tensor"]
        assert split
        assert all(parameter.numel * t == parameter.full_numel for parameter in split)
        assert all(parameter.numel == parameter.full_numel for parameter in parameters(tree) if parameter.sharding == "replicated")


@given(
    t=st.sampled_from([1, 2, 4]), sp=st.booleans(), recompute=st.sampled_from([None, "selective", "full"]), layers=st.integers(1, 5)
)
def test_backward_starts_with_the_bytes_that_forward_saved(t: int, sp: bool, recompute: str | None, layers: int) -> None:
    spec = {
        None: RecomputeSpec(),
        "selective": RecomputeSpec(granularity="selective", modules=("core_attn",)),
        "full": RecomputeSpec(granularity="full", method="uniform", num_layers=1),
    }[recompute]
    asked = replace(job(t=t, sp=sp and t > 1), recompute=spec)
    memory = chunk_memory(chunk_tree(module_inputs(asked), ChunkKind(layers=((LayerKind(), layers),))))
    saved = [point.saved for point in memory.points(BACKWARD)]
    assert saved[0] == memory.retained
    assert memory.peak(FORWARD) >= memory.retained
    assert saved[-1] < saved[0]
    if recompute is None:
        assert saved == sorted(saved, reverse=True)
