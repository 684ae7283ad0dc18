"""Multi-token prediction: parameters by their published sizes, placement, messages, and allocations of megatron-core.

Saved bytes and peaks are those of megatron-core 0.16.1 with Transformer Engine 2.11, run on meta tensors.
"""

from __future__ import annotations

from collections import Counter

import pytest

from analyzer.communication.table import communication_rows
from analyzer.layout.groups import group_size, groups
from analyzer.memory.chunk_memory import chunk_memory
from analyzer.memory.ranks import rank_classes_of_tensors
from analyzer.modules.inputs import module_inputs
from analyzer.modules.models.gpt import full_model
from analyzer.modules.tree import parameters
from analyzer.passes.stages import stage_models
from analyzer.specs import TrainingJob
from tests.job_of import job_of

SMALL = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --global-batch-size 8 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 "
    "--attention-dropout 0 --group-query-attention --num-query-groups 4 --no-create-attention-mask-in-dataloader "
    "--use-distributed-optimizer"
)
UNTIED = "--untie-embeddings-and-output-weights"
MIB = 2**20


def small(line: str, gpus: int = 1) -> TrainingJob:
    return job_of(line, base=SMALL, gpus=gpus, environ={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


def numel(job: TrainingJob) -> int:
    return sum(parameter.full_numel for parameter in parameters(full_model(module_inputs(job))))


DEEPSEEK_V3 = (
    "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --bf16 --tokenizer-type NullTokenizer --vocab-size 129279 "
    "--make-vocab-size-divisible-by 128 --position-embedding-type rope --no-rope-fusion --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --qk-layernorm --multi-latent-attention --q-lora-rank 1536 "
    "--kv-lora-rank 512 --num-experts 256 --moe-ffn-hidden-size 2048 --moe-router-topk 8 --moe-layer-freq ([0]*3+[1]*58) "
    "--moe-shared-expert-intermediate-size 2048 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
)


def test_parameters_of_deepseek_v3() -> None:
    """671 billion, and 11.5 billion of the MTP layer that are not shared (README_WEIGHTS.md of DeepSeek-V3)."""
    plain = numel(job_of("", base=DEEPSEEK_V3))
    assert round(plain / 1e9) == 671
    own = numel(job_of("--mtp-num-layers 1", base=DEEPSEEK_V3)) - plain
    assert own == pytest.approx(11.5e9, rel=0.01)


def test_parameters_of_a_depth() -> None:
    """A layer, three norms and a projection 2·h → h for each depth; embedding and head are shared."""
    h, layers = 1024, 4
    plain = numel(small(UNTIED))
    vocabulary = small(UNTIED).model.padded_vocab_size * h
    of_layer = (plain - 2 * vocabulary - h) // layers
    assert numel(small(f"{UNTIED} --mtp-num-layers 2")) - plain == 2 * (of_layer + 3 * h + 2 * h * h)


def test_copies_of_the_embedding() -> None:
    """The MTP stage has a copy. With tied embeddings the last stage also has its own output layer (gpt_model.py)."""
    vocabulary = small("").model.padded_vocab_size * 1024
    sizes = {}
    for tied in ("", UNTIED):
        job = small(f"{tied} --mtp-num-layers 1 --pipeline-model-parallel-size 2", 2)
        stages = [stage.trees[0] for stage in stage_models(job)]
        sizes[tied] = [[p.shared_embedding for p in parameters(stage) if p.numel == vocabulary] for stage in stages]
    assert sizes == {"": [[True], [True, False]], UNTIED: [[True], [True, False]]}  # language_model.py marks both stages


def test_group_of_the_embedding() -> None:
    """First rank, last rank if tied, and the pipeline rank of the MTP layers (get_embedding_ranks, pretrain_gpt.py 0.16.1)."""
    parallel = small("--pipeline-model-parallel-size 4", 4).parallel
    cases = [(True, None, (0, 3)), (False, None, (0,)), (False, 3, (0, 3)), (True, 2, (0, 2, 3)), (False, 2, (0, 2))]
    for tied, mtp, members in cases:
        assert next(groups(parallel, "embd", tied=tied, mtp_rank=mtp)) == members
        assert group_size(parallel, "embd", tied=tied, mtp_rank=mtp) == len(members)


@pytest.mark.parametrize(
    ("line", "gpus", "rank", "peak"),
    [
        (f"{UNTIED} --mtp-num-layers 1", 1, 0, 4430.84),
        (f"{UNTIED} --mtp-num-layers 2 --tensor-model-parallel-size 2 --sequence-parallel", 2, 0, 2730.87),
        (
            f"{UNTIED} --mtp-num-layers 1 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            1, 0, 3862.38,
        ),
        ("--mtp-num-layers 1 --pipeline-model-parallel-size 2", 2, 0, 1503.26),
        ("--mtp-num-layers 1 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Ett|tt|m|L", 4, 0, 1964.45),
    ],
)  # fmt: skip
def test_peaks_match_megatron(line: str, gpus: int, rank: int, peak: float) -> None:
    """MiB, within 0.1 %."""
    found = rank_classes_of_tensors(small(line, gpus))[rank].memory.peak_allocated_bytes / MIB
    assert found == pytest.approx(peak, rel=1e-3)


def test_every_depth_saves_its_own_softmax() -> None:
    """Head and loss of each depth save 4·s·b·V more bytes."""
    job = small(f"{UNTIED} --mtp-num-layers 2")
    softmax = 4 * 4096 * job.model.padded_vocab_size
    (plain,), (two,) = (stage_models(each)[0].trees for each in (small(UNTIED), job))
    names = Counter(t.name for _, module in two.walk() for t in module.saved if t.bytes == softmax)
    assert names == {"softmax": 3}
    assert chunk_memory(two).retained - chunk_memory(plain).retained > 2 * softmax


@pytest.mark.parametrize(
    ("release", "method", "of_decoder", "of_depth"),
    [("0.17.1", "uniform", 0, 1), ("0.19.0", "uniform", 2, 3), ("0.19.0", "block", 1, 1)],
)
def test_checkpoints_of_hybrid_models(release: str, method: str, of_decoder: int, of_depth: int) -> None:
    """`MultiTokenPredictionLayer._checkpointed_forward` covers a whole depth with uniform recomputation, `HybridStack.forward` of
    0.18 and later each of the layers in a stack, with block recomputation only the first."""
    line = "--hybrid-layer-pattern M-/*- --position-embedding-type none --recompute-granularity full --recompute-num-layers 1"
    base = SMALL.replace("--num-layers 4 ", "")
    job = job_of(f"{line} --recompute-method {method}", base=base, release=release)
    (tree,) = stage_models(job)[0].trees
    found = Counter("mtp" in path for path, module in tree.walk() if module.recomputed)
    assert (found[False], found[True]) == (of_decoder, of_depth)


def test_pipeline_messages_after_the_mtp_layers() -> None:
    """A message has D + 1 hidden states, and a message with its three sizes precedes it."""
    job = small("--mtp-num-layers 2 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Ett|tt|mm|L", 4)
    sent = {
        (row.pipeline_rank, row.module): row.shape
        for row in communication_rows(job, stage_models(job))
        if row.group == "pp" and row.dtype == "bf16"
    }
    one, three = (4096, 1, 1024), (3 * 4096, 1, 1024)
    assert sent == {
        (0, "pipeline.hidden_states"): one,
        (1, "pipeline.hidden_states"): one,
        (1, "pipeline.hidden_states_gradient"): one,
        (2, "pipeline.hidden_states"): three,
        (2, "pipeline.hidden_states_gradient"): one,
        (3, "pipeline.hidden_states_gradient"): three,
    }
    sizes = [row for row in communication_rows(job, stage_models(job)) if row.group == "pp" and row.dtype == "int64"]
    assert {(row.shape, row.calls_per_microbatch) for row in sizes} == {((3,), 1)}
    assert len(sizes) == 6


def test_tensor_parallel_messages_of_a_depth() -> None:
    """Counted in megatron-core with two depths: all-gathers of 2·h for the projection, and of h for everything else."""
    job = small(f"{UNTIED} --mtp-num-layers 2 --tensor-model-parallel-size 2 --sequence-parallel", 2)
    counts: Counter[tuple[str, int]] = Counter()
    for row in communication_rows(job, stage_models(job)):
        if row.group == "tp" and row.dtype == "bf16" and row.calls_per_microbatch:
            numel = 1
            for size in row.shape:
                numel *= size
            counts[row.kind, numel] += row.calls_per_microbatch
    assert counts == {
        ("all_gather", 4096 * 1024): 49,
        ("all_gather", 4096 * 2048): 4,
        ("reduce_scatter", 4096 * 1024): 30,
        ("reduce_scatter", 4096 * 2048): 2,
    }


@pytest.mark.parametrize(("layout", "copies"), [("Et|tt|tttt|tmL", False), ("Et|tt|ttttt|mL", True)])
def test_a_stage_with_only_mtp_layers_copies_its_input(layout: str, copies: bool) -> None:
    """`TransformerBlock.forward` clones its input if it has neither layers nor a norm, and the input stays allocated."""
    stages = f"--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout {layout}"
    job = job_of(f"--mtp-num-layers 1 --position-embedding-type rope {stages}")
    decoder = next(child for child in stage_models(job)[-1].trees[-1].children if child.name == "decoder")
    assert sum(tensor.bytes for tensor in decoder.saved) == copies * 2 * 2048 * 1024
