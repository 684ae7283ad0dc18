"""Modules with frozen weights: what is left of them, in memory, communication and time.

Sources: `backward_needs_input`, `backward_input_needs_gather` and `requires_wgrad` of Transformer Engine 2.11
(pytorch/module/{linear,layernorm_linear}.py), and `DistributedDataParallel.__init__`, which takes trained parameters only.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.memory.block_memory import Setting, block_memory, highest_level
from analyzer.modules.freezing import frozen, without_input_gradient
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.layer import LayerKind, one_layer
from analyzer.modules.shapes import shapes_of
from analyzer.modules.tree import Module
from analyzer.program.lowering import operations
from analyzer.program.operations import OperationKind
from analyzer.states.buffers.gradient_buffers import chunk_buffers
from analyzer.states.buffers.parameter_order import numel_of, parameter_runs, trained_numel
from analyzer.time.work.context import work_context
from analyzer.time.work.kernels import Gemm
from analyzer.time.work.of_module import work_of
from tests.job_of import job_of

JOB = job_of(
    "--tensor-model-parallel-size 2 --sequence-parallel --attention-backend flash --hidden-dropout 0 --attention-dropout 0"
)


@pytest.fixture
def layer() -> Module:
    return one_layer(shapes_of(JOB).inputs, LayerKind())


def _saved(module: Module, kind: ModuleKind) -> set[str]:
    return {tensor.name for _, each in module.walk() if each.kind is kind for tensor in each.saved}


def test_linear_layers_save_only_what_the_norm_before_them_needs(layer: Module) -> None:
    without = frozen(layer)
    for kind in (ModuleKind.QKV, ModuleKind.FC1):
        assert _saved(layer, kind) == {"input", "normalized input", "mu", "rsigma"}
        assert _saved(without, kind) == {"input", "mu", "rsigma"}
    assert _saved(layer, ModuleKind.FC2) == {"input"}
    assert _saved(without, ModuleKind.FC2) == set()
    assert _saved(without, ModuleKind.ACTIVATION) == _saved(layer, ModuleKind.ACTIVATION)


def test_the_attention_kernel_stores_the_output_that_the_projection_no_longer_saves(layer: Module) -> None:
    """Bytes worked out by hand: two normalized inputs of [s/t, b, h] and the input of fc2 [s, b, 4h/t], in 16 bit."""
    shapes = shapes_of(JOB)
    tokens, h = shapes.s * shapes.b, shapes.model.hidden_size
    copies = 2 * 2 * tokens * h // 2 + 2 * tokens * 4 * h // 2
    projection = 2 * tokens * h // 2 if shapes.b > 1 else 0  # for several samples flash attention returns a copy of its output
    assert layer.retained_bytes - frozen(layer).retained_bytes == copies + projection


def test_the_input_is_not_gathered_again_for_the_weight_gradient(layer: Module) -> None:
    def gathers(module: Module, kind: ModuleKind) -> int:
        calls = (call for _, each in module.walk() if each.kind is kind for call in each.collectives)
        return sum(call.kind == "all_gather" and call.phase == "backward" for call in calls)

    assert gathers(layer, ModuleKind.FC1) == 1
    assert gathers(frozen(layer), ModuleKind.FC1) == 0
    assert gathers(frozen(layer), ModuleKind.FC2) == 1, "the gradient of its output is gathered for the data gradient"


def test_frozen_weights_are_in_no_buffer(layer: Module) -> None:
    half = Module(name="decoder", kind=ModuleKind.DECODER, children=(layer, frozen(layer)))
    assert numel_of(half) == 2 * numel_of(layer)
    assert trained_numel(half) == numel_of(layer)
    buffers = chunk_buffers(JOB, parameter_runs(half), bucket_size=None)
    assert sum(size for buffer in buffers for bucket in buffer.buckets for size in bucket.sizes) == numel_of(layer)


def test_a_frozen_linear_layer_computes_no_weight_gradient(layer: Module) -> None:
    def backward(module: Module) -> list[str]:
        fc1 = next(each for _, each in module.walk() if each.kind is ModuleKind.FC1)
        return [kernel.name for kernel in work_of(fc1, work_context(JOB)).backward if isinstance(kernel, Gemm)]

    assert backward(layer) == ["data gradient", "weight gradient"]
    assert backward(frozen(layer)) == ["data gradient"]


def test_a_layer_whose_input_needs_no_gradient_keeps_nothing_and_has_no_backward(layer: Module) -> None:
    without = frozen(layer, input_gradient=False)
    memory = block_memory(without)
    assert memory.retained == 0
    assert without.retained_bytes == 0
    assert [each.kind for each in operations(without).backward] == [OperationKind.BEGIN, OperationKind.END]
    highest = highest_level(without, Setting(), backward=False)
    assert 0 < highest < highest_level(layer, Setting(), backward=False)
    assert {each.phase for _, module in without.walk() for each in module.collectives} == {"forward"}


def test_equal_layers_stay_one_object(layer: Module) -> None:
    assert frozen(layer) is frozen(layer)
    assert frozen(layer) is not frozen(layer, input_gradient=False)


def test_a_trained_layer_after_a_frozen_part_computes_no_data_gradient(layer: Module) -> None:
    fc2 = next(each for _, each in layer.walk() if each.kind is ModuleKind.FC2)
    kernels = work_of(without_input_gradient(replace(fc2)), work_context(JOB)).backward
    assert [each.name for each in kernels if isinstance(each, Gemm)] == ["weight gradient"]
