"""The residual stream of DeepSeek-V4, against sizes worked out from the statements of `HyperConnectionModule` (branch dev)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import analyzer
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module
from analyzer.passes.stages import stage_models
from analyzer.specs import TrainingJob
from analyzer.states.buffers.of_stage import stage_buffers
from analyzer.states.buffers.parameter_order import sum_of_parameters
from analyzer.states.of_rank import stage_states

TOKENS, HIDDEN, STREAMS = 4096, 4096, 4
MAPPINGS = STREAMS * STREAMS + 2 * STREAMS
STREAM = 2 * TOKENS * STREAMS * HIDDEN
"""Bytes of the stream in 16 bit."""


@cache
def job_of_model(options: str = "") -> TrainingJob:
    words = (
        "--info-model deepseek-ai/DeepSeek-V4-Flash --nproc-per-node 8 --nnodes 8 --info-megatron 0.19.0 --num-layers 4 --bf16 "
        f"--seq-length {TOKENS} --micro-batch-size 1 --global-batch-size 64 --expert-model-parallel-size 8 {options}"
    )
    return analyzer.analyze(words.split(), environ={}).job


def modules(job: TrainingJob, kind: ModuleKind) -> list[Module]:
    """The modules of one kind in the first stage, which has some."""
    (stage, *_) = stage_models(job)
    found = [module for tree in stage.trees for _, module in tree.walk() if module.kind is kind]
    assert found
    return found


def test_saved_tensors_before_a_branch() -> None:
    """`native_proj_rms` saves the stream, and `compute_mappings` the stream in fp32: x.float() of all parts."""
    for module in modules(job_of_model(), ModuleKind.HYPER_CONNECTION):
        sizes = {each.name: each.bytes for each in module.saved}
        assert sizes["stream"] == STREAM
        assert sizes["stream in fp32"] == 2 * STREAM
        assert sizes["projected stream"] == 4 * TOKENS * MAPPINGS


def test_parameters_stay_in_fp32() -> None:
    """`mark_keep_in_fp32`: the projection of all parts to 24 numbers, a bias of each, and three factors."""
    for module in modules(job_of_model(), ModuleKind.HYPER_CONNECTION):
        assert {each.dtype for each in module.parameters} == {"fp32"}
        assert sum(each.numel for each in module.parameters) == MAPPINGS * STREAMS * HIDDEN + MAPPINGS + 3


@pytest.mark.parametrize("method", ["uniform", "block"])
def test_a_checkpoint_saves_the_stream_once(method: str) -> None:
    """`CheckpointFunction` saves the whole stream, which is what the first hyper-connection reads."""
    job = job_of_model(f"--recompute-granularity full --recompute-method {method} --recompute-num-layers 1")
    for checkpoint in modules(job, ModuleKind.CHECKPOINT):
        assert [each.bytes for each in checkpoint.saved] == [STREAM]
        assert [each.bytes for each in checkpoint.outlives] == [STREAM]
        assert [each.bytes for each in checkpoint.backward_workspace] == [STREAM]
        layer = checkpoint.children[0]
        read = [each for each in layer.children[0].saved if each.name == "stream"]
        assert [each.shares for each in read] == [checkpoint.saved[0].name]
        norm = next(each for each in layer.children if each.kind is ModuleKind.ATTENTION_NORM)
        assert [each.shares for each in norm.saved if each.name == "input"] == [""]


def test_an_attribute_references_the_input_of_the_second_norm() -> None:
    """`HyperConnectionTransformerLayer.mlp_norm_manager` is not set to None after its last use."""
    for norm in modules(job_of_model(), ModuleKind.FEED_FORWARD_NORM):
        assert [each.lingers for each in norm.saved if each.name == "input"] == [True]


def test_parameters_in_fp32_are_their_own_master_weights() -> None:
    """Unsharded states of Adam: 2 bytes of a parameter, 4 of its master weight and 8 of its moments; in fp32 4, 0 and 8."""
    job = job_of_model()
    job = replace(job, optimizer=replace(job.optimizer, distributed=False))
    (stage, *_) = stage_models(job)
    (tree,) = stage.trees
    in_fp32 = sum_of_parameters(tree, lambda each: each.numel if each.dtype == "fp32" else 0)
    in_16_bit = sum_of_parameters(tree, lambda each: each.numel) - in_fp32
    states = stage_states(job, stage, stage_buffers(job, stage))
    assert in_fp32 > 8 * MAPPINGS * STREAMS * HIDDEN
    assert states.master_weights == 4 * in_16_bit
    assert states.moments == 8 * (in_16_bit + in_fp32)
    assert states.parameters == pytest.approx(2 * in_16_bit + 4 * in_fp32, rel=1e-5)


def test_fused_kernels_save_the_stream_in_16_bit() -> None:
    """`CutileProjRmsComputeH` saves the projected stream and three weights in fp32; the Sinkhorn kernel its first step."""
    job = job_of_model()
    assert job.model.hyper_connections is not None
    job = replace(job, model=replace(job.model, hyper_connections=replace(job.model.hyper_connections, fused=True)))
    for module in modules(job, ModuleKind.HYPER_CONNECTION):
        in_fp32 = sum(each.bytes for each in module.saved if each.dtype == "fp32") // 4
        assert in_fp32 == TOKENS * (MAPPINGS + 1 + 2 * STREAMS + 2 * STREAMS * STREAMS)
