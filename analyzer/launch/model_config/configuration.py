"""A Hugging Face configuration (config.json): its values by name, and errors about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.reading import LARGEST as LARGEST_OF_OPTIONS
from analyzer.launch.info_options import MODEL

LARGEST: Final = 10**15
"""Numbers above it are not sizes of a model."""
SMALLEST_SHARE: Final = 1 / 64
"""Less is no share of the size of a model."""
LAYERS: Final = frozenset({"num_hidden_layers", "n_layer"})
"""Fields with the number of layers, each of which is looked at."""
GELU: Final = frozenset({
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "gelu_pytorch_tanh",
    "quick_gelu",
})  # fmt: skip
"""Names of GELU, exact and approximate."""
SILU: Final = frozenset({"silu", "swish"})
ACTIVATIONS: Final = GELU | SILU | {
    "laplace", "leaky_relu", "linear", "mish", "prelu", "relu", "relu2", "relu6", "sigmoid", "tanh", "xielu",
}  # fmt: skip
"""Names of activation functions: `ACT2CLS` of transformers 5.23.0 (src/transformers/activations.py)."""


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
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, value, "an integer of 1 or more")
        if value > LARGEST:
            raise self._wrong(key, value, f"an integer of at most {LARGEST}")
        limit = LARGEST_OF_OPTIONS["num_layers"]
        if key in LAYERS and value > limit:
            fault = f"{key} of {self.name} is {value}, which is above {limit}, the largest number that is modelled"
            raise InputError(MODEL, fault, "give less")
        return value

    def integers(self, key: str) -> list[int]:
        """A list of integers; empty if it is missing or null. Raises InputError for anything else."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in value):
            raise self._wrong(key, value, "a list of integers")
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

    def share(self, key: str, default: float) -> float:
        """A number from `SMALLEST_SHARE` to 1; `default` if it is missing or null. Raises InputError for anything else."""
        value = self.number(key, default)
        if not SMALLEST_SHARE <= value <= 1:
            raise self._wrong(key, value, f"a number from {SMALLEST_SHARE:g} to 1")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false; `default` if it is missing or null. Raises InputError for anything else."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A text; `default` if it is missing, null or empty. Raises InputError for anything else."""
        value = self.get(key) or default
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def activation(self, *keys: str, default: str) -> str:
        """The activation function in the first of the fields that is not null. Raises InputError for one that is not known."""
        key = next((key for key in keys if self.get(key) is not None), keys[0])
        value = self.text(key, default)
        if value not in ACTIVATIONS:
            raise self._wrong(key, value, f"one of {', '.join(sorted(ACTIVATIONS))}")
        return value

    def nested(self, key: str) -> Configuration:
        """A nested object with its fields; empty if it is missing or null. Raises InputError for anything else."""
        return Configuration(self.table(key), f"{key} of {self.name}")

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
