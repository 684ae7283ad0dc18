"""The model that a framework takes from a Hugging Face checkpoint, and what Megatron-Bridge sets for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from analyzer.errors import AnalyzerError, InputError
from analyzer.launch.model_config.published import published_model
from analyzer.launch.other_models import refuse_other_model

if TYPE_CHECKING:
    from analyzer.launch.model_config.common import MegatronModel

_OF_EXPERTS: Final = ("--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm")
"""What providers of Megatron-Bridge have for models with experts (models/*_provider.py)."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model by the name or the folder of its checkpoint."""

    name: str
    defaults: tuple[str, ...]
    """Options that the framework sets for it; options of the launch follow, and take precedence."""
    experts: bool = False
    letters: str = ""
    """Of a hybrid model: those of its layers."""
    depth_letters: str = ""
    """And those of the layers in an MTP depth."""


def named_model(setting: str, name: str, *, folder: Path) -> NamedModel:
    """The model that `setting` names. Raises UnsupportedError for the name of a model of another kind that is not published.

    A name that is neither a published model nor a folder is left to the reader of configurations, which refuses it.
    """
    if "${" in name:
        remedy = f"set the key or the variable that it refers to, or write {setting}=MODEL"
        raise InputError(setting, f"{name} refers to something that is not there", remedy)
    if len(name.split()) > 1 and not (folder / name).exists():
        fault = f"{name!r} is a text in the place of a model"
        raise InputError(setting, fault, f"write {setting}=MODEL, with the name of a model or the folder of its config.json")
    published = published_model(name)
    if published is None and not (folder / name).is_dir():
        refuse_other_model(setting, name)
    found = published or name
    model = _model(found, folder)
    if model is None:
        return NamedModel(found, (), False)
    experts = any(option[0] == "--num-experts" for option in model.options)
    return NamedModel(found, _OF_EXPERTS if experts else (), experts, model.letters, model.depth_letters)


def _model(name: str, folder: Path) -> MegatronModel | None:
    """None for a model that is refused with its own message when the words are read."""
    from analyzer.launch.model_config.families import megatron_model
    from analyzer.launch.model_config.published import read_configuration

    try:
        return megatron_model(read_configuration(name, folder=folder))
    except AnalyzerError:
        return None
