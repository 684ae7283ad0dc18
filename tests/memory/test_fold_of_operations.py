"""The peak of an iteration beside a second calculation: the sum of all operations, and the variables of Megatron's schedule.

A pass of a chunk is a list of allocations and frees, of which two numbers remain: the bytes that it adds, and its peak above its
start. Passes that follow each other are joined by these numbers alone. Messages between pipeline stages are added by executing the
assignments of the schedules of core/pipeline_parallel/schedules.py (0.16.1): a tensor is allocated while a variable, a list, an
attribute of a chunk, the autograd graph of an output, or a microbatch in flight refers to it.

Left out is what other events than these change: overlapped microbatches, activation offloading, gathered
parameters of FSDP, deferred gradients, and what checkpoints of MoE layers leave until the next backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from analyzer.errors import InputError
from analyzer.layout.stages import Chunk
from analyzer.memory.chunk_memory import BACKWARD, Situation
from analyzer.memory.iteration import peak_of_iteration
from analyzer.memory.ranks import contexts
from analyzer.memory.stages import StageAnalysis, analysed_stages
from analyzer.modules.shapes import shapes_of
from analyzer.modules.tree import Module
from analyzer.program.chunks import chunk_program
from analyzer.program.lowering import operations
from analyzer.program.operations import Operation, OperationKind, Role
from analyzer.program.schedule.pipeline import Step
from analyzer.specs import TrainingJob
from tests.examples import examples
from tests.job_of import job_of

ALONE = Situation(backward=True, alone=True)
LINE = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --global-batch-size 64"


class Pass(NamedTuple):
    """Bytes that a list of operations adds, and its peak above its start."""

    net: int
    peak: int

    def then(self, other: Pass) -> Pass:
        """Both, one after the other."""
        return Pass(self.net + other.net, max(self.peak, self.net + other.peak))


def fold(sizes: Sequence[int]) -> Pass:
    found = Pass(0, 0)
    for size in sizes:
        found = found.then(Pass(size, max(0, size)))
    return found


def changes(program: Sequence[Operation]) -> Iterator[int]:
    for each in program:
        if each.kind is OperationKind.ALLOCATE:
            yield each.bytes
        elif each.kind is OperationKind.FREE:
            yield -each.bytes


def passes(tree: Module, received: int) -> tuple[Pass, Pass]:
    """Forward and backward of a chunk. Its local variables are freed when the forward returns.

    `received`: bytes of the gradient from the next stage. It is the gradient of the output of the last layer, which counts it until
    it is added to another gradient; a variable of the schedule refers to it until the backward ends.
    """
    forward, backward, local = Pass(0, 0), Pass(0, 0), 0
    blocks = [block for block in chunk_program(tree).blocks for _ in range(block.times)]
    for block in blocks:
        program = operations(block.module).forward
        forward = forward.then(fold(list(changes(program))))
        local += sum(changes([each for each in program if each.role is Role.FRAME]))
    stays = 0
    for block in reversed(blocks):
        program = operations(block.module).backward
        place = next((place for place, each in enumerate(program) if each.role is Role.RESIDUAL_SUM), None)
        if stays or place is None:
            backward = backward.then(fold(list(changes(program))))
            continue
        stays = received
        backward = backward.then(fold([*changes(program[:place]), received, *changes(program[place:])]))
    return forward.then(Pass(-local, 0)), backward.then(Pass(-stays, 0))


class Message(NamedTuple):
    """A tensor that pipeline stages exchange."""

    kind: Literal["input", "output", "input gradient", "output gradient"]
    microbatch: int
    chunk: int


@dataclass
class Schedule:
    """What the schedules of Megatron-LM refer to, on one stage."""

    order: Sequence[Step]
    chunks: Sequence[Chunk]
    variables: dict[str, Message | None] = field(default_factory=dict)
    queued: list[Message] = field(default_factory=list)
    """Received, and not used yet: the elements of `input_tensors` and `output_tensor_grads`."""
    attributes: dict[int, int] = field(default_factory=dict)
    """The microbatch whose input each chunk refers to (`set_input_tensor`); -1 is one of the iteration before."""
    freed: set[Message] = field(default_factory=set)
    """Outputs whose data is freed (`deallocate_output_tensor`). Their autograd graphs still refer to the input."""
    in_flight: list[tuple[int, int]] = field(default_factory=list)
    finished: set[tuple[int, int]] = field(default_factory=set)

    def held(self, step: Step) -> int:
        """The number of messages that something refers to, and that neither this step nor a microbatch in flight counts."""
        found = {each for each in (*self.variables.values(), *self.queued) if each is not None}
        found |= {Message("input", number, chunk) for chunk, number in self.attributes.items()}
        found |= {Message("input", each.microbatch, each.chunk) for each in found if each.kind == "output"}
        # the gradient of an input is its attribute `grad`
        with_gradient = [each for each in found if each.kind == "input" and (each.microbatch < 0 or each[1:] in self.finished)]
        found |= {each._replace(kind="input gradient") for each in with_gradient}
        counted = {Message("input", *each) for each in (*self.in_flight, (step.microbatch, step.chunk))}
        if step.kind == "backward":
            counted.add(Message("output gradient", step.microbatch, step.chunk))
        return sum(map(self.exists, found - self.freed - counted))

    def exists(self, message: Message) -> bool:
        chunk = self.chunks[message.chunk]
        return not (chunk.post_process if "output" in message.kind else chunk.pre_process)

    def begin(self, index: int) -> None:
        raise NotImplementedError

    def end(self, index: int) -> None:
        step = self.order[index]
        if step.kind == "forward":
            self.in_flight.append((step.microbatch, step.chunk))
        else:
            self.in_flight.remove((step.microbatch, step.chunk))
            self.finished.add((step.microbatch, step.chunk))
            self.variables["input_tensor_grad"] = Message("input gradient", step.microbatch, step.chunk)

    def following(self, index: int, kind: str) -> Step | None:
        return next((step for step in self.order[index + 1 :] if step.kind == kind), None)

    def changes_after(self, index: int, kind: str) -> bool:
        """Whether the next step is of this kind."""
        return index + 1 < len(self.order) and self.order[index + 1].kind == kind


class WithoutInterleaving(Schedule):
    """`forward_backward_pipelining_without_interleaving`: the variables of the backward are elements of lists."""

    def begin(self, index: int) -> None:
        step = self.order[index]
        if step.kind == "backward":
            for name, kind in KINDS.items():
                self.variables[name] = Message(kind, step.microbatch, step.chunk)
            self.freed.add(Message("output", step.microbatch, step.chunk))

    def end(self, index: int) -> None:
        super().end(index)
        step = self.order[index]
        if step.kind == "forward" and self.changes_after(index, "backward"):
            output = Message("output", step.microbatch, step.chunk)
            self.variables["output_tensor"] = output
            self.freed.add(output)
        elif step.kind == "backward" and self.changes_after(index, "forward"):
            self.variables["input_tensor"] = Message("input", self.order[index + 1].microbatch, step.chunk)


class Interleaved(Schedule):
    """`forward_backward_pipelining_with_interleaving`: a message is received one pass before it is used."""

    def __init__(self, order: Sequence[Step], chunks: Sequence[Chunk], *, overlaps: bool) -> None:
        super().__init__(order, chunks, attributes=dict.fromkeys(range(len(chunks)), -1))
        self.overlaps = overlaps
        first = next(index for index, step in enumerate(order) if step.kind == "backward")
        self.steady = any(step.kind == "forward" for step in order[first:])
        self.warmup = first - 2 if self.steady else first - 1
        """The last forward of the warm-up."""

    def begin(self, index: int) -> None:
        step = self.order[index]
        if step.kind == "forward":
            self.free_output()
            self.attributes[step.chunk] = step.microbatch
        used = Message("input" if step.kind == "forward" else "output gradient", step.microbatch, step.chunk)
        self.queued = [each for each in self.queued if each != used]

    def end(self, index: int) -> None:
        super().end(index)
        step = self.order[index]
        if step.kind == "forward":
            output = Message("output", step.microbatch, step.chunk)
            self.variables["output_tensor"] = output if self.exists(output) else None
            if index <= self.warmup:
                self.free_output()
                self.receive(index, "input", "input_tensor")
                if index == self.warmup and self.steady:
                    self.receive(index, "output gradient", "" if self.overlaps else "output_tensor_grad")
            elif self.overlaps:
                self.receive(index, "input")
            return
        if index > self.warmup and self.order[index - 1].kind == "forward" and self.steady and not self.overlaps:
            self.free_output()
            self.variables["input_tensor"] = None
            if self.changes_after(index, "forward"):
                self.receive(index, "input", "input_tensor")
        named = not self.overlaps or self.changes_after(index, "backward")
        self.receive(index, "output gradient", "output_tensor_grad" if named else "")

    def free_output(self) -> None:
        output = self.variables.get("output_tensor")
        if output is not None:
            self.freed.add(output)

    def receive(self, index: int, kind: Literal["input", "output gradient"], variable: str = "") -> None:
        step = self.following(index, "forward" if kind == "input" else "backward")
        if step is not None:
            message = Message(kind, step.microbatch, step.chunk)
            self.queued.append(message)
            if variable:
                self.variables[variable] = message


KINDS: Final[dict[str, Literal["input", "output", "output gradient"]]] = {
    "input_tensor": "input",
    "output_tensor": "output",
    "output_tensor_grad": "output gradient",
}


def peak_by_folding(job: TrainingJob, stage: StageAnalysis) -> tuple[int, int]:
    """The peak without workspaces, and the bytes that are left after the iteration."""
    order, chunks = stage.iterations[1].order, stage.model.chunks
    message = shapes_of(job).hidden("message").bytes
    of_chunks = [
        passes(tree, received=0 if chunk.post_process else message) for tree, chunk in zip(stage.model.trees, chunks, strict=True)
    ]
    schedule: Schedule
    if len(chunks) == 1:
        schedule = WithoutInterleaving(order, chunks)
    else:
        schedule = Interleaved(order, chunks, overlaps=job.parallel.overlap_p2p)
    now = highest = 0
    for index, step in enumerate(order):
        schedule.begin(index)
        found = of_chunks[step.chunk][step.kind == "backward"]
        highest = max(highest, now + found.peak + message * schedule.held(step))
        now += found.net
        schedule.end(index)
        sends = len(chunks) == 1 and step.kind == "forward" and schedule.changes_after(index, "backward")
        if sends and not chunks[0].post_process:
            # send_forward_recv_backward: the output, and the gradient that is assigned to a variable when it has arrived
            highest = max(highest, now + message * (2 + schedule.held(step)))
    return highest, now


def check(options: str) -> None:
    job = job_of(f"{LINE} {options}")
    for stage in analysed_stages(job):
        _, context = contexts(job, stage, stage.iterations[1])
        walked = peak_of_iteration(stage.iterations[1], stage.chunks, workspaces=stage.workspaces, context=context, warm=True)
        folded, left = peak_by_folding(job, stage)
        more = walked.bytes - sum(each.bytes for each in stage.workspaces) - folded
        # tensors that stay if no other microbatch of the chunk is in flight
        lingering = {chunk.peak(ALONE) - chunk.peak(BACKWARD) for chunk in stage.chunks}
        assert more == 0 or (len(stage.chunks) > 1 and more in lingering), stage.model.pipeline_rank
        assert left == 0


def check_if_accepted(parts: tuple[str, ...]) -> None:
    """Checks a launch that is drawn, unless Megatron refuses it."""
    try:
        check(" ".join(parts))
    except InputError:
        assume(False)


MOE = "--num-experts 8 --disable-bias-linear --moe-grouped-gemm --expert-model-parallel-size 2"
MLA = "--multi-latent-attention --position-embedding-type rope --kv-lora-rank 64 --qk-pos-emb-head-dim 32"
MODELS = (
    "",
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights",
    "--group-query-attention --num-query-groups 2 --attention-dropout 0 --hidden-dropout 0 --qk-layernorm",
    MLA,
    f"{MOE} --moe-token-dispatcher-type alltoall --moe-router-topk 2 --swiglu",
    f"{MOE} --moe-token-dispatcher-type allgather --moe-shared-expert-intermediate-size 256",
    f"{MOE} --moe-token-dispatcher-type alltoall --moe-layer-freq 2 --moe-permute-fusion",
    "--mtp-num-layers 1 --position-embedding-type rope",
)
PRECISIONS = (
    "",
    "--fp8-format hybrid",
    "--fp8-format e4m3 --fp8-recipe blockwise",
    "--accumulate-allreduce-grads-in-fp32",
    "--fp32-residual-connection",
)
RECOMPUTED = ("", "", "--recompute-granularity selective", "--recompute-granularity selective --recompute-modules mlp core_attn")
SPLITS = ("", "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel", "--context-parallel-size 2")
OTHERS = (
    "",
    "--optimizer muon",
    "--attention-backend unfused",
    "--transformer-impl local",
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
    "--use-distributed-optimizer --overlap-grad-reduce",
    "--micro-batch-size 2",
)
PIPELINES = ("", "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4")


@settings(max_examples=examples(120), deadline=None, derandomize=True)
@given(st.tuples(*map(st.sampled_from, (MODELS, PRECISIONS, RECOMPUTED, SPLITS, PIPELINES, OTHERS))))
def test_the_peak_is_the_fold_of_all_operations_and_messages(parts: tuple[str, ...]) -> None:
    """For every stage, to the byte; and all that an iteration allocates is freed in it."""
    check_if_accepted(parts)


VIRTUAL = tuple(
    f"--num-layers {layers} --pipeline-model-parallel-size {pipeline} --num-layers-per-virtual-pipeline-stage {each} {more}"
    for layers, pipeline, each in ((8, 2, 1), (8, 2, 2), (8, 4, 1), (16, 4, 2))
    for more in ("", "--no-overlap-p2p-communication", "--global-batch-size 16", "--global-batch-size 256")
)


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(st.tuples(*map(st.sampled_from, (MODELS, PRECISIONS, RECOMPUTED, SPLITS, VIRTUAL, OTHERS))))
def test_the_peak_of_the_interleaved_schedule(parts: tuple[str, ...]) -> None:
    check_if_accepted(parts)


@pytest.mark.parametrize("number", [1, 2])
def test_full_recomputation(number: int) -> None:
    check(
        f"--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers {number}"
    )
    check(f"--recompute-granularity full --recompute-method block --recompute-num-layers {number}")
