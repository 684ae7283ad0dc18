"""Muon: the weights that it updates, their states and workspaces, and owners with the layer-wise optimizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator_hook.step.supported import check_supported
from analyzer.communication.table import communication_rows
from analyzer.errors import AnalyzerError, InputError, UnsupportedError
from analyzer.memory.ranks import rank_classes
from analyzer.modules.tree import total_bytes
from analyzer.passes.stages import stage_models
from analyzer.results import CommunicationRow
from analyzer.specs import MuonSpec, TrainingJob
from analyzer.states.buffers.matrices import OptimizerParameter, weights
from analyzer.states.layer_wise import owners
from analyzer.states.muon import orthogonalization
from analyzer.states.record import States
from tests.job_of import job_of, states_by_ranks_of, states_of

LINES = "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
H, LAYERS, VOCABULARY = 1024, 8, 32128
"""Sizes of `job_of`. The vocabulary is 32001 padded to a multiple of 128."""
MATRICES = LAYERS * 12 * H * H
"""Queries, keys and values 3h², projection h², FFN 8h²."""
OTHERS = 2 * VOCABULARY * H + (2 * LAYERS + 1) * H
LION_WITH_MUON = "--optimizer muon --muon-scalar-optimizer lion"
EXPERTS = "--num-experts 8 --moe-grouped-gemm --moe-ffn-hidden-size 512 --expert-model-parallel-size 4"


def muon_states_of(line: str) -> States:
    job = job_of(f"{LINES} {line}")
    return states_of(job, stage_models(job)[0])


def sent(job: TrainingJob) -> list[CommunicationRow]:
    return [message for message in communication_rows(job, stage_models(job)) if message.phase == "parameter"]


def test_one_momentum_for_matrices_and_two_moments_for_the_rest() -> None:
    """Jordan et al. 2024: Muon stores one momentum. Adam updates embedding, output layer and vectors."""
    states = muon_states_of("--optimizer muon")
    assert states.master_weights == 4 * (MATRICES + OTHERS)
    assert states.moments == 4 * MATRICES + 8 * OTHERS
    assert states.gradients == 4 * (MATRICES + OTHERS)  # nothing is sharded
    assert states.parameters == 2 * (MATRICES + OTHERS)
    assert states.gradient_copies == 0


def test_gradients_in_bf16_are_copied_for_the_step() -> None:
    """`Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads`."""
    states = muon_states_of("--optimizer muon --grad-reduce-in-bf16")
    assert states.gradient_copies == 4 * (MATRICES + OTHERS)
    assert states.gradients == 2 * (MATRICES + OTHERS)


@pytest.mark.parametrize(("experts", "release", "fails"), [(6, "0.16.1", True), (8, "0.16.1", False), (6, "0.18.2", False)])
def test_as_many_matrices_of_experts_as_others_fail(experts: int, release: str, fails: bool) -> None:
    """Six other matrices a layer: queries, keys and values, projection, router, two of the shared experts and their gate.

    Two ranks have 3 or 4 experts of two matrices each.
    """
    line = f"{LINES} --moe-grouped-gemm --num-experts {experts} --expert-model-parallel-size 2"
    launch = f"{line} --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate --optimizer"
    job = job_of(f"{launch} muon", gpus=8, release=release)
    if fails:
        with pytest.raises(InputError, match=r"^--optimizer: muon fails in this release .*, here 48; use dist_muon"):
            states_of(job, stage_models(job)[0])
    else:
        assert states_of(job, stage_models(job)[0]).moments > 0
    distributed = job_of(f"{launch} dist_muon", gpus=8, release=release)
    assert states_of(distributed, stage_models(distributed)[0]).moments > 0


def test_lion_stores_one_moment() -> None:
    """Chen et al. 2023: Lion stores one momentum per parameter. The update is computed before it is applied."""
    line = f"{LINES} --vocab-size 32000"
    lion, with_muon = (job_of(f"{line} {more}", release="0.17.1") for more in ("--optimizer lion", LION_WITH_MUON))
    for job in (lion, with_muon):
        states = states_of(job, stage_models(job)[0])
        assert states.master_weights == states.moments == states.gradients == 2 * states.parameters
    output_layer = lion.model.padded_vocab_size * H
    last_matrix = 4 * H * H  # fc2 of the last layer
    assert total_bytes(states_of(lion, stage_models(lion)[0]).step_workspace) == 4 * (output_layer + last_matrix)
    # with Muon the update of the output layer follows that of the embedding
    assert total_bytes(states_of(with_muon, stage_models(with_muon)[0]).step_workspace) == 4 * 2 * output_layer


def test_matrices_other_than_embeddings_are_orthogonalized() -> None:
    """`get_megatron_muon_optimizer`: matrices that are not marked as embedding or output layer, also the position table."""
    job = job_of("--optimizer muon")
    listed = tuple(weights(job, stage_models(job)[0]))
    orthogonalized = [weight.shape for weight in listed if weight.orthogonalized]
    assert orthogonalized.count((2048, H)) == 1  # positions
    assert orthogonalized.count((3 * H, H)) == orthogonalized.count((4 * H, H)) == LAYERS
    assert (VOCABULARY, H) not in orthogonalized
    experts = job_of(f"--optimizer muon {EXPERTS} --disable-bias-linear")
    one_each = [weight for weight in weights(experts, stage_models(experts)[0]) if weight.expert]
    assert all(weight.orthogonalized for weight in one_each)
    assert len(one_each) == LAYERS * 2 * 2  # two local experts with two matrices each


def test_muon_updates_the_embedding_copy_of_mtp_layers() -> None:
    """`setup_embeddings_and_output_layer` marks it on the first stage only. Muon then needs a workspace for V·h elements."""
    job = job_of(f"--optimizer muon --pipeline-model-parallel-size 2 --mtp-num-layers 1 {LINES}")
    first, last = stage_models(job)
    embedding = (VOCABULARY, H)
    assert [weight.orthogonalized for weight in weights(job, first) if weight.shape == embedding] == [False]
    assert [weight.orthogonalized for weight in weights(job, last) if weight.shape == embedding] == [True, False]
    assert total_bytes(states_of(job, last).step_workspace) == 12 * VOCABULARY * H


@pytest.mark.parametrize(
    ("line", "bytes_per_element"),
    [
        ("", 16),  # the update of fc1, the result for fc2 in fp32, and the results of two multiplications that scale it
        ("--muon-use-nesterov", 20),  # and the Nesterov momentum
        ("--muon-fp32-matmul-prec high", 16),  # two iterates (8) and two squares (8h²) are smaller for 4h · h
    ],
)
def test_a_step_needs_the_workspace_of_the_largest_matrix(line: str, bytes_per_element: int) -> None:
    """`OrthogonalizedOptimizer.step`, `newton_schulz` and `scaled_orthogonalize_fn`, line by line; the largest are fc1 and fc2."""
    assert total_bytes(muon_states_of(f"--optimizer muon {line}").step_workspace) == bytes_per_element * 4 * H * H


def test_the_workspace_of_square_matrices_includes_their_squares() -> None:
    """X, XXᵀ, b·XXᵀ + c·(XXᵀ)² and the next X: four times 4·h²."""
    job = job_of("--optimizer muon --muon-fp32-matmul-prec high")
    square = OptimizerParameter(shape=(H, H), dtype="bf16", orthogonalized=True, partition=1)
    assert total_bytes(orthogonalization(job, square)) == 16 * H * H


def test_every_rank_gathers_split_matrices() -> None:
    """`newton_schulz_tp` with duplicated: gathered parts, the full matrix, normalized, and in bf16: 4 + 4 + 4 + 2 bytes."""
    job = job_of("--optimizer muon --tensor-model-parallel-size 2 --muon-tp-mode duplicated")
    half = OptimizerParameter(shape=(2 * H, H), dtype="bf16", orthogonalized=True, partition=0)
    assert total_bytes(orthogonalization(job, half)) == 14 * 4 * H * H
    gathers = [message for message in sent(job) if message.module == "optimizer.muon.gradients"]
    assert {(message.shape, message.group, message.dtype): message.calls_per_iteration for message in gathers} == {
        ((H, H), "tp", "fp32"): 4 * LAYERS,  # queries, keys, values, projection
        ((4 * H, H), "tp", "fp32"): LAYERS,
        ((H, 4 * H), "tp", "fp32"): LAYERS,
    }


def test_the_distributed_mode_reduces_squares() -> None:
    """`newton_schulz_step`: XXᵀ along the unsplit dimension, once per Newton-Schulz step, and one norm per matrix."""
    job = job_of("--optimizer muon --tensor-model-parallel-size 2 --muon-tp-mode distributed")
    rows = {(message.module, message.shape): message.calls_per_iteration for message in sent(job)}
    matrices = 6 * LAYERS
    assert rows["optimizer.muon.norm", (1,)] == matrices
    assert rows["optimizer.muon.square", (H, H)] == 5 * matrices


@pytest.mark.parametrize("partition", [0, 1])
def test_the_distributed_mode_squares_the_unsplit_side(partition: int) -> None:
    """`newton_schulz_tp` and `newton_schulz_step` of emerging_optimizers, on a rank's part [m, n] of a matrix with t = 8 parts.

    With partition_dim 0 the part is transposed, so X is [n, m]; with 1 it is not. X @ X.mT is a square of the side that is not
    split, n or m = h here, although the other one is shorter. In bf16: X, A = X·Xᵀ, B = b·A + c·A², and the next X = a·X + B·X.
    """
    job = job_of("--optimizer muon --tensor-model-parallel-size 8 --muon-tp-mode distributed")
    shape = (H // 8, H) if partition == 0 else (H, H // 8)
    part = OptimizerParameter(shape=shape, dtype="bf16", orthogonalized=True, partition=partition)
    iterates, squares = 2 * 2 * (H * H // 8), 2 * 2 * H * H
    assert total_bytes(orthogonalization(job, part)) == iterates + squares


def test_the_blockwise_mode_does_not_communicate() -> None:
    assert not [message for message in sent(job_of("--optimizer muon --tensor-model-parallel-size 2")) if message.group == "tp"]


def test_parameters_are_assigned_forward_and_backward() -> None:
    """The example in `LayerWiseDistributedOptimizer.shard_params`: ten sorted parameters, four ranks."""
    listed = [OptimizerParameter(shape=(numel, 1), dtype="bf16", orthogonalized=True) for numel in range(1, 11)]
    assert [[weight.numel - 1 for weight in owned] for owned in owners(listed, 4)] == [[0, 7, 8], [1, 6, 9], [2, 5], [3, 4]]


@given(numels=st.lists(st.integers(1, 50), max_size=60), ranks=st.integers(1, 9))
def test_every_parameter_has_one_owner(numels: list[int], ranks: int) -> None:
    listed = [
        OptimizerParameter(shape=(numel,), dtype="bf16", orthogonalized=False, parts=(place,)) for place, numel in enumerate(numels)
    ]
    shared = owners(listed, ranks)
    assert sorted(weight.parts for owned in shared for weight in owned) == sorted(weight.parts for weight in listed)
    assert max(map(len, shared)) - min(map(len, shared)) <= 2
    loads = [sum(weight.numel for weight in owned) for owned in shared]
    assert max(loads) - min(loads) <= 2 * max(numels, default=0)


@pytest.mark.parametrize(
    "layout", ["", "--context-parallel-size 2", "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"]
)
def test_distributed_states_add_up_to_the_full_states(layout: str) -> None:
    """Each parameter of a replica has one owner, and every rank is in one class."""
    line = f"{LINES} {layout}"
    full, shared = (rank_classes(job_of(f"{line} --optimizer {name}")) for name in ("muon", "dist_muon"))
    replicas = job_of(line).parallel.data_with_context
    assert sorted(rank for each in shared for rank in ranks_of(each.ranks)) == list(range(8))
    total = sum(each.memory.optimizer_bytes * len(ranks_of(each.ranks)) for each in shared)
    assert total * replicas == sum(each.memory.optimizer_bytes * len(ranks_of(each.ranks)) for each in full)
    assert {each.memory.gradients_bytes for each in shared} == {each.memory.gradients_bytes for each in full}


def test_experts_are_distributed_over_their_data_parallel_ranks() -> None:
    """Eight ranks, four expert-parallel: dense parameters have eight owners, experts two."""
    job = job_of(f"{LINES} {EXPERTS} --optimizer dist_muon")
    listed = tuple(weights(job, stage_models(job)[0]))
    dense = 4 * sum(w.numel * (2 if w.orthogonalized else 3) for w in listed if not w.expert)
    experts = 4 * sum(w.numel * 2 for w in listed if w.expert)
    total = sum(each.memory.optimizer_bytes * len(ranks_of(each.ranks)) for each in rank_classes(job))
    assert total == dense + 4 * experts
    gathers = {message.group: message.shape for message in sent(job) if message.kind == "all_gather"}
    assert gathers == {
        "dp_cp": (sum(w.numel for w in listed if not w.expert),),
        "edp": (sum(w.numel for w in listed if w.expert),),
    }


def test_the_step_workspace_includes_sent_and_received_parameters() -> None:
    """`allgather_params`: a flat copy of the own parameters, and a tensor for those of each rank; 2 bytes per element."""
    job = job_of(f"{LINES} --optimizer dist_muon")
    highest = max(rank_classes(job), key=lambda each: each.memory.allocated_bytes)
    states = states_of(job, stage_models(job)[0])
    assert highest.memory.optimizer_bytes < states.master_weights + states.moments
    dense = owners(weights(job, stage_models(job)[0]), 8)
    smallest, largest = (f([sum(w.numel for w in owned) for owned in dense]) for f in (min, max))
    full = MATRICES + OTHERS
    temporaries = {total_bytes(states.step_workspace) for _, states in states_by_ranks_of(job, stage_models(job)[0])}
    assert min(temporaries) == pytest.approx(2 * (full + smallest), rel=1e-3)
    assert max(temporaries) == pytest.approx(2 * (full + largest), rel=1e-3)


def test_own_parameters_are_not_received_from_0_17_on() -> None:
    """`allgather_params` of 0.17.1 sends from the tensor that stands for the own part of the result; 2 bytes per element."""
    job = job_of(f"{LINES} --optimizer dist_muon", release="0.17.1")
    temporaries = {total_bytes(states.step_workspace) for _, states in states_by_ranks_of(job, stage_models(job)[0])}
    assert temporaries == {2 * (MATRICES + OTHERS)}


def test_equal_parts_are_gathered_through_a_stacked_tensor() -> None:
    """`newLikeFlat` in `ProcessGroupNCCL::allgather`; each data-parallel rank of the experts owns four of 32 equal matrices."""
    job = job_of(
        f"{LINES} --num-experts 8 --moe-grouped-gemm --moe-ffn-hidden-size 4096 --expert-model-parallel-size 2 "
        "--optimizer dist_muon"
    )
    experts = LAYERS * 4 * 2 * 4096 * H
    temporaries = {total_bytes(states.step_workspace) for _, states in states_by_ranks_of(job, stage_models(job)[0])}
    assert temporaries == {2 * (experts + experts + experts // 4)}


def test_a_single_replica_owns_all_parameters() -> None:
    line = f"{LINES} --tensor-model-parallel-size 8"
    distributed = rank_classes(job_of(f"{line} --optimizer dist_muon"))
    assert [each.memory for each in distributed] == [each.memory for each in rank_classes(job_of(f"{line} --optimizer muon"))]


def test_gradient_norms_span_all_ranks() -> None:
    """`LayerWiseDistributedOptimizer.get_grad_norm` passes no group."""
    job = job_of("--optimizer dist_muon --tensor-model-parallel-size 2")
    (norm,) = (message for message in communication_rows(job, stage_models(job)) if message.module == "optimizer.grad_norm")
    assert norm.group == "world"


@pytest.mark.parametrize(
    ("line", "release", "option"),
    [
        ("--optimizer muon --use-distributed-optimizer", "0.16.1", "--use-distributed-optimizer"),
        ("--optimizer muon --overlap-grad-reduce", "0.16.1", "--overlap-grad-reduce"),
        ("--optimizer dist_muon --overlap-grad-reduce --overlap-param-gather", "0.16.1", "--overlap-grad-reduce"),
        ("--optimizer muon --overlap-grad-reduce", "0.17.1", "--overlap-grad-reduce"),
        ("--optimizer muon --ckpt-format torch_dcp", "0.16.1", "--optimizer muon"),
        ("--optimizer muon --use-megatron-fsdp --ckpt-format fsdp_dtensor", "0.16.1", "--use-megatron-fsdp"),
        ("--optimizer muon --muon-num-ns-steps 6", "0.16.1", "--muon-num-ns-steps"),
        ("--optimizer muon --use-precision-aware-optimizer", "0.16.1", "--use-precision-aware-optimizer"),
        ("--optimizer lion --use-distributed-optimizer", "0.17.1", "--use-distributed-optimizer"),
    ],
)
def test_options_that_megatron_rejects(line: str, release: str, option: str) -> None:
    with pytest.raises(InputError) as error:
        job_of(line, release=release)
    assert error.value.option == option
    assert not isinstance(error.value, UnsupportedError)


@pytest.mark.parametrize(
    ("line", "release"),
    [
        ("--optimizer dist_muon --overlap-grad-reduce --overlap-param-gather", "0.17.1"),
        ("--optimizer lion", "0.18.2"),
        ("--optimizer muon --muon-scalar-optimizer lion", "0.18.2"),
        ("--optimizer soap", "0.18.2"),
    ],
)
def test_unsupported_options_are_rejected(line: str, release: str) -> None:
    with pytest.raises(UnsupportedError):
        job_of(line, release=release)


def test_muon_with_fp16_is_rejected() -> None:
    with pytest.raises(AnalyzerError, match="--fp16"):
        job_of(
            "--optimizer muon",
            base="--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
            "--max-position-embeddings 2048 --micro-batch-size 1 --fp16 --tokenizer-type NullTokenizer --vocab-size 32000",
        )


def test_the_shadow_supports_all_layouts_of_muon() -> None:
    for line, release in (("--optimizer muon", "0.16.1"), ("--optimizer lion", "0.17.1")):
        check_supported(job_of(line, release=release))
    check_supported(job_of("--optimizer muon --use-distributed-optimizer", release="0.18.2"))


def test_later_releases_distribute_parameters_without_a_layout() -> None:
    job = job_of("--optimizer muon --use-distributed-optimizer --no-use-layer-wise-param-layout", release="0.18.2")
    assert job.optimizer.muon == MuonSpec(layer_wise=True)
    assert not job.optimizer.distributed
    same = job_of("--optimizer dist_muon --no-use-layer-wise-param-layout", release="0.18.2")
    assert rank_classes(job) == rank_classes(same)


def ranks_of(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    return [rank for first, last in ranges for rank in range(first, last + 1)]


def test_sequential_experts_are_listed_expert_by_expert() -> None:
    """`SequentialMLP.local_experts`: fc1 and fc2 of each expert. A grouped GEMM has all weights of fc1 before those of fc2."""
    options = f"--num-layers 1 --optimizer muon --disable-bias-linear {EXPERTS.replace('--moe-grouped-gemm ', '')}"

    def shapes(line: str) -> list[tuple[int, ...]]:
        job = job_of(f"{LINES} {line}")
        return [weight.shape for weight in weights(job, stage_models(job)[0]) if weight.expert]

    fc1, fc2 = (512, H), (H, 512)
    assert shapes(options) == [fc1, fc2, fc1, fc2]
    assert shapes(f"{options} --moe-grouped-gemm") == [fc1, fc1, fc2, fc2]


NVIDIA_RUN = (
    "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 4 --global-batch-size 32 --seq-length 1024 "
    "--max-position-embeddings 1024 --disable-bias-linear --tokenizer-type NullTokenizer --vocab-size 50257 --num-experts 8 "
    "--moe-token-dispatcher-type allgather --moe-router-topk 2 --moe-router-dtype fp32 --moe-ffn-hidden-size 1024 "
    "--moe-grouped-gemm --deterministic-mode --no-gradient-accumulation-fusion --bf16 --no-bias-gelu-fusion"
)
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.mark.parametrize(
    ("release", "more"),
    [("0.16.1", "dist_muon"), ("0.17.1", "dist_muon"), ("0.18.2", "dist_muon --no-use-layer-wise-param-layout")],
)
def test_the_last_rank_owns_the_embedding(release: str, more: str) -> None:
    """`_shard_params_ping_pong`: 88 dense parameters in ascending order, 50,304 · 512 elements last.

    They go to ranks 0 to 7, then 7 to 0, so the 88th goes to rank 7, with 12 bytes per element for master weight and moments.
    MiB of optimizer states: the shadow engine ran megatron-core 0.16.1 for these ranks.
    """
    job = job_of(f"{NVIDIA_RUN} --expert-model-parallel-size 8 --optimizer {more}", base="", release=release, environ=DETERMINISTIC)
    found = {
        rank: (states.master_weights + states.moments) / 2**20
        for ranks, states in states_by_ranks_of(job)
        for first, last in ranks
        for rank in range(first, last + 1)
    }
    assert [found[rank] for rank in (0, 2, 5, 7)] == pytest.approx([112.04, 110.10, 108.10, 394.85], abs=0.01)
    assert found[7] - found[6] == pytest.approx(12 * 50304 * 512 / 2**20, rel=0.03)
