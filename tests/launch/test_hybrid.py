"""Options of hybrid models with Mamba layers: patterns, pipeline stages, MTP depths, and what Megatron-LM refuses."""

from __future__ import annotations

from itertools import pairwise

import pytest

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.model.hybrid import read_pattern
from analyzer.predict import predict
from analyzer.specs import TrainingJob
from tests.job_of import BLACKWELL, arguments_of, job_of

SPEC = "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"

EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear"


def hybrid(line: str, *, release: str = "0.16.1", gpus: int = 8) -> TrainingJob:
    """Return the job of a hybrid model."""
    return job_of(f"{SPEC} {line}", release=release, gpus=gpus)


def test_the_default_sizes_of_mamba_layers() -> None:
    """`TransformerConfig`: states of 128, heads of 64, 8 groups; `MambaMixer`: twice the hidden size of 1024."""
    found = hybrid("--hybrid-override-pattern M-M*M-M-").model.hybrid
    assert found is not None
    assert (found.state_dim, found.head_dim, found.groups, found.heads, found.width) == (128, 64, 8, 32, 2048)
    assert found.memory_efficient


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # the values of megatron-core 0.16.1: allocate_layers(total, attention, mlp)
        ("--num-layers 10 --hybrid-attention-ratio 0.2", "MMM*MM*MMM"),
        ("--num-layers 10 --hybrid-attention-ratio 0.1 --hybrid-mlp-ratio 0.1", "MMMMM*MMM-"),
        ("--num-layers 10 --hybrid-attention-ratio 0.3 --hybrid-mlp-ratio 0.3", "M-*MM*-*M-"),
        ("--num-layers 4 --is-hybrid-model", "MMMM"),
    ],
)
def test_shares_of_layer_types_become_a_pattern(line: str, expected: str) -> None:
    pattern = read_pattern(arguments_of(f"--hidden-size 64 --num-attention-heads 4 {line}"))
    assert pattern is not None
    assert pattern.letters == expected


def test_bars_are_pipeline_stages_and_slashes_are_mtp_depths() -> None:
    job = hybrid(
        "--hybrid-layer-pattern M-|M*|M-|M*/*-/*- --pipeline-model-parallel-size 2 --position-embedding-type rope", release="0.19.0"
    )
    assert job.parallel.virtual_pipeline == 2
    assert job.parallel.pipeline_layout.layout == ("Ett", "tt", "tt", "ttmmL")
    assert job.model.num_layers == 8
    assert job.model.mtp_num_layers == 2


