"""The options of a launch as words, and the parts of a translation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How one fork option is read."""

    words: tuple[str, ...] = ()
    """Megatron's words."""
    of_experts: tuple[str, ...] = ()
    """Further words for a model with experts."""
    notes: tuple[str, ...] = ()
    """Additional sentences."""
    warnings: tuple[str, ...] = ()
    """Sentences about what is not counted."""
    dropped: tuple[str, ...] = ()
    """Megatron flags of the launch that the words replace."""
    withheld: tuple[str, ...] = ()
    """Why there can be no verdict (`Arguments.withheld`)."""


NOTHING = Reading()


@dataclass(frozen=True)
class LaunchOptions:
    """The options of a launch, by flag with their values as written."""

    fork: Mapping[str, Sequence[str]]
    """Options of forks."""
    megatron: Mapping[str, Sequence[str]]
    """Options of Megatron-LM."""
    world: int | None = None
    """Number of GPUs, if it is known."""
    keys: frozenset[str] = field(default=frozenset())
    """Keys of the forks that the launch may be for."""

    def has(self, flag: str) -> bool:
        """Whether the option is given."""
        return flag in self.fork or flag in self.megatron

    def word(self, flag: str) -> str | None:
        """The first value of the option; None if it is not given or has no value."""
        values = self.fork.get(flag) or self.megatron.get(flag)
        return values[0] if values else None

    def integer(self, flag: str, default: int) -> int:
        """The first value of the option as an integer; `default` if it is not given or is not one."""
        value = self.maybe_integer(flag)
        return default if value is None else value

    def maybe_integer(self, flag: str) -> int | None:
        """The first value of the option as an integer; None if it is not given or is not one."""
        word = self.word(flag)
        try:
            return None if word is None else int(word)
        except ValueError:
            return None

    @property
    def tensor(self) -> int:
        """Tensor-parallel size."""
        return self.integer("--tensor-model-parallel-size", 1)

    @property
    def pipeline(self) -> int:
        """Pipeline-parallel size."""
        return self.integer("--pipeline-model-parallel-size", 1)

    @property
    def ffn_hidden_size(self) -> int | None:
        """`--ffn-hidden-size`, or four times the hidden size."""
        hidden = self.maybe_integer("--hidden-size")
        given = self.maybe_integer("--ffn-hidden-size")
        return given if given is not None else None if hidden is None else 4 * hidden
