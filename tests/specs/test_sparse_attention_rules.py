"""DeepSeek sparse attention: its sizes, and what is refused with it."""

from __future__ import annotations

import pytest

from analyzer.errors import InputError, UnsupportedError
from analyzer.predict import predict
from tests.job_of import job_of

LATENT = (
    "--multi-latent-attention --q-lora-rank 192 --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 "
    "--no-rope-fusion --position-embedding-type rope "
)
SIZES = "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 64 --dsa-indexer-topk 256 "
SPARSE = f"{LATENT} --experimental-attention-variant dsa {SIZES} --dsa-indexer-loss-coeff 0.01"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (f"{SPARSE} --context-parallel-size 2", "cannot be used with sparse attention"),
        (SPARSE.replace("--no-rope-fusion", ""), "add --no-rope-fusion"),
        (f"{SPARSE} --mtp-num-layers 1", "Megatron stops in MTP layers"),
        (f"{SPARSE} --recompute-activations", "Megatron stops if it recomputes core_attn"),
        (f"{SPARSE} --recompute-granularity selective --recompute-modules mla_up_proj", "not modelled with sparse attention"),
        (f"{SPARSE} --fp8-format hybrid", "not modelled with sparse attention"),
        (f"{SPARSE} --deterministic-mode", "not modelled with sparse attention"),
        (SPARSE.replace("--multi-latent-attention", ""), "add --multi-latent-attention"),
        (SPARSE.replace("--dsa-indexer-loss-coeff 0.01", ""), "Megatron stops at the loss of the indexer"),
        (SPARSE.replace("--dsa-indexer-topk 256", ""), "--dsa-indexer-topk: is missing"),
        (f"{SPARSE} --dsa-indexer-head-dim 16", "16 is below 32"),
    ],
)
def test_refused(options: str, part: str) -> None:
    with pytest.raises(InputError, match=part):
        job_of(options, release="0.18.2")


@pytest.mark.parametrize("release", ["0.16.1", "0.17.1"])
def test_releases_that_build_no_layers_with_it(release: str) -> None:
    """`get_experimental_attention_variant_module_spec` raises ValueError."""
    with pytest.raises(InputError, match="build no layers with dsa") as caught:
        job_of(SPARSE, release=release)
    assert not isinstance(caught.value, UnsupportedError)


def test_later_kernels_are_not_modelled() -> None:
    with pytest.raises(UnsupportedError, match="and later is not modelled"):
        job_of(SPARSE, release="0.19.0")


def test_parameters_of_the_indexer() -> None:
    """`DSAIndexer.__init__`: projections of the compressed queries and of the hidden states, and a LayerNorm of the keys."""
    with_indexer, without = (predict(job_of(options, release="0.18.2")) for options in (SPARSE, LATENT))
    model = job_of(SPARSE, release="0.18.2").model
    of_layer = 4 * 64 * 192 + 64 * model.hidden_size + 2 * 64 + 4 * model.hidden_size
    assert with_indexer.parameters_unpadded - without.parameters_unpadded == model.num_layers * of_layer
