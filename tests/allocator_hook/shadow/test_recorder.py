"""Allocations of backwards that PyTorch computes in another way on the GPU than on the meta device or under a dispatch mode."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.shadow

ROWS, COLUMNS, CHOSEN = 1024, 256, 512


class Sink:
    """The live allocations and their peak, in bytes."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.peak = 0

    def allocation(self, pointer: int, bytes: int, *, stream: int = 0) -> None:
        del stream
        self.live[pointer] = bytes
        self.peak = max(self.peak, sum(self.live.values()))

    def free(self, pointer: int) -> None:
        del self.live[pointer]

    def label(self, pointer: int, role: Any, name: str, *, shape: Any, dtype: str, bytes: int) -> None:
        """Labels are not needed."""


@pytest.mark.parametrize("operation", ["index_select", "gather", "topk"])
def test_the_gradient_of_selected_elements_is_allocated_once(operation: str) -> None:
    """FunctionsManual.cpp and TensorAdvancedIndexing.cpp write into new zeros, unless a dispatch mode is active."""
    torch = pytest.importorskip("torch")
    from allocator_hook.shadow.recorder import Recorder

    source = torch.empty(ROWS, COLUMNS, device="meta", requires_grad=True)
    select: Any = {
        "index_select": lambda: source.index_select(0, torch.empty(CHOSEN, dtype=torch.int64, device="meta")),
        "gather": lambda: source.gather(1, torch.empty(ROWS, 2, dtype=torch.int64, device="meta")),
        "topk": lambda: source.topk(2, dim=1)[0],
    }[operation]
    sink = Sink()
    with Recorder(sink, cublas_workspace_bytes=0):
        chosen = select()
        gradient = torch.empty_like(chosen)
        before = sum(sink.live.values())
        sink.peak = before
        torch.autograd.backward(chosen, gradient)
    assert sink.peak - before == 4 * ROWS * COLUMNS


def test_the_backward_of_softmax_multiplies_the_gradient_and_the_softmax() -> None:
    """SoftMax.cu softmax_backward_cuda_out allocates the product beside its result; the meta device only the result."""
    torch = pytest.importorskip("torch")
    from allocator_hook.shadow.recorder import Recorder

    source = torch.empty(ROWS, COLUMNS, device="meta", requires_grad=True)
    sink = Sink()
    with Recorder(sink, cublas_workspace_bytes=0):
        softmax = source.softmax(-1)
        gradient = torch.empty_like(softmax)
        before = sum(sink.live.values())
        torch.autograd.backward(softmax, gradient)
    assert sink.peak - before == 2 * 4 * ROWS * COLUMNS


@pytest.mark.parametrize(("referenced", "tensors"), [(False, 2), (True, 3)])
def test_autograd_adds_in_place_to_a_gradient_that_only_it_references(referenced: bool, tensors: int) -> None:
    """`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp: two gradients, or also their sum."""
    torch = pytest.importorskip("torch")
    from allocator_hook.shadow.recorder import Recorder

    kept = []

    class Product(torch.autograd.Function):  # type: ignore[name-defined, misc]
        @staticmethod
        def forward(context: Any, source: Any) -> Any:
            del context
            return source.sum()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            del context, gradient
            made = torch.empty(ROWS, COLUMNS, device="meta")
            if referenced:
                kept.append(made)
            return made

    source = torch.empty(ROWS, COLUMNS, device="meta", requires_grad=True)
    sink = Sink()
    with Recorder(sink, cublas_workspace_bytes=0):
        tokens = torch.zeros(CHOSEN, dtype=torch.int64, device="meta")
        outputs = [
            torch.nn.functional.embedding(tokens, source),
            Product.apply(source),
        ]  # autograd runs the backward of the last one first
        gradients = [torch.empty_like(output) for output in outputs]
        before = sum(sink.live.values())
        sink.peak = before
        torch.autograd.backward(outputs, gradients)
    assert sink.peak - before == tensors * 4 * ROWS * COLUMNS


@pytest.mark.parametrize(("dims", "columns"), [((0, 1), 15360), ((2,), 0)])
def test_a_sum_over_tokens_has_a_buffer_of_partial_results(dims: tuple[int, ...], columns: int) -> None:
    """18 blocks of 128 threads divide the rows on an H100 (Reduce.cuh). A sum over the last dimension stores one for each block."""
    torch = pytest.importorskip("torch")
    from allocator_hook.shadow.gpu import Gpu
    from allocator_hook.shadow.recorder import Recorder

    gpu = Gpu(name="H100", capability=(9, 0), multiprocessors=132, memory_bytes=1)
    sink = Sink()
    with Recorder(sink, cublas_workspace_bytes=0, gpu=gpu):
        gradient = torch.empty(512, 4, 15360, dtype=torch.bfloat16, device="meta")
        before = sum(sink.live.values())
        result = gradient.sum(dim=dims)
    assert sink.peak - before == 2 * result.numel() + 4 * columns * 18 * 32 * 4
