"""DeepSeek sparse attention: its sizes, and what is refused with it."""

from __future__ import annotations

import pytest

from analyzer.api import analyze_inference
from analyzer.errors import InputError, UnsupportedError
from analyzer.predict import predict
from analyzer.specs import AbsorbedSpec
from tests.job_of import AMPERE, job_of

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


def test_kernels_of_tilelang_are_not_modelled() -> None:
    """The weights are counted, and there is no verdict."""
    job = job_of(f"{SPARSE} --disable-bias-linear --dsa-kernel-backend tilelang", release="0.19.0")
    assert "DSAttention of Megatron-LM are counted as those of dense multi-latent attention" in job.withheld[0]
    assert job.model.sparse_attention is None


def test_parameters_of_the_indexer() -> None:
    """`DSAIndexer.__init__`: projections of the compressed queries and of the hidden states, and a LayerNorm of the keys."""
    with_indexer, without = (predict(job_of(options, release="0.18.2")) for options in (SPARSE, LATENT))
    model = job_of(SPARSE, release="0.18.2").model
    of_layer = 4 * 64 * 192 + 64 * model.hidden_size + 2 * 64 + 4 * model.hidden_size
    assert with_indexer.parameters_unpadded - without.parameters_unpadded == model.num_layers * of_layer


LATER = f"{SPARSE} --disable-bias-linear --swiglu --num-layers 8"
SHARED = f"{LATER} --dsa-indexer-topk-freq 4 --dsa-indexer-skip-topk-offset 3"


RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CUDNN = f"{LATER} --kv-lora-rank 512 --num-attention-heads 64 --dsa-kernel-backend cudnn --dsa-indexer-use-sparse-loss"


def _indexers(options: str) -> int:
    """The weights of 0.19 beyond those of latent attention, in units of an indexer."""
    job = job_of(options, release="0.19.0")
    latent = job_of(f"{LATENT} --disable-bias-linear --swiglu --num-layers 8", release="0.19.0")
    mtp = job_of(f"{LATENT} --disable-bias-linear --swiglu --num-layers 8 --mtp-num-layers 1", release="0.19.0")
    without = mtp if job.model.mtp_num_layers else latent
    of_layer = 4 * 64 * 192 + 64 * job.model.hidden_size + 2 * 64 + 4 * job.model.hidden_size
    more = predict(job).parameters_unpadded - predict(without).parameters_unpadded
    assert more % of_layer == 0
    return more // of_layer


@pytest.mark.parametrize(
    ("options", "count"),
    [(LATER, 8), (SHARED, 4), (f"{LATER} --dsa-indexer-topk-freq 4", 2), (f"{SHARED} --mtp-num-layers 1", 5)],
)
def test_layers_with_an_indexer(options: str, count: int) -> None:
    """`is_dsa_skip_topk_layer` of 0.19.0: layers 1, 2, 3 and 7; 1 and 5. The number of the layer in an MTP layer is 1."""
    assert _indexers(options) == count


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (f"{SHARED} --pipeline-model-parallel-size 2", "a stage begins with layer 5, which uses the keys that layer 3 of another"),
        (f"{LATER} --context-parallel-size 2", "--cp-comm-type: context parallelism of dsa gathers the keys"),
        (SPARSE, "add --disable-bias-linear"),
        (LATER.replace("--no-rope-fusion", ""), "add --no-rope-fusion"),
        (f"{LATER} --tensor-model-parallel-size 2", "--tensor-model-parallel-size: dsa needs sequence parallelism"),
        (f"{LATER} --qk-layernorm".replace("--q-lora-rank 192", ""), "dsa normalizes compressed queries only"),
        (f"{SHARED} {RECOMPUTED}", "add --no-create-attention-mask-in-dataloader"),
        (f"{CUDNN} --no-dsa-indexer-scoring-relu", "the kernels of cuDNN apply a ReLU"),
        (f"{CUDNN} --kv-lora-rank 64", "--kv-lora-rank: is not modelled with sparse attention .dsa. by cuDNN; use 512"),
        (f"{CUDNN} --num-attention-heads 48 --kv-channels 64", "48 heads of a tensor-parallel rank"),
        (CUDNN.replace("--dsa-indexer-use-sparse-loss", ""), "add --dsa-indexer-use-sparse-loss"),
    ],
)
def test_refused_by_later_releases(options: str, part: str) -> None:
    """`TransformerConfig.__post_init__`, `_validate_dsa_index_share_pipeline_split` and modules of attention of 0.19.0.

    The recomputation of layers that use the keys of others fails in 0.19.0 itself, as run by the shadow engine.
    """
    with pytest.raises(InputError, match=part):
        job_of(options, release="0.19.0")


