"""Sizes of a Mamba mixer on one rank.

Symbols: d elements of all heads, a heads, p elements of a head, g groups, n elements of a state, q tokens of a chunk, c the
context-parallel size. Tensor parallelism splits heads and groups. Context-parallel ranks exchange tokens for heads, so that each
convolves and scans whole sequences.
"""

from __future__ import annotations

from functools import cached_property

from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Tensor
from analyzer.specs.hybrid import SCAN_CHUNK
from analyzer.specs.model import HybridSpec
from analyzer.units import DTYPE_BYTES, ceil_div


class MixerSizes:
    """Sizes of the parts of a mixer. `_of_rank` ones are split over tensor- and context-parallel ranks."""

    def __init__(self, shapes: Shapes) -> None:
        assert shapes.model.hybrid is not None
        self.shapes = shapes
        self.hybrid: HybridSpec = shapes.model.hybrid
        self.t, self.c = shapes.t, shapes.split.context
        self.s = shapes.inputs.sequence_length
        """Tokens of a whole sample."""
        self.b = shapes.b
        self.heads = self.hybrid.heads // self.t
        self.width = self.heads * self.hybrid.head_dim
        self.groups = self.hybrid.groups // self.t
        self.states = self.groups * self.hybrid.state_dim
        """Elements of B, and of C, of a token."""
        self.channels = self.width + 2 * self.states
        """Channels of the convolution: x, B and C."""
        self.projected = 2 * self.width + 2 * self.states + self.heads
        """Elements of the input projection: z, x, B, C and dt."""

    @cached_property
    def heads_of_rank(self) -> int:
        return self.heads // self.c

    @cached_property
    def width_of_rank(self) -> int:
        return self.width // self.c

    @cached_property
    def groups_of_rank(self) -> int:
        """Groups of a context-parallel rank. Ranks that share a group have copies of it (`MambaContextParallel`)."""
        return max(self.groups // self.c, 1)

    @cached_property
    def states_of_rank(self) -> int:
        return self.groups_of_rank * self.hybrid.state_dim

    @cached_property
    def channels_of_rank(self) -> int:
        return self.width_of_rank + 2 * self.states_of_rank

    @cached_property
    def projected_of_rank(self) -> int:
        return 2 * self.width_of_rank + 2 * self.states_of_rank + self.heads_of_rank

    @property
    def repeated_states(self) -> int:
        """Elements of B, and of C, of a token before they are exchanged: each group for every rank that shares it."""
        return self.states_of_rank * self.c

    @property
    def chunks(self) -> int:
        return ceil_div(self.s, SCAN_CHUNK)

    @property
    def splits(self) -> int:
        """Parts of the heads of a group whose gradients of B and C are computed by different multiprocessors."""
        heads = self.heads_of_rank // self.groups_of_rank
        of_unit = ceil_div(self.b * self.chunks * self.heads_of_rank, self.shapes.inputs.multiprocessors)
        return ceil_div(heads, max(min(of_unit, heads), 1))

    def tokens(self, name: str, width: int, symbol: str, *, dtype: str | None = None, made_in: str = "") -> Tensor:
        """[b, s, width] of whole samples."""
        kind = dtype or self.shapes.dtype
        formula = f"{DTYPE_BYTES[kind]}·s·b·{symbol}"
        return Tensor(name=name, shape=(self.b, self.s, width), dtype=kind, formula=formula, made_in=made_in)

    def vector(self, name: str) -> Tensor:
        """[heads] in fp32."""
        return Tensor(name=name, shape=(self.heads_of_rank,), dtype="fp32", formula="4·a/(t·c)")

    def rows(self, name: str, *last: int, symbol: str = "") -> Tensor:
        """[b, heads, chunks, q, ...] in fp32."""
        shape = (self.b, self.heads_of_rank, self.chunks, *(last or (SCAN_CHUNK,)))
        return Tensor(name=name, shape=shape, dtype="fp32", formula=f"4·s·b·a/(t·c){symbol}")

    def all_states(self, name: str, *, dtype: str) -> Tensor:
        """[b, chunks, heads, p, n]: the states of all chunks."""
        shape = (self.b, self.chunks, self.heads_of_rank, self.hybrid.head_dim, self.hybrid.state_dim)
        return Tensor(name=name, shape=shape, dtype=dtype, formula=f"{DTYPE_BYTES[dtype]}·s/q·b·d·n/(t·c)")

    def scores(self, name: str, parts: int = 1) -> Tensor:
        """[b, chunks, parts, g, q, q] in fp32: products of C and B."""
        shape = (self.b, self.chunks, parts, self.groups_of_rank, SCAN_CHUNK, SCAN_CHUNK)
        return Tensor(name=name, shape=shape, dtype="fp32", formula="4·s·b·q·g/(t·c)" + (" parts" if parts > 1 else ""))
