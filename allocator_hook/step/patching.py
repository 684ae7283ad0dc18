"""Replacing attributes of other modules for a while, each with its reason, and putting every one of them back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

_ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class Patch:
    """`target.name` is `value` while the patch is applied."""

    target: Any
    name: str
    value: Any
    reason: str


class Patches:
    """A context in which patches hold. They are applied in order and undone in reverse, whatever happens in between."""

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._patches = tuple(patches)
        self._before: list[tuple[Patch, Any]] = []

    def __enter__(self) -> Patches:
        for patch in self._patches:
            # what the target itself holds: an inherited attribute comes back by deleting the override
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
