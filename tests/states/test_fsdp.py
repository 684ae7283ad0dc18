"""FSDP: padding compared with Megatron's function, model states, gathered buckets, messages, and measured runs."""

from __future__ import annotations

from dataclasses import replace
from math import lcm, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.communication.table import communication_rows
from analyzer.errors import InputError, UnsupportedError
from analyzer.memory.ranks import rank_classes
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import parameters, total_bytes
from analyzer.passes.fsdp import fsdp_trees
from analyzer.passes.stages import stage_models
from analyzer.results import CommunicationRow
from analyzer.specs import FsdpSpec, TrainingJob
from analyzer.states.buffers.fsdp import padded_numel, sharded_buckets
from analyzer.states.buffers.fsdp_gathering import chunk_passes
from tests.data_files import measured_records
from tests.job_of import BASE, BLACKWELL, HOPPER, job_of, states_of

MEGATRON = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --use-distributed-optimizer --untie-embeddings-and-output-weights"
TORCH = "--use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights"
LAYER_SHAPES = [
    (768, 512), (768,), (512, 256), (512,), (1024, 512), (1024,), (512, 1024), (512,), (512,), (512,), (512,), (512,),
]  # fmt: skip
"""A layer with h = 512 and biases on one of two tensor-parallel ranks."""


def sharded(strategy: str, line: str = "", *, gpus: int = 8, release: str = "0.16.1") -> TrainingJob:
    return job_of(f"{MEGATRON} --data-parallel-sharding-strategy {strategy} {line}", gpus=gpus, release=release)


def numel_of(job: TrainingJob) -> int:
    return sum(parameter.numel for parameter in parameters(stage_models(job)[0].trees[0]))


def data_messages(job: TrainingJob) -> list[CommunicationRow]:
    rows = communication_rows(job, stage_models(job)[:1])
    return [row for row in rows if row.module.startswith("data_parallel")]


@pytest.mark.parametrize(
    ("shapes", "ranks", "expected"),
    [
        (LAYER_SHAPES, 2, 1_579_008),
        (LAYER_SHAPES, 4, 1_581_056),
        ([(25216, 512), (1024, 512), (512,), (512,)], 4, 13_436_928),
        ([(512, 1024), (256, 512), (192, 512), (1536, 256), (2048, 128), (4096, 512), (512, 2048)], 8, 4_554_752),
        ([(100, 192), (7, 128), (5,), (300,)], 2, 20_736),
        ([(100, 192), (7, 128), (5,), (300,)], 8, 21_504),
    ],
)
def test_padding_matches_megatron(shapes: list[tuple[int, ...]], ranks: int, expected: int) -> None:
    """Sizes from `build_data_parallel_buffer_index` of megatron-core 0.16.1, run on these shapes."""
    assert padded_numel(shapes, ranks=ranks) == expected


@pytest.mark.parametrize(
    ("strategy", "tensor", "hidden_sizes"), [("optim_grads", 8, 50), ("optim_grads", 2, 0), ("no_shard", 2, 50)]
)
def test_each_replica_reduces_the_norms_of_its_shard(strategy: str, tensor: int, hidden_sizes: int) -> None:
    """Norms and biases of eight layers, and the final norm. They are shorter than a row and at the end of their bucket, which
    the first of several replicas does not store (`_allreduce_non_tensor_model_parallel_grads`, 0.16.1)."""
    job = sharded(strategy, f"--tensor-model-parallel-size {tensor} --sequence-parallel")
    rows = communication_rows(job, stage_models(job)[:1])
    assert [row.shape for row in rows if row.module == "replicated_gradients"] == [(hidden_sizes * 1024,)] * bool(hidden_sizes)


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8),
    st.sampled_from([1, 2, 8]),
)
def test_padded_buckets_have_space_for_all_parameters(shapes: list[tuple[int, ...]], ranks: int) -> None:
    """Shards are equal, and also without sharding the bucket is at least as large as its parameters."""
    total = sum(prod(shape) for shape in shapes)
    padded = padded_numel(shapes, ranks=ranks)
    assert padded >= total
    assert padded % ranks == 0
    assert total <= padded_numel(shapes, ranks=None) <= padded
    assert padded < total + (len(shapes) + ranks) * lcm(*(prod(shape[1:]) for shape in shapes))


