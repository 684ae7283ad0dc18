"""The number of tokens of the tokenizer, and the padded vocabulary size. No network access.

Megatron: `_vocab_size_with_padding` (megatron/training/tokenizer/tokenizer.py up to 0.16,
megatron/core/tokenizers/utils/build_tokenizer.py from 0.17 on).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError
from analyzer.files import refuse_special_file
from analyzer.launch.derive.model.families import facts_of
from analyzer.launch.derive.reading import integer, option, positive, since, text
from analyzer.launch.entry_script import family_of
from analyzer.launch.tokenizer.known_tokenizers import BERT_FILES, GPT2, TIKTOKEN_DEFAULT, known_size, size_of_path
from analyzer.launch.tokenizer.tokenizer_files import count_hugging_face, count_vocabulary_json, read_sentencepieces, read_words
from analyzer.launch.written_files import as_written
from analyzer.specs import AssumedVocabulary
from analyzer.units import round_up

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput

OWN_TOKENIZER: Final = re.compile(r"\w[-_]tokenizer|tokenizer[-_]\w", re.IGNORECASE)
"""A folder that is named after another tokenizer, such as europa-tokenizer."""
_UNREADABLE: Final = (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError)
"""Exceptions of the functions that read tokenizer files, for a file of another format."""


ASSUMED_SIZE: Final = 128_000
"""Tokens that are assumed if the size is unknown; about that of the tokenizers of Llama 3, Mistral and DeepSeek-V3."""
OTHER_SIZES: Final = (32_000, 256_000)
"""Sizes of small and large tokenizers, such as those of Llama 2 and Gemma. The report says what they would change."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Number of tokens, and number of embedding rows over all tensor-parallel ranks."""

    size: int
    padded: int
    assumed: AssumedVocabulary | None = None
    """Set if the size is unknown."""


@dataclass(frozen=True, kw_only=True)
class _Count:
    """Number of tokens of a tokenizer, and the assumption it is based on; without `size` it is unknown."""

    size: int | None
    assumption: str | None = None
    """The assumption, or the reason that the size is unknown."""


def pad_vocabulary(size: int, *, divisible_by: int, tensor: int) -> int:
    """`size` rounded up to a multiple of `divisible_by` (`--make-vocab-size-divisible-by`) × tensor-parallel size."""
    return round_up(size, divisible_by * tensor)


def read_vocabulary(launch: LaunchInput, *, tensor: int) -> Vocabulary:
    """The vocabulary of a launch. If its size is unknown, `ASSUMED_SIZE` tokens are assumed.

    Raises InputError if it cannot be split over tensor-parallel ranks, and with --info-strict if its size is unknown.
    """
    arguments = launch.arguments
    of_script = facts_of(arguments).vocabulary
    if of_script is not None:
        return Vocabulary(size=of_script, padded=of_script)
    given = positive(arguments, "padded_vocab_size")
    try:
        count = _count(arguments, environ=launch.environ, folder=launch.folder)
    except InputError:
        if given is None:
            raise
        count = _Count(size=None)
    if given is not None:
        if count.size is None:
            launch.assume("The tokenizer was not found: its number of tokens is assumed to be --padded-vocab-size.")
        elif count.assumption is not None:
            launch.assume(count.assumption)
        return Vocabulary(size=min(count.size or given, given), padded=given)
    if count.size is None:
        return _assumed(launch, count.assumption or "", tensor=tensor)
    if count.assumption is not None:
        launch.assume(count.assumption)
    return Vocabulary(size=count.size, padded=_padded(arguments, count.size, tensor=tensor))


def _assumed(launch: LaunchInput, why: str, *, tensor: int) -> Vocabulary:
    """The vocabulary of unknown size. Raises InputError with --info-strict."""
    arguments = launch.arguments
    if launch.strict:
        named = option(arguments, "tokenizer_type")
        raise InputError(named, f"the number of tokens is unknown: {why}", "add --vocab-size N, or --padded-vocab-size N")
    others = tuple((size, _padded(arguments, size, tensor=tensor)) for size in OTHER_SIZES)
    padded = _padded(arguments, ASSUMED_SIZE, tensor=tensor)
    return Vocabulary(size=ASSUMED_SIZE, padded=padded, assumed=AssumedVocabulary(reason=why, others=others))


