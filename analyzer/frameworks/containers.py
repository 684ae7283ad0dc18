"""The values of a ConfigContainer of Megatron-Bridge, from its YAML or from the object in Python, as plain values.

Megatron-Bridge is not imported: objects are read by their fields. Source of the YAML: megatron/training/config/yaml_utils.py of
Megatron-LM, which `ConfigContainer.to_yaml` uses.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Final

from analyzer.errors import InputError

Tree = dict[str, Any]
TARGET: Final = "_target_"
"""Key with the class of an object."""
_DEPTH: Final = 8
"""Objects inside objects that are read."""
_DTYPES: Final = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "uint8": "fp8",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
}  # fmt: skip
"""Names of dtypes of torch in options of Megatron-LM, where FP8 states are stored as uint8."""


def from_container(config: object) -> Tree:
    """The plain values of a ConfigContainer, or of a mapping with the keys of its YAML. Raises InputError for anything else."""
    tree = from_yaml(config) if isinstance(config, Mapping) else from_object(config)
    if not isinstance(tree, dict):
        raise InputError("config", f"is of type {type(config).__name__}", "give a ConfigContainer of Megatron-Bridge")
    return tree


def from_yaml(value: Any) -> Any:
    """A value of the YAML, with dtypes, enums and functions as their names. Objects keep their class in `_target_`."""
    if isinstance(value, list):
        return [from_yaml(each) for each in value]
    if isinstance(value, str) and value.startswith("torch."):
        return dtype(value)
    if not isinstance(value, Mapping):
        return value
    target = value.get(TARGET)
    if not isinstance(target, str):
        return {str(key): from_yaml(each) for key, each in value.items()}
    if "_name_" in value:
        return str(value["_name_"])
    if target.startswith("torch."):
        return dtype(target)
    rest = {str(key): from_yaml(each) for key, each in value.items() if key not in ("_call_", "_args_", "_partial_")}
    if value.get("_call_") is False or value.get("_partial_"):
        return target.rpartition(".")[2]
    arguments = value.get("_args_")
    if len(rest) == 1 and isinstance(arguments, list) and len(arguments) == 1:
        return from_yaml(arguments[0])  # an enum without its name, or a path
    return rest


def from_object(value: Any, depth: int = 0) -> Any:
    """The same for an object of Python. Fields that are objects without fields are left out."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, PurePath):
        return str(value)
    if depth > _DEPTH:
        return None
    if isinstance(value, Mapping):
        return {str(key): from_object(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [from_object(each, depth + 1) for each in value]
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ == "dtype":
        return dtype(str(value))
    if isinstance(value, type) or callable(value):
        name = getattr(value, "__name__", None)
        if name is not None:
            return name
    names = _fields(value)
    if not names:
        return None
    tree: Tree = {TARGET: f"{kind.__module__}.{kind.__qualname__}"}
    return tree | {name: from_object(getattr(value, name, None), depth + 1) for name in names}


def dtype(name: str) -> str:
    """The name of a dtype of torch in options of Megatron-LM: bf16 for torch.bfloat16."""
    last = name.rpartition(".")[2]
    return _DTYPES.get(last, last)


def _fields(value: Any) -> list[str]:
    """Names of the fields of an object: of its dataclass, and attributes that were set later."""
    names = [each.name for each in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    names += [name for name in getattr(value, "__dict__", {}) if name not in names]
    return [name for name in names if not name.startswith("_")]
