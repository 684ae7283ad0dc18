"""An output layer in FP8 (`--fp8-output-proj`, core 0.18): `TELMHeadColumnParallelLinear`, whose weight stays in 16 bit."""

from __future__ import annotations

import pytest

from analyzer.errors import InputError
from analyzer.memory.workspaces import workspaces
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module
from analyzer.passes.stages import stage_models
from analyzer.specs import TrainingJob
from analyzer.time.work.context import work_context
from analyzer.time.work.kernels import Gemm
from analyzer.time.work.of_module import work_of
from tests.job_of import BLACKWELL, job_of

VOCABULARY = 32000
HIDDEN = 1024
TOKENS = 2048
MXFP8 = "--fp8-format e4m3 --fp8-recipe mxfp8 --untie-embeddings-and-output-weights"


def job(rest: str = "--fp8-output-proj") -> TrainingJob:
    return job_of(f"{MXFP8} {rest}", release="0.18.2", gpu=BLACKWELL)


def output_layer(of: TrainingJob) -> Module:
    return next(each for each in _all(stage_models(of)[0].trees[0]) if each.kind is ModuleKind.OUTPUT_LAYER)


def _all(tree: Module) -> list[Module]:
    return [tree, *(found for child in tree.children for found in _all(child))]


def test_its_input_is_saved_in_fp8_and_referenced_in_16_bit_until_the_loss() -> None:
    layer = output_layer(job())
    scales = HIDDEN * TOKENS // 32
    assert {tensor.name: tensor.bytes for tensor in layer.saved} == {
        "input in fp8, column-wise": TOKENS * HIDDEN,
        "scales of input in fp8, column-wise": scales,
    }
    assert [tensor.bytes for tensor in layer.forward_held if tensor.name == "input"] == [2 * TOKENS * HIDDEN]
    assert {tensor.name: tensor.bytes for tensor in output_layer(job("")).saved} == {"input": 2 * TOKENS * HIDDEN}


def test_its_weight_has_two_copies_in_fp8_and_is_stored_in_16_bit() -> None:
    stored = "--fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag --use-distributed-optimizer --overlap-param-gather "
    for rest in ("", f"{stored}--overlap-grad-reduce "):
        of = job(f"{rest}--fp8-output-proj")
        assert [each.dtype for each in output_layer(of).parameters if not each.quantized] == ["bf16"]
        sizes = {each.name: each.bytes for each in workspaces(of, stage_models(of)[0].trees)}
        copies = 2 * (VOCABULARY * HIDDEN + VOCABULARY * HIDDEN // 32)
        assert sizes["FP8 copies of the output layer's weight"] == copies
    plain = job("")
    assert not any("output layer" in each.name for each in workspaces(plain, stage_models(plain)[0].trees))


def test_no_gemm_is_one_of_pytorch() -> None:
    """Its GEMMs were the only ones of PyTorch, so that the handles of cuBLAS have no workspaces."""
    with_fp8, plain = job(), job("")
    assert not any("cuBLAS" in each.name for each in workspaces(with_fp8, stage_models(with_fp8)[0].trees))
    assert any("cuBLAS" in each.name for each in workspaces(plain, stage_models(plain)[0].trees))


def test_its_gemms_have_the_speed_of_fp8() -> None:
    for rest, precision in (("--fp8-output-proj", "8"), ("", "16")):
        work = work_of(output_layer(job(rest)), work_context(job(rest)))
        gemms = [each for each in (*work.forward, *work.backward) if isinstance(each, Gemm)]
        assert {each.precision for each in gemms} == {precision}
        assert len(gemms) == len(("forward", "data gradient", "weight gradient"))


def test_tied_embeddings_need_a_pipeline() -> None:
    """The last of several stages has a weight of its own (`skip_weight_param_allocation` of `GPTModel`)."""
    tied = "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-output-proj"
    assert job_of(f"{tied} --pipeline-model-parallel-size 2", release="0.18.2", gpu=BLACKWELL).precision.fp8 == job().precision.fp8
    with pytest.raises(InputError, match="needs a weight of its own"):
        job_of(tied, release="0.18.2", gpu=BLACKWELL)


def test_rows_of_the_vocabulary_are_whole_blocks() -> None:
    with pytest.raises(InputError, match="needs a multiple of 32 rows of the vocabulary on each rank, not 32001"):
        job("--fp8-output-proj --vocab-size 32001 --make-vocab-size-divisible-by 1")


def test_hybrid_models_have_no_such_layer() -> None:
    """Only `GPTModel` builds `TELMHeadColumnParallelLinear`."""
    pattern = "--num-layers 4 --hybrid-layer-pattern M*-M --mamba-num-heads 32 --mamba-head-dim 64"
    assert job(f"{pattern} --fp8-output-proj").precision == job(pattern).precision
