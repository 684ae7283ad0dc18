"""Launches that fail in the code of Megatron, and similar ones that run. `analyzer.specs.rules.failures` and `quantized` have the
sources."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.errors import InputError
from analyzer.specs.rules.failures import failure_violations
from tests.job_of import job_of

STORED_BLOCKS = "--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather"
FSDP = (
    "--use-megatron-fsdp --use-distributed-optimizer --no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor "
    "--data-parallel-sharding-strategy optim"
)
OUTER, INSTANCES = "--outer-dp-sharding-strategy optim", "--num-distributed-optimizer-instances 2"
STAGES = "--pipeline-model-parallel-size 2"
LOCAL = "--cuda-graph-impl local --te-rng-tracker"
MLA = "--multi-latent-attention --position-embedding-type rope"
EXPERTS = "--num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
OVERLAP = f"{EXPERTS} --disable-bias-linear --overlap-moe-expert-parallel-comm {STAGES} --num-layers-per-virtual-pipeline-stage 2"
MTP = f"{OVERLAP} --position-embedding-type rope --mtp-num-layers 1"
LATENT = f"{OVERLAP} --moe-latent-size 256"
DELAY = f"{OVERLAP} --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --delay-wgrad-compute"
NO_STAGES = f"{EXPERTS} --disable-bias-linear --overlap-moe-expert-parallel-comm"
CAPACITY = f"{EXPERTS} --moe-router-topk 2 --moe-pad-expert-input-to-capacity --moe-expert-capacity-factor"
"""Two of eight experts for each token: a capacity of four times the mean is all tokens."""
SHARED = "--bf16 --tensor-model-parallel-size 2 --sequence-parallel --fp8-format e4m3 --fp8-recipe"

UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
VIRTUAL = "--num-virtual-stages-per-pipeline-rank 2"
FIRST = "--decoder-first-pipeline-num-layers"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"


@pytest.mark.parametrize(
    ("line", "runs", "dest"),
    [
        (f"{FSDP} {STAGES}", FSDP, "--use-megatron-fsdp"),
        (f"{LOCAL} {STAGES}", LOCAL, "--cuda-graph-impl"),
        ("--fp32-residual-connection", "--fp32-residual-connection --transformer-impl local", "--fp32-residual-connection"),
        (
            f"{MLA} --fp32-residual-connection",
            f"{MLA} --fp32-residual-connection {EXPERTS}",
            "--fp32-residual-connection",
        ),
        (
            f"{MTP} --moe-layer-freq [1,1,1,1,1,1,1,0]",
            f"{MTP} --moe-layer-freq [0,1,1,1,1,1,1,1]",
            "--overlap-moe-expert-parallel-comm",
        ),
        (DELAY, f"{DELAY} --disable-tp-comm-bulk-wgrad", "--delay-wgrad-compute"),
        (
            f"{NO_STAGES} --overlap-grad-reduce --moe-layer-freq [1,1,1,1,1,1,1,0]",
            f"{NO_STAGES} --overlap-grad-reduce",
            "--overlap-grad-reduce",
        ),
        (f"{LATENT} --delay-wgrad-compute", LATENT, "--delay-wgrad-compute"),
        (f"{CAPACITY} 4.5", f"{CAPACITY} 4", "--moe-expert-capacity-factor"),
        (f"{CAPACITY} 4.5", f"{CAPACITY} 4.5 --moe-token-dispatcher-type allgather", "--moe-expert-capacity-factor"),
        (f"{FSDP}_grads {STORED_BLOCKS}", f"{FSDP}_grads_params {STORED_BLOCKS}", "--data-parallel-sharding-strategy"),
        (f"{FSDP} {STORED_BLOCKS}", f"{FSDP} --fp8-format e4m3 --fp8-recipe blockwise", "--data-parallel-sharding-strategy"),
        (f"{FSDP} {OUTER} {INSTANCES}", f"{FSDP}_grads_params {OUTER} {INSTANCES}", "--outer-dp-sharding-strategy"),
        (f"{FSDP}_grads_params {OUTER}", f"{FSDP}_grads_params", "--outer-dp-sharding-strategy"),
        (
            f"{FSDP}_grads_params {OUTER} {INSTANCES} {EXPERTS} --disable-bias-linear",
            f"{FSDP}_grads_params {INSTANCES} {EXPERTS} --disable-bias-linear",
            "--outer-dp-sharding-strategy",
        ),
        (f"{UNIFORM} 3", f"{UNIFORM} 4", "--recompute-num-layers"),
        (f"{UNIFORM} 2 --pipeline-model-parallel-size 4 {VIRTUAL}", f"{UNIFORM} 2 {STAGES} {VIRTUAL}", "--recompute-num-layers"),
        (f"{UNIFORM} 2 {STAGES} {FIRST} 3", f"{UNIFORM} 3 {STAGES} {FIRST} 3 --num-layers 9", "--recompute-num-layers"),
        (
            f"{UNIFORM} 2 {STAGES} {LOSS} --num-layers 7",
            f"{UNIFORM} 5 {STAGES} {LOSS} {EMBEDDING} --num-layers 10",
            "--recompute-num-layers",
        ),
    ],
)
def test_launches_that_fail_in_the_code_of_megatron_are_refused(line: str, runs: str, dest: str) -> None:
    with pytest.raises(InputError, match=f"^{dest}: "):
        job_of(line, gpus=8)
    job_of(runs, gpus=8)


@pytest.mark.parametrize(
    ("line", "runs", "dest"),
    [
        (f"{SHARED} blockwise {MLA} --kv-lora-rank 64", f"{SHARED} blockwise {MLA} --kv-lora-rank 128", "--kv-lora-rank"),
        (f"{SHARED} blockwise --seq-length 64", f"{SHARED} tensorwise --seq-length 64", "--sequence-parallel"),
        (f"{SHARED} blockwise --tp-comm-overlap", f"{SHARED} tensorwise --tp-comm-overlap", "--tp-comm-overlap"),
    ],
)
def test_what_one_release_of_a_library_refuses_is_a_warning(line: str, runs: str, dest: str) -> None:
    """Checks of Transformer Engine that not all releases have: the launch is analyzed."""
    for each, expected in ((line, True), (runs, False)):
        warnings = job_of(each, gpus=8).warnings
        assert any(text.startswith(f"{dest}: ") and "(Transformer Engine 2.11;" in text for text in warnings) == expected


@pytest.mark.parametrize(
    ("options", "gpus", "fails"),
    [
        (FSDP, 8, True),
        (FSDP.removesuffix("optim") + "no_shard", 8, False),  # each rank has the gradients of all parameters
        (FSDP, 1, False),
    ],
)
def test_loss_scaling_fails_if_gradients_are_sharded(options: str, gpus: int, fails: bool) -> None:
    job = job_of(options, gpus=gpus)
    scaled = replace(job, precision=replace(job.precision, parameters="fp16"))
    assert [each.options for each in failure_violations(scaled)] == ([("use_megatron_fsdp",)] if fails else [])
    assert not list(failure_violations(job))


def test_experts_are_sharded_over_optimizer_instances_from_0_17_on() -> None:
    job_of(f"{FSDP}_grads_params {OUTER} {INSTANCES} {EXPERTS} --disable-bias-linear", gpus=8, release="0.17.1")


def test_graphs_of_parts_of_a_layer_run_with_pipeline_stages() -> None:
    job_of(f"{LOCAL} --cuda-graph-scope attn {STAGES}", gpus=8)


def test_dense_mtp_layers_overlap_from_0_19_on() -> None:
    job_of(f"{MTP} --moe-layer-freq [1,1,1,1,1,1,1,0]", gpus=8, release="0.19.0")


DEPTH = "--position-embedding-type rope --mtp-num-layers 1"


def test_full_recomputation_of_mtp_layers_fails_in_0_18() -> None:
    for release in ("0.17.1", "0.19.0"):
        job_of(f"{DEPTH} {UNIFORM} 1", release=release)
    with pytest.raises(InputError, match=r"^--recompute-granularity: full fails in this release with MTP layers"):
        job_of(f"{DEPTH} {UNIFORM} 1", release="0.18.2")
    job_of(f"{UNIFORM} 2", release="0.18.2")


def test_weight_gradients_of_latent_projections_are_delayed_from_0_17_on() -> None:
    job_of(f"{LATENT} --delay-wgrad-compute", gpus=8, release="0.17.1")
