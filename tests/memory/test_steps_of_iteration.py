"""Only steps that can be the highest are looked at. The peak is that of all steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.memory import iteration
from analyzer.memory.chunk_memory import ChunkMemory
from analyzer.memory.iteration import PeakContext, peak_of_iteration, step_bytes
from analyzer.memory.messages import MessageTensors
from analyzer.memory.ranks import contexts
from analyzer.memory.stages import analysed_stages
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Tensor
from analyzer.program.chunks import Block
from analyzer.program.schedule.iteration import Iteration
from analyzer.program.schedule.messages import Ring
from analyzer.program.schedule.pipeline import steps
from analyzer.program.schedule.references import Ends
from tests.job_of import job_of

MIB = 1 << 20
VIRTUAL = "--num-layers-per-virtual-pipeline-stage 1"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAUNCHES = {
    "--num-layers 4": 8,
    "--num-layers 8 --pipeline-model-parallel-size 4 --global-batch-size 64 --untie-embeddings-and-output-weights": 8,
    f"--num-layers 8 --pipeline-model-parallel-size 2 {VIRTUAL} --global-batch-size 64": 8,
    f"--num-layers 8 --pipeline-model-parallel-size 4 {VIRTUAL} --no-overlap-p2p-communication --global-batch-size 64": 8,
    "--num-layers 13 --hidden-size 4096 --num-attention-heads 32 --pipeline-model-parallel-layout Et|t*8|t|t|t|tL "
    f"--pipeline-model-parallel-size 3 --global-batch-size 24 --untie-embeddings-and-output-weights {RECOMPUTED}": 3,
    f"--num-layers 10 --pipeline-model-parallel-size 5 {VIRTUAL} --global-batch-size 80": 5,
}
"""Options, and the number of GPUs."""


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("line", "gpus"), LAUNCHES.items())
def test_the_peak_of_some_steps_is_that_of_all(line: str, gpus: int, *, warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(f"--hidden-size 512 --num-attention-heads 8 {line}", gpus=gpus)
    for stage in analysed_stages(job):
        context = contexts(job, stage, stage.iterations[1])[warm]

        def peak() -> int:
            found = peak_of_iteration(stage.iterations[1], stage.chunks, context=context, workspaces=stage.workspaces, warm=warm)  # noqa: B023
            return found.bytes

        some = peak()
        with monkeypatch.context() as patched:
            patched.setattr(iteration._Steps, "candidates", lambda *_: None)
            assert peak() == some


def chunk(saved: int, temporary: int) -> ChunkMemory:
    """A chunk of one module that saves and needs so many MiB."""
    tensors = [Tensor(name=name, shape=(size * MIB,), dtype="uint8") for name, size in (("saved", saved), ("temporary", temporary))]
    module = Module(
        name="layer",
        kind=ModuleKind.OTHER,
        saved=tuple(tensors[:1]),
        forward_workspace=tuple(tensors[1:]),
        backward_workspace=tuple(tensors),
    )
    return ChunkMemory([Block(module, "", 1)])


@settings(deadline=None)
@given(st.data())
def test_the_peak_of_any_chunks_is_the_highest_step(data: st.DataObject) -> None:
    """Chunks of any sizes, on any rank of an interleaved pipeline. A message has 4 MiB: [2048, 1, 1024] in bf16."""
    pipeline = data.draw(st.integers(2, 5))
    number = data.draw(st.integers(2, 4))
    rank = data.draw(st.integers(0, pipeline - 1))
    order = steps(pipeline=pipeline, pipeline_rank=rank, chunks=number, microbatches=pipeline * data.draw(st.integers(1, 4)))
    sizes = st.tuples(st.integers(1, 40), st.integers(1, 40))
    chunks = [chunk(*each) for each in data.draw(st.lists(sizes, min_size=number, max_size=number))]
    ends = Ends(
        tuple(rank == 0 and each == 0 for each in range(number)),
        tuple(rank == pipeline - 1 and each == number - 1 for each in range(number)),
    )
    ring = Ring(pipeline, pipeline, data.draw(st.booleans()), ends.first[0], ends.last[-1])
    found = Iteration(order, ends, ring)
    context = PeakContext(messages=MessageTensors(job_of(""), rank, (False,) * number))
    highest = max(peak for peak, _ in step_bytes(found, chunks, context=context))
    assert peak_of_iteration(found, chunks, context=context, warm=True).bytes == highest
