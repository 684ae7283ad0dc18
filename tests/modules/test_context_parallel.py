"""Context parallelism: memory and messages of each communication type.

Peaks are those of megatron-core 0.16.1 with Transformer Engine 2.11, run on meta tensors as the last of four ranks, and
with all-gathers and flash-attn as the first, which needs the most. Attention dominates the memory of the model. Messages were
counted in the same runs.
"""

from __future__ import annotations

from collections import Counter

import pytest

from analyzer.communication.table import communication_rows
from analyzer.errors import InputError
from analyzer.layout.job_groups import ranks_in_group
from analyzer.memory.ranks import rank_classes_of_tensors
from analyzer.passes.stages import stage_models
from analyzer.specs import TrainingJob
from tests.job_of import job_of

WIDE = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 256 --num-attention-heads 16 --kv-channels 128 --seq-length 32768 "
    "--max-position-embeddings 32768 --global-batch-size 8 --bf16 --tokenizer-type NullTokenizer --vocab-size 1000 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --no-create-attention-mask-in-dataloader "
    "--use-distributed-optimizer"
)
GROUPED = "--group-query-attention --num-query-groups 4"
FUSED, FLASH = "--micro-batch-size 1", "--micro-batch-size 2 --attention-backend flash"
MIB = 2**20


