"""Hugging Face models that are not read, by their model_type and by the beginning of their name, with the reason."""

from __future__ import annotations

from typing import Final

from analyzer.errors import UnsupportedError
from analyzer.launch.info_options import MODEL

REFUSED: Final = {
    "ALiBi positions": ("bloom", "mpt"),
    "an encoder": ("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "whisper", "marian", "m2m_100", "nllb_moe", "t5gemma"),
    "bidirectional attention": ("bert", "roberta", "deberta", "deberta_v2", "distilbert", "electra", "albert", "modernbert"),
    "Mamba layers beside attention in one layer, or Mamba layers of the first version": (
        "mamba",
        "mamba2",
        "falcon_mamba",
        "falcon_h1",
        "jamba",
        "bamba",
        "zamba",
        "zamba2",
    ),
    "Kimi delta attention, which no release of Megatron-LM has": ("kimi_linear", "glm5_next", "glm5_next_text"),
    "lightning attention": ("minimax", "minimax_text_01", "minimax_m1", "bailing_hybrid"),
    "linear attention of another kind": ("rwkv", "recurrent_gemma", "olmo_hybrid", "lfm2", "lfm2_moe"),
    "norms after attention and FFN": (
        "gemma3n",
        "gemma3n_text",
        "olmo2",
        "olmo3",
        "flex_olmo",
        "exaone_moe",
        "vaultgemma",
    ),
    "rotary positions in a part of its layers, and norms after attention and FFN": ("exaone4_hybrid",),
    "embeddings in each layer, and keys and values of other layers": ("gemma4_dense", "gemma4_unified"),
    "norms without weights": ("olmo",),
    "one norm for parallel attention and FFN": ("gptj", "codegen", "cohere", "cohere2", "cohere2_moe", "phi"),
    "biases in its norms and output layer, and routing by sparse mixing": ("phimoe",),
    "a learned activation function (xIELU)": ("apertus",),
    "two attention layers and a FFN beside the experts in each layer": ("longcat_flash",),
    "other head sizes in a part of its layers": ("mimo_v2_flash", "step3p5"),
}
"""Types that are not modelled, by the part that the options of a GPT in Megatron-LM do not give."""
_IMAGES: Final = {
    "llava_next": "a number of image tokens that depends on the size of an image",
    "llava_onevision": "a number of image tokens that depends on the size of an image",
    "mllama": "cross-attention between text and images",
    "llama_nemotron_nano_vl": "a RADIO encoder beside its language model",
    "paligemma": "attention without a causal mask for its images",
}
"""Vision-language models, which Megatron-LM does not build from a Hugging Face configuration."""
_SCRIPTS: Final = {
    "a RADIO encoder beside its language model": "examples/multimodal/train.py, with --language-model-type and --vision-model-type",
    "an encoder": "pretrain_t5.py, if it is a T5",
    "bidirectional attention": "pretrain_bert.py, if it is a BERT",
}
"""The training scripts whose launches are analyzed instead."""
_NAMES: Final = {
    "gemma-3n-": "gemma3n",
    "gemma-4-e": "gemma4_dense",
    "gemma-4-31b": "gemma4_dense",
    "olmo-1b": "olmo",
    "olmo-7b": "olmo",
    "olmo-2-": "olmo2",
    "olmo-3-": "olmo3",
    "exaone-4.0-32b": "exaone4_hybrid",
    "exaone-4.5": "exaone4_hybrid",
    "kimi-linear": "kimi_linear",
    "minimax-text-01": "minimax_text_01",
    "minimax-m1": "minimax_m1",
    "bloom": "bloom",
    "mpt-": "mpt",
    "mamba": "mamba",
    "falcon-mamba": "falcon_mamba",
    "falcon-h1": "falcon_h1",
    "jamba": "jamba",
    "bamba": "bamba",
    "zamba": "zamba",
    "recurrentgemma": "recurrent_gemma",
    "lfm2": "lfm2",
    "gpt-j-": "gptj",
    "codegen": "codegen",
    "c4ai-command": "cohere",
    "phi-1": "phi",
    "phi-2": "phi",
    "phi-3.5-moe": "phimoe",
    "apertus": "apertus",
    "longcat-flash": "longcat_flash",
    "mimo-v2-flash": "mimo_v2_flash",
    "t5-": "t5",
    "flan-t5": "t5",
    "mt5-": "mt5",
    "bert-": "bert",
    "roberta-": "roberta",
    "modernbert": "modernbert",
    "llava-v1.6": "llava_next",
    "llava-next": "llava_next",
    "llava-onevision": "llava_onevision",
    "llama-3.2-11b-vision": "mllama",
    "llama-3.2-90b-vision": "mllama",
    "llama-3.1-nemotron-nano-vl": "llama_nemotron_nano_vl",
    "paligemma": "paligemma",
}
"""The model_type of published models, by the beginning of their names without the organization, in lower case."""


def refusal(name: str, model_type: str) -> UnsupportedError | None:
    """The error for a model of a type that is not modelled; None if the type is not known to be refused."""
    kind = model_type.lower()
    what = next((what for what, kinds in REFUSED.items() if kind in kinds), _IMAGES.get(kind))
    if what is None:
        return None
    script = _SCRIPTS.get(what)
    remedy = "choose a model without it" if script is None else f"give the launch of {script}"
    return UnsupportedError(MODEL, f"{name} has {what} (model_type {model_type}), which is not modelled", remedy)


def refusal_of_name(name: str) -> UnsupportedError | None:
    """The error for a published model that is not modelled; None if its name does not tell. `name` may have an organization."""
    short = name.rpartition("/")[2].lower()
    found = max((beginning for beginning in _NAMES if short.startswith(beginning)), key=len, default=None)
    return None if found is None else refusal(name, _NAMES[found])