def _padded(arguments: Arguments, size: int, *, tensor: int) -> int:
    """The embedding rows for `size` tokens. Raises InputError if they cannot be split over tensor-parallel ranks."""
    if arguments.get("pad_vocab_size") is not False:
        divisible_by = positive(arguments, "make_vocab_size_divisible_by") or 128
        return pad_vocabulary(size, divisible_by=divisible_by, tensor=tensor)
    if size % tensor:
        raise InputError(
            option(arguments, "pad_vocab_size"),
            f"{size} tokens cannot be split over {tensor} tensor-parallel ranks",
            "leave it out",
        )
    return size


def _count(arguments: Arguments, *, environ: Mapping[str, str], folder: Path) -> _Count:
    """Number of tokens, by `--tokenizer-type`."""
    kind = text(arguments, "tokenizer_type", facts_of(arguments).tokenizer)
    if kind in ("NullTokenizer", "NullMultimodalTokenizer"):
        return _count_null(arguments, kind)
    if kind == "TikTokenizer":
        return _Count(size=positive(arguments, "vocab_size") or TIKTOKEN_DEFAULT)
    if kind in ("HuggingFaceTokenizer", "SFTTokenizer"):
        return _count_named(arguments, kind, environ=environ, folder=folder)
    if kind == "GPT2BPETokenizer":
        return _count_file(arguments, kind, dest="vocab_file", folder=folder, count=count_vocabulary_json)
    if kind in ("Llama2Tokenizer", "GPTSentencePieceTokenizer"):
        return _count_file(
            arguments, kind, dest="tokenizer_model", folder=folder, count=lambda path: len(read_sentencepieces(path))
        )
    if kind == "SentencePieceTokenizer":
        extra = integer(arguments, "vocab_extra_ids") or 0
        special = not since(arguments, "0.17") or bool(arguments.get("tokenizer_sentencepiece_legacy"))
        return _count_file(
            arguments,
            kind,
            dest="tokenizer_model",
            folder=folder,
            count=lambda path: _sentencepiece_tokens(path, extra=extra, special=special),
        )
    if kind.startswith("BertWordPiece"):
        extra = integer(arguments, "vocab_extra_ids") or 0
        return _count_file(
            arguments,
            kind,
            dest="vocab_file",
            folder=folder,
            count=lambda path: len(read_words(path) | {"[BOS]", "[EOS]"}) + extra,
            extra=extra,
            published=BERT_FILES.get(kind, "") if family_of(arguments.entry) != "gpt" else "",
        )
    name = arguments.get("tokenizer_model")
    if name is not None and arguments.get("vocab_size") is None:
        return _count_named(arguments, kind, environ=environ, folder=folder)
    return _count_given(arguments, f"{kind} cannot be read by this program")


def _count_null(arguments: Arguments, kind: str) -> _Count:
    """`--vocab-size`, plus one end-of-document token up to 0.17 and for NullMultimodalTokenizer."""
    size = positive(arguments, "vocab_size")
    if size is None:
        raise InputError("--vocab-size", f"is required with {kind}", "add --vocab-size N")
    return _Count(size=size if kind == "NullTokenizer" and since(arguments, "0.18") else size + 1)


def _count_given(arguments: Arguments, why: str) -> _Count:
    """`--vocab-size`, if the tokenizer cannot be read for the reason `why`; without it the size is unknown."""
    size = positive(arguments, "vocab_size")
    if size is None:
        return _Count(size=None, assumption=why)
    return _Count(size=size, assumption=f"{size} tokens are assumed, from --vocab-size: {why}.")


def _count_file(
    arguments: Arguments, kind: str, *, dest: str, folder: Path, count: Callable[[Path], int], extra: int = 0, published: str = ""
) -> _Count:
    """Number of tokens in the file of `dest`; if it does not exist, `--vocab-size`, or the size of a tokenizer with this path.

    `extra`: tokens that the launch adds to those of such a tokenizer. `published`: what a file named vocab.txt is taken for.
    """
    named = option(arguments, dest)
    value = arguments.get(dest)
    path = None if value is None else as_written(folder / str(value))
    if path is not None and _found(path, named, Path.is_file):
        return _Count(size=_counted(path, named, count))
    missing = f"{named} is not given" if path is None else f"{value} was not found"
    if path is None and "tokenizer_type" not in arguments.given:
        missing = "the launch gives no tokenizer"
    known = None if path is None else size_of_path(published if published and path.name == "vocab.txt" else str(value), kind)
    if known is None and kind == "GPT2BPETokenizer":
        known = _of_gpt2(arguments, path)
    if known is not None and arguments.get("vocab_size") is None:
        known += extra
        return _Count(size=known, assumption=f"Vocabulary: {known:,} tokens, the usual number of {kind}, because {missing}.")
    return _count_given(arguments, missing)