def wide(line: str, gpus: int = 4) -> TrainingJob:
    return job_of(f"{line} --context-parallel-size {gpus}", base=WIDE, gpus=gpus, environ={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


@pytest.mark.parametrize(
    ("kind", "heads", "kernel", "peak"),
    [
        ("p2p", GROUPED, FUSED, 880.10),
        ("p2p", GROUPED, FLASH, 1888.53),
        ("p2p", "", FUSED, 1308.60),
        ("p2p", "", FLASH, 2813.03),
        ("a2a", GROUPED, FUSED, 905.94),
        ("a2a", GROUPED, FLASH, 1724.53),
        ("a2a", "", FUSED, 1278.44),
        ("a2a", "", FLASH, 2368.72),
        ("all_gather", GROUPED, FUSED, 1002.19),
        ("all_gather", GROUPED, FLASH, 2548.72),
        ("all_gather", "", FUSED, 1918.44),
        ("all_gather", "", FLASH, 4736.72),
    ],
)
def test_peaks_match_transformer_engine(kind: str, heads: str, kernel: str, peak: float) -> None:
    """MiB, within 0.2 %."""
    (only,) = rank_classes_of_tensors(wide(f"{heads} {kernel} --cp-comm-type {kind}"))
    assert only.memory.peak_allocated_bytes / MIB == pytest.approx(peak, rel=2e-3)
    assert only.memory.peak_at.endswith("core_attention")


def test_peak_of_hierarchical_context_parallelism_matches_transformer_engine() -> None:
    (only,) = rank_classes_of_tensors(
        wide(f"{GROUPED} {FUSED} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4", 8)
    )
    assert only.memory.peak_allocated_bytes / MIB == pytest.approx(564.50, rel=2e-3)


def calls(job: TrainingJob) -> dict[tuple[str, str, str, int], int]:
    """Calls of a layer per microbatch, by kind, group, phase and number of elements."""
    counts: Counter[tuple[str, str, str, int]] = Counter()
    for row in communication_rows(job, stage_models(job)):
        if row.group.startswith("cp"):
            numel = 1
            for size in row.shape:
                numel *= size
            counts[row.kind, row.group, row.phase, numel] += row.calls_per_microbatch
    return {key: count // job.model.num_layers for key, count in counts.items()}


TOKENS, QUERY, KEY = 8192, 16 * 128, 4 * 128
"""Tokens on each of four ranks; elements of the queries and of the keys of one token."""


def test_messages_of_the_ring() -> None:
    """In backward the first step sends keys and values, the last their gradients, and the other steps both in one message."""
    pair = TOKENS * 2 * KEY
    assert calls(wide(f"{GROUPED} {FUSED}")) == {
        ("send", "cp", "forward", pair): 3,
        ("send", "cp", "backward", pair): 2,
        ("send", "cp", "backward", 2 * pair): 2,
    }
    two = calls(wide(f"{GROUPED} {FUSED}", 2))
    assert two == {("send", "cp", "forward", 2 * pair): 1, ("send", "cp", "backward", 2 * pair): 2}


def test_messages_of_all_to_all_and_all_gather() -> None:
    assert calls(wide(f"{GROUPED} {FUSED} --cp-comm-type a2a")) == {
        ("all_to_all", "cp", phase, TOKENS * width): 2 for phase in ("forward", "backward") for width in (QUERY, KEY)
    }
    full = 4 * TOKENS * KEY
    assert calls(wide(f"{GROUPED} {FUSED} --cp-comm-type all_gather")) == {
        ("all_gather", "cp", "forward", full): 2,
        ("all_gather", "cp", "backward", full): 2,
        ("reduce_scatter", "cp", "backward", full): 2,
    }


def test_messages_of_hierarchical_context_parallelism() -> None:
    """Inner groups exchange heads, outer rings send keys and values. In backward the output is exchanged again."""
    job = wide(f"{GROUPED} {FUSED} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4", 8)
    tokens = TOKENS // 2
    pair = tokens * 2 * KEY
    assert calls(job) == {
        ("all_to_all", "cp_a2a", "forward", tokens * QUERY): 2,
        ("all_to_all", "cp_a2a", "forward", tokens * KEY): 2,
        ("all_to_all", "cp_a2a", "backward", tokens * QUERY): 3,
        ("all_to_all", "cp_a2a", "backward", tokens * KEY): 2,
        ("send", "cp_p2p", "forward", pair): 3,
        ("send", "cp_p2p", "backward", pair): 2,
        ("send", "cp_p2p", "backward", 2 * pair): 2,
    }
    assert (ranks_in_group(job, "cp_a2a"), ranks_in_group(job, "cp_p2p")) == (2, 4)


def test_a_hierarchy_with_one_level_becomes_that_level() -> None:
    """Transformer Engine uses only the level that has more than one rank (attn_forward_func_with_cp)."""
    inner = wide(f"{FUSED} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 1").parallel
    outer = wide(f"{FUSED} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 1 4").parallel
    assert (inner.cp_comm_type, inner.cp_inner_size) == ("a2a", 1)
    assert (outer.cp_comm_type, outer.cp_inner_size) == ("p2p", 1)
    with pytest.raises(InputError, match="hierarchical"):
        wide(f"{FUSED} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 1 2")


def test_messages_of_the_ring_with_latent_attention() -> None:
    """Keys have 192 elements per head and values 128; they are sent together."""
    job = wide(f"{FUSED} --multi-latent-attention --kv-channels 128 --rope-type yarn --no-rope-fusion")
    pair = TOKENS * 16 * (192 + 128)
    assert calls(job) == {
        ("send", "cp", "forward", pair): 3,
        ("send", "cp", "backward", pair): 2,
        ("send", "cp", "backward", 2 * pair): 2,
    }


def test_sliding_windows_and_sinks_need_a_communication_type_that_supports_them() -> None:
    """The ring does not support windows, and only all-to-all supports sinks (get_attention_backend, attn_forward_func_with_cp)."""
    for option in ("--window-size 128,0", "--softmax-type learnable"):
        with pytest.raises(InputError, match=r"Transformer Engine has no"):
            wide(f"{FUSED} {option} --cp-comm-type p2p")
    assert wide(f"{FUSED} --window-size 128,0 --cp-comm-type all_gather").model.attention_backend == "fused"
    job = wide(f"{FUSED} --softmax-type learnable --cp-comm-type a2a")
    assert calls(job)["all_gather", "cp", "backward", 16] == 1


MASKED = (
    "--num-layers 8 --hidden-size 128 --num-attention-heads 16 --seq-length 16384 --max-position-embeddings 16384 "
    "--micro-batch-size 2 --global-batch-size 16 --bf16 --tokenizer-type NullTokenizer --vocab-size 1000 "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --context-parallel-size 4"
)


@pytest.mark.parametrize("line", ["", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"])
@pytest.mark.parametrize("release", ["0.8.0", "0.16.1", "0.19.0"])
def test_the_mask_of_the_full_sequence_exists_while_its_rows_are_copied(line: str, release: str) -> None:
    """`get_batch_on_this_cp_rank` (megatron/training/utils.py 0.8, core/utils.py 0.16.1 and 0.19): `index_select` of the mask.

    Every rank of the stage has the full mask b·s², and its quarter.
    """
    environ = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    job = job_of(f"{MASKED} {line}", base="", gpus=8, release=release, environ=environ)
    without = job_of(f"{MASKED} {line} --no-create-attention-mask-in-dataloader", base="", gpus=8, release=release, environ=environ)
    mask = 2 * 16384**2
    (memory,), (memory_without,) = ([each.memory for each in rank_classes_of_tensors(every)] for every in (job, without))
    assert memory.peak_at == "forward of microbatch 0, batch"
    between = memory.allocated_bytes
    labels_and_ids = 2 * (4096 * (8 + 4) + 16384 * 8)  # the embedding counts the tokens
    assert memory.peak_allocated_bytes == pytest.approx(between + mask + mask // 4 + labels_and_ids, abs=4096)
    assert memory_without.peak_allocated_bytes < memory.peak_allocated_bytes


def test_only_stages_with_a_batch_have_the_mask() -> None:
    """`get_batch` of pretrain_gpt.py returns None between the first and the last stage."""
    job = job_of(f"{MASKED} --pipeline-model-parallel-size 4", base="", gpus=16, environ={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    found = [
        any("full sequence" in tensor.name for _, module in stage.trees[0].walk() for tensor in module.forward_workspace)
        for stage in stage_models(job)
    ]
    assert found == [True, False, False, True]
