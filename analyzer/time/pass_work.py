"""The work of one microbatch in a model chunk: kernels and messages of its forward and of its backward, each with its number.

Work is counted block by block from the operations of the tree, so that recomputation is included and equal layers cost nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from analyzer.modules.kinds import ATTENTION_BRANCH, ModuleKind, Parallel
from analyzer.modules.tree import Collective, Module
from analyzer.passes.graph_scopes import FULL_ITERATION, Scope, layer_scope
from analyzer.program.chunks import chunk_program
from analyzer.program.lowering import operations
from analyzer.program.operations import Operation, OperationKind
from analyzer.specs import GraphSpec, MoeSpec, TrainingJob
from analyzer.time.message_seconds import NO_CHOICES, Choices, Exchange, Part
from analyzer.time.work.attention import LOSS_OF_INDEXER, OUTSIDE_CHECKPOINT
from analyzer.time.work.context import WorkContext, work_context
from analyzer.time.work.kernels import Attention, Gemm, Kernel
from analyzer.time.work.linear import gathers_outside_userbuffers, quantized_weight_bytes
from analyzer.time.work.of_module import work_of

Exposure = Literal["full", "userbuffers", "kernels", "microbatch"]
"""What hides a message: nothing, the GEMM that it is split with, other kernels of its module, or another microbatch."""
_EXPERT_GROUPS: Final = frozenset({"ep", "etp", "tp_ep"})
_CAPTURED_PREPROCESS: Final = 0.45
"""Share of the operations of the dispatch that graphs of the scope moe_preprocess capture."""


class Message(NamedTuple):
    """A collective or a point-to-point message of a module."""

    part: Part
    kind: str
    group: str
    payload: int
    """Bytes of one call on one rank: of the full tensor."""
    exposure: Exposure
    exchange: Exchange = ""
    choices: Choices = NO_CHOICES
    behind: tuple[Kernel, ...] = ()
    """Kernels that run at the same time."""
    behind_share: float = 1.0
    """Share of the time of these kernels for each call."""


class PassWork(NamedTuple):
    """Kernels, messages and host operations of the forward or the backward of a microbatch through a chunk."""

    kernels: tuple[tuple[Kernel, int], ...]
    messages: tuple[tuple[Message, int], ...]
    calls: float
    """Operations that the host issues one by one."""
    graph_calls: float
    """Operations that CUDA graphs replay."""
    synchronizations: int
    """Times that the host waits for the GPU."""


class ChunkWork(NamedTuple):
    """The work of a chunk."""

    forward: PassWork
    backward: PassWork
    cast_bytes: float
    """Bytes moved once for each iteration to quantize the weights."""


@dataclass(frozen=True)
class Settings:
    """Settings of a job that determine how messages overlap and what CUDA graphs replay."""

    graphs: GraphSpec | None
    moe: MoeSpec | None
    overlaps_experts: bool
    expert_tensor: int


def settings_of(job: TrainingJob) -> Settings:
    """The settings of a job."""
    flags = job.flags
    overlaps_experts = flags.overlap_moe_expert_parallel_comm
    return Settings(job.graphs, job.model.moe, overlaps_experts, job.parallel.expert_tensor)


def chunk_work(job: TrainingJob, tree: Module) -> ChunkWork:
    """The work of one microbatch in a chunk, cached for each tree."""
    return tree.derived(_chunk_work, work_context(job), settings_of(job))


def _chunk_work(tree: Module, context: WorkContext, settings: Settings) -> ChunkWork:
    totals = {"forward": _Total(), "backward": _Total()}
    casts = 0.0
    for block in chunk_program(tree).blocks:
        for direction, total in totals.items():
            total.add(block.module.derived(block_work, direction, context, settings), block.times)
        casts += block.times * block.module.derived(_block_casts, context)
    return ChunkWork(totals["forward"].frozen(), totals["backward"].frozen(), casts)


def _block_casts(module: Module, context: WorkContext) -> float:
    return sum(quantized_weight_bytes(each, context) for _, each in module.walk())


class _Total:
    """Sums of kernels and messages."""

    def __init__(self) -> None:
        self.kernels: Counter[Kernel] = Counter()
        self.messages: Counter[Message] = Counter()
        self.calls = 0.0
        self.graph_calls = 0.0
        self.synchronizations = 0

    def add(self, work: PassWork, times: int) -> None:
        for kernel, count in work.kernels:
            self.kernels[kernel] += times * count
        for message, count in work.messages:
            self.messages[message] += times * count
        self.calls += times * work.calls
        self.graph_calls += times * work.graph_calls
        self.synchronizations += times * work.synchronizations

    def frozen(self) -> PassWork:
        kernels, messages = tuple(self.kernels.items()), tuple(self.messages.items())
        return PassWork(kernels, messages, self.calls, self.graph_calls, self.synchronizations)


def block_work(module: Module, direction: str, context: WorkContext, settings: Settings) -> PassWork:
    """The work of a block, from its operations in the order of execution.

    That of a layer is the sum of its branches, so that layers share the work of a common branch.
    """
    total = _Total()
    if is_sum_of_children(module, settings):
        for child in module.children:
            total.add(child.derived(block_work, direction, context_of(child, context), settings), 1)
        return total.frozen()
    alone = module.kind is ModuleKind.CHECKPOINT and module.differentiable
    if alone and len(module.children) > 1 and not module.collectives and settings.graphs is None:
        numbers = Counter(map(id, module.children))
        for child in {id(child): child for child in module.children}.values():
            total.add(child.derived(_checkpointed_work, direction, context, settings), numbers[id(child)])
        return total.frozen()
    program = operations(module)
    capture = _Capture(settings)
    for operation in program.forward if direction == "forward" else program.backward:
        capture.follow(operation)
        if operation.kind is OperationKind.COLLECTIVE and operation.call is not None:
            message = message_of(operation.module, operation.call, operation.phase, context, settings)
            if message.exposure == "userbuffers" and _outside_userbuffers(operation):
                message = message._replace(exposure="full", behind=())
            total.messages[message] += operation.call.count
            total.calls += (1 - capture.share(operation.module)) * operation.call.count
        elif operation.kind is OperationKind.COMPUTE:
            _add_compute(total, operation, context, capture)
    return total.frozen()


def _checkpointed_work(layer: Module, direction: str, context: WorkContext, settings: Settings) -> PassWork:
    """The work of a checkpoint around one layer. That around several layers is the sum."""
    alone = Module(name="checkpoint", kind=ModuleKind.CHECKPOINT, function=True, children=(layer,), recomputed=True)
    return block_work(alone, direction, context, settings)


def is_sum_of_children(module: Module, settings: Settings) -> bool:
    """Whether the work of a module is that of its children: a layer without checkpoint, collectives and CUDA graphs of its own."""
    plain = not module.recomputed and not module.collectives and settings.graphs is None
    return plain and module.kind is ModuleKind.LAYER and bool(module.children)


def context_of(module: Module, context: WorkContext) -> WorkContext:
    """The settings that a child of a layer depends on: attention does not depend on expert parallelism."""
    return context.of_dense_layers if module.kind in ATTENTION_BRANCH else context


def _add_compute(total: _Total, operation: Operation, context: WorkContext, capture: _Capture) -> None:
    separate = context.chunks > 1 and _outside_userbuffers(operation)
    work = work_of(operation.module, context.outside_userbuffers if separate else context)
    forward = operation.phase != "backward"
    in_checkpoint = operation.phase == "recompute" and capture.runs_in(ModuleKind.ATTENTION_KERNEL_CHECKPOINT)
    absent = OUTSIDE_CHECKPOINT if in_checkpoint else LOSS_OF_INDEXER if operation.without_gradients else frozenset()
    launches = 0
    for kernel in work.forward if forward else work.backward:
        of_loss = operation.without_gradients and isinstance(kernel, Attention) and kernel.of_loss
        if kernel.name not in absent and not of_loss:
            total.kernels[kernel] += 1
            launches += kernel.launches
    captured = capture.share(operation.module)
    total.graph_calls += captured * launches
    total.calls += (1 - captured) * launches
    if forward and work.synchronizes and not capture.everything:
        total.synchronizations += 1


def _outside_userbuffers(operation: Operation) -> bool:
    return gathers_outside_userbuffers(operation.module, without_gradients=operation.without_gradients)


class _Capture:
    """Which modules CUDA graphs capture, while the operations of a block are read."""

    def __init__(self, settings: Settings) -> None:
        self._graphs, self._moe = settings.graphs, settings.moe
        self.everything = self._graphs is not None and FULL_ITERATION in self._graphs.scope
        self._open: list[Module] = []
        self._scope: Scope | None = None

    def follow(self, operation: Operation) -> None:
        """Keeps the modules that are running."""
        if operation.kind is OperationKind.BEGIN:
            if operation.module.kind is ModuleKind.LAYER and self._graphs is not None:
                self._scope = layer_scope(self._graphs, self._moe, operation.module)
            self._open.append(operation.module)
        elif operation.kind is OperationKind.END:
            closed = self._open.pop()
            if closed.kind is ModuleKind.LAYER:
                self._scope = None

    def runs_in(self, kind: ModuleKind) -> bool:
        """Whether a module of the kind runs."""
        return any(each.kind is kind for each in self._open)

    def share(self, module: Module) -> float:
        """Share of the operations of a module that graphs replay."""
        if self.everything:
            return 1.0
        if self._scope is None or self._graphs is None:
            return 0.0
        kinds = {each.kind for each in self._open} | {module.kind}
        if kinds & self._scope.full or kinds & self._scope.parts:
            return 1.0
        preprocesses = module.kind is ModuleKind.DISPATCH and "moe_preprocess" in self._graphs.scope
        return _CAPTURED_PREPROCESS if preprocesses else 0.0


def message_of(module: Module, call: Collective, phase: str, context: WorkContext, settings: Settings) -> Message:
    """A message with its part of the breakdown, and what hides it."""
    kind = module.kind
    if call.group in _EXPERT_GROUPS or kind in (ModuleKind.DISPATCH, ModuleKind.COMBINE):
        exchange: Exchange = "flex" if settings.moe is not None and settings.moe.dispatcher == "flex" else "plain"
        exposure: Exposure = "microbatch" if settings.overlaps_experts else "full"
        moe = settings.moe
        choices = Choices(moe.num_experts, moe.topk, settings.expert_tensor) if moe is not None else NO_CHOICES
        return Message("ep", call.kind, call.group, call.message_bytes, exposure, exchange, choices)
    if call.group.startswith("cp"):
        return _ring_message(module, call, phase, context) if call.kind == "send" else _message("cp", call)
    if call.group == "tp" and module.overlaps_collectives:
        return _message("tp", call)._replace(exposure="userbuffers", behind=_gemms_beside(module, call, phase, context))
    if call.group == "tp" and phase == "backward" and kind.facts.parallel is Parallel.COLUMN:
        return _message("tp", call)._replace(exposure="kernels", behind=_gemms_beside(module, call, phase, context))
    return _message("tp", call)


def _message(part: Part, call: Collective) -> Message:
    return Message(part, call.kind, call.group, call.message_bytes, "full")


def _ring_message(module: Module, call: Collective, phase: str, context: WorkContext) -> Message:
    """Keys and values for the next step of ring attention, which are sent while the attention of a step runs."""
    work = work_of(module, context)
    kernels = work.backward if phase == "backward" else work.forward
    attention = tuple(each for each in kernels if isinstance(each, Attention))
    return _message("cp", call)._replace(exposure="kernels", behind=attention, behind_share=1 / (call.count + 1))


def _gemms_beside(module: Module, call: Collective, phase: str, context: WorkContext) -> tuple[Kernel, ...]:
    """The GEMMs of a linear layer that run beside one of its messages.

    In forward it is its only GEMM. In backward the gather of the input runs beside the data gradient, and the reduction of the data
    gradient beside the weight gradient. Sources: transformer_engine/pytorch/module/layernorm_linear.py (TE 2.11),
    `LinearWithGradAccumulationAndAsyncCommunication` of megatron/core/tensor_parallel/layers.py (0.16.1).
    """
    work = work_of(module, context)
    if phase != "backward":
        return tuple(each for each in work.forward if isinstance(each, Gemm))
    name = "data gradient" if call.kind == "all_gather" else "weight gradient"
    return tuple(each for each in work.backward if isinstance(each, Gemm) and each.name == name)
