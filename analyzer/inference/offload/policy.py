"""What is placed where, and how a block of requests is generated: the policy of FlexLLMGen (`Policy` in flexllmgen/flex_opt.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

COMPRESSED: Final = 0.28125
"""Bytes of a compressed tensor relative to 16 bits: 4 bits, and for each group of 64 a scale and a minimum of 16 bits."""


class Shares(NamedTuple):
    """Shares of the bytes of tensors on each tier, from 0 to 1. They sum to 1."""

    gpu: float
    host: float
    disk: float

    def text(self) -> str:
        """As the options of this program and of FlexLLMGen have them, in percent."""
        return "/".join(f"{100 * share:.4g}" for share in self)


class Placement(NamedTuple):
    """Shares of the weights, of the KV cache, and of the activations between layers."""

    weights: Shares
    cache: Shares
    activations: Shares


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Sizes and methods of a block of requests. Each layer runs all batches of the block before the next layer."""

    batch_size: int
    """Requests that the GPU computes at once."""
    batches: int = 1
    """Batches of a block. The weights of a layer are loaded once for all of them."""
    compressed_weights: bool = False
    """4 bits in groups of 64. The GPU decompresses them each time it uses them."""
    compressed_cache: bool = False
    attention_on_cpu: bool = False
    """Attention of the decode over the cache in host memory or on disk, in 32 bits."""
    overlapped: bool = True
    """Loads and stores run while the GPU computes."""
    pinned_weights: bool = True
    """Weights in host memory are page-locked, so that the GPU can read them."""

    @property
    def block_size(self) -> int:
        """Requests of a block."""
        return self.batch_size * self.batches

    @property
    def weight_factor(self) -> float:
        """Bytes of a weight matrix relative to 16 bits."""
        return COMPRESSED if self.compressed_weights else 1.0

    @property
    def cache_factor(self) -> float:
        """Bytes of the cache relative to 16 bits."""
        return COMPRESSED if self.compressed_cache else 1.0


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Where tensors are, and how a block is run."""

    placement: Placement
    schedule: Schedule


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of each request."""

    prompt: int
    generated: int

    @property
    def cached(self) -> int:
        """Tokens in the allocated cache. The last generated token needs none."""
        return self.prompt + self.generated - 1

    @property
    def mean_attended(self) -> float:
        """Mean number of tokens that a decode step attends to, itself included: step i of 1 to generated - 1 has prompt + i."""
        return self.prompt + self.generated / 2
