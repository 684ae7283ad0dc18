"""Whole tensors on tiers, against the placements of FlexLLMGen and the sizes of OPT."""

from __future__ import annotations

from typing import Any

import pytest

from analyzer.errors import UnsupportedError
from analyzer.inference.offload.machine import machine_of
from analyzer.inference.offload.policy import Schedule, Shares
from analyzer.inference.offload.tensors import Tensor, placed, placed_cache, sub_layers
from analyzer.specs.attention import MlaSpec
from analyzer.specs.model import ModelSpec
from tests.small_job import job
from tools.score_offload import case, model, placement, records


def of_job(**model_fields: Any) -> ModelSpec:
    return job(**model_fields).model


PLAIN = Schedule(batch_size=1)
COMPRESSED = Schedule(batch_size=1, compressed_weights=True)


def test_the_realised_shares_are_those_of_flexllmgen() -> None:
    """Of the decoder layers, as the records have them."""
    compared = 0
    for record in records(published=True):
        if "realised_weight_percent_gpu_cpu" not in record:
            continue
        inputs = case(record, machine_of("T4"))
        layers = [inputs.layers.attention, inputs.layers.mlp]
        sizes = [layer.bytes(PLAIN) for layer in layers]
        shares = [placed(layer, placement(record).weights, PLAIN) for layer in layers]
        for tier, expected in enumerate(record["realised_weight_percent_gpu_cpu"]):
            found = sum(size * share[tier] for size, share in zip(sizes, shares, strict=True)) / sum(sizes)
            assert 100 * found == pytest.approx(expected, abs=0.01)
        compared += 1
    assert compared >= 17


@pytest.mark.parametrize(
    ("percent", "matrices_on_gpu"),
    [((0, 100, 0), 0), ((12, 88, 0), 0), ((13, 87, 0), 1), ((37, 63, 0), 1), ((38, 62, 0), 2), ((88, 12, 0), 4), ((100, 0, 0), 4)],
)
def test_a_projection_is_placed_by_its_middle(percent: tuple[int, int, int], matrices_on_gpu: int) -> None:
    """The middles of the four projections are at 12.5, 37.5, 62.5 and 87.5 % of the attention, and the last ones are on the GPU."""
    attention = sub_layers(model("opt-30b")).attention
    nominal = Shares(*(each / 100 for each in percent))
    assert placed(attention, nominal, PLAIN).gpu == pytest.approx(matrices_on_gpu / 4, abs=1e-3)


def test_the_disk_has_the_first_tensors() -> None:
    mlp = sub_layers(model("opt-30b")).mlp
    assert placed(mlp, Shares(0.3, 0.3, 0.4), PLAIN) == pytest.approx((0.5, 0, 0.5), abs=1e-3)
    assert placed(mlp, Shares(0.0, 0.0, 1.0), PLAIN) == (0, 0, 1)


def test_the_layers_of_opt_30b_have_its_parameters() -> None:
    """12 h² + 13 h in a layer; the head has its own copy of the embedding (OptConfig.model_bytes counts both)."""
    layers, hidden = sub_layers(model("opt-30b")), 7168
    assert layers.attention.elements == 4 * hidden**2 + 6 * hidden
    assert layers.mlp.elements == 8 * hidden**2 + 7 * hidden
    assert layers.embedding.elements == (50272 + 2050) * hidden
    assert layers.head.elements == 50272 * hidden + 2 * hidden


def test_compression_leaves_vectors_alone() -> None:
    layers = sub_layers(model("opt-30b"))
    vectors = sum(tensor.elements for tensor in layers.mlp.tensors if not tensor.is_matrix)
    assert layers.mlp.bytes(COMPRESSED) == 2 * (0.28125 * layers.mlp.matrix_elements + vectors)


def test_a_gated_model_with_grouped_queries() -> None:
    spec = of_job(activation="swiglu", bias_linear=False, bias_qkv=False, num_query_groups=2, normalization="RMSNorm")
    layers, hidden = sub_layers(spec), spec.hidden_size
    keys = 2 * spec.kv_channels
    matrices = [tensor.elements for tensor in layers.attention.tensors if tensor.is_matrix]
    assert matrices == [hidden * spec.query_projection_size, hidden * keys, hidden * keys, hidden * spec.query_projection_size]
    assert layers.mlp.tensors == (*[Tensor(hidden * spec.ffn_hidden_size, True)] * 3, Tensor(hidden, False))


def test_a_cache_is_divided_between_whole_requests() -> None:
    schedule = Schedule(batch_size=8)
    assert placed_cache(Shares(0.3, 0.7, 0.0), schedule) == (0.25, 0.75, 0.0)
    assert placed_cache(Shares(0.3, 0.3, 0.4), schedule) == (0.25, 0.25, 0.5)
    assert placed_cache(Shares(0.0, 1.0, 0.0), schedule) == (0.0, 1.0, 0.0)


def test_a_model_with_latent_attention_is_refused() -> None:
    latent = MlaSpec(q_lora_rank=None, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=8, v_head_dim=8)
    with pytest.raises(UnsupportedError, match="multi-latent"):
        sub_layers(of_job(mla=latent))
