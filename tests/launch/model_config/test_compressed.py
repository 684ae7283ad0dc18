"""DeepSeek-V4: which fields of a config.json are read, and which are refused."""

from __future__ import annotations

import pytest

from analyzer.errors import UnsupportedError
from analyzer.launch.model_config.configuration import Configuration
from analyzer.launch.model_config.families import megatron_model
from analyzer.specs.attention import CompressedModel
from tests.launch.model_config.configurations import published

FIELDS = published()["deepseek-ai/DeepSeek-V4-Flash"]["config"]
NAMES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def compressed(**changed: object) -> CompressedModel:
    found = megatron_model(Configuration({**FIELDS, **changed}, "x")).parts.compressed
    assert found is not None
    return found


def test_layers_by_their_names_in_transformers() -> None:
    """Those of transformers 5 have layer_types in place of compress_ratios."""
    layers = FIELDS["num_hidden_layers"]
    names = [NAMES[ratio] for ratio in compressed().attention.ratios[:layers]]
    assert compressed(compress_ratios=None, layer_types=names) == compressed()


@pytest.mark.parametrize("count", [None, 0])
def test_models_without_hashed_routing(count: int | None) -> None:
    assert compressed(num_hash_layers=count).hash_layers == 0


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"scoring_func": "softmax"}, "scores of the router other than sqrtsoftplus"),
        ({"first_k_dense_replace": 1}, "layers without experts"),
        ({"mlp_layer_types": ["dense"] * 43}, "layers without experts"),
        ({"compress_ratios": [0, 2] * 22}, "compression ratios for 43 layers, or others than 0, 4 and 128"),
    ],
)
def test_other_layers_are_refused(changed: dict[str, object], part: str) -> None:
    with pytest.raises(UnsupportedError, match=part):
        compressed(**changed)
