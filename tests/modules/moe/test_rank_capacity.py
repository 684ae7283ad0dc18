"""A constant number of rows for the experts of a rank, and pages for what they save (core 0.18).

Expectations are those of `_HybridEPManager.setup_metadata` (core/transformer/moe/token_dispatcher.py) and of
`PagedStashManager` (core/transformer/moe/paged_stash.py): 1.5 times the mean number of rows is allocated, in a multiple of 256, and
the pages hold 1.2 times the mean.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import analyzer
from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.build import build
from analyzer.launch.launchers.world import World
from analyzer.memory.workspaces import workspaces
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.moe.experts import beside_pages_bytes, experts
from analyzer.modules.moe.routing import Routing
from analyzer.modules.shapes import shapes_of
from analyzer.modules.tree import Module
from analyzer.passes.stages import stage_models
from analyzer.specs import TrainingJob
from analyzer.time.work.context import work_context
from analyzer.time.work.kernels import Work
from analyzer.time.work.of_module import work_of
from tests.job_of import BASE, BLACKWELL, arguments_of, job_of

TOKENS = 2048
TOPK = 2
WIDTH = 1024
FFN = 512
EXPERTS = (
    f"--num-experts 8 --moe-router-topk {TOPK} --moe-ffn-hidden-size {FFN} --moe-grouped-gemm --swiglu --disable-bias-linear "
    "--normalization RMSNorm --untie-embeddings-and-output-weights --expert-model-parallel-size 4 --moe-router-dtype fp32 "
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --use-transformer-engine-op-fuser "
    "--fp8-format e4m3 --fp8-recipe mxfp8"
)
LIMITED = "--moe-expert-rank-capacity-factor 1.5"
PAGED = f"{LIMITED} --moe-paged-stash --moe-paged-stash-buffer-size-factor-cuda 1.2 --moe-mlp-glu-interleave-size 32"


def moe(rest: str) -> TrainingJob:
    return job_of(f"{EXPERTS} {rest}", release="0.18.2", gpu=BLACKWELL)


def of_experts(job: TrainingJob) -> Module:
    return experts(shapes_of(job), dispatched=())


def saved(module: Module) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for child in module.children for tensor in child.saved}


def test_allocated_rows() -> None:
    assert Routing(shapes_of(moe(LIMITED))).rows == TOKENS * TOPK * 3 // 2
    assert Routing(shapes_of(moe("--moe-expert-rank-capacity-factor 1.01"))).rows == 4352  # 4136 of 4096, in a multiple of 256


def test_fused_operations_have_multiples_of_256_rows() -> None:
    """`get_align_size_for_quantization` (0.18). HybridEP pads the rows of each expert in FP8, by half a multiple on average."""
    local_experts = 2
    assert Routing(shapes_of(moe(""))).rows == TOKENS * TOPK + local_experts * 256 // 2
    in_16_bit = f"{EXPERTS.partition('--fp8-format')[0]}"
    assert Routing(shapes_of(job_of(in_16_bit, release="0.18.2", gpu=BLACKWELL))).rows == TOKENS * TOPK
    sequential = EXPERTS.replace("--moe-grouped-gemm ", "").replace("flex --moe-flex-dispatcher-backend hybridep", "alltoall")
    assert Routing(shapes_of(job_of(sequential, release="0.18.2", gpu=BLACKWELL))).padded_to == 256
    alone = EXPERTS.replace("--use-transformer-engine-op-fuser", "")
    assert Routing(shapes_of(job_of(alone, release="0.18.2", gpu=BLACKWELL))).rows == TOKENS * TOPK + local_experts * 32 // 2
    assert any("a multiple of 256: 128 more are counted" in each for each in moe("").assumptions)
    assert not any("are padded to a multiple" in each for each in moe(LIMITED).assumptions)


def test_the_experts_save_as_many_rows_as_are_allocated() -> None:
    assert saved(of_experts(moe(LIMITED)))["fc1 output"] == (TOKENS * TOPK * 3 // 2, 2 * FFN)


def test_pages_hold_a_multiple_of_the_mean() -> None:
    found = saved(of_experts(moe(PAGED)))
    assert found["fc1 output, in pages"] == (int(1.2 * TOKENS * TOPK), 2 * FFN)
    assert set(found) == {f"{name}, in pages" for name in saved(of_experts(moe(LIMITED)))}


def test_what_one_layer_saves_is_also_allocated_beside_the_pages() -> None:
    """The input and the activation in MXFP8, with a scale for 32 values, and the output of the first layer in 16 bit."""
    rows = TOKENS * TOPK * 3 // 2
    quantized = rows * (WIDTH + FFN)
    expected = quantized + quantized // 32 + 2 * rows * 2 * FFN
    assert beside_pages_bytes(shapes_of(moe(PAGED))) == pytest.approx(expected, rel=0.01)
    assert beside_pages_bytes(shapes_of(moe(LIMITED))) == 0
    job = moe(PAGED)
    named = {each.name: each for each in workspaces(job, stage_models(job)[0].trees)}
    beside = named["saved tensors of experts beside their pages"]
    assert beside.bytes == beside_pages_bytes(shapes_of(job))
    assert beside.kinds == frozenset({ModuleKind.EXPERTS})


@given(capacity=st.floats(1, 4), pages=st.floats(0.5, 4))
def test_pages_do_not_depend_on_the_capacity(capacity: float, pages: float) -> None:
    job = moe(PAGED)
    assert job.model.moe is not None
    changed = replace(job.model.moe, rank_capacity=capacity, page_factor=pages)
    job = replace(job, model=replace(job.model, moe=changed))
    rows, _ = saved(of_experts(job))["fc1 output, in pages"]
    assert rows == pytest.approx(pages * TOKENS * TOPK, rel=256 / (TOKENS * TOPK), abs=1)


def test_kernels_read_the_rows_of_tokens_only() -> None:
    """The number of rows of each expert is known on the GPU, so that the time does not depend on the capacity."""
    plain, limited, paged = (_kernels(moe(rest)) for rest in ("", LIMITED, PAGED))
    assert plain == limited == paged


def _kernels(job: TrainingJob) -> list[Work]:
    return [work_of(each, work_context(job)) for tree in stage_models(job)[0].trees for each in _all(tree)]


def _all(tree: Module) -> list[Module]:
    return [tree, *(found for child in tree.children for found in _all(child))]


def test_peak_and_what_is_not_timed() -> None:
    words = (
        "--nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
        "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --bf16 --tokenizer-type NullTokenizer "
        f"--vocab-size 32000 --train-iters 10 --lr 1e-4 --info-gpu B200 --info-megatron 0.18 {EXPERTS}"
    )
    plain, limited, paged = (analyzer.analyze(f"{words} {rest}".split(), environ={}) for rest in ("", LIMITED, PAGED))
    peak, limited_peak, paged_peak = (each.ranks[0].memory.peak_allocated_bytes for each in (plain, limited, paged))
    assert peak < paged_peak < limited_peak
    assert paged.time is not None
    assert "copies of expert tensors to pages and back, which are assumed to be hidden" in paged.time.not_counted


@pytest.mark.parametrize(
    ("rest", "fault"),
    [
        ("--moe-expert-rank-capacity-factor 0.9", "fewer rows than the mean"),
        (PAGED.replace(" --moe-mlp-glu-interleave-size 32", ""), "pages are not modelled without --moe-mlp-glu-interleave-size"),
        (f"{PAGED} --moe-mlp-glu-interleave-size 16", "pages are not modelled without --moe-mlp-glu-interleave-size 32"),
        (f"{PAGED} --fp8-recipe tensorwise", "pages are not modelled without MXFP8"),
        (f"{PAGED} --recompute-granularity selective --recompute-modules moe_act", "with recomputed experts"),
        (f"{PAGED} --moe-token-dispatcher-type alltoall", "pages are not modelled without HybridEP"),
        (f"{PAGED} --moe-paged-stash-buffer-size-factor-cuda 0.5", "nothing on the host holds the others"),
    ],
)
def test_not_modelled(rest: str, fault: str) -> None:
    with pytest.raises(UnsupportedError, match=fault):
        moe(rest)


@pytest.mark.parametrize("factor", ["nan", "inf"])
def test_factors_are_finite(factor: str) -> None:
    for line in (f"--moe-expert-rank-capacity-factor {factor}", f"{PAGED} --moe-paged-stash-buffer-size-factor-cuda {factor}"):
        with pytest.raises(InputError, match="is not a finite number"):
            moe(line)


def test_more_tokens_than_rows_are_refused() -> None:
    arguments = arguments_of(f"{BASE} {EXPERTS} {LIMITED}", release="0.18.2")
    with pytest.raises(InputError, match="more than the rows"):
        build(arguments, World(1, 8), environ={}, gpu=BLACKWELL, folder=Path("/nowhere"), moe_imbalance=2)


def test_pages_on_the_host_hold_what_those_on_the_gpu_do_not() -> None:
    half = "--moe-paged-stash-buffer-size-factor-cuda 0.5 --moe-paged-stash-buffer-size-factor-cpu 1"
    assert saved(of_experts(moe(f"{PAGED} {half}")))["fc1 output, in pages"] == (TOKENS * TOPK // 2, 2 * FFN)


def test_layers_in_16_bit_have_no_pages() -> None:
    """The fused kernels of Transformer Engine, which mark what is copied to pages, do not run in 16 bit."""
    shapes = shapes_of(moe(PAGED)).in_16_bit
    assert not any("in pages" in name for name in saved(experts(shapes, dispatched=())))


def test_other_dispatchers_allocate_the_rows_that_arrive() -> None:
    assert moe(f"{LIMITED} --moe-token-dispatcher-type alltoall").model.moe == moe("--moe-token-dispatcher-type alltoall").model.moe


def test_expert_tensor_parallelism_is_refused() -> None:
    """The rows are a multiple of the tokens of one rank (`setup_metadata`), and those of all of its group arrive."""
    with pytest.raises(InputError, match="moe-expert-rank-capacity-factor: is not modelled with expert tensor parallelism"):
        moe(f"{LIMITED} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2")
