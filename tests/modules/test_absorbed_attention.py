"""Sparse attention of core 0.19, compared with what megatron-core 0.19.0 allocates in the shadow engine.

The grid of `tests/allocator_hook/shadow/test_formulas_against_shadow.py` compares every tensor, with a checkout of that release.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.modules.branches import attention_branch
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.shapes import shapes_of
from analyzer.modules.tree import Module
from analyzer.predict import predict
from analyzer.specs import TrainingJob
from analyzer.time.work.context import work_context
from analyzer.time.work.kernels import Attention, Gemm
from analyzer.time.work.of_module import work_of
from tests.modules.test_kinds import job_of_layout

MIB = 2**20


def attention(job: TrainingJob) -> Module:
    return attention_branch(shapes_of(job), "latent", fused_norm=False, input_shares="")


def of_kind(job: TrainingJob, kind: ModuleKind) -> Module:
    return next(module for _, module in attention(job).walk() if module.kind is kind)


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("cudnn", 3_055_789_568),
        ("cudnn, shared keys, tp4 sp", 2_093_042_176),
        ("cudnn, shared keys, recomputed", 1_186_020_352),
        ("torch", 1_611_675_648),
    ],
)
def test_peaks(name: str, recorded: int) -> None:
    """Peaks of blocks of the allocator, which are larger than their tensors: up to 0.5 % in layouts as small as these."""
    report = predict(job_of_layout(f"absorbed attention, {name}"))
    assert max(rank.memory.peak_allocated_bytes for rank in report.ranks) == pytest.approx(recorded, rel=0.005)


def test_tensors_that_flash_mla_saves() -> None:
    """Queries of 64 heads with 576 elements and outputs with 512 for 2,048 tokens, one key of each, and 256 indices of each."""
    saved = of_kind(job_of_layout("absorbed attention, cudnn"), ModuleKind.CHOSEN_ATTENTION).saved
    assert sorted(tensor.bytes / MIB for tensor in saved if tensor.bytes >= MIB) == [2, 2.25, 128, 144]


def test_operations_of_torch_save_the_scores_of_all_pairs() -> None:
    """Two matrices in fp32, one in 16 bit and three masks for each head."""
    saved = of_kind(job_of_layout("absorbed attention, torch, one sample"), ModuleKind.CHOSEN_ATTENTION).saved
    scores = 8 * 1024 * 1024
    matrices = sorted(tensor.bytes for tensor in saved if tensor.bytes >= scores)
    assert matrices == [scores, scores, scores, 2 * scores, 4 * scores, 4 * scores]


def test_each_head_of_the_indexer_is_a_product_of_its_own_with_shared_keys() -> None:
    """`_compute_indexer_scores_chunk_with_global_rows` multiplies in fp32, and the kernel of cuDNN in 16 bit, all heads at once."""
    found = {}
    for name in ("cudnn", "cudnn, shared keys"):
        job = job_of_layout(f"absorbed attention, {name}")
        work = work_of(of_kind(job, ModuleKind.INDEX_LOSS), work_context(job))
        found[name] = next(kernel for kernel in work.forward if isinstance(kernel, Gemm))
    alone, shared = found["cudnn"], found["cudnn, shared keys"]
    assert (alone.precision, shared.precision) == ("16", "32")
    assert (alone.m, shared.m, shared.batch) == (4 * 1024, 1024, 4 * alone.batch)
    assert alone.flops == shared.flops


def test_attention_reads_the_chosen_keys_only() -> None:
    """A query reads 256 keys, or all keys up to its own."""
    job = job_of_layout("absorbed attention, cudnn")
    (kernel,) = (each for each in work_of(of_kind(job, ModuleKind.CHOSEN_ATTENTION), work_context(job)).forward)
    assert isinstance(kernel, Attention)
    assert kernel.pairs == pytest.approx(sum(min(place + 1, 256) for place in range(1024)), rel=0.005)
    assert (kernel.head_dim, kernel.value_dim, kernel.heads) == (576, 512, 64)


def test_layers_without_an_indexer_have_its_weights_neither() -> None:
    job = job_of_layout("absorbed attention, cudnn, shared keys")
    kinds = [module.kind for _, module in attention_branch(
        shapes_of(job), "latent_without_indexer", fused_norm=False, input_shares=""
    ).walk()]  # fmt: skip
    assert ModuleKind.INDEX_PROJECTION not in kinds
    assert ModuleKind.CHOSEN_ATTENTION in kinds


def test_chosen_keys_stay_for_other_layers_without_a_mask() -> None:
    """The configuration references them, from one forward to the next. A mask of the data carries them otherwise."""
    job = job_of_layout("absorbed attention, cudnn, shared keys")
    unmasked = replace(job, flags=replace(job.flags, attention_mask_in_dataloader=False))
    assert of_kind(job, ModuleKind.INDEX_LOSS).referenced == ()
    assert sum(tensor.bytes for tensor in of_kind(unmasked, ModuleKind.INDEX_LOSS).referenced) == 2048 * 256 * 4 + 2048 * 4
