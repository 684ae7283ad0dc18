"""Sizes of public tokenizers: `len(AutoTokenizer.from_pretrained(name))` of their published files."""

from __future__ import annotations

import re
from typing import Final

GPT2: Final = 50257
LLAMA_2: Final = 32000
BEGIN_AND_END: Final = 2
"""Tokens that Megatron adds to a vocabulary of BERT."""
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
    "tiiuae/falcon-40b": 65024,
    "TinyLlama/TinyLlama-1.1B": 32000,
    "huggyllama/llama-": 32000,
    "codellama/CodeLlama-": 32016,
    "mistralai/Mistral-Nemo-": 131072,
    "mistralai/Mixtral-8x22B-": 32768,
    "EleutherAI/pythia-": 50277,
    "facebook/opt-": 50265,
    "bigcode/starcoder": 49152,
    "google/gemma-": 256000,
    "swiss-ai/Apertus-": 131072,
    "nvidia/Nemotron-H-": 131072,
    "nvidia/NVIDIA-Nemotron-Nano-": 131072,
    "nvidia/NVIDIA-Nemotron-3-": 131072,
    "nvidia/NVIDIA-Nemotron-3.5-": 131072,
    "alehc/swissai-tokenizer": 131072,
    "google-t5/t5-small": 32100,
    "t5-small": 32100,
}
"""By prefix of a Hugging Face name; the longest matching prefix is used."""


_LEAST_LETTERS: Final = 7
_BY_MODEL: Final = {
    "llama2": LLAMA_2,
    "llama3": 128256,
    **{
        model: size
        for model, size in ((prefix.rpartition("/")[2].lower(), size) for prefix, size in _BY_PREFIX.items())
        if len(model) >= _LEAST_LETTERS or any(letter.isdigit() for letter in model)
    },
}
"""By prefix of the name without its organization, in lower case, without prefixes that are too short to name a model. Folders are
also named llama2 and llama3."""

_PATHS: Final = {
    "GPT2BPETokenizer": (
        (re.compile(r"nordic_tokenizer_131072"), 131072),
        (re.compile(r"gpt[-_]?2|gpt[-_]vocab|(^|[/_])bpe[/_]vocab"), GPT2),
    ),
    "other GPT-2 vocabularies": ((re.compile(r"codeparrot"), 32768),),
    "BertWordPieceLowerCase": ((re.compile(r"uncased"), 30522 + BEGIN_AND_END),),
    "BertWordPieceCase": ((re.compile(r"bert.*[-_]cased"), 28996 + BEGIN_AND_END),),
    "Llama2Tokenizer": (
        (re.compile(r"llm-jp-tokenizer-100k\.ver3\.0b1\.model$"), 99487),
        (re.compile(r"llama[-_]?2|mistral|mixtral|(^|/)tokenizer\.model$"), LLAMA_2),
    ),
}
"""By tokenizer type: paths, in lower case, of its public files, and their number of tokens; the first that fits is used.

The vocabularies of BERT are those of bert-large-uncased and bert-large-cased, and Megatron adds [BOS] and [EOS].
The tokenizer of CodeParrot has the files of GPT-2 with 32,768 tokens (config.json of codeparrot/codeparrot-small).
Megatron's own scripts have gpt2-vocab.json and bpe/vocab.json; the file of Llama 2 is named tokenizer.model. The nordic tokenizer
is that of LumiOpen's Viking models, and the file of LLM-jp is in llm-jp/llm-jp-tokenizer.
"""


BERT_FILES: Final = {"BertWordPieceLowerCase": "bert-large-uncased-vocab.txt", "BertWordPieceCase": "bert-large-cased-vocab.txt"}
"""The published vocabulary for each type of tokenizer. The scripts of BERT and T5 also name it vocab.txt."""


def known_size(name: str) -> int | None:
    """Number of tokens of a public Hugging Face tokenizer, by name or by a path with the name; None for others."""
    written = name.lower()
    fits = [prefix for prefix in _BY_PREFIX if written.startswith(prefix.lower())]
    if fits:
        return _BY_PREFIX[max(fits, key=len)]
    for part in reversed(written.split("/")):
        starts = {0, *(found.end() for found in re.finditer(r"[-_.]", part))}
        fits = [prefix for prefix in _BY_MODEL for start in starts if part.startswith(prefix, start)]
        if fits:
            return _BY_MODEL[max(fits, key=len)]
    return None


def size_of_path(path: str, kind: str) -> int | None:
    """Number of tokens of a public tokenizer of the type `kind` with a file at `path`; None for other paths."""
    return next((size for pattern, size in _PATHS.get(kind, ()) if pattern.search(path.lower())), None)