def _of_gpt2(arguments: Arguments, path: Path | None) -> int | None:
    """Number of tokens of GPT-2's tokenizer if the launch names its type, or its two files; None if a path names another one."""
    has_files = path is not None and "vocab" in path.name and any(word.startswith("--merge-file") for word in arguments.words)
    if not has_files and "tokenizer_type" not in arguments.given:
        return None
    if path is not None and OWN_TOKENIZER.search(str(path)):
        return None
    others = (size_of_path(word, "other GPT-2 vocabularies") for word in arguments.words)
    return next(filter(None, others), GPT2)


def _counted(path: Path, named: str, count: Callable[[Path], int]) -> int:
    try:
        size = count(path)
    except _UNREADABLE as error:
        raise _unreadable(named, path, error) from None
    if size <= 0:
        raise InputError(named, f"{path} has no tokens", "give the file of the tokenizer")
    return size


def _unreadable(named: str, path: Path, error: Exception) -> InputError:
    why = str(error).splitlines()[0] if str(error) else type(error).__name__
    return InputError(
        named,
        f"{path} cannot be read as a vocabulary ({why})",
        "give a valid file, or leave it out and add --vocab-size N",
    )


def _sentencepiece_tokens(path: Path, *, extra: int, special: bool) -> int:
    """Number of pieces of the model; with `special` (up to 0.16) plus missing special tokens and `--vocab-extra-ids`."""
    pieces = set(read_sentencepieces(path))
    if not special:
        return len(pieces)
    missing = sum(piece not in pieces for piece in ("<pad>", "<s>", "</s>"))
    return len(pieces | {"<CLS>", "<SEP>", "<EOD>", "<MASK>"} | {f"<extra_id_{i}>" for i in range(extra)}) + missing


def _count_named(arguments: Arguments, kind: str, *, environ: Mapping[str, str], folder: Path) -> _Count:
    """Number of tokens of a Hugging Face tokenizer: a folder, a file, a name in the local cache, or a known name."""
    value = arguments.get("tokenizer_model")
    named = option(arguments, "tokenizer_model")
    if value is None:
        return _count_given(arguments, f"{kind} needs {named}")
    name = str(value)
    given = as_written(folder / name)
    place = given if _found(given, named, _exists) else _cached(name, environ=environ)
    if place is not None:
        try:
            size, source = count_hugging_face(place)
        except _UNREADABLE as error:
            raise _unreadable(named, place, error) from None
        if not size:
            raise InputError(named, f"{place / source} has no tokens", "give the folder of the tokenizer")
        if source != "config.json":
            return _Count(size=size)
        return _Count(size=size, assumption=f"Vocabulary: {size:,} tokens, from {place / source}; they may include unused rows.")
    known = known_size(name)
    if known is not None and arguments.get("vocab_size") is None:
        return _Count(
            size=known,
            assumption=f"Vocabulary: {known:,} tokens, the published number of {name}, because its files were not found.",
        )
    return _count_given(arguments, f"{name} is neither a local tokenizer nor a name with a known size")


def _found(place: Path, named: str, exists: Callable[[Path], bool]) -> bool:
    """Whether `exists` finds a tokenizer at `place`. Raises InputError if it may not be read, and for a pipe or a device.

    /dev/null is no tokenizer.
    """
    if str(place) != os.devnull:
        refuse_special_file(place, named, "give the file of the tokenizer")
    try:
        return exists(place)
    except OSError as error:
        raise InputError(named, f"{place} cannot be read ({error.strerror})", "give a path that you may read") from None


def _exists(place: Path) -> bool:
    """Whether there is a file or a folder with files at `place`. Launch scripts create a folder and download into it."""
    return place.is_file() or (place.is_dir() and any(place.iterdir()))


def _cached(name: str, *, environ: Mapping[str, str]) -> Path | None:
    """The newest snapshot of `name` in the local Hugging Face cache, or None."""
    home = environ.get("HF_HOME") or str(Path(environ.get("HOME", "~")) / ".cache" / "huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    snapshots = hub / f"models--{name.replace('/', '--')}" / "snapshots"
    try:
        found = sorted((entry for entry in snapshots.iterdir() if entry.is_dir()), key=lambda entry: entry.stat().st_mtime)
    except OSError:
        return None
    return found[-1] if found else None
