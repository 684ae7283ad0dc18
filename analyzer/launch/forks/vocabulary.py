"""Vocabulary sizes of forks: padding to a given size, and the tokenizers of Pai-Megatron-Patch.

Sources: megatron/tokenizer/tokenizer.py of bigscience-workshop/Megatron-DeepSpeed, megatron_patch/tokenizer/__init__.py of
Pai-Megatron-Patch, slime/backends/megatron_utils/arguments.py of slime, megatron/tokenizer/tokenizer.py of Megatron-LLM,
and the configurations of the published models.
"""

from __future__ import annotations

from typing import Final

from analyzer.launch.forks.launch_options import NOTHING, LaunchOptions, Reading
from analyzer.launch.other_models import refuse_other_model

FIXED: Final = {
    "BloomTokenizerFromCustom": 134298,
    "BloomTokenizerFromHF": 250880,
    "ChatGLMTokenizerFromHF": 130528,
    "GLM10BZHTokenizerFromHF": 50048,
    "IcetkGLM130BTokenizer": 150528,
    "StarcoderTokenizerFromHF": 49152,
    "VicunaTokenizerFromHF": 32000,
}
"""Rows of the vocabulary by `--patch-tokenizer-type`, whatever `--extra-vocab-size` is."""
BASE: Final = {
    "BaichuanTokenizer": 64000,
    "FalconTokenizer": 65024,
    "LLama2Tokenizer": 32000,
    "LLama3Tokenizer": 128000,
    "LLamaTokenizer": 32000,
    "MistralTokenizer": 32000,
    "MixtralTokenizer": 32000,
    "OPTTokenizer": 50265,
    "Qwen2Tokenizer": 151643,
    "Qwen2VLTokenizer": 151643,
    "QwenTokenizer": 151851,
    "YiTokenizer": 64000,
}
"""Tokens of the published tokenizers, to which `--extra-vocab-size` is added."""
DEEPSEEK: Final = {0: 163840, 467: 129280, 2400: 102400}
"""Rows with DeepSeekV2Tokenizer by `--extra-vocab-size`: Moonlight, DeepSeek-V3 and DeepSeek-V2."""
LLAMA: Final = 32000
"""Tokens of the tokenizer of Llama and Llama 2."""
_SPECIAL: Final = 5
"""Tokens that Megatron-LLM adds to it: <CLS>, <SEP>, <EOD>, <MASK> and <PAD>."""
YUAN: Final = 135040
"""Rows of the vocabulary of the published Yuan 2.0 models."""
_TOKENIZER: Final = ("--tokenizer-type", "--vocab-size", "--make-vocab-size-divisible-by")


def pad_vocabulary(launch: LaunchOptions, flag: str) -> Reading:
    """The vocabulary is padded to a given number of rows."""
    rows = launch.maybe_integer(flag)
    return NOTHING if rows is None else _rows(rows, f"{flag} {rows} is read as a vocabulary of {rows} rows.")


def patch_tokenizer(launch: LaunchOptions, flag: str) -> Reading:
    """The rows are the tokens of the tokenizer and `--extra-vocab-size`, without further padding."""
    kind = launch.word(flag) or ""
    padded = launch.maybe_integer("--padded-vocab-size")
    extra = launch.integer("--extra-vocab-size", 0)
    rows = padded or FIXED.get(kind) or (DEEPSEEK.get(extra) if kind == "DeepSeekV2Tokenizer" else None)
    if rows is None and kind in BASE:
        rows = BASE[kind] + extra
    if rows is None:
        return Reading(warnings=(f"{flag} {kind}: the number of tokens is unknown, so the prediction may be too high or too low.",))
    return _rows(rows, f"{flag} {kind} is read as a vocabulary of {rows} rows.")


def extra_vocabulary(launch: LaunchOptions, flag: str) -> Reading:
    """It belongs to `--patch-tokenizer-type`; with other tokenizers the rows are unknown."""
    if launch.has("--patch-tokenizer-type") or launch.integer(flag, 0) == 0:
        return NOTHING
    return Reading(warnings=(f"{flag}: the additional rows are not counted, so the prediction is slightly too low.",))


def llm_tokenizer(launch: LaunchOptions) -> Reading:
    """Tokenizers of Megatron-LLM: that of Falcon-40B, and SentencePiece models in `--vocab_file`."""
    kind, path = launch.word("--tokenizer-type"), launch.word("--vocab-file")
    if kind == "FalconTokenizer":
        return Reading(words=("--tokenizer-model", "tiiuae/falcon-40b"))
    if kind != "SentencePieceTokenizer" or path is None:
        return NOTHING
    words = ("--tokenizer-model", path)
    if not _of_llama(launch) or launch.has("--vocab-size"):
        return Reading(words=words)
    added = (launch.word("--vocab_extra_ids_list") or "").split(",")
    tokens = LLAMA + _SPECIAL + sum(bool(token) for token in added)
    return Reading(words=(*words, "--vocab-size", str(tokens)))


def extra_tokens(launch: LaunchOptions, flag: str) -> Reading:
    """Tokens that are added to the tokenizer. They are counted for the tokenizer of Llama (`llm_tokenizer`)."""
    if launch.word("--tokenizer-type") == "SentencePieceTokenizer" and _of_llama(launch):
        return NOTHING
    return Reading(warnings=(f"{flag}: the additional tokens are not counted, so the prediction may be slightly too low.",))


def _of_llama(launch: LaunchOptions) -> bool:
    return "llama" in (launch.word("--vocab-file") or "").lower()


def tokenizer_folder(launch: LaunchOptions, flag: str) -> Reading:
    """A tokenizer of Hugging Face, by name or path. It has no effect if the number of rows is given."""
    name = launch.word(flag)
    return NOTHING if name is None or launch.has("--pad-vocab-size-to") else Reading(words=("--tokenizer-model", name))


def slime_checkpoint(launch: LaunchOptions, flag: str) -> Reading:
    """The checkpoint has the tokenizer; `--vocab-size` gives the rows before padding. Raises UnsupportedError for no GPT."""
    refuse_other_model(flag, launch.word(flag) or "")
    size = launch.maybe_integer("--vocab-size")
    if size is not None:
        words = ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(size - 1))
        return Reading(words=words, dropped=("--tokenizer-type", "--vocab-size"))
    if launch.has("--tokenizer-model"):
        return NOTHING
    return Reading(words=("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", launch.word(flag) or ""))


def _rows(rows: int, note: str) -> Reading:
    """A vocabulary with exactly `rows` rows: Megatron's NullTokenizer adds one token to `--vocab-size`."""
    words = ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(rows - 1), "--make-vocab-size-divisible-by", "1")
    return Reading(words=words, dropped=_TOKENIZER, notes=(note,))
