"""Writes each collective of a step to a trace, with its group and phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from allocator_hook.step.collectives import DTYPES
from allocator_hook.step.groups import GroupInfo, named_groups
from allocator_hook.step.marks import Marks
from analyzer.trace.events import Phase


class CollectiveTarget(Protocol):
    """The collective method of the trace writer and the CUDA recorder."""

    def collective(
        self,
        kind: str,
        *,
        group: str,
        shape: Sequence[int],
        dtype: str,
        bytes: int,
        members: Sequence[int] = (),
        size: int | None = None,
        phase: Phase | None = None,
        peer: int | None = None,
    ) -> None: ...


class CollectiveWriter:
    """Writes each call with its group and phase. Calls before `connect` are ignored."""

    def __init__(self) -> None:
        self._groups: dict[Any, GroupInfo] = {}
        self._writer: CollectiveTarget | None = None
        self._marks: Marks | None = None

    def connect(self, writer: CollectiveTarget, marks: Marks) -> None:
        self._writer, self._marks = writer, marks

    def __call__(self, kind: str, group: Any, tensor: torch.Tensor, *, peer: int | None) -> None:
        if self._writer is None or self._marks is None:
            return
        self._groups = self._groups or named_groups()
        group = group if group is not None else torch.distributed.group.WORLD
        known = self._groups.get(group)
        members = known.members if known else tuple(torch.distributed.get_process_group_ranks(group))
        name = known.name if known else "other"
        if name == "world" and peer is not None:
            name = self._shared_group(peer)
        self._writer.collective(
            kind,
            group=name,
            members=members,
            shape=tuple(tensor.shape),
            dtype=DTYPES.get(tensor.dtype, str(tensor.dtype)),
            bytes=tensor.numel() * tensor.element_size(),
            phase=self._marks.phase,  # type: ignore[arg-type]
            peer=peer,
        )

    def _shared_group(self, peer: int) -> str:
        """Return the group of a send or receive in the world group: "pp" or "cp" if `peer` is in that group, else "world"."""
        found = {info.name for info in self._groups.values() if peer in info.members}
        return next((name for name in ("pp", "cp") if name in found), "world")
