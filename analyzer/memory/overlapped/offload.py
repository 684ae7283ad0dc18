"""Fine-grained activation offloading while microbatches overlap: which groups of modules are on the GPU, and when.

From the second iteration on, a group is not offloaded if the next backward is that of its microbatch and no later group of the
chunk has its name. At the end of the backward of each group, the group that was offloaded last is copied back. If none is left,
the last group of the microbatch whose backward is next is copied back, provided that its forward has finished. A group that is not
on the GPU is copied back by its own backward.

Source: core/pipeline_parallel/fine_grained_activation_offload.py `ChunkOffloadHandler`, `PipelineOffloadManager` (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from analyzer.memory.block_memory import explained
from analyzer.memory.overlapped.layers import Placed, units
from analyzer.modules.tree import Module, total_bytes
from analyzer.passes.activation_offload import COMMITS, group_of
from analyzer.program.schedule.pipeline import Step
from analyzer.specs import ActivationOffloadSpec

Microbatch = tuple[int, int]
"""A microbatch in a chunk, as (microbatch, chunk)."""
_COMMITTED_LATER: Final = frozenset({"attn_norm", "moe_act"})
"""Groups that are copied to the host when the node ends; `mlp_norm` is copied when the combine node ends."""


class Member(NamedTuple):
    """A module of a group."""

    layer: int
    """Index of its layer in the chunk."""
    group: str
    path: str
    """Its path in the block of the layer."""
    stays: int
    """Bytes on the GPU if the group is not offloaded."""
    copied: int
    """Bytes that are copied back from the host."""
    on_demand: int
    """Of these, bytes that its own backward counts."""


@dataclass
class _State:
    """A microbatch in a chunk. Groups are (layer, name)."""

    waiting: list[tuple[int, str]] = field(default_factory=list)
    """Groups on the host, in the order in which they were offloaded."""
    on_gpu: dict[Member, int] = field(default_factory=dict)
    """Bytes of the members that are on the GPU before their backward."""
    used: set[Member] = field(default_factory=set)
    done: bool = False
    """Its forward has started its last group."""


class OffloadedGroups:
    """A walk over an iteration. `members`: for each chunk, the members of its groups in the order of the forward."""

    def __init__(self, members: Sequence[tuple[Member, ...]], order: Sequence[Step]) -> None:
        self._members = members
        self._groups = [list(dict.fromkeys((each.layer, each.group) for each in chunk)) for chunk in members]
        self._backwards = [(step.microbatch, step.chunk) for step in order if step.kind == "backward"]
        self._begun = 0
        """Number of microbatches whose backward has begun, or that were skipped because they have no group."""
        self._current: Microbatch | None = None
        self._states = {key: _State() for key in self._backwards}
        self.bytes = 0
        """On the GPU for a later backward."""

    def member(self, chunk: int, layer: int, path: str) -> Member | None:
        """The member of a group that a path in the block of a layer belongs to."""
        for each in self._members[chunk]:
            if each.layer == layer and (path == each.path or path.startswith(f"{each.path}.")):
                return each
        return None

    def has(self, key: Microbatch, group: tuple[int, str]) -> bool:
        """Whether the chunk of a microbatch has this group."""
        return group in self._groups[key[1]]

    def start_forward(self, key: Microbatch, group: tuple[int, str]) -> None:
        """The forward of a group starts."""
        self._states[key].done = self._states[key].done or group == self._groups[key[1]][-1]

    def commit_forward(self, key: Microbatch, group: tuple[int, str]) -> None:
        """The forward of a group has ended: it is offloaded, unless its backward follows."""
        state = self._states[key]
        groups = self._groups[key[1]]
        last = all(name != group[1] or layer <= group[0] for layer, name in groups)
        if last and self._next(group[1]) == key:
            self._add(state, ((each, each.stays) for each in self._of(key, group)))
        else:
            state.waiting.append(group)

    def start_backward(self, key: Microbatch) -> None:
        """The backward of a group starts."""
        if self._current != key:
            self._current = key
            self._begun = self._backwards.index(key) + 1

    def use(self, key: Microbatch, member: Member) -> int:
        """The backward of a member starts, which counts its tensors. Returns the bytes on the GPU that it does not count."""
        state = self._states[key]
        on_gpu = state.on_gpu.pop(member, 0)
        self.bytes -= on_gpu
        state.used.add(member)
        return max(0, on_gpu - member.on_demand)

    def end_backward(self, key: Microbatch) -> None:
        """The backward of a group has ended: another one is copied back."""
        state = self._states[key]
        if not state.waiting:
            following = self._next(None)
            if following is None or not self._states[following].done:
                return
            key, state = following, self._states[following]
        if state.waiting:
            group = state.waiting.pop()
            self._add(state, ((each, each.copied) for each in self._of(key, group) if each not in state.used))

    def run(self, step: Step) -> None:
        """A step that does not overlap with another one."""
        key = (step.microbatch, step.chunk)
        groups = self._groups[step.chunk]
        if step.kind == "forward":
            for group in sorted(groups, key=lambda group: (group[0], COMMITS.index(group[1]))):
                self.commit_forward(key, group)
            self._states[key].done = True
            return
        for group in reversed(groups):
            self.start_backward(key)
            for member in self._of(key, group):
                self.use(key, member)
            self.end_backward(key)

    def _next(self, name: str | None) -> Microbatch | None:
        """The next microbatch whose backward has not begun and that has a group, with this name if given."""
        for key in self._backwards[self._begun :]:
            if any(name in (None, group) for _, group in self._groups[key[1]]):
                return key
        return None

    def _of(self, key: Microbatch, group: tuple[int, str]) -> list[Member]:
        return [each for each in self._members[key[1]] if (each.layer, each.group) == group]

    def _add(self, state: _State, members: Iterator[tuple[Member, int]]) -> None:
        for member, size in members:
            state.on_gpu[member] = size
            self.bytes += size


class StepGroups:
    """The groups of both microbatches of an overlapped step."""

    def __init__(self, groups: OffloadedGroups, forward: Microbatch, backward: Microbatch) -> None:
        self._groups = groups
        self._forward = forward
        self._backward = backward
        self._pending: list[tuple[int, str]] = []
        self._used = 0

    @property
    def bytes(self) -> int:
        """Bytes of groups that are on the GPU before their backward."""
        return self._groups.bytes + self._used

    def forward(self, placed: Sequence[Placed], *, ends_layer: bool) -> Iterator[Placed]:
        """The instants of the forward of a node. The groups are followed while they are iterated over."""
        members = [self._member(each, self._forward) for each in placed]
        for index, (each, member) in enumerate(zip(placed, members, strict=True)):
            group = None if member is None else (member.layer, member.group)
            if group is not None:
                self._groups.start_forward(self._forward, group)
            yield each
            if group is None or any(later is not None and later.group == group[1] for later in members[index + 1 :]):
                continue
            if group[1] in _COMMITTED_LATER or group[1] == "mlp_norm":
                self._pending.append(group)
            else:
                self._groups.commit_forward(self._forward, group)
        for group in [each for each in self._pending if ends_layer or each[1] != "mlp_norm"]:
            self._pending.remove(group)
            self._groups.commit_forward(self._forward, group)

    def backward(self, placed: Sequence[Placed]) -> Iterator[Placed]:
        """The instants of the backward of a node."""
        members = [self._member(each, self._backward) for each in placed]
        for index, (each, member) in enumerate(zip(placed, members, strict=True)):
            if member is not None:
                self._groups.start_backward(self._backward)
                self._used = self._groups.use(self._backward, member)
            yield each
            self._used = 0
            if member is not None and all(later is None or later.group != member.group for later in members[index + 1 :]):
                self._groups.end_backward(self._backward)

    def combine_backward(self, layer: int) -> None:
        """The backward of the combine node of a layer starts, which ends the forward of the group `mlp_norm`."""
        if self._groups.has(self._backward, (layer, "mlp_norm")):
            self._groups.start_backward(self._backward)

    def _member(self, each: Placed, key: Microbatch) -> Member | None:
        path, _ = explained(each.block, each.instant)
        return self._groups.member(key[1], each.layer, path)


def group_members(offload: ActivationOffloadSpec, tree: Module) -> tuple[Member, ...]:
    """The members of the groups of a chunk, in the order of the forward."""
    _, layers, _ = units(tree)
    return tuple(
        Member(
            layer=layer.number,
            group=name,
            path=path,
            stays=total_bytes(tensor for tensor in child.offloaded if tensor not in child.saved),
            copied=total_bytes(child.copied_back),
            on_demand=total_bytes(child.copied_on_demand),
        )
        for layer in layers
        for block, _ in layer.modules
        for name, path, child in _members(offload, block, block.name)
    )


def _members(offload: ActivationOffloadSpec, module: Module, path: str) -> Iterator[tuple[str, str, Module]]:
    for child in module.children:
        inside = f"{path}.{child.name}"
        name = group_of(offload, module, child)
        if name is not None:
            yield name, inside, child
        yield from _members(offload, child, inside)