@pytest.mark.parametrize(
    ("strategy", "parameters_share", "gradients_share", "optimizer_share"),
    [("no_shard", 1, 1, 1), ("optim", 1, 1, 8), ("optim_grads", 1, 8, 8), ("optim_grads_params", 8, 8, 8)],
)
def test_each_strategy_shards_the_states_in_its_name(
    strategy: str, parameters_share: int, gradients_share: int, optimizer_share: int
) -> None:
    """Docstring of `MegatronFSDP`: optim is ZeRO-1, optim_grads ZeRO-2, optim_grads_params ZeRO-3; always fp32 master weights."""
    job = sharded(strategy)
    states, numel = states_of(job), numel_of(job)
    assert states.parameters == pytest.approx(2 * numel / parameters_share, rel=2e-3)
    assert states.gradients == pytest.approx(4 * numel / gradients_share, rel=2e-3)
    assert states.master_weights == pytest.approx(4 * numel / optimizer_share, rel=2e-3)
    assert states.moments == pytest.approx(8 * numel / optimizer_share, rel=2e-3)


def test_outer_sharding_shards_optimizer_states_over_all_replicas() -> None:
    """Hybrid sharding: weights and gradients over the ranks of an instance; with `optim`, optimizer states over all ranks."""
    numel = numel_of(sharded("optim_grads_params"))
    for outer, share in (("no_shard", 4), ("optim", 8)):
        line = f"--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy {outer}"
        states = states_of(sharded("optim_grads_params", line))
        assert states.parameters == pytest.approx(2 * numel / 4, rel=2e-3)
        assert states.gradients == pytest.approx(4 * numel / 4, rel=2e-3)
        assert states.master_weights + states.moments == pytest.approx(12 * numel / share, rel=2e-3)


def test_the_unsharded_model_is_on_the_gpu_before_it_is_sharded() -> None:
    """`get_model` creates it there, except with `--init-model-with-meta-device`."""
    job = sharded("optim_grads_params")
    unsharded = 2 * numel_of(job)
    assert unsharded < states_of(job).at_start < 1.6 * unsharded  # and the first bucket and the shards
    assert states_of(sharded("optim_grads_params", "--init-model-with-meta-device")).at_start == 0
    small = job_of(
        f"{MEGATRON} --data-parallel-sharding-strategy optim_grads_params --num-layers 32 --hidden-size 8192 "
        "--num-attention-heads 64 "
        "--seq-length 64 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--suggested-communication-unit-size 1",
        gpus=64,
    )
    memory = rank_classes(small)[0].memory
    assert memory.peak_at == "sharding of the model"
    assert memory.peak_allocated_bytes == states_of(small).at_start > memory.allocated_bytes


def test_all_buckets_of_a_small_model_are_prefetched() -> None:
    """Half of a communication unit, 500 million elements, is prefetched. Each layer is freed after it has run."""
    job = sharded("optim_grads_params")
    tree = stage_models(job)[0].trees[0]
    buckets = sharded_buckets(job, tree)
    assert [bucket.unit for bucket in buckets] == [None, *range(8)]
    passes = chunk_passes(job, tree, buckets)
    all_buckets = frozenset(range(9))
    layers = [ids for ids in passes.forward[1:] if ids != all_buckets]  # no bucket is gathered before the embedding
    assert layers == [all_buckets - set(range(1, layer)) for layer in range(2, 9)]
    assert passes.forward[-1] == all_buckets  # the final norm gathers for the backward
    assert passes.gathered_forward == (0, *(2,) * 8)
    assert passes.gathered_backward == (0,) * 9
    assert passes.gradients[0] == all_buckets


