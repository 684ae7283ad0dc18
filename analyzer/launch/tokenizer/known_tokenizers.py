"""Sizes of public tokenizers: `len(AutoTokenizer.from_pretrained(name))` of their published files."""

from __future__ import annotations

from typing import Final

GPT2: Final = 50257
LLAMA_2: Final = 32000
TIKTOKEN_DEFAULT: Final = 2**17
"""`DEFAULT_TIKTOKEN_MAX_VOCAB` of Megatron's TikTokenizer."""

_BY_PREFIX: Final = {
    "meta-llama/Llama-2-": LLAMA_2,
    "meta-llama/Meta-Llama-3": 128256,
    "meta-llama/Llama-3": 128256,
    "Qwen/Qwen1.5-": 151646,
    "Qwen/Qwen2-": 151646,
    "Qwen/Qwen2.5-": 151665,
    "Qwen/Qwen3-": 151669,
    "deepseek-ai/DeepSeek-V3": 128815,
    "openai/gpt-oss-": 200019,
    "mistralai/Mistral-7B-v0.1": 32000,
    "mistralai/Mistral-7B-Instruct-v0.1": 32000,
    "mistralai/Mistral-7B-Instruct-v0.2": 32000,
    "mistralai/Mistral-7B-v0.3": 32768,
    "mistralai/Mistral-7B-Instruct-v0.3": 32768,
    "mistralai/Mixtral-8x7B-": 32000,
    "openai-community/gpt2": GPT2,
    "gpt2": GPT2,
    "EleutherAI/gpt-neox-20b": 50277,
    "bigscience/bloom": 250680,
    "tiiuae/falcon-7b": 65024,
    "TinyLlama/TinyLlama-1.1B": 32000,
}
"""By prefix of a Hugging Face name; the longest matching prefix is used."""


def known_size(name: str) -> int | None:
    """Number of tokens of a public Hugging Face tokenizer; None for other names."""
    fits = [prefix for prefix in _BY_PREFIX if name.lower().startswith(prefix.lower())]
    return _BY_PREFIX[max(fits, key=len)] if fits else None
