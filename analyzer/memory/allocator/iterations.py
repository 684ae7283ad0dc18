"""What a rank runs in the replay: the requests of its chunks, and the steps of the first and of a later iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from analyzer.memory.allocator.script import ChunkScript, Streams, script
from analyzer.memory.features import deferrals
from analyzer.memory.stages import StageAnalysis
from analyzer.memory.workspaces import STREAM_POOL, Workspace, shared_expert_streams
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.moe.routing import RECEIVED_ROWS
from analyzer.modules.tree import SIDE_STREAM, Module
from analyzer.passes.deferred_output_gradients import Deferral
from analyzer.passes.stages import fsdp_trees_of, offload_trees_of
from analyzer.program.operations import Role
from analyzer.program.schedule import iteration as schedule
from analyzer.program.schedule.pipeline import Pair, Step
from analyzer.specs import TrainingJob

if TYPE_CHECKING:
    from analyzer.memory.allocator.overlapped_script import Part


RELOAD_STREAM: Final = 2
RELOADS: Final[Streams] = ((Role.RELOADED, RELOAD_STREAM),)
"""`ChunkOffloadHandler` (core/pipeline_parallel/fine_grained_activation_offload.py, 0.16.1) copies tensors back on a stream."""
COMMUNICATION: Final[Streams] = (
    (RECEIVED_ROWS, SIDE_STREAM),
    (ModuleKind.COMBINE, SIDE_STREAM),
    (ModuleKind.FEED_FORWARD_ADD, SIDE_STREAM),
)
"""With overlapped microbatches the nodes of the dispatch and of the combine run on the stream of the communication
(`TransformerLayerSchedulePlan`, core/models/common/model_chunk_schedule_plan.py, 0.16.1)."""


@dataclass(frozen=True)
class ReplayedIteration:
    """The steps of an iteration, complete or up to a step, and the requests of each chunk."""

    scripts: tuple[ChunkScript, ...]
    order: Sequence[Step]
    deferral: Deferral | None = None
    """What the backwards of the last chunk keep until the end of the iteration."""
    overlapped: Mapping[int, tuple[Part, ...]] = field(default_factory=dict)
    """By their indices in `order`, the forwards that overlap with the backward after them."""

    captured: tuple[Workspace, ...] | None = None
    """For the capture of CUDA graphs: the tensors that stay allocated from then on."""
    switches: bool = False
    """What follows runs on another stream."""
    layer_streams: int = 1
    """How many streams all layers of a rank have for their shared experts (`CoreBehavior.stream_of_each_layer`)."""

    def layers(self, chunk: int) -> Sequence[int]:
        """For each block of a chunk, the number of its stream for shared experts. PyTorch hands out those of its pool in turn."""
        first = sum(len(each.blocks) for each in self.scripts[:chunk])
        return [(first + index) % self.layer_streams for index in range(len(self.scripts[chunk].blocks))]

    @property
    def requests(self) -> int:
        """The number of requests, which `MAX_REQUESTS` limits."""
        return sum(self.scripts[step.chunk].requests for step in self.order if step.kind == "forward")


Phase = ReplayedIteration | None
"""An iteration, or None for the optimizer step after the first iteration."""


def iterations_of(job: TrainingJob, stage: StageAnalysis) -> tuple[ReplayedIteration, ReplayedIteration]:
    """The first iteration of a stage and a later one."""
    trees = [_trees(job, stage, index) for index in range(len(stage.model.trees))]
    scripts = (tuple(_script(job, each) for each in listed) for listed in zip(*trees, strict=True))
    deferred = deferrals(job, stage.model) if stage.model.chunks[-1].post_process else (None, None)
    backwards = 1 if deferred[0] is None else 2
    first, later = (
        ReplayedIteration(
            each,
            first_steps(messages.order, backwards),
            deferral,
            _overlapped(job, stage.model.trees, messages),
            layer_streams=shared_expert_streams(job, STREAM_POOL),
        )
        for each, messages, deferral in zip(scripts, stage.iterations, deferred, strict=True)
    )
    return first, later


def _overlapped(job: TrainingJob, trees: Sequence[Module], iteration: schedule.Iteration) -> dict[int, tuple[Part, ...]]:
    """`ReplayedIteration.overlapped`."""
    if not job.flags.overlap_moe_expert_parallel_comm:
        return {}
    from analyzer.memory.allocator.overlapped_script import overlapped_script
    from analyzer.memory.overlapped.microbatches import GradientRules

    known: dict[Pair, tuple[Part, ...]] = {}
    found = {}
    for moment in iteration.moments(warm=True):
        pair = moment.pair
        if pair is not None:
            if pair not in known:
                known[pair] = overlapped_script(trees, pair, GradientRules.of(job), streams=_streams(job))
            found[moment.number] = known[pair]
    return found


def first_steps(order: Sequence[Step], backwards: int = 1) -> Sequence[Step]:
    """An iteration up to and including the first backward, or the first few, when most memory is in use.

    Later steps reuse the same blocks.
    """
    ends = [place for place, step in enumerate(order) if step.kind == "backward"]
    return order[: 1 + ends[:backwards][-1]]


def _trees(job: TrainingJob, stage: StageAnalysis, index: int) -> tuple[Module, Module]:
    """The trees of a chunk in the first iteration and in later ones."""
    first, later = offload_trees_of(job, stage.model.trees[index], stage.model.chunks[index])
    sharded, before_backward = fsdp_trees_of(job, first)
    return before_backward or sharded, sharded if first is later else fsdp_trees_of(job, later)[0]


def _script(job: TrainingJob, tree: Module) -> ChunkScript:
    return script(tree, _streams(job))


def _streams(job: TrainingJob) -> Streams:
    """The streams of a job's tensors."""
    if job.fsdp is not None:
        from analyzer.memory.allocator.fsdp_states import streams_of

        return streams_of(job.fsdp)
    offload = job.activation_offload
    reloads = RELOADS if offload is not None and offload.modules else ()
    return (*reloads, *COMMUNICATION) if job.flags.overlap_moe_expert_parallel_comm else reloads