def test_a_small_communication_unit_prefetches_one_layer() -> None:
    size = 2 * 12_000_000
    job = sharded("optim_grads_params", f"--suggested-communication-unit-size {size}")
    tree = stage_models(job)[0].trees[0]
    buckets = sharded_buckets(job, tree)
    passes = chunk_passes(job, tree, buckets)
    assert max(len(ids) for ids in passes.forward) == 3  # parameters outside layers, a layer and the next layer
    assert max(len(ids) for ids in passes.backward) == 3
    # the final norm gathers the first layer, and the backward of the last layer frees it
    assert passes.gathered_forward == (0, 2, *(1,) * 7)
    assert passes.gathered_backward == (0, *(1,) * 8)


def test_modules_outside_layers_do_not_prefetch_after_the_first_backward_from_0_18_on() -> None:
    """From 0.18 on modules outside layers stay in the state PRE_BACKWARD after the first backward and do not prefetch."""
    job = sharded("optim_grads_params", release="0.18.2")
    tree = stage_models(job)[0].trees[0]
    buckets = sharded_buckets(job, tree)
    assert chunk_passes(job, tree, buckets, first=True).forward[-1] == frozenset(range(9))
    later = chunk_passes(job, tree, buckets)
    assert later.forward[-1] == frozenset({0})
    assert later.gathered_backward == (0, *(1,) * 8)


def test_double_buffers_replace_temporary_tensors() -> None:
    plain, doubled = (rank_classes(sharded("optim_grads_params", line))[0].memory for line in ("", "--fsdp-double-buffer"))
    parts = {part.name: part.bytes for part in doubled.runtime_parts}
    layer = 2 * 12 * 1024**2
    assert parts["double buffer of gathered parameters"] == pytest.approx(2 * layer, rel=0.01)
    assert parts["double buffer of unsharded gradients"] == pytest.approx(4 * layer, rel=0.01)
    temporary = sum(part.bytes for part in doubled.transient_parts if part.name == "gathered parameters")
    assert temporary < sum(part.bytes for part in plain.transient_parts if part.name == "gathered parameters")


def test_dtypes_of_gradients() -> None:
    """0.17 has options for the dtypes in which gradients are accumulated and sent, unless the gradient buffer is fp32."""
    line = "--megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-grad-comm-dtype bf16"
    for extra, summed, sent in (("", 4, "fp32"), ("--grad-reduce-in-bf16", 4, "bf16")):
        job = sharded("optim_grads_params", f"{line} {extra}", release="0.17.1")
        assert states_of(job).gradients == pytest.approx(summed * numel_of(job) / 8, rel=2e-3)
        assert {row.dtype for row in data_messages(job) if row.kind == "reduce_scatter"} == {sent}
    plain = sharded("optim_grads_params", "--grad-reduce-in-bf16")
    assert states_of(plain).gradients == pytest.approx(2 * numel_of(plain) / 8, rel=2e-3)
    assert states_of(plain).gradient_copies == pytest.approx(4 * numel_of(plain) / 8, rel=2e-3)


def test_the_peak_includes_unsharded_parameters() -> None:
    """The same job with replicated and with sharded parameters: equal activations, and unsharded buckets in addition."""
    replicated, split = (rank_classes(sharded(strategy))[0].memory for strategy in ("optim_grads", "optim_grads_params"))
    assert replicated.parameters_bytes > 7 * split.parameters_bytes
    gathered = sum(part.bytes for part in split.transient_parts if part.name == "gathered parameters")
    assert gathered == pytest.approx(replicated.parameters_bytes, rel=2e-3)
    assert replicated.activations_bytes == split.activations_bytes


