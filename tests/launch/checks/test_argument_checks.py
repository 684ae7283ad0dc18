"""Checks of combinations of options that the table of Megatron's checks does not have, and where they do not apply."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analyzer.errors import InputError
from analyzer.launch.build import build
from analyzer.launch.launchers.world import World
from tests.job_of import BASE, BASE_2023, HOPPER, arguments_of, job_of

RELEASES = ("0.16.1", "0.17.1", "0.18.2", "0.19.0")
_FSDP = (
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params "
    "--no-gradient-accumulation-fusion"
)


@pytest.mark.parametrize("release", RELEASES)
def test_optimizer_instances_need_the_distributed_optimizer(release: str) -> None:
    """`DistributedDataParallel`: 'Partial DistOpt cannot be used without DistOpt'."""
    job_of("--num-distributed-optimizer-instances 2 --use-distributed-optimizer", release=release)
    with pytest.raises(InputError, match=r"^--num-distributed-optimizer-instances: needs the distributed optimizer"):
        job_of("--num-distributed-optimizer-instances 2", release=release)


def test_muon_has_no_optimizer_instances_before_0_18() -> None:
    """`get_megatron_muon_optimizer` refuses the distributed optimizer until 0.17, and the instances need it."""
    for name in ("muon", "dist_muon"):
        with pytest.raises(InputError, match=r"^--num-distributed-optimizer-instances: needs the distributed optimizer"):
            job_of(f"--num-distributed-optimizer-instances 2 --optimizer {name}")


@pytest.mark.parametrize(
    ("line", "warned"),
    [
        (_FSDP, True),
        (f"{_FSDP} --overlap-grad-reduce", False),
        ("", False),
    ],
)
def test_optimizer_instances_that_megatron_fsdp_does_not_reduce_between_get_a_warning(line: str, warned: bool) -> None:
    """`MegatronFSDP` reduces between instances where `no_sync` ended; `start_grad_sync` of DDP does so without it."""
    job = job_of(f"--num-distributed-optimizer-instances 2 --use-distributed-optimizer {line}")
    assert any("between the optimizer instances" in each for each in job.warnings) is warned


@pytest.mark.parametrize(
    ("line", "release", "warned"),
    [
        ("--expert-model-parallel-size 2", "0.16.1", True),
        ("--expert-model-parallel-size 1", "0.16.1", False),
        ("--expert-model-parallel-size 2", "0.17.1", False),
    ],
)
def test_experts_that_megatron_fsdp_shards_like_dense_layers_get_a_warning(line: str, release: str, warned: bool) -> None:
    """`FSDPDistributedIndex` uses the mesh of the dense model for experts if `_init_dist_index` gives none (0.16.1)."""
    experts = f"--num-experts 8 --disable-bias-linear --moe-token-dispatcher-type alltoall {line}"
    options = f"{_FSDP} --num-distributed-optimizer-instances 2 --use-distributed-optimizer --overlap-grad-reduce"
    job = job_of(f"{options} {experts}", gpus=8, release=release)
    assert any("trains wrongly" in each for each in job.warnings) is warned


@pytest.mark.parametrize(
    ("sizes", "warned"),
    [
        ("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1", True),
        ("--tensor-model-parallel-size 1 --expert-tensor-parallel-size 2", True),
        ("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2", False),
        ("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 2", False),
    ],
)
def test_experts_that_are_reduced_with_other_weights_get_a_warning(sizes: str, warned: bool) -> None:
    """`setattr(param, "allreduce", not (is_expert and self.expert_parallel))` (TEGroupedLinear, 0.16.1)."""
    experts = "--num-experts 8 --disable-bias-linear --moe-token-dispatcher-type alltoall --sequence-parallel"
    job = job_of(f"{experts} {sizes}", gpus=8)
    assert any("with other parts of the experts" in each for each in job.warnings) is warned


@pytest.mark.parametrize("release", RELEASES)
def test_optimizer_instances_contradict_fp32_accumulation_in_reduce_scatter(release: str) -> None:
    """`_ParamAndGradBucketGroup`: 'RS w/ FP32 accumulation not supported with num_distributed_optimizer_instances > 1'."""
    with pytest.raises(InputError, match="fp32-accumulation"):
        job_of(
            "--num-distributed-optimizer-instances 2 --use-distributed-optimizer --ddp-reduce-scatter-with-fp32-accumulation",
            release=release,
        )


def test_checkpoints_need_an_interval_in_2023() -> None:
    with pytest.raises(InputError, match=r"^--save: "):
        job_of("--save folder", base=BASE_2023, release="2023")


def test_forks_do_not_have_all_checks() -> None:
    """The Megatron-LM of llm-jp saves without --save-interval."""
    arguments = replace(arguments_of(f"{BASE} --save folder"), fork="llm-jp")
    assert build(arguments, World(1, 8), environ={}, gpu=HOPPER, folder=Path("/nowhere"))


@pytest.mark.parametrize(
    "option", ["--overlap-param-gather", "--rotary-interleaved", "--moe-latent-size 256", "--context-parallel-size 2"]
)
def test_legacy_models_do_not_have_newer_options(option: str) -> None:
    line = (
        "--use-legacy-models --ckpt-format torch --use-distributed-optimizer --overlap-grad-reduce --position-embedding-type rope"
    )
    job_of(line)
    with pytest.raises(InputError, match="legacy models"):
        job_of(f"{line} {option}")


def test_a_warm_up_in_iterations_contradicts_training_in_samples() -> None:
    job_of("--train-samples 1000 --lr-warmup-samples 10")
    with pytest.raises(InputError, match=r"^--lr-warmup-iters: .* use --lr-warmup-samples"):
        job_of("--train-samples 1000 --lr-warmup-iters 10")
