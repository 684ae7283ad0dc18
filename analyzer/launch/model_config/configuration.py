"""A Hugging Face configuration (config.json): its values by name, and errors about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.info_options import MODEL

LARGEST: Final = 10**15
"""Numbers above it are not sizes of a model."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The values of a config.json."""

    values: Mapping[str, object]
    name: str
    """The model or file, for messages."""

    @property
    def model_type(self) -> str:
        """The model class of transformers. Raises InputError if it is missing."""
        kind = self.values.get("model_type")
        if not isinstance(kind, str) or not kind:
            raise InputError(MODEL, f"{self.name} has no model_type", "give the config.json of a Hugging Face model")
        return kind

    def get(self, key: str, default: object = None) -> object:
        """The value of `key`; `default` if it is missing or null."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer above 0; `default` if it is missing or null. Raises InputError for anything else."""
        value = self.get(key, default)
        if value is None:
            raise InputError(MODEL, f"{self.name} has no {key}", "give the complete config.json of the model")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
            raise self._wrong(key, value, "an integer of 1 or more")
        return value

    def optional(self, key: str) -> int | None:
        """An integer above 0, or None if it is missing, null or 0. Raises InputError for anything else."""
        return self.integer(key) if self.get(key) not in (None, 0) else None

    def number(self, key: str, default: float) -> float:
        """A number; `default` if it is missing or null. Raises InputError for anything else."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
            raise self._wrong(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false; `default` if it is missing or null. Raises InputError for anything else."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def table(self, key: str) -> Mapping[str, object]:
        """A nested object; empty if it is missing or null. Raises InputError for anything else."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return value

    def _wrong(self, key: str, value: object, expected: str) -> InputError:
        written = repr(value)
        return InputError(MODEL, f"{key} of {self.name} is {written[:40]}", f"give {expected}")

    def not_expressible(self, what: str) -> UnsupportedError:
        """The error for a model with a part that Megatron's options for GPT do not give, or that this program does not model."""
        return UnsupportedError(MODEL, f"{self.name} has {what}, which is not modelled", "choose a model without it")