def test_messages_of_sharded_parameters() -> None:
    """Layers are gathered for forward and backward and reduced in every microbatch. Other parameters are gathered once."""
    job = sharded("optim_grads_params", "--global-batch-size 32")
    numel = numel_of(job)
    sums: dict[tuple[str, bool], int] = {}
    for row in data_messages(job):
        key = (row.kind, row.calls_per_microbatch > 0)
        sums[key] = sums.get(key, 0) + (row.calls_per_microbatch or row.calls_per_iteration) * row.shape[0]
    outside = (2 * 32_128 + 2048) * 1024  # embedding, output layer and positions
    assert sums["reduce_scatter", True] == pytest.approx(numel, rel=2e-3)
    assert sums["all_gather", True] == pytest.approx(2 * (numel - outside), rel=2e-3)
    assert sums["all_gather", False] == pytest.approx(outside, rel=2e-3)


@pytest.mark.parametrize(
    ("strategy", "kinds"),
    [
        ("no_shard", {("all_reduce", 0)}),
        ("optim", {("reduce_scatter", 0), ("all_gather", 0)}),
        ("optim_grads", {("reduce_scatter", 1), ("all_gather", 0)}),
    ],
)
def test_messages_of_replicated_parameters(strategy: str, kinds: set[tuple[str, int]]) -> None:
    """Gradients that are not sharded are reduced in the last microbatch only."""
    assert {(row.kind, row.calls_per_microbatch) for row in data_messages(sharded(strategy))} == kinds


def test_fsdp2_shards_all_model_states_equally() -> None:
    """Parameters and gradients in 16 bit, fp32 master weights and moments: (2 + 2 + 4 + 8)/n bytes per parameter."""
    job = job_of(TORCH)
    states, numel = states_of(job), numel_of(job)
    assert states.steady == pytest.approx(16 * numel / 8, rel=1e-3)
    assert states.at_start == pytest.approx(2 * numel, rel=1e-6)
    rows = data_messages(job)
    gathered = sum(row.calls_per_microbatch * row.shape[0] for row in rows if row.kind == "all_gather")
    assert gathered == pytest.approx(2 * numel, rel=1e-3)
    assert sum(row.calls_per_microbatch for row in rows if row.kind == "reduce_scatter") == 8 + 3
    not_resharded = data_messages(job_of(f"{TORCH} --torch-fsdp2-no-reshard-after-forward"))
    assert {row.phase for row in not_resharded} == {"forward", "gradient"}


def test_an_fsdp2_layer_runs_with_its_own_parameters_and_a_neighbor() -> None:
    """torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (torch 2.13), P = 12h² + 13h elements of a layer in bf16.

    Forward: `wait_for_unshard` copies the parameters out and keeps the all-gather buffer in `all_gather_state`: 2P + 2P.
    Backward: the parameters, the all-gather buffer of the preceding layer (`_backward_prefetch`), and the input of the following
    layer's reduce-scatter (`reduce_scatter_states`): three times 2P. Each module of the layer leaves its gradients: 2P together.
    The root has the final norm, 2h elements: unsharded in the whole forward and backward, its gradients until the backward ends.
    """
    job = job_of(TORCH)
    plain, sharding = stage_models(job)[0].trees[0], fsdp_trees(job, stage_models(job)[0].trees[0])[0]
    layers = [[module for _, module in tree.walk() if module.kind is ModuleKind.LAYER][3] for tree in (plain, sharding)]
    added = [
        total_bytes(layers[1].forward_workspace) - total_bytes(layers[0].forward_workspace),
        total_bytes(layers[1].backward_workspace) - total_bytes(layers[0].backward_workspace),
    ]
    numel = 12 * 1024**2 + 13 * 1024
    norm = 2 * 2 * 1024
    assert added == [2 * 2 * numel + norm, 3 * 2 * numel + 2 * norm]
    assert sum(tensor.bytes for _, module in layers[1].walk() for tensor in module.reloads) == 2 * numel
    assert not any(module.reloads for _, module in layers[0].walk())


