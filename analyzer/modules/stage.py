"""What a pipeline rank holds of the model."""

from __future__ import annotations

from dataclasses import dataclass

from analyzer.layout.stages import Chunk
from analyzer.modules.tree import Module


@dataclass(frozen=True, kw_only=True)
class StageModel:
    """The chunks of a pipeline rank, and a tree for each, in the same order."""

    pipeline_rank: int
    chunks: tuple[Chunk, ...]
    trees: tuple[Module, ...]
