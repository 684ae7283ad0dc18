"""The part of the model on one pipeline rank."""

from __future__ import annotations

from dataclasses import dataclass

from analyzer.layout.stages import Chunk
from analyzer.modules.tree import Module


@dataclass(frozen=True, kw_only=True)
class StageModel:
    """The model chunks of a pipeline rank and their module trees, in the same order."""

    pipeline_rank: int
    chunks: tuple[Chunk, ...]
    trees: tuple[Module, ...]
