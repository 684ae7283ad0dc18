"""Temporary replacement of attributes of other modules. Every patch states its reason and is undone at the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

_ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class Patch:
    """Replaces `target.name` with `value`."""

    target: Any
    name: str
    value: Any
    reason: str


class Patches:
    """Context manager that applies patches in order and undoes them in reverse order, also after an exception."""

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._patches = tuple(patches)
        self._before: list[tuple[Patch, Any]] = []

    def __enter__(self) -> Patches:
        for patch in self._patches:
            # only the target's own attribute is saved: an inherited one is restored by deleting the override
            self._before.append((patch, vars(patch.target).get(patch.name, _ABSENT)))
            setattr(patch.target, patch.name, patch.value)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._before:
            patch, before = self._before.pop()
            if before is _ABSENT:
                delattr(patch.target, patch.name)
            else:
                setattr(patch.target, patch.name, before)
