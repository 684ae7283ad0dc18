"""Attention of which the weights are counted, and not the activations: that of a plugin, or with indexers of core 0.19."""

from __future__ import annotations

from dataclasses import dataclass


def layers_with_indexers(count: int, *, every: int, after: int) -> tuple[bool, ...]:
    """For each of `count` layers, whether it has an indexer: each of the first ones until `after`, then every `every`-th one.

    Source: `is_dsa_skip_topk_layer` of megatron-core 0.19.0.
    """
    return tuple(max(layer - after, 0) % every == 0 for layer in range(1, count + 1))


@dataclass(frozen=True, kw_only=True)
class PluginLayers:
    """Weights in the attention of some layers. Every tensor-parallel rank has each of them in full."""

    plugin: str
    """What has them: a module of a plugin, or a class of Megatron-LM."""
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
    counted_as: str = ""
    """Whose activations are counted in place of those of the attention, too high or too low; empty if `replaces`."""
    in_mtp: bool = False
    """MTP layers have them too."""
    shares_keys: bool = False
    """The other layers use the keys that the last layer with these weights chose, which must be in the same pipeline stage."""

    @property
    def reason(self) -> str:
        """What is not counted, a fragment of a sentence."""
        if self.counted_as:
            counted = f"the memory and the time of {self.plugin} are counted as {self.counted_as}"
            return f"{counted}, without those of its {self.described}"
        return f"the activations and the time of the {self.described} of {self.plugin} are not counted"