def test_resharding_after_forward_lowers_the_peak() -> None:
    memory = rank_classes(job_of(TORCH))[0].memory
    not_resharded = rank_classes(job_of(f"{TORCH} --torch-fsdp2-no-reshard-after-forward"))[0].memory
    layers = 2 * 8 * 12 * 1024**2
    assert not_resharded.peak_allocated_bytes - memory.peak_allocated_bytes > layers
    assert sum(part.bytes for part in not_resharded.transient_parts if part.name == "gathered parameters") > layers


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("--use-megatron-fsdp --use-distributed-optimizer", "--use-megatron-fsdp"),
        ("--use-megatron-fsdp --ckpt-format fsdp_dtensor --use-torch-fsdp2", "--use-megatron-fsdp"),
        (f"{TORCH} --pipeline-model-parallel-size 2", "--use-torch-fsdp2"),
        (f"{TORCH} --use-distributed-optimizer", "--use-torch-fsdp2"),
        (f"{TORCH} --ckpt-format torch", "--use-torch-fsdp2"),
        (f"{TORCH} --init-model-with-meta-device", "--init-model-with-meta-device"),
        ("--use-torch-fsdp2 --untie-embeddings-and-output-weights", "--use-torch-fsdp2"),
        ("--use-torch-fsdp2 --no-gradient-accumulation-fusion", "--use-torch-fsdp2"),
    ],
)
def test_options_that_megatron_rejects(line: str, option: str) -> None:
    """`validate_args` of 0.16.1."""
    with pytest.raises(InputError) as error:
        job_of(line)
    assert error.value.option == option


