"""What a checkpoint around a MoE layer leaves allocated in later steps: a layer with known sizes, and sums by hand.

The dispatcher references the probabilities of its last forward (`self.probs`, moe/token_dispatcher.py, 0.16.1). After the
recomputation of a checkpoint their autograd graph references the input of the checkpoint and its gradient. The next dispatch
replaces them: in the next forward, or in the recomputation of the next backward.
"""

from __future__ import annotations

from analyzer.layout.stages import chunks
from analyzer.memory.chunk_memory import BACKWARD, ChunkMemory, Situation, chunk_memory
from analyzer.memory.iteration import PeakContext, step_bytes
from analyzer.memory.order import ends_of
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Tensor
from analyzer.program.schedule.iteration import Iteration
from analyzer.program.schedule.messages import Ring
from analyzer.program.schedule.pipeline import Step, steps
from tests.parallel_spec import spec

HIDDEN = 2 * 1024 * 512
"""Bytes of the input of the checkpoint, and of its gradient: [1024, 1, 512] in bf16."""
A, W = 3 * HIDDEN, 100 * HIDDEN
"""Bytes that attention saves, and of its workspace, which makes its forward the peak."""


def tensors(name: str, size: int) -> tuple[Tensor, ...]:
    return (Tensor(name=name, shape=(size // HIDDEN, 1024, 512), dtype="bf16"),)


def checkpointed_chunk() -> ChunkMemory:
    """One checkpoint around a layer of attention and a dispatcher, whose attribute references what the checkpoint leaves."""
    parts = (
        Module(name="attention", kind=ModuleKind.ATTENTION, saved=tensors("saved", A), forward_workspace=tensors("workspace", W)),
        Module(name="dispatch", kind=ModuleKind.DISPATCH),
    )
    layer = Module(name="layers", kind=ModuleKind.LAYER, children=parts)
    checkpoint = Module(
        name="checkpoint",
        kind=ModuleKind.CHECKPOINT,
        saved=tensors("input", HIDDEN),
        outlives=tensors("input gradient", HIDDEN),
        children=(layer,),
        recomputed=True,
    )
    return chunk_memory(Module(name="decoder", kind=ModuleKind.DECODER, children=(checkpoint,)))


def test_a_backward_after_a_backward_has_the_input_and_the_gradient_of_the_earlier_one() -> None:
    """Attention is recomputed before the dispatch: its own input and activations, and both tensors of the earlier backward."""
    memory = checkpointed_chunk()
    assert memory.peak(BACKWARD) == HIDDEN + A + W
    assert memory.peak(Situation(backward=True, left=True)) == HIDDEN + A + W + 2 * HIDDEN


def test_another_chunk_runs_beside_what_a_checkpoint_has_left() -> None:
    """The first of two stages with two chunks. In the forward of microbatch 3 in chunk 0, four inputs of checkpoints are saved:
    of microbatches 0 to 2 in chunk 0 and of microbatch 1 in chunk 1. The backward of microbatch 0 in chunk 1 has left an input and
    its gradient.
    """
    parallel = spec(2, pipeline=2, virtual_pipeline=2)
    order = steps(pipeline=2, pipeline_rank=0, chunks=2, microbatches=4)
    at = order.index(Step("forward", 3, 0))
    assert [(each.kind, each.microbatch, each.chunk) for each in order[:at] if each.kind == "backward"] == [("backward", 0, 1)]
    iteration = Iteration(order, ends_of(chunks(4, parallel)[0]), Ring(2, 2, overlaps=True, first=True, last=False))
    found = step_bytes(iteration, [checkpointed_chunk()] * 2, context=PeakContext())
    assert found[at][0] == 4 * HIDDEN + (HIDDEN + A + W) + 2 * HIDDEN
