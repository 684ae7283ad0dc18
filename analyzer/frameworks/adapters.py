"""Adapters and frozen parts in the configurations of Megatron-Bridge, which NeMo-RL shares.

Source: megatron/bridge/peft/{lora,dora,canonical_lora}.py of Megatron-Bridge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from analyzer.errors import InputError
from analyzer.frameworks.options import is_true
from analyzer.specs.fine_tuning import Adapter, AdapterKind
from analyzer.specs.model import FROZEN_PARTS
from analyzer.specs.vision_part import VisionTraining
from analyzer.units import natural

_KINDS: Final[dict[str, AdapterKind]] = {
    "LoRA": "lora",
    "VLMLoRA": "vlm_lora",
    "CanonicalLoRA": "canonical_lora",
    "DoRA": "dora",
}
"""By the class of Bridge."""
_DTYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16"}


_OF_EXPERTS: Final = ("normalize_moe_lora", "experts_shared_outer_loras")
_REGATHER: Final = "sequence_parallel_input_regather"
_FIELDS: Final = frozenset({
    "dim", "alpha", "target_modules", "exclude_modules", "dropout", "dropout_position", "lora_A_init_method", "lora_B_init_method",
    "canonical_mapping", "params_to_save",
})  # fmt: skip
_OF_LORA: Final = frozenset({_REGATHER, "a2a_experimental", "lora_dtype", "share_expert_adapters", *_OF_EXPERTS})
_FIELDS_OF: Final[Mapping[AdapterKind, frozenset[str]]] = {
    "lora": _FIELDS | _OF_LORA,
    "canonical_lora": _FIELDS | {"normalize_moe_lora", "share_expert_adapters"},
    "dora": _FIELDS,
    "vlm_lora": _FIELDS | _OF_LORA | {"freeze_vision_model", "freeze_vision_projection", "freeze_language_model"},
}
"""Fields of the classes of Bridge."""


def unknown_fields(config: Mapping[str, Any], prefix: str, kind: AdapterKind) -> list[str]:
    """Keys of an adapter that its class in Bridge does not have, and that are not off."""
    known = {"_target_", *_FIELDS_OF[kind]} if kind in _FIELDS_OF else config
    return [f"{prefix}.{name}" for name, value in config.items() if name not in known and value not in (None, False, "", [], {})]


def settings_of_adapter(config: Mapping[str, Any], kind: AdapterKind) -> tuple[str, ...]:
    """Settings that change an adapter and that are no fields of `Adapter`."""
    names = [name for name in ("a2a_experimental", *_OF_EXPERTS) if is_true(config.get(name))]
    post = config.get("dropout_position") == "post"
    found = (*names, *(("dropout_position=post",) if post else ()))
    return tuple(each for each in found if each.partition("=")[0] in _FIELDS_OF.get(kind, ()))


def is_regathered(config: Mapping[str, Any], kind: AdapterKind) -> bool:
    """Whether inputs of adapters are gathered again in the backward."""
    return _REGATHER in _FIELDS_OF.get(kind, ()) and is_true(config.get(_REGATHER))


def bridge_adapter(config: Mapping[str, Any], prefix: str, kind: AdapterKind = "lora") -> Adapter | None:
    """The adapter of keys such as dim and target_modules; None if it is off. Raises InputError without a rank."""
    if not config or not is_true(config.get("enabled", True)):
        return None
    rank = natural(str(config.get("dim")))
    if not rank:
        raise InputError(f"{prefix}.dim", f"{config.get('dim')!r} is not a number of 1 or more", f"write {prefix}.dim=8")
    check_dropout(config, prefix, kind)
    return Adapter(
        kind=kind,
        rank=rank,
        alpha=_number(config.get("alpha")),
        targets=_names(config.get("target_modules")),
        excluded=_names(config.get("exclude_modules")),
        dropout=_number(config.get("dropout")) or 0.0,
        adapter_dtype=dtype_name(config.get("lora_dtype")),
        share_expert_adapters=_flag(config.get("share_expert_adapters")),
        regathers=is_regathered(config, kind),
        options=settings_of_adapter(config, kind),
        source=f"{prefix}.dim={rank}",
    )


def kind_of(target: str) -> AdapterKind:
    """The kind of adapter by its class in Bridge."""
    return _KINDS.get(target.rpartition(".")[2], "other")


def kind_named(name: str, setting: str) -> AdapterKind:
    """The kind of adapter by its name in `create_peft` of Bridge (peft/utils.py). Raises InputError for another name."""
    kind = next((each for each in _KINDS.values() if each == name), None)
    if kind is None:
        raise InputError(setting, f"{name!r} is no adapter of Megatron-Bridge", f"use one of {', '.join(_KINDS.values())}")
    return kind


def check_dropout(config: Mapping[str, Any], prefix: str, kind: AdapterKind) -> None:
    """Raises InputError for DoRA with dropout after its projections (`DoRA.__post_init__`, peft/dora.py)."""
    if kind == "dora" and config.get("dropout_position") == "post":
        raise InputError(f"{prefix}.dropout_position", "is post, which DoRA refuses", f"write {prefix}.dropout_position=pre")


def dtype_name(value: object) -> str | None:
    """bf16, fp16 or fp32 for torch.bfloat16 and the like; None for anything else."""
    if isinstance(value, Mapping):
        value = value.get("_target_")
    name = str(value).rpartition(".")[2]
    return _DTYPES.get(name, name if name in ("bf16", "fp16", "fp32", "fp8") else None)


def frozen_parts(config: Mapping[str, Any], prefix: str) -> tuple[str, ...]:
    """Keys such as freeze_vision_model that are true. Routers, which are small, are left out."""
    return tuple(
        f"{prefix}.{key}"
        for key, value in config.items()
        if key.startswith("freeze_") and key.count("router") == 0 and is_true(value)
    )


_OF_SOUND: Final = {
    "freeze_audio_model": "sound_model", "freeze_sound_encoder": "sound_model", "freeze_sound_projection": "sound_projection",
}  # fmt: skip
"""Settings of the parts for sound, by their names in the models."""


def bridge_vision(given: Mapping[str, Any], prefix: str) -> VisionTraining:
    """The parts for images and sound of a model that Megatron-Bridge builds. `given`: settings such as freeze_vision_model."""
    sections = {f"freeze_{section}": section for section in FROZEN_PARTS} | _OF_SOUND
    frozen = tuple(
        (section, is_true(given[setting]), f"{prefix}{setting}") for setting, section in sections.items() if setting in given
    )
    return VisionTraining(holder="Megatron-Bridge", frozen=frozen)


def _names(value: object) -> tuple[str, ...]:
    return tuple(str(each) for each in value) if isinstance(value, list | tuple) else () if value is None else (str(value),)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None
