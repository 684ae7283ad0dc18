"""The environment variables that an analysis reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

NOT_OF_THE_LAUNCH: Final = frozenset({"HOME", "XDG_CACHE_HOME"})
"""Variables that only say where this program keeps its cache."""


class Environment(dict[str, str]):
    """Environment variables. `used` are those that were looked up and have a value."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__(variables)
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self._read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._read.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a variable."""
        self._read.add(name)
        return super().get(name, default)

    @property
    def used(self) -> dict[str, str]:
        """The variables that were looked up and have a value, sorted by name."""
        return {name: value for name, value in sorted(self.items()) if name in self._read - NOT_OF_THE_LAUNCH}
