"""The modules of a model chunk, as the functions of the model families list them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from analyzer.modules.head import final_norm
from analyzer.modules.inputs import LayerInputs
from analyzer.modules.layer import LayerRuns, ModuleRuns
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Module, Tensor
from analyzer.specs import Family

CACHED_ENDS: Final = 256


class Stack(NamedTuple):
    """A `TransformerBlock`: layers, and the final norm if the chunk has it."""

    name: str
    modules: ModuleRuns
    received: tuple[Tensor, ...] = ()
    """A block without modules returns a copy of what its stage received (`TransformerBlock.forward`)."""


Parts = tuple[Module | Stack, ...]
"""Modules of a chunk in the order of execution."""
ROOTS: Final[dict[Family, tuple[str, str]]] = {
    "gpt": ("gpt_model", "megatron.core.models.gpt.GPTModel"),
    "bert": ("bert_model", "megatron.core.models.bert.BertModel"),
    "t5": ("t5_model", "megatron.core.models.T5.T5Model"),
    "llava": ("llava_model", "megatron.core.models.multimodal.llava_model.LLaVAModel"),
    "mimo": ("mimo_model", "megatron.core.models.mimo.MimoModel"),
}
"""Name of the root of a chunk, and its class."""


ONE_BLOCK: Final[frozenset[Family]] = frozenset({"gpt", "bert"})
"""Families with one block of layers: a run of equal layers of `ChunkKind` is one run of modules."""


@dataclass(frozen=True, kw_only=True)
class ChunkKind:
    """What the tree of a chunk depends on in addition to `ModuleInputs`. Chunks of one kind have equal trees."""

    layers: LayerRuns
    """The kinds of the decoder layers."""
    pre_process: bool = True
    post_process: bool = True
    final_norm: bool = True
    mtp_layers: int = 0


@lru_cache(maxsize=CACHED_ENDS)
def cached_final_norm(inputs: LayerInputs) -> Module:
    """The final norm, cached by its inputs."""
    return final_norm(Shapes(inputs))