def test_a_single_device_connection_is_rejected() -> None:
    """With FSDP, CUDA_DEVICE_MAX_CONNECTIONS must not be 1."""
    line = f"{MEGATRON} --tensor-model-parallel-size 2"
    assert job_of(line).flags.cuda_device_max_connections is None
    with pytest.raises(InputError, match="CUDA_DEVICE_MAX_CONNECTIONS"):
        job_of(line, environ={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


def test_options_follow_the_release() -> None:
    """`--use-custom-fsdp` before 0.14; 0.18 made optim_grads_params the default; 0.19 enables the distributed optimizer."""
    with pytest.raises(InputError, match="distributed optimizer"):
        job_of("--use-custom-fsdp", release="0.13.0")
    with pytest.raises(InputError, match="fused"):
        job_of("--use-custom-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy optim_grads", release="0.13.0")
    with pytest.raises(UnsupportedError):
        job_of("--use-megatron-fsdp --ckpt-format fsdp_dtensor")
    latest = job_of("--use-megatron-fsdp --ckpt-format fsdp_dtensor", release="0.19.0")
    assert latest.optimizer.distributed
    assert latest.fsdp is not None
    assert latest.fsdp.strategy == "optim_grads_params"
    assert job_of(MEGATRON).fsdp == FsdpSpec(implementation="megatron", strategy="no_shard", expert_instances=False)


def test_loading_a_checkpoint_creates_moments_before_the_first_iteration() -> None:
    """`load_checkpoint` requests the optimizer state before it looks for a checkpoint of format fsdp_dtensor."""
    for line, created in (("", False), ("--load /dummy", True), ("--load /dummy --finetune", False)):
        states = states_of(sharded("optim_grads_params", line))
        assert states.before_first_step == states.steady - (0 if created else states.moments)


@pytest.mark.parametrize("gpu", ["h100", "gb200"])
def test_memory_matches_measured_runs(gpu: str) -> None:
    """NVIDIA's functional test of FSDP of April 2026: 12 layers, hidden size 512, two tensor-parallel ranks.

    The code is between 0.17 and 0.18. Modules outside layers already do not prefetch, which affects the peak.
    """
    wanted = f"gpt3_mcore_te_tp2_zp_z3_resume_fsdp_dtensor/dev_dgx_{gpu}"
    [record] = [each for each in measured_records("megatron_ci.json") if each["id"].endswith(wanted)]
    job = job_of(
        " ".join(str(word) for word in record["argv"]),
        base="",
        gpus=8,
        environ=record["env"],
        gpu=HOPPER if gpu == "h100" else BLACKWELL,
    )
    memory = rank_classes(job)[0].memory
    assert memory.allocated_bytes == pytest.approx(record["measured"]["allocated_bytes"], rel=0.005)
    assert job.fsdp is not None
    newer = replace(job, fsdp=replace(job.fsdp, outside_layers_prefetches=False))
    peak = rank_classes(newer)[0].memory
    assert peak.peak_allocated_bytes == pytest.approx(record["measured"]["peak_allocated_bytes"], rel=0.003)
    assert peak.peak_at.startswith("first iteration")


@pytest.mark.parametrize("fused", [True, False])
def test_unfused_gradients_of_the_output_layer_are_allocated_after_its_backward(fused: bool) -> None:
    """`register_post_accumulate_grad_hook` (megatron_fsdp.py, 0.16.1): the logits gradient is free then, and larger here.

    A GEMM that accumulates the gradient writes to the bucket, which is allocated before it (`get_main_grad`).
    """
    job = sharded("optim_grads_params", "--micro-batch-size 16" + " --no-gradient-accumulation-fusion" * (not fused))
    tree = fsdp_trees(job, stage_models(job)[0].trees[0])[0]
    [output] = [module for _, module in tree.walk() if module.kind is ModuleKind.OUTPUT_LAYER]
    sizes = {tensor.name: tensor.bytes for tensor in output.backward_workspace}
    [bucket] = [each for each in sharded_buckets(job, stage_models(job)[0].trees[0]) if each.unit is None]
    assert sizes["logits gradient"] > 4 * bucket.numel
    assert sizes.get("unsharded gradients", 0) == (4 * bucket.numel if fused else 0)


def test_the_peak_of_a_run_with_unfused_gradients_matches() -> None:
    """NVIDIA's functional test of July 2026: two layers, whose peak is in the backward of the output layer."""
    [record] = [each for each in measured_records("megatron_ci.json") if "deepseek_proxy_fsdp_ep2_fsdp2_1node" in each["id"]]
    line, release = " ".join(record["argv"]), record["megatron_release"]
    memory = rank_classes(job_of(line, base="", gpus=4, environ=record["env"], gpu=BLACKWELL, release=release))[0].memory
    assert memory.peak_at == "backward of microbatch 0, output_layer"
    assert memory.peak_allocated_bytes == pytest.approx(record["measured"]["peak_allocated_bytes"], rel=0.006)


def test_experts_are_sharded_over_their_data_parallel_ranks() -> None:
    line = "--num-experts 8 --moe-grouped-gemm --disable-bias-linear --expert-model-parallel-size 4 "
    line += "--moe-token-dispatcher-type alltoall"
    job = sharded("optim_grads_params", line)
    stage = stage_models(job)[0]
    experts = sum(p.numel for p in parameters(stage.trees[0]) if p.sharding == "expert")
    rest = numel_of(job) - experts
    assert states_of(job).parameters == pytest.approx(2 * (rest / 8 + experts / 2), rel=2e-3)
    groups = {row.group for row in communication_rows(job, [stage]) if row.kind == "reduce_scatter" and row.phase == "gradient"}
    assert {"dp_cp", "edp"} <= groups


def test_fsdp_is_off_by_default() -> None:
    assert job_of("", base=BASE).fsdp is None


@pytest.mark.parametrize(
    "job",
    [
        *(sharded(strategy) for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")),
        sharded("optim_grads_params", "--load /dummy", release="0.18.2"),
        sharded("optim_grads_params", "--hidden-size 8192 --num-attention-heads 64 --num-layers 32 --seq-length 64"),
        job_of(TORCH),
    ],
)
def test_the_parts_of_the_peak_add_up(job: TrainingJob) -> None:
    """The peak is in a later iteration, in the first iteration, in the optimizer step, or while the model is sharded."""
    memory = rank_classes(job)[0].memory
    static = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes + memory.runtime_bytes
    assert memory.peak_allocated_bytes == static + memory.activations_bytes + memory.transient_bytes
    assert memory.transient_bytes == sum(part.bytes for part in memory.transient_parts)
    assert memory.peak_allocated_bytes >= memory.allocated_bytes
