"""The peak of an iteration beside a second calculation: the sum of all operations, and the variables of Megatron's schedule.

A pass of a chunk is a list of allocations and frees, of which two numbers remain: the bytes that it adds, and its peak above its
start. Passes that follow each other are joined by these numbers alone. Messages between pipeline stages are added by executing the
assignments of `forward_backward_pipelining_without_interleaving` (core/pipeline_parallel/schedules.py, 0.16.1): a tensor is
allocated while a variable, the autograd graph of an output, or a microbatch in flight refers to it.

Left out are what other events than these change: the interleaved schedule, overlapped microbatches, activation offloading, gathered
parameters of FSDP, deferred gradients, and what checkpoints of MoE layers leave until the next backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from analyzer.errors import InputError
from analyzer.memory.iteration import peak_of_iteration
from analyzer.memory.ranks import contexts
from analyzer.memory.stages import StageAnalysis, analysed_stages
from analyzer.modules.shapes import shapes_of
from analyzer.modules.tree import Module
from analyzer.program.chunks import chunk_program
from analyzer.program.lowering import operations
from analyzer.program.operations import Operation, OperationKind, Role
from analyzer.schedule.pipeline import Step
from analyzer.specs import TrainingJob
from tests.job_of import job_of

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


@dataclass
class Schedule:
    """The variables of 1F1B on a stage. A message is named by its kind and microbatch."""

    first: bool
    last: bool
    variables: dict[str, tuple[str, int]] = field(default_factory=dict)
    in_flight: list[int] = field(default_factory=list)

    def held(self, *, step: Step) -> int:
        """Messages that variables refer to, and that neither this step nor a microbatch in flight counts."""
        found = set(self.variables.values())
        if "output_tensor" in self.variables:  # its autograd graph refers to the input
            microbatch = self.variables["output_tensor"][1]
            found.discard(("output", microbatch))  # its data was freed when it was sent
            found.add(("input", microbatch))
        counted = {("input", each) for each in (*self.in_flight, step.microbatch)}
        if step.kind == "backward":
            counted.add(("output gradient", step.microbatch))
        exists = {"input": not self.first, "input gradient": not self.first, "output gradient": not self.last}
        return sum(exists[kind] for kind, number in found - counted)

    def begin(self, step: Step) -> None:
        if step.kind == "forward":
            return
        self.variables["input_tensor"] = ("input", step.microbatch)
        self.variables["output_tensor"] = ("output", step.microbatch)
        self.variables["output_tensor_grad"] = ("output gradient", step.microbatch)

    def end(self, step: Step, *, following: Step | None) -> None:
        if step.kind == "forward":
            self.in_flight.append(step.microbatch)
            if following is not None and following.kind == "backward":
                self.variables["output_tensor"] = ("output", step.microbatch)
            return
        self.in_flight.remove(step.microbatch)
        self.variables["input_tensor_grad"] = ("input gradient", step.microbatch)
        if following is not None and following.kind == "forward":
            self.variables["input_tensor"] = ("input", following.microbatch)


def peak_by_folding(job: TrainingJob, stage: StageAnalysis) -> tuple[int, int]:
    """The peak without workspaces, and the bytes that are left after the iteration."""
    [tree] = stage.model.trees
    [chunk] = stage.model.chunks
    message = shapes_of(job).hidden("message").bytes
    forward, backward = passes(tree, received=0 if chunk.post_process else message)
    schedule = Schedule(chunk.pre_process, chunk.post_process)
    now = highest = 0
    order = stage.iterations[1].order
    for step, following in zip(order, (*order[1:], None), strict=True):
        schedule.begin(step)
        found = forward if step.kind == "forward" else backward
        highest = max(highest, now + found.peak + message * schedule.held(step=step))
        now += found.net
        schedule.end(step, following=following)
        if step.kind == "forward" and following is not None and following.kind == "backward" and not chunk.post_process:
            # send_forward_recv_backward: the output, and the gradient that is assigned to a variable when it has arrived
            highest = max(highest, now + message * (2 + schedule.held(step=step)))
    return highest, now


def check(options: str) -> None:
    job = job_of(f"{LINE} {options}")
    for stage in analysed_stages(job):
        _, context = contexts(job, stage, stage.iterations[1])
        walked = peak_of_iteration(stage.iterations[1], stage.chunks, workspaces=stage.workspaces, context=context, warm=True)
        folded, left = peak_by_folding(job, stage)
        assert walked.bytes - sum(each.bytes for each in stage.workspaces) == folded, stage.model.pipeline_rank
        assert left == 0


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


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.tuples(*map(st.sampled_from, (MODELS, PRECISIONS, RECOMPUTED, SPLITS, PIPELINES, OTHERS))))
def test_the_peak_is_the_fold_of_all_operations_and_messages(parts: tuple[str, ...]) -> None:
    """For every stage, to the byte; and all that an iteration allocates is freed in it."""
    try:
        check(" ".join(parts))
    except InputError:
        assume(False)


@pytest.mark.parametrize("number", [1, 2])
def test_full_recomputation(number: int) -> None:
    check(
        f"--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers {number}"
    )
    check(f"--recompute-granularity full --recompute-method block --recompute-num-layers {number}")