def test_recomputation_without_a_mask_is_accepted() -> None:
    job = job_of(f"{SHARED} {RECOMPUTED} --no-create-attention-mask-in-dataloader", release="0.19.0")
    assert job.recompute.granularity == "full"


def test_kernels_need_hopper() -> None:
    """`_get_topk_alignment` raises RuntimeError before compute capability 9.0."""
    with pytest.raises(InputError, match="the kernels of cuDNN need Hopper or later"):
        job_of(CUDNN, release="0.19.0", gpu=AMPERE)


@pytest.mark.parametrize(
    ("heads", "capability", "computed"),
    [(64, (9, 0), 64), (16, (9, 0), 64), (128, (9, 0), 128), (16, (10, 0), 64), (128, (10, 3), 128), (48, (9, 0), None)],
)
def test_heads_of_the_kernels(heads: int, capability: tuple[int, int], computed: int | None) -> None:
    """`_flash_mla_head_padding`."""
    assert AbsorbedSpec(backend="cudnn").computed_heads(heads, capability) == computed
    assert AbsorbedSpec().computed_heads(heads, capability) == heads


def test_stages_that_begin_with_an_indexer_and_gathered_keys_are_accepted() -> None:
    options = f"{SHARED} --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 6 --context-parallel-size 2"
    assert job_of(f"{options} --cp-comm-type all_gather", release="0.19.0").parallel.context == 2


def test_the_remedy_is_a_split_that_megatron_accepts() -> None:
    """Of 78 layers with indexers in 1, 2, 3, 7, 11 … (GLM-5.2) stages of 14, 12, 12, 12, 12 and 16 are those of its recipe."""
    options = f"{SHARED.replace('--num-layers 8', '--num-layers 78')} --pipeline-model-parallel-size 6"
    with pytest.raises(InputError, match="add --decoder-first-pipeline-num-layers 14 --decoder-last-pipeline-num-layers 16"):
        job_of(options, release="0.19.0", gpus=48)
    split = "--decoder-first-pipeline-num-layers 14 --decoder-last-pipeline-num-layers 16"
    assert job_of(f"{options} {split}", release="0.19.0", gpus=48).parallel.pipeline == 6


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_remedy_of_few_stages_is_accepted(stages: int) -> None:
    options = f"{SHARED.replace('--num-layers 8', '--num-layers 24')} --pipeline-model-parallel-size {stages}"
    with pytest.raises(InputError, match="begin each stage with a layer that has an indexer: add ") as caught:
        job_of(options, release="0.19.0", gpus=24)
    remedy = str(caught.value).rpartition("add ")[2]
    assert job_of(f"{options} {remedy}", release="0.19.0", gpus=24).parallel.pipeline == stages


def test_sparse_layers_of_hybrids_need_an_earlier_release() -> None:
    options = f"{SIZES} --dsa-indexer-loss-coeff 0.01 --q-lora-rank 192 --kv-lora-rank 64 --no-rope-fusion --disable-bias-linear"
    with pytest.raises(UnsupportedError, match="of hybrids in core"):
        job_of(f"{options} --hybrid-layer-pattern MD-D", release="0.19.0")


def test_inference_of_later_releases_is_not_modelled() -> None:
    line = "--info-model zai-org/GLM-5.2 --nproc-per-node 8 --tensor-model-parallel-size 8"
    with pytest.raises(UnsupportedError, match="inference with sparse or linear attention is not modelled"):
        analyze_inference(line, batch=1, prompt=128, generate=16, environ={})
