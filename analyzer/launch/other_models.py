"""Models that are no GPT, by the name of a checkpoint. Their sizes would be those of their language part only."""

from __future__ import annotations

import re
from typing import Final

from analyzer.errors import UnsupportedError

_KINDS: Final = (
    ("a vision-language model", r"vlm?\d*|vision|llava|internvl\d*|pixtral|paligemma|multimodal|mllm|ovis\d*|glm-?4[.\d]*v"),
    ("a multimodal model", r"omni|audio|asr|tts|whisper"),
    ("a Mamba hybrid", r"mamba2?|jamba|zamba2?|nemotron-?h|nemotron-3(?:-\w+)*"),
    ("a model with an encoder", r"bert|roberta|t5|umt5|bart"),
)
"""Kinds of models, and words in lower case that names of their checkpoints have."""


def kind_of_checkpoint(name: str) -> str | None:
    """What the last part of a name or path says of the model; None if it says nothing."""
    written = re.sub(r"([a-z0-9])(?=VL)", r"\1-", name.rstrip("/").rpartition("/")[2]).lower()
    return next((kind for kind, words in _KINDS if re.search(rf"(?:^|[-_.])(?:{words})(?=$|[-_.])", written)), None)


def refuse_other_model(flag: str, name: str) -> None:
    """Raises UnsupportedError for a checkpoint of a model that is no GPT."""
    kind = kind_of_checkpoint(name)
    if kind is not None:
        raise UnsupportedError(flag, f"{name} is {kind}, and only GPTs are modelled", "give the checkpoint or the options of a GPT")