@pytest.mark.parametrize(
    ("line", "release", "match"),
    [
        ("--hybrid-override-pattern MM", "0.16.1", "2 letters, and --num-layers is 8"),
        ("--hybrid-override-pattern MMMMMMMQ", "0.16.1", "'Q' is not a layer type"),
        ("--hybrid-override-pattern MMMMMMMG", "0.16.1", "or name core 0.17 or later"),
        ("--hybrid-layer-pattern M+", "0.18.2", "or name core 0.19 or later"),
        ("--hybrid-layer-pattern MG", "0.18.2", "add --swiglu"),
        ("--hybrid-layer-pattern MD*", "0.18.2", "has attention .* and multi-latent attention .D."),
        ("--hybrid-layer-pattern MG --swiglu --tensor-model-parallel-size 8 --linear-num-key-heads 4", "0.18.2", "4 key heads"),
        ("--hybrid-override-pattern MMMM|MMM", "0.16.1", "core 0.17 or later"),
        ("--hybrid-override-pattern MMMMMMME", "0.16.1", "layers with experts"),
        ("--hybrid-override-pattern MMMMMMMM --mamba-num-groups 3", "0.16.1", "cannot be split into 3 groups"),
        ("--hybrid-override-pattern MMMMMMMM --mamba-num-groups 2 --tensor-model-parallel-size 4", "0.16.1", "2 groups"),
        (
            "--hybrid-override-pattern MMMMMMMM --context-parallel-size 8 --mamba-num-groups 1 --mamba-num-heads 4",
            "0.16.1",
            "4 heads",
        ),
        ("--hybrid-layer-pattern M|M|M --pipeline-model-parallel-size 2", "0.19.0", "3 stages"),
        ("--hybrid-layer-pattern MM/M/*", "0.19.0", "different layers"),
        ("--hybrid-layer-pattern MM --mtp-num-layers 1", "0.19.0", "in the pattern"),
        (
            "--hybrid-layer-pattern M|M --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            "0.19.0",
            "cannot be used with a hybrid model",
        ),
        ("--hybrid-layer-pattern MMMM --fp8-format hybrid --mamba-num-heads 33 --mamba-num-groups 1", "0.19.0", "multiple of 16"),
        # 2·2048 + 2·8·128 + 32 outputs on 4 ranks
        ("--hybrid-layer-pattern MMMM --fp8-format hybrid --tensor-model-parallel-size 4", "0.19.0", "1544 outputs on a rank"),
    ],
)
def test_what_megatron_refuses_is_an_error(line: str, release: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        hybrid(line, release=release)


@pytest.mark.parametrize(
    "line",
    [
        "--hybrid-layer-pattern MD --bf16",
        "--hybrid-layer-pattern M* --multi-latent-attention",
        "--hybrid-layer-pattern MM --mtp-hybrid-override-pattern M",
        "--hybrid-layer-pattern M* --window-size 128,0",
        "--hybrid-layer-pattern MM --optimizer muon",
        f"--hybrid-layer-pattern ME {EXPERTS} --cuda-graph-impl local --cuda-graph-scope mamba moe_router",
    ],
)
def test_what_is_not_modelled_is_refused(line: str) -> None:
    with pytest.raises(UnsupportedError):
        hybrid(line, release="0.19.0")


@pytest.mark.parametrize(
    ("line", "release", "latent", "sparse"),
    [
        # `validate_args` and `core_transformer_config_from_args`: + and D switch multi-latent attention on, D also dsa
        ("--hybrid-layer-pattern M+-", "0.19.0", True, False),
        ("--hybrid-layer-pattern MD- --bf16 --dsa-indexer-loss-coeff 0 --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 64 "
         "--dsa-indexer-topk 64", "0.18.2", True, True),
        ("--hybrid-layer-pattern M*-", "0.19.0", False, False),
    ],
)  # fmt: skip
def test_letters_switch_attention_on(line: str, release: str, latent: bool, sparse: bool) -> None:
    model = hybrid(line, release=release).model
    assert (model.mla is not None, model.sparse_attention is not None) == (latent, sparse)


def test_letters_g_are_gated_delta_nets_also_in_mtp_depths() -> None:
    """Parameters of a layer: `GatedDeltaNet.__init__` of core 0.18.2, with the norm that is fused into its input projection."""
    counts = [
        predict(hybrid(f"--hybrid-layer-pattern {pattern} --swiglu --position-embedding-type rope", release="0.18.2", gpus=1))
        .ranks[0]
        .parameters
        for pattern in ("M-*/*", "MG-*/*", "MG-*/G*")
    ]
    hidden, keys, values, heads = 1024, 16 * 128, 32 * 128, 32
    inputs = hidden * (2 * keys + 2 * values + 2 * heads) + 2 * hidden
    layer = inputs + 4 * (2 * keys + values) + 2 * heads + 2 * 128 + values * hidden
    assert [after - before for before, after in pairwise(counts)] == [layer, layer]


def test_norms_of_queries_and_keys_have_no_effect() -> None:
    """`hybrid_stack_spec` gives the layers none."""
    with_norms = hybrid("--hybrid-layer-pattern M*- --qk-layernorm", release="0.19.0")
    assert not with_norms.model.qk_layernorm
    assert any("--qk-layernorm" in each and "no effect" in each for each in with_norms.warnings)


def test_fsdp2_does_not_train_parameters_that_mamba_layers_reference() -> None:
    """`MambaContextParallel` keeps the parameters that FSDP2 replaces: the shadow engine reduces no gradient of them."""
    line = "--use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights"
    warned = [hybrid(f"--hybrid-override-pattern {pattern} {line}").warnings for pattern in ("MMMMMMMM", "*-*-*-*-")]
    assert [any("dt_bias, A_log and D" in each for each in warnings) for warnings in warned] == [True, False]


def test_fp4_has_an_effect_from_0_17_on() -> None:
    line = "--num-layers 2 --hybrid-override-pattern MM --fp4-format e2m1 --fp4-recipe nvfp4"
    with pytest.raises(UnsupportedError, match="has no effect"):
        hybrid(line, release="0.16.1")
    precision = job_of(f"{SPEC} {line}", release="0.19.0", gpu=BLACKWELL).precision
    assert precision.fp8 is not None
    assert precision.fp8.recipe == "nvfp4"


def test_full_recomputation_has_an_effect_from_0_18_on() -> None:
    line = "--hybrid-override-pattern MMMM*MMM --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    before, after = hybrid(line), hybrid(line, release="0.19.0")
    assert before.recompute.granularity is None
    assert any("has no effect" in each for each in before.warnings)
    assert after.recompute.granularity == "full"
