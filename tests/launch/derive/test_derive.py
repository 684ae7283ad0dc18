"""Derived values, and errors for what Megatron refuses.

Each case states a rule of `validate_args` or of a config's `__post_init__` in Megatron-LM 0.16.1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.errors import InputError
from analyzer.launch.derive.launch_input import LaunchInput
from analyzer.launch.derive.model.shape import ffn_hidden_size
from analyzer.launch.derive.parallel import parallel_spec
from analyzer.launch.launchers.world import World
from analyzer.specs import ParallelSpec
from tests.data_files import truth, truth_records
from tests.job_of import AMPERE, BASE, BASE_2023, BLACKWELL, HOPPER, arguments_of, job_of

TP2 = "--tensor-model-parallel-size 2 "
PP2 = "--pipeline-model-parallel-size 2 "
PP4 = "--pipeline-model-parallel-size 4 "
DISTRIBUTED = "--use-distributed-optimizer "

REFUSED = [
    # sizes that do not divide
    ("--tensor-model-parallel-size 3", "--tensor-model-parallel-size", "groups of 3"),
    ("--context-parallel-size 16", "--context-parallel-size", "groups of 16"),
    ("--expert-model-parallel-size 2", "--expert-model-parallel-size", "no experts"),
    ("--expert-tensor-parallel-size 3", "--expert-tensor-parallel-size", "groups of 3"),
    (PP2 + "--context-parallel-size 2 --use-tp-pp-dp-mapping", "--use-tp-pp-dp-mapping", "4 and 2"),
    ("--num-distributed-optimizer-instances 3", "--num-distributed-optimizer-instances", "3 instances"),
    ("--num-attention-heads 12 --kv-channels 64 --tensor-model-parallel-size 8", "--tensor-model-parallel-size", "12 heads"),
    ("--num-attention-heads 12", "--num-attention-heads", "1024"),
    ("--group-query-attention --num-query-groups 3", "--num-query-groups", "16 heads"),
    ("--ffn-hidden-size 4095 " + TP2, "--tensor-model-parallel-size", "4095"),
    ("--context-parallel-size 8 --seq-length 2040", "--seq-length", "2040 tokens"),
    ("--tensor-model-parallel-size 8 --sequence-parallel --seq-length 2044", "--seq-length", "2044 tokens"),
    ("--max-position-embeddings 1024", "--max-position-embeddings", "2048"),
    ("--encoder-seq-length 2048", "--encoder-seq-length", "the same meaning"),
    ("--global-batch-size 12", "--global-batch-size", "batch of 12"),
    ("--global-batch-size 4", "--global-batch-size", "batch of 4"),
    ("--num-layers 6 " + PP4, "--pipeline-model-parallel-size", "6 layers"),
    ("--moe-ffn-hidden-size 1024", "--moe-ffn-hidden-size", "no experts"),
    # sizes with which an analysis would not end
    ("--num-layers 1000000000000", "--num-layers", "above 10000, the largest number"),
    ("--num-layers 10000 --pipeline-model-parallel-size 2000", "--pipeline-model-parallel-size", "above 1024, the largest number"),
    (
        "--num-layers 10000 --pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 1",
        "--pipeline-model-parallel-size",
        "10000 model chunks of all stages are above 2048",
    ),
    ("--mtp-num-layers 1000000000000", "--mtp-num-layers", "above 100, the largest number"),
    ("--hidden-size 1000000000000", "--hidden-size", "above 10000000, the largest number"),
    ("--num-experts 1000000000000", "--num-experts", "above 4096, the largest number"),
    ("--num-layers 32 --num-experts 4096 --moe-token-dispatcher-type alltoall", "--num-experts", "131072 experts, and 50000 is"),
    # zero, negative
    ("--num-layers 0", "--num-layers", "not above 0"),
    ("--micro-batch-size -1", "--micro-batch-size", "not above 0"),
    ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size", "not above 0"),
    # pipeline
    (PP2 + "--num-layers-per-virtual-pipeline-stage 3", "--num-layers-per-virtual-pipeline-stage", "4 layers"),
    (PP2 + "--num-virtual-stages-per-pipeline-rank 3", "--num-virtual-stages-per-pipeline-rank", "4 layers"),
    (PP2 + "--num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication", "--pipeline-model-parallel-size", "need 3"),
    ("--num-virtual-stages-per-pipeline-rank 2", "--pipeline-model-parallel-size", "need 2"),
    (
        PP2 + "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 2",
        "--num-layers-per-virtual-pipeline-stage",
        "contradicts",
    ),
    (PP4 + "--decoder-first-pipeline-num-layers 3", "--decoder-first-pipeline-num-layers", "the 5 layers"),
    (PP2 + "--decoder-first-pipeline-num-layers 8", "--decoder-first-pipeline-num-layers", "0 of 8"),
    ("--decoder-last-pipeline-num-layers 3", "--decoder-last-pipeline-num-layers", "5 of 8"),
    (
        PP4 + "--decoder-first-pipeline-num-layers 2 --account-for-loss-in-pipeline-split",
        "--decoder-first-pipeline-num-layers",
        "contradicts",
    ),
    (PP2 + "--account-for-embedding-in-pipeline-split", "--pipeline-model-parallel-size", "9 layers"),
    (PP2 + "--pipeline-model-parallel-layout Etttt|tttL", "--pipeline-model-parallel-layout", "7 decoder layers"),
    (PP2 + "--overlap-p2p-communication-warmup-flush", "--overlap-p2p-communication-warmup-flush", "no overlapped"),
    (PP2 + "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 4", "--global-batch-size", "need 2 microbatches"),
    (PP4 + "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 10", "--global-batch-size", "leave 1"),
    (
        PP4 + "--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 3",
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "less than the 4",
    ),
    # contradicting flags
    ("--fp16", "--fp16", "--bf16"),
    ("--accumulate-allreduce-grads-in-fp32 --main-grads-dtype bf16", "--accumulate-allreduce-grads-in-fp32", "bf16"),
    ("--fp16-lm-cross-entropy", "--fp16-lm-cross-entropy", "--fp16"),
    ("--swiglu --squared-relu", "--swiglu", "--squared-relu"),
    ("--squared-relu", "--squared-relu", "fused"),
    ("--quick-geglu", "--quick-geglu", "fused"),
    ("--recompute-granularity selective --recompute-modules mlp", "--recompute-modules", "with biases"),
    ("--swiglu --use-te-activation-func", "--use-te-activation-func", ""),
    ("--no-position-embedding", "--no-position-embedding", "learned_absolute"),
    (TP2 + "--tp-comm-overlap", "--tp-comm-overlap", "sequence parallelism"),
    ("--tp-comm-overlap --sequence-parallel", "--tp-comm-overlap", "sequence parallelism"),
    # the optimizer
    ("--use-distributed-optimizer --optimizer sgd", "--use-distributed-optimizer", "sgd"),
    ("--use-precision-aware-optimizer", "--use-precision-aware-optimizer", "distributed"),
    (DISTRIBUTED + "--exp-avg-dtype bf16", "--exp-avg-dtype", "precision-aware"),
    ("--main-grads-dtype bf16", "--main-grads-dtype", "precision-aware"),
    ("--overlap-param-gather --overlap-grad-reduce", "--overlap-param-gather", "distributed"),
    (DISTRIBUTED + "--overlap-param-gather", "--overlap-param-gather", "--overlap-grad-reduce"),
    (
        DISTRIBUTED + "--overlap-grad-reduce --overlap-param-gather --overlap-param-gather-with-optimizer-step --ckpt-format torch",
        "--overlap-param-gather-with-optimizer-step",
        "virtual",
    ),
    ("--ddp-average-in-collective --calculate-per-token-loss", "--ddp-average-in-collective", ""),
    # recomputation
    ("--recompute-granularity full --recompute-num-layers 1", "--recompute-granularity", "method"),
    ("--recompute-granularity full --recompute-method block", "--recompute-granularity", "number of layers"),
    ("--recompute-activations --recompute-method uniform", "--recompute-method", "selective"),
    ("--recompute-activations --recompute-num-layers 1", "--recompute-num-layers", "selective"),
    ("--recompute-granularity selective --recompute-modules moe_act", "--recompute-modules", "moe_act"),
    ("--recompute-granularity selective --recompute-modules attention", "--recompute-modules", "'attention'"),
    ("--distribute-saved-activations", "--distribute-saved-activations", "full"),
    (
        TP2 + "--sequence-parallel --recompute-granularity full --recompute-method block --recompute-num-layers 1 "
        "--distribute-saved-activations",
        "--distribute-saved-activations",
        "--sequence-parallel",
    ),
    # batch size rampup
    ("--train-iters 5 --train-samples 100", "--train-samples", "--train-iters"),
    ("--train-iters 5 --rampup-batch-size 8 8 100 --global-batch-size 32", "--rampup-batch-size", "--train-iters"),
    ("--rampup-batch-size 8 7 100 --global-batch-size 32", "--rampup-batch-size", "multiple of 7"),
    ("--rampup-batch-size 32 8 100 --global-batch-size 32", "--rampup-batch-size", "starts at 32"),
    ("--rampup-batch-size 4 4 100 --global-batch-size 32", "--rampup-batch-size", "batch of 4"),
    # other options
    ("--defer-embedding-wgrad-compute", "--defer-embedding-wgrad-compute", "needs a pipeline"),
    (PP2 + "--defer-embedding-wgrad-compute --no-gradient-accumulation-fusion", "--defer-embedding-wgrad-compute", ""),
    ("--deterministic-mode --cross-entropy-loss-fusion", "--deterministic-mode", "--cross-entropy-loss-fusion"),
    ("--deterministic-mode --use-flash-attn", "--deterministic-mode", "--use-flash-attn"),
    ("--context-parallel-size 2 --cp-comm-type allgather", "--cp-comm-type", "'allgather'"),
    ("--cp-comm-type a2a+p2p", "--cp-comm-type", "hierarchical"),
    (
        "--context-parallel-size 4 --cp-comm-type a2a --group-query-attention --num-query-groups 2",
        "--cp-comm-type",
        "2 heads of keys",
    ),
    ("--context-parallel-size 2 --transformer-impl local", "--context-parallel-size", "Transformer Engine"),
    ("--attention-backend local", "--attention-backend", "local"),
]


def with_base(line: str) -> str:
    """BASE without the options that are in `line`."""
    words, overridden = BASE.split(), set(line.split())
    kept = []
    for at, word in enumerate(words):
        option = word if word.startswith("--") else words[at - 1]
        if option not in overridden:
            kept.append(word)
    return " ".join(kept)


@pytest.mark.parametrize(("line", "option", "word"), REFUSED, ids=[line for line, _, _ in REFUSED])
def test_refused(line: str, option: str, word: str) -> None:
    with pytest.raises(InputError) as error:
        job_of(line, base=with_base(line))
    assert error.value.option == option
    assert word in error.value.fault
    assert error.value.remedy
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "dest",
    ["--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings", "--micro-batch-size"],
)
def test_required(dest: str) -> None:
    words = BASE.split()
    at = words.index(dest)
    with pytest.raises(InputError, match=rf"^{dest}: is missing; add it, for example {dest} \d+$"):
        job_of("", base=" ".join(words[:at] + words[at + 2 :]))


def parallel_of(record: dict[str, Any]) -> ParallelSpec:
    arguments = arguments_of(" ".join(record["argv"]))
    launch = LaunchInput(arguments=arguments, environ={}, folder=Path("/nowhere"), gpu=HOPPER)
    return parallel_spec(launch, World(1, record["world_size"]), num_layers=int(str(arguments.get("num_layers"))))


def test_world_sizes_that_megatron_refuses_are_refused() -> None:
    refused = 0
    for record in truth("groups.json")["refused"]:
        with pytest.raises(InputError):
            parallel_of(record)
        refused += 1
    assert refused == 5


def test_parallel_sizes_are_those_of_megatron() -> None:
    for record in truth_records("groups.json"):
        parallel, sizes = parallel_of(record), record["sizes"]
        dense = (parallel.tensor, parallel.pipeline, parallel.context, parallel.data)
        assert dense == (sizes["tp"], sizes["pp"], sizes["cp"], sizes["dp"])
        assert (parallel.expert, parallel.expert_tensor, parallel.order, parallel.virtual_pipeline) == (
            sizes["ep"],
            sizes["etp"],
            sizes["order"],
            sizes["vpp"],
        )


def test_ffn_hidden_size_is_that_of_megatron() -> None:
    for record in truth_records("parameters.json"):
        arguments = arguments_of(" ".join(record["argv"]))
        assert ffn_hidden_size(arguments, hidden_size=int(str(arguments.get("hidden_size")))) == record["ffn_hidden_size"]


@pytest.mark.parametrize(
    ("line", "release", "ffn"),
    [
        # results of `validate_args`: h = 1024 -> 2688 with --swiglu, 4096 without
        ("--swiglu", "0.16.1", 2688),
        ("", "0.16.1", 4096),
        ("--quick-geglu --disable-bias-linear", "0.16.1", 4096),
        ("--swiglu --ffn-hidden-size 3000", "0.16.1", 3000),
        # the code of 2023 overwrites what is given
        ("--swiglu --ffn-hidden-size 3000", "2023", 2688),
        ("--ffn-hidden-size 3000", "2023", 3000),
    ],
)
def test_ffn_hidden_size(line: str, release: str, ffn: int) -> None:
    assert job_of(line, release=release).model.ffn_hidden_size == ffn


@pytest.mark.parametrize(
    ("line", "parameters", "gradients"),
    [
        ("", "fp32", "fp32"),
        ("--bf16", "bf16", "fp32"),
        ("--bf16 --grad-reduce-in-bf16", "bf16", "bf16"),
        ("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", "bf16", "bf16"),
        ("--bf16 --main-grads-dtype bf16 --use-precision-aware-optimizer --use-distributed-optimizer", "bf16", "bf16"),
        ("--fp16", "fp16", "fp16"),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", "fp16", "fp32"),
    ],
)
def test_gradient_types(line: str, parameters: str, gradients: str) -> None:
    precision = job_of(line, base=BASE.replace("--bf16", "")).precision
    assert (precision.parameters, precision.gradients) == (parameters, gradients)


def test_fp16_gradients_cannot_be_clipped_by_the_precision_aware_optimizer() -> None:
    """`clip_grad_by_total_norm_fp32` asserts that decoupled gradients are fp32 or bf16."""
    line, base = "--fp16 --use-distributed-optimizer --use-precision-aware-optimizer", BASE.replace("--bf16", "")
    with pytest.raises(InputError, match=r"^--use-precision-aware-optimizer: .*--accumulate-allreduce-grads-in-fp32"):
        job_of(line, base=base)
    for remedy in ("--accumulate-allreduce-grads-in-fp32", "--clip-grad 0"):
        assert job_of(f"{line} {remedy}", base=base).optimizer.precision_aware


def test_query_groups() -> None:
    assert job_of("").model.num_query_groups == 16
    assert job_of("--group-query-attention").model.num_query_groups == 1
    idle = job_of("--num-query-groups 4")
    assert idle.model.num_query_groups == 16
    assert any(each.startswith("--num-query-groups has no effect") for each in idle.assumptions)


def test_fewer_query_groups_than_ranks_depend_on_the_release() -> None:
    line = "--tensor-model-parallel-size 8 --group-query-attention --num-query-groups 2"
    assert any("query groups" in each and "too low" in each for each in job_of(line).assumptions)
    with pytest.raises(InputError, match=r"use a divisor of 2, for example --tensor-model-parallel-size 2$"):
        job_of(line, release="0.15.3")


def test_sequence_parallelism_is_off_with_one_tensor_parallel_rank() -> None:
    assert not job_of("--sequence-parallel").parallel.sequence_parallel
    assert job_of("--sequence-parallel " + TP2).parallel.sequence_parallel


@pytest.mark.parametrize(
    ("line", "virtual", "overlap"),
    [
        (PP2, None, False),
        (PP2 + "--num-layers-per-virtual-pipeline-stage 2", 2, True),
        (PP2 + "--num-layers-per-virtual-pipeline-stage 4", None, False),
        (PP4 + "--num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication", 2, False),
        (PP2 + "--pipeline-model-parallel-layout Et|tt|tt|tttL", 2, True),
        (PP2 + "--pipeline-model-parallel-layout Ettt|tttttL", None, False),
    ],
)
def test_virtual_stages(line: str, virtual: int | None, overlap: bool) -> None:
    parallel = job_of(line).parallel
    assert (parallel.virtual_pipeline, parallel.overlap_p2p) == (virtual, overlap)


def test_virtual_stages_of_2023() -> None:
    line = PP4 + "--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 16"
    assert not job_of(line, release="2023").parallel.overlap_p2p
    with pytest.raises(InputError, match="need 3 pipeline ranks"):
        job_of(line.replace(PP4, PP2), release="2023")


def test_virtual_stages_without_a_batch_size_get_the_smallest_valid_one() -> None:
    job = job_of(PP4 + "--num-virtual-stages-per-pipeline-rank 2")
    assert (job.batch.global_batch_size, job.batch.microbatches) == (8, 4)
    assert any("--global-batch-size is not given" in each for each in job.assumptions)


@given(data=st.sampled_from([1, 2, 4, 8]), micro=st.integers(1, 8), microbatches=st.integers(1, 50))
def test_batches_are_divided_without_remainder(data: int, micro: int, microbatches: int) -> None:
    base = BASE.replace("--micro-batch-size 1", f"--micro-batch-size {micro}")
    batch = job_of(f"--global-batch-size {data * micro * microbatches}", base=base, gpus=data).batch
    assert batch.microbatches == batch.first_microbatches == microbatches


def test_default_batch_is_one_microbatch() -> None:
    batch = job_of(TP2).batch
    assert (batch.global_batch_size, batch.microbatches) == (4, 1)


def test_a_rampup_that_is_over_needs_no_divisible_sizes() -> None:
    line = "--rampup-batch-size 4 4 1000 --global-batch-size 64 --train-samples 5000"
    job = job_of(line + " --load /checkpoints", gpus=8)
    assert (job.batch.microbatches, job.batch.first_microbatches) == (8, 8)
    assert any("assumed to be over" in each for each in job.assumptions)
    with pytest.raises(InputError, match=r"^--rampup-batch-size: a batch of 4 cannot be split"):
        job_of(line, gpus=8)


def test_rampup() -> None:
    line = "--rampup-batch-size 16 16 1000 --global-batch-size 64 --train-samples 5000"
    batch = job_of(line).batch
    assert (batch.first_microbatches, batch.microbatches) == (2, 8)
    late = job_of(line, release="0.19.0")
    assert late.batch.first_microbatches == 8
    assert any("--rampup-batch-size" in each for each in late.assumptions)


def test_decreased_batch() -> None:
    assert job_of("--global-batch-size 13 --decrease-batch-size-if-needed").batch.microbatches == 1


def test_evaluation_batch_from_0_18_on() -> None:
    line = "--global-batch-size 12 --decrease-batch-size-if-needed"
    assert job_of(line).batch.microbatches == 1
    with pytest.raises(InputError, match=r"^--eval-global-batch-size: an evaluation batch of 12"):
        job_of(line, release="0.19.0")


def test_default_recompute_modules() -> None:
    assert job_of("--recompute-activations").recompute.modules == ("core_attn",)
    picked = job_of(
        "--recompute-granularity selective --recompute-modules mlp layernorm shared_experts --disable-bias-linear"
    ).recompute
    assert picked.modules == ("layernorm", "mlp")
    assert job_of("--recompute-modules mlp").recompute.granularity is None


def test_block_recomputation_of_zero_layers() -> None:
    recompute = job_of("--recompute-granularity full --recompute-method block --recompute-num-layers 0").recompute
    assert recompute.num_layers == 0


def test_recompute_num_layers_of_2023() -> None:
    assert job_of("--recompute-granularity full --recompute-method uniform", release="2023").recompute.num_layers == 1


def test_cuda_device_max_connections() -> None:
    assumed = job_of(TP2)
    assert assumed.flags.cuda_device_max_connections == "1"
    assert any(each.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1") for each in assumed.assumptions)
    assert not any("CUDA_DEVICE" in each for each in job_of("").assumptions)
    other = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert job_of("", environ=other).flags.cuda_device_max_connections == "8"
    assert job_of(TP2, environ=other, gpu=BLACKWELL).flags.cuda_device_max_connections == "8"
    for line in (TP2, "--context-parallel-size 2"):
        with pytest.raises(InputError, match=r"^CUDA_DEVICE_MAX_CONNECTIONS: is 8"):
            job_of(line, environ=other, gpu=AMPERE)


def test_deterministic_mode_needs_environment_variables() -> None:
    job = job_of("--deterministic-mode")
    assert any("NCCL_ALGO=Ring" in each and "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0" in each for each in job.assumptions)
    with pytest.raises(InputError, match=r"^NCCL_ALGO: NVLS"):
        job_of("--deterministic-mode", environ={"NCCL_ALGO": "NVLS"})
    with pytest.raises(InputError, match=r"^NVTE_ALLOW_NONDETERMINISTIC_ALGO: 1"):
        job_of("--deterministic-mode", environ={"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"})


def test_recompute_activations_in_the_2023_code_needs_no_other_option() -> None:
    """Its parser has the default 1 for --recompute-num-layers (megatron/arguments.py, August 2023)."""
    assert job_of("--recompute-activations", release="2023", base=BASE_2023).recompute.granularity == "selective"
    with pytest.raises(InputError, match=r"^--recompute-num-layers"):
        job_of("--recompute-activations --recompute-num-layers 2", release="2023", base=BASE_2023)


def test_overlapped_tensor_parallelism_with_one_rank_asks_for_more_ranks() -> None:
    """Megatron turns sequence parallelism off with one tensor-parallel rank, so adding it again would not help."""
    with pytest.raises(InputError, match=r"^--tp-comm-overlap: .*use --tensor-model-parallel-size 2"):
        job_of("--tp-comm-overlap --sequence-parallel")


def test_numbers_of_a_rampup_may_have_underscores() -> None:
    """Megatron reads them with `int`; scripts of BigScience write 9_765_625."""
    line = "--rampup-batch-size 16 16 9_765_625 --global-batch-size 64 --train-samples 50_000_000"
    assert job_of(line, gpus=1).batch.first_microbatches == 16


def test_userbuffers_do_not_gather_fp4() -> None:
    line = "--fp4-format e2m1 --tensor-model-parallel-size 2 --sequence-parallel"
    assert job_of(line, gpu=BLACKWELL).precision.fp8 is not None
    job = job_of(f"{line} --tp-comm-overlap", gpu=BLACKWELL)
    assert any("gather 16 bit and FP8 only" in each for each in job.warnings)
