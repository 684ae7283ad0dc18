"""Linear functions of a placement: times and bytes that the formulas evaluate and the linear program minimizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from analyzer.inference.offload.policy import Placement

ZERO: Final = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Linear:
    """A constant, and what the whole of the weights, cache or activations adds if it is on the GPU, in host memory or on disk."""

    constant: float = 0.0
    weights: tuple[float, float, float] = ZERO
    cache: tuple[float, float, float] = ZERO
    activations: tuple[float, float, float] = ZERO

    def __add__(self, other: Linear) -> Linear:
        return Linear(
            self.constant + other.constant,
            _sum(self.weights, other.weights),
            _sum(self.cache, other.cache),
            _sum(self.activations, other.activations),
        )

    def at(self, placement: Placement) -> float:
        """The value for a placement."""
        found = self.constant
        for factors, shares in zip((self.weights, self.cache, self.activations), placement, strict=True):
            found += factors[0] * shares.gpu + factors[1] * shares.host + factors[2] * shares.disk
        return found

    def coefficients(self) -> tuple[float, ...]:
        """The nine factors: weights, cache and activations, each on the GPU, in host memory, on disk."""
        return (*self.weights, *self.cache, *self.activations)


def total(terms: Iterable[Linear]) -> Linear:
    """The sum of linear functions."""
    found = Linear()
    for term in terms:
        found = found + term
    return found


def _sum(one: tuple[float, float, float], other: tuple[float, float, float]) -> tuple[float, float, float]:
    return (one[0] + other[0], one[1] + other[1], one[2] + other[2])
