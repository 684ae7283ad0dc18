"""Models whose sizes a launch gives in part only, by the name of a checkpoint: the sizes would be those of a language part."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from analyzer.errors import UnsupportedError
from analyzer.specs.vision_part import VISION_TYPES


class _Kind(NamedTuple):
    """A kind of models."""

    name: str
    words: str
    """Words in lower case that names of their checkpoints have, as a regular expression."""
    fault: str
    remedy: str


_KINDS: Final = (
    _Kind(
        "a vision-language model",
        r"vlm?\d*|vision|llava|internvl\d*|pixtral|paligemma|multimodal|mllm|ovis\d*|glm-?4[.\d]*v",
        "whose vision part is not known here",
        f"give the folder with its config.json, of one of the types {', '.join(VISION_TYPES[:-1])} and {VISION_TYPES[-1]}, "
        "or a text model",
    ),
    _Kind(
        "a multimodal model",
        r"omni|audio|asr|tts|whisper",
        "whose parts for images and sound are not known here",
        "give the folder with its config.json, of the type qwen2_5_omni or qwen3_omni_moe, or a model of text and images",
    ),
    _Kind(
        "a Mamba hybrid",
        r"mamba2?|jamba|zamba2?|nemotron-?h|nemotron-3(?:-\w+)*",
        "whose layers are not known here",
        "give the folder with its config.json, of the type nemotron_h or granitemoehybrid, or another model",
    ),
    _Kind(
        "a model with an encoder",
        r"bert|roberta|t5|umt5|bart",
        "which is modelled in launches of pretrain_bert.py and pretrain_t5.py only",
        "give such a launch, or the checkpoint of a model that generates text",
    ),
)


def kind_of_checkpoint(name: str) -> str | None:
    """What the last part of a name or path says of the model; None if it says nothing."""
    found = _kind_of(name)
    return None if found is None else found.name


def _kind_of(name: str) -> _Kind | None:
    written = re.sub(r"([a-z0-9])(?=VL)", r"\1-", name.rstrip("/").rpartition("/")[2]).lower()
    return next((kind for kind in _KINDS if re.search(rf"(?:^|[-_.])(?:{kind.words})(?=$|[-_.])", written)), None)


def refuse_other_model(flag: str, name: str) -> None:
    """Raises UnsupportedError for a checkpoint of one of these models."""
    kind = _kind_of(name)
    if kind is not None:
        raise UnsupportedError(flag, f"{name} is {kind.name}, {kind.fault}", kind.remedy)
