"""MoE layers: derived values, and errors for what Megatron refuses.

Each case states a rule of `validate_args`, `TransformerConfig.__post_init__` or `megatron/core/transformer/moe` in
Megatron-LM 0.16.1. Recorded launches and sizes are those that Megatron accepted or refused (tests/data/truth).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.build import build
from analyzer.launch.launchers.world import World
from analyzer.launch.parse import parse
from analyzer.specs import HardwareSpec, MoeSpec, TrainingJob
from tests.data_files import truth, truth_records
from tests.job_of import BASE, HOPPER, arguments_of, job_of

E8 = "--num-experts 8 --disable-bias-linear "
TP2 = "--tensor-model-parallel-size 2 "
SHARED_EXPERTS = E8 + "--moe-shared-expert-intermediate-size 1024 "
GROUPED = E8 + "--moe-grouped-gemm "
VOLTA = HardwareSpec(name="V100-32GB", compute_capability=(7, 0))


def moe_of(line: str, **where: Any) -> MoeSpec:
    moe = job_of(line, **where).model.moe
    assert moe is not None
    return moe


REFUSED = [
    # experts and layers
    ("--num-experts -1", "--num-experts", "not above 0"),
    (E8 + "--expert-model-parallel-size 3", "--expert-model-parallel-size", "groups of 3"),
    ("--num-experts 6 --disable-bias-linear --expert-model-parallel-size 4", "--num-experts", "6 experts"),
    ("--num-experts 0 --expert-model-parallel-size 2", "--expert-model-parallel-size", "no experts"),
    ("--num-experts 0 --moe-ffn-hidden-size 512", "--moe-ffn-hidden-size", "no experts"),
    (E8 + "--moe-layer-freq [0,1]*3", "--moe-layer-freq", "lists 6 layers"),
    (E8 + "--moe-layer-freq [0,2]*4", "--moe-layer-freq", "2 is neither"),
    (E8 + "--moe-layer-freq 0", "--moe-layer-freq", "not above 0"),
    (E8 + TP2 + "--sequence-parallel --moe-ffn-hidden-size 513", "--moe-ffn-hidden-size", "513"),
    # router
    (E8 + "--moe-router-topk 9", "--moe-router-topk", "9 of 8"),
    (E8 + "--moe-router-topk 0", "--moe-router-topk", "not above 0"),
    (E8 + "--moe-router-topk 1", "--moe-router-topk", "softmax over one score"),
    (E8 + "--moe-router-group-topk 2", "--moe-router-group-topk", "number of groups"),
    (E8 + "--moe-router-group-topk 2 --moe-router-num-groups 3", "--moe-router-num-groups", "8 experts"),
    (E8 + "--moe-router-group-topk 5 --moe-router-num-groups 4", "--moe-router-group-topk", "4 groups"),
    (E8 + "--moe-router-topk 4 --moe-router-group-topk 1 --moe-router-num-groups 4", "--moe-router-group-topk", "4 best experts"),
    (E8 + "--moe-router-enable-expert-bias", "--moe-router-enable-expert-bias", "softmax"),
    (
        E8 + "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2",
        "--moe-aux-loss-coeff",
        "1 coefficients for 2",
    ),
    (E8 + "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 1e-2", "--moe-aux-loss-coeff", "has no loss"),
    (E8 + "--moe-router-padding-for-quantization", "--moe-router-padding-for-quantization", "fp8 or fp4"),
    (
        E8 + "--moe-router-padding-for-quantization --fp8-format e4m3 --bf16 --moe-token-dispatcher-type alltoall "
        "--moe-router-load-balancing-type sinkhorn",
        "--moe-router-padding-for-quantization",
        "the backward of sinkhorn",
    ),
    (
        E8 + "--moe-router-padding-for-quantization --fp8-format e4m3 --bf16 --moe-token-dispatcher-type alltoall "
        "--moe-expert-capacity-factor 1",
        "--moe-router-padding-for-quantization",
        "the backward of the expert capacity",
    ),
    (E8 + "--moe-router-padding-for-fp8", "--moe-router-padding-for-fp8", "fp8 or fp4"),
    (E8 + "--moe-apply-probs-on-input", "--moe-apply-probs-on-input", "not 2"),
    # capacity
    (E8 + "--moe-pad-expert-input-to-capacity", "--moe-pad-expert-input-to-capacity", "no capacity"),
    (
        E8 + "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor -1",
        "--moe-pad-expert-input-to-capacity",
        "no capacity",
    ),
    (
        E8 + "--moe-expert-capacity-factor 1 --moe-router-load-balancing-type sinkhorn",
        "--moe-expert-capacity-factor",
        "sinkhorn",
    ),
    # shared experts and dispatchers
    (E8 + "--moe-shared-expert-intermediate-size 0", "--moe-shared-expert-intermediate-size", "not above 0"),
    ("--num-experts 8 --moe-shared-expert-intermediate-size 512", "--moe-shared-expert-intermediate-size", "no biases"),
    (SHARED_EXPERTS + "--moe-shared-expert-overlap", "--moe-shared-expert-overlap", "allgather"),
    (
        SHARED_EXPERTS + "--moe-shared-expert-overlap --moe-token-dispatcher-type alltoall --moe-latent-size 512",
        "--moe-shared-expert-overlap",
        "--moe-latent-size",
    ),
    (E8 + "--moe-enable-deepep", "--moe-enable-deepep", "allgather"),
    # parallelism and biases
    (E8 + TP2, "--num-experts", "sequence parallelism"),
    ("--num-experts 8 --sequence-parallel " + TP2, "--expert-tensor-parallel-size", "biases"),
    ("--num-experts 8 --moe-grouped-gemm", "--moe-grouped-gemm", "bias and dropout"),
    (GROUPED.replace("--disable-bias-linear", "") + "--moe-use-legacy-grouped-gemm", "--moe-grouped-gemm", "no biases"),
    (GROUPED + "--moe-use-legacy-grouped-gemm --moe-latent-size 256", "--moe-grouped-gemm", "--moe-latent-size"),
    (GROUPED + "--transformer-impl local --quick-geglu", "--moe-grouped-gemm", "--quick-geglu"),
    # recomputation
    (
        SHARED_EXPERTS
        + "--moe-token-dispatcher-type alltoall --moe-shared-expert-overlap --recompute-granularity selective "
        + "--recompute-modules shared_experts",
        "--recompute-modules",
        "--moe-shared-expert-overlap",
    ),
    (E8 + "--recompute-granularity selective --recompute-modules moe_act", "--recompute-modules", "--moe-grouped-gemm"),
    (
        E8 + "--moe-layer-recompute --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--moe-layer-recompute",
        "full",
    ),
]


@pytest.mark.parametrize(("line", "option", "fault"), REFUSED, ids=[line for line, _, _ in REFUSED])
def test_refused(line: str, option: str, fault: str) -> None:
    with pytest.raises(InputError) as error:
        job_of(line)
    assert not isinstance(error.value, UnsupportedError)
    assert error.value.option == option
    assert fault in error.value.fault
    assert error.value.remedy
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "release", "option"),
    [
        (E8 + "--moe-token-dispatcher-type alltoall_seq", "0.12.3", "--moe-token-dispatcher-type alltoall_seq"),
        (E8 + "--moe-router-load-balancing-type quantile_balancing", "0.19.0", "--moe-router-load-balancing-type"),
        (E8 + "--moe-router-score-function sqrtsoftplus", "0.19.0", "--moe-router-score-function"),
        (E8 + "--use-legacy-models --transformer-impl local", "0.16.1", "--num-experts"),
    ],
)
def test_not_modelled(line: str, release: str, option: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        job_of(line, release=release)
    assert error.value.option == option


def test_old_releases() -> None:
    with pytest.raises(InputError, match=r"^--num-experts: 0"):
        job_of("--num-experts 0", release="0.12.3")
    assert job_of("--num-experts 0").model.moe is None
    assert job_of("--moe-ffn-hidden-size 512", release="0.12.3").model.moe is None
    half = BASE.replace("--bf16", "--fp16")
    assert moe_of(E8 + "--expert-model-parallel-size 2", base=half).num_experts == 8
    with pytest.raises(InputError, match=r"^--expert-model-parallel-size: is not supported with --fp16"):
        job_of(E8 + "--expert-model-parallel-size 2", base=half, release="0.15.3")
    assert moe_of(GROUPED, base=half).grouped_gemm
    for line, release in ((GROUPED, "0.15.3"), (GROUPED + "--moe-use-legacy-grouped-gemm", "0.16.1")):
        with pytest.raises(InputError, match=r"^--moe-grouped-gemm: works in bf16 only"):
            job_of(line, base=half, release=release)


def test_grouped_gemm_needs_ampere() -> None:
    with pytest.raises(InputError, match=r"^--moe-grouped-gemm: needs an Ampere GPU or later, and the GPU is V100-32GB"):
        job_of(GROUPED, gpu=VOLTA)


def test_defaults_of_moe_layers() -> None:
    job = job_of("--num-experts 8")
    moe = job.model.moe
    assert moe == MoeSpec(num_experts=8, topk=2, ffn_hidden_size=4096, layers=(True,) * 8)
    assert job.parallel.expert_tensor == 1
    assert job_of("").model.moe is None


def test_kinds_of_experts() -> None:
    assert (moe_of(E8).grouped_gemm, moe_of(E8).legacy_grouped_gemm) == (False, False)
    assert (moe_of(GROUPED).grouped_gemm, moe_of(GROUPED).legacy_grouped_gemm) == (True, False)
    assert moe_of(GROUPED + "--moe-use-legacy-grouped-gemm").legacy_grouped_gemm
    assert moe_of(GROUPED + "--transformer-impl local").legacy_grouped_gemm
    assert not moe_of(E8 + "--moe-use-legacy-grouped-gemm").legacy_grouped_gemm
    biased = job_of("--num-experts 8 --moe-grouped-gemm --no-bias-dropout-fusion").model
    assert biased.bias_linear
    assert biased.moe is not None


def test_the_pattern_of_moe_layers() -> None:
    assert moe_of(E8 + "--moe-layer-freq 3").layers == (True, False, False, True, False, False, True, False)
    assert moe_of(E8 + "--moe-layer-freq ([0]+[1]*3)*2").layers == (False, True, True, True) * 2


def test_shared_experts() -> None:
    plain = moe_of(SHARED_EXPERTS + "--moe-shared-expert-gate")
    assert (plain.shared_ffn_hidden_size, plain.shared_gate, plain.shared_overlap) == (1024, True, False)
    assert moe_of(SHARED_EXPERTS + "--moe-shared-expert-overlap --moe-token-dispatcher-type alltoall").shared_overlap
    assert not moe_of(E8 + "--moe-shared-expert-overlap").shared_overlap


def test_balancing() -> None:
    assert moe_of(E8 + "--moe-aux-loss-coeff 1e-2").aux_loss_coeff == 0.01
    assert moe_of(E8 + "--moe-aux-loss-coeff 1e-2", release="0.12.3").aux_loss_coeff == 0.01
    assert moe_of(E8 + "--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type none").aux_loss_coeff == 0
    two = moe_of(E8 + "--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.25 0.5")
    assert (two.load_balancing, two.aux_loss_coeff) == (("seq_aux_loss", "global_aux_loss"), 0.75)
    assert moe_of(E8 + "--moe-router-topk 1 --moe-router-load-balancing-type sinkhorn").topk == 1
    assert moe_of(E8 + "--moe-router-topk 1 --moe-router-score-function sigmoid --moe-router-enable-expert-bias").expert_bias
    assert moe_of(E8 + "--moe-router-topk 1 --moe-router-pre-softmax --moe-z-loss-coeff 1e-3").z_loss_coeff == 0.001


def test_capacity() -> None:
    assert moe_of(E8 + "--moe-expert-capacity-factor -1").capacity_factor is None
    dropping = job_of(E8 + "--moe-expert-capacity-factor 1.25")
    assert dropping.model.moe is not None
    assert (dropping.model.moe.capacity_factor, dropping.model.moe.pad_to_capacity) == (1.25, False)
    assert any("dropped" in each and "too high" in each for each in dropping.assumptions)
    padded = job_of(E8 + "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity")
    assert not any("Routing" in each or "dropped" in each for each in padded.assumptions)


def imbalanced(line: str, imbalance: float) -> TrainingJob:
    arguments = arguments_of(f"{BASE} {line}")
    return build(arguments, World(1, 8), environ={}, gpu=HOPPER, folder=Path("/nowhere"), moe_imbalance=imbalance)


def test_imbalance() -> None:
    assert any("Balanced routing" in each for each in job_of(E8).assumptions)
    job = imbalanced(E8 + "--expert-model-parallel-size 8", 3.5)
    assert job.model.moe is not None
    assert job.model.moe.imbalance == 3.5
    assert any("3.5 times the mean" in each for each in job.assumptions)
    assert not any("Balanced routing" in each for each in job.assumptions)
    with pytest.raises(InputError, match=r"^--info-moe-imbalance: there are no experts"):
        imbalanced("", 1.5)
    with pytest.raises(InputError, match=r"^--info-moe-imbalance: .* every expert gets the same number of rows"):
        imbalanced(E8 + "--expert-model-parallel-size 8 --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity", 1.5)


@given(experts=st.sampled_from([8, 16, 64]), expert=st.sampled_from([1, 2, 4, 8]), topk=st.integers(2, 8))
def test_the_imbalance_is_limited_to_all_tokens_on_one_rank(experts: int, expert: int, topk: int) -> None:
    """A rank with n experts receives at most min(n, k) rows per token, and k/ep on average."""
    line = f"--num-experts {experts} --disable-bias-linear --expert-model-parallel-size {expert} --moe-router-topk {topk}"
    most = min(experts // expert, topk) / (topk / expert)
    imbalanced(line, most)
    with pytest.raises(InputError, match=r"^--info-moe-imbalance: .* is above "):
        imbalanced(line, most * 1.01)


@pytest.mark.parametrize("word", ["0.5", "nan", "inf", "many"])
def test_an_imbalance_below_one_is_refused(word: str) -> None:
    with pytest.raises(InputError, match=r"^--info-moe-imbalance: .*1.5"):
        parse(["--info-moe-imbalance", word], environ={}, folder=Path("/nowhere"))
    assert parse(["--info-moe-imbalance", "2"], environ={}, folder=Path("/nowhere"))[2].moe_imbalance == 2


@pytest.mark.parametrize(
    ("line", "release", "remedy"),
    [
        ("", "0.16.1", "--no-bias-gelu-fusion"),
        ("", "0.13.0", None),
        ("--no-bias-gelu-fusion", "0.16.1", None),
        ("--moe-grouped-gemm --no-bias-dropout-fusion", "0.16.1", "--no-bias-gelu-fusion"),
        ("--swiglu", "0.16.1", "--no-bias-swiglu-fusion"),
        ("--swiglu --moe-grouped-gemm --no-bias-dropout-fusion", "0.16.1", None),
        ("--quick-geglu --moe-grouped-gemm --no-bias-dropout-fusion", "0.16.1", None),
    ],
)
def test_fusions_that_fail_in_the_first_forward_are_reported(line: str, release: str, remedy: str | None) -> None:
    """Outcomes of megatron-core 0.16.1 on tensors without data. 0.13 multiplies by the probabilities later."""
    notes = [each for each in job_of(f"--num-experts 8 {line}", release=release).assumptions if "first forward pass" in each]
    assert [note.split(" add ")[1].split()[0] for note in notes] == ([] if remedy is None else [remedy])


def test_recompute_modules_of_moe_layers() -> None:
    line = "--recompute-granularity selective --recompute-modules moe moe_act shared_experts mlp layernorm"
    assert job_of(GROUPED + line).recompute.modules == ("layernorm", "mlp", "moe", "moe_act")
    everything = "--moe-shared-expert-intermediate-size 1024 " + line
    assert job_of(GROUPED + everything).recompute.modules == ("layernorm", "mlp", "moe", "moe_act", "shared_experts")
    assert job_of(E8 + "--moe-layer-recompute").recompute.modules == ("core_attn", "moe")


def test_assumptions_name_the_option_and_the_direction() -> None:
    for flag in ("--moe-input-jitter-eps 0.01", "--moe-router-fusion", "--moe-enable-routing-replay"):
        (sentence,) = [each for each in job_of(E8 + flag).assumptions if each.startswith(flag.split()[0])]
        assert "too low" in sentence or "too high" in sentence


def job_from(record: dict[str, Any]) -> TrainingJob:
    folder = Path("/nowhere")
    arguments, world, _ = parse(["--nproc-per-node", str(record["world_size"]), *record["argv"]], environ={}, folder=folder)
    return build(arguments, world, environ={}, gpu=HOPPER, folder=folder)


def groups(kind: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = truth("groups.json")[kind]
    return records


def test_the_records_exist() -> None:
    assert (len(groups("records")), len(groups("refused"))) == (21, 5)


@pytest.mark.parametrize("record", groups("records"), ids=lambda record: "-".join(str(v) for v in record["sizes"].values()))
def test_sizes_of_every_recorded_layout(record: dict[str, Any]) -> None:
    parallel = job_from(record).parallel
    assert record["sizes"] == {
        "tp": parallel.tensor,
        "pp": parallel.pipeline,
        "cp": parallel.context,
        "ep": parallel.expert,
        "etp": parallel.expert_tensor,
        "vpp": parallel.virtual_pipeline,
        "dp": parallel.data,
        "edp": parallel.expert_data,
        "order": parallel.order,
    }


@pytest.mark.parametrize("record", groups("refused"), ids=lambda record: record["error"][:60])
def test_layouts_that_megatron_refuses_are_refused(record: dict[str, Any]) -> None:
    with pytest.raises(InputError) as error:
        job_from(record)
    assert not isinstance(error.value, UnsupportedError)


def test_published_moe_models() -> None:
    """Every MoE model in the parameter records of Megatron."""
    built = 0
    for record in truth_records("parameters.json"):
        words = record["argv"]
        if "--num-experts" not in words:
            continue
        job, layout = job_from(record), record["layout"]
        model, parallel = job.model, job.parallel
        assert model.moe is not None
        assert (model.padded_vocab_size, model.vocab_size) == (record["padded_vocab_size"], record["tokenizer_vocab"])
        assert model.ffn_hidden_size == record["ffn_hidden_size"]
        # three matrices of every expert (gate, up and down), in every MoE layer
        routed = 3 * model.hidden_size * model.moe.ffn_hidden_size * model.moe.num_experts * sum(model.moe.layers)
        if model.bias_linear:  # biases of the three matrices
            routed += (2 * model.moe.ffn_hidden_size + model.hidden_size) * model.moe.num_experts * sum(model.moe.layers)
        assert routed == record["full_routed_experts"]
        if model.moe.shared_ffn_hidden_size is not None:
            shared_width = 3 * model.hidden_size * model.moe.shared_ffn_hidden_size
            assert shared_width * sum(model.moe.layers) == record["full_by_kind"]["shared_experts"]
        else:
            assert "shared_experts" not in record["full_by_kind"]
        assert layout == {
            "tp": parallel.tensor,
            "pp": parallel.pipeline,
            "cp": parallel.context,
            "ep": parallel.expert,
            "etp": parallel.expert_tensor,
            "vpp": parallel.virtual_pipeline,
            "dp": parallel.data,
        }
        built += 1
    assert built >= 13


def test_a_width_of_experts_has_no_effect_in_dense_models_since_0_18() -> None:
    """Megatron ignores it if --moe-layer-freq leaves some layers dense, in 0.18 and 0.19."""
    line = "--moe-ffn-hidden-size 512 --moe-layer-freq"
    for frequency in ("2", "[0]*1+[1]*7"):
        assert job_of(f"{line} {frequency}", release="0.18.2").model.moe is None
        with pytest.raises(InputError, match="there are no experts"):
            job_of(f"{line} {frequency}", release="0.17.1")
    with pytest.raises(InputError, match="there are no experts"):
        job_of(f"{line} 1", release="0.18.2")


def test_experts_padded_for_fp4() -> None:
    """Since 0.16, `TransformerConfig.__post_init__` accepts --moe-router-padding-for-quantization with FP8 and with FP4."""
    line = E8 + "--moe-token-dispatcher-type alltoall --moe-router-padding-for-quantization --fp4-format e2m1"
    assert moe_of(line, gpu=HardwareSpec(name="B200", compute_capability=(10, 0))).pad_for_quantization
