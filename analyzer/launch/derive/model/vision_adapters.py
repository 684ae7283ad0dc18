"""Adapters beside the linear layers of the parts for images and sound.

ms-swift: `all-linear` means all linear layers of the parts that are not frozen, other names those of all parts. PEFT has the whole
adapter of a layer of transformers on each tensor-parallel rank. Megatron-Bridge finds layers by the names of their modules, which
for Qwen3-VL are modules of Megatron: their ranks share both projections.

Sources: `get_multimodal_target_regex` of ms-swift 4.6 (swift/megatron/utils/utils.py), `Linear` of PEFT (tuners/lora/layer.py);
peft/{lora,module_matcher,utils}.py of Megatron-Bridge: `LoRA.transform`, `ParallelLinearAdapter` and `LinearAdapter`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from analyzer.launch.derive.adapters import ALL_LINEAR
from analyzer.specs.adapters import DEFAULT_TARGETS

if TYPE_CHECKING:
    from analyzer.specs.fine_tuning import Adapter
    from analyzer.specs.vision_part import VisionTraining, VisionWeight, VisionWeights

_IN_MEGATRON: Final = {"qkv": "linear_qkv", "proj": "linear_proj"}
"""Names of the modules of Megatron in the place of those of transformers, where they differ."""
_NO_ADAPTER: Final = frozenset({"audio_tower.proj", "audio_tower.proj1", "audio_tower.proj2"})
"""Layers that are a section of ms-swift themselves: the expression for the layers in it does not match the section."""


def adapter_weights(
    found: tuple[VisionWeight, ...],
    of: VisionWeights,
    training: VisionTraining,
    adapter: Adapter | None,
    *,
    tensor: int,
    split: bool,
) -> tuple[tuple[VisionWeight, ...], str]:
    """The weights of the adapters, and why they are not counted.

    `found`: the weights as a rank holds them. `split`: in modules of Megatron.
    """
    if adapter is None:
        return (), ""
    layers = tuple(each for each in found if each.linear and _has_adapter(each, of, training, adapter, split=split))
    names = sorted({_layer(each, split=split) for each in layers})
    if not layers or not adapter.rank or (split and adapter.rank % tensor):  # `adapter_spec` refuses it
        return (), ""
    known = training.holder in ("ms-swift", "Megatron-Bridge") or not set(adapter.targets) & set(ALL_LINEAR)
    if adapter.kind != "lora" or adapter.excluded or training.holder == "mbridge" or not known:
        return (), f"adapters beside {', '.join(names)} of the {of.described} are not counted"
    return tuple(each for layer in layers for each in _pair(layer, adapter.rank)), ""


def _has_adapter(weight: VisionWeight, of: VisionWeights, training: VisionTraining, adapter: Adapter, *, split: bool) -> bool:
    every = bool(set(adapter.targets) & set(ALL_LINEAR))
    if training.holder == "ms-swift" and every:
        return of.section(weight) in training.adapted and weight.name.removesuffix(".weight") not in _NO_ADAPTER
    targets = set(DEFAULT_TARGETS) if every or not adapter.targets else _whole(adapter)
    return _layer(weight, split=split) in targets


def _whole(adapter: Adapter) -> set[str]:
    """Names of layers; of canonical LoRA also those whose parts are named."""
    names = set(adapter.targets)
    if names & {"linear_q", "linear_k", "linear_v"}:
        names.add("linear_qkv")
    return names | ({"linear_fc1"} if names & {"linear_fc1_up", "linear_fc1_gate"} else set())


def _layer(weight: VisionWeight, *, split: bool) -> str:
    """The last part of the path of the layer of a weight."""
    name = weight.name.removesuffix(".weight").rpartition(".")[2]
    return _IN_MEGATRON.get(name, name) if split else name


def _pair(layer: VisionWeight, rank: int) -> Iterator[VisionWeight]:
    """The projection to the rank, which is split as the layer, or by the rank, and that to the outputs."""
    rows, columns = layer.shape
    outputs = None if layer.split is None else 0
    name = layer.name.removesuffix(".weight")
    made = replace(layer, linear=False, adapter=True, frozen=False)
    yield replace(made, name=f"{name}.lora_A.weight", shape=(rank, columns))
    yield replace(made, name=f"{name}.lora_B.weight", shape=(rows, rank), split=outputs)
