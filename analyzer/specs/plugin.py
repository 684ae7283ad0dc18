"""Attention that a plugin of a framework builds, or adds modules to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PluginLayers:
    """The weights of a plugin in the attention of some layers. Every tensor-parallel rank has each of them in full."""

    plugin: str
    """Its module in Python."""
    described: str
    """What has these weights, for a sentence, such as `indexers`."""
    layers: tuple[bool, ...]
    """For each decoder layer, whether it has them."""
    weights: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of each weight."""
    replaces: bool
    """They are all of the attention of these layers. Otherwise they are beside the attention of the model."""
    summed: bool
    """Under sequence parallelism their gradients are summed over tensor-parallel ranks: each rank computes those of its tokens."""
    estimated: bool
    """The attention of the model computes otherwise in the plugin, so what is counted of it may be too high or too low."""

    @property
    def reason(self) -> str:
        """What is not counted, a fragment of a sentence."""
        if self.estimated:
            counted = f"the activations of attention in {self.plugin} are counted as those of Megatron-LM"
            return f"{counted}, without its {self.described}"
        return f"the activations and the time of the {self.described} of {self.plugin} are not counted"
