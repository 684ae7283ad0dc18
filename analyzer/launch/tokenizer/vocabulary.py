"""The number of tokens of the tokenizer, and the padded vocabulary size. No network access.

Megatron: `_vocab_size_with_padding` (megatron/training/tokenizer/tokenizer.py up to 0.16,
megatron/core/tokenizers/utils/build_tokenizer.py from 0.17 on).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError
from analyzer.launch.derive.reading import integer, option, positive, since, text
from analyzer.launch.tokenizer.known_tokenizers import GPT2, LLAMA_2, TIKTOKEN_DEFAULT, known_size
from analyzer.launch.tokenizer.tokenizer_files import count_hugging_face, count_vocabulary_json, read_sentencepieces, read_words
from analyzer.units import round_up

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput

DEFAULT_TOKENIZER: Final = "GPT2BPETokenizer"
"""The default tokenizer of pretrain_gpt.py."""
_UNREADABLE: Final = (OSError, ValueError, KeyError, TypeError, IndexError)
"""Exceptions of the functions that read tokenizer files, for a file of another format."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Number of tokens, and number of embedding rows over all tensor-parallel ranks."""

    size: int
    padded: int


@dataclass(frozen=True, kw_only=True)
class _Count:
    """Number of tokens of a tokenizer, and the assumption it is based on."""

    size: int
    assumption: str | None = None


def pad_vocabulary(size: int, *, divisible_by: int, tensor: int) -> int:
    """`size` rounded up to a multiple of `divisible_by` (`--make-vocab-size-divisible-by`) × tensor-parallel size."""
    return round_up(size, divisible_by * tensor)


def read_vocabulary(launch: LaunchInput, *, tensor: int) -> Vocabulary:
    """The vocabulary of a launch. Raises InputError if its size is unknown or cannot be split over tensor-parallel ranks."""
    arguments = launch.arguments
    given = positive(arguments, "padded_vocab_size")
    try:
        count = _count(arguments, environ=launch.environ, folder=launch.folder)
    except InputError:
        if given is None:
            raise
        count = _Count(
            size=given, assumption="The tokenizer was not found: its number of tokens is assumed to be --padded-vocab-size."
        )
    if count.assumption is not None:
        launch.assume(count.assumption)
    if given is not None:
        return Vocabulary(size=min(count.size, given), padded=given)
    if arguments.get("pad_vocab_size") is False:
        if count.size % tensor:
            raise InputError(
                option(arguments, "pad_vocab_size"),
                f"{count.size} tokens cannot be split over {tensor} tensor-parallel ranks",
                "leave it out",
            )
        return Vocabulary(size=count.size, padded=count.size)
    divisible_by = positive(arguments, "make_vocab_size_divisible_by") or 128
    return Vocabulary(size=count.size, padded=pad_vocabulary(count.size, divisible_by=divisible_by, tensor=tensor))


def _count(arguments: Arguments, *, environ: Mapping[str, str], folder: Path) -> _Count:
    """Number of tokens, by `--tokenizer-type`."""
    kind = text(arguments, "tokenizer_type", DEFAULT_TOKENIZER)
    if kind in ("NullTokenizer", "NullMultimodalTokenizer"):
        return _count_null(arguments, kind)
    if kind == "TikTokenizer":
        return _Count(size=positive(arguments, "vocab_size") or TIKTOKEN_DEFAULT)
    if kind in ("HuggingFaceTokenizer", "SFTTokenizer"):
        return _count_named(arguments, kind, environ=environ, folder=folder)
    if kind == "GPT2BPETokenizer":
        return _count_file(arguments, kind, dest="vocab_file", folder=folder, count=count_vocabulary_json, known=GPT2)
    if kind in ("Llama2Tokenizer", "GPTSentencePieceTokenizer"):
        known = LLAMA_2 if kind == "Llama2Tokenizer" else None
        return _count_file(
            arguments, kind, dest="tokenizer_model", folder=folder, count=lambda path: len(read_sentencepieces(path)), known=known
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
            arguments, kind, dest="vocab_file", folder=folder, count=lambda path: len(read_words(path) | {"[BOS]", "[EOS]"}) + extra
        )
    return _count_given(arguments, kind, "cannot be read by this program")


def _count_null(arguments: Arguments, kind: str) -> _Count:
    """`--vocab-size`, plus one end-of-document token up to 0.17 and for NullMultimodalTokenizer."""
    size = positive(arguments, "vocab_size")
    if size is None:
        raise InputError("--vocab-size", f"is required with {kind}", "add --vocab-size N")
    return _Count(size=size if kind == "NullTokenizer" and since(arguments, "0.18") else size + 1)


def _count_given(arguments: Arguments, kind: str, why: str) -> _Count:
    """`--vocab-size`, if the tokenizer cannot be read. Raises InputError without it."""
    size = positive(arguments, "vocab_size")
    if size is None:
        raise InputError(
            option(arguments, "tokenizer_type"),
            f"the number of tokens is unknown: {kind} {why}",
            "add --vocab-size N, or --padded-vocab-size N",
        )
    return _Count(size=size, assumption=f"{size} tokens are assumed, from --vocab-size: {kind} {why}.")


def _count_file(
    arguments: Arguments, kind: str, *, dest: str, folder: Path, count: Callable[[Path], int], known: int | None = None
) -> _Count:
    """Number of tokens in the file of `dest`; if it does not exist, `--vocab-size` or `known`, the usual size."""
    named = option(arguments, dest)
    value = arguments.get(dest)
    path = None if value is None else folder / str(value)
    if path is not None and path.is_file():
        return _Count(size=_counted(path, named, count))
    missing = f"{named} is not given" if path is None else f"{value} was not found"
    if known is not None and arguments.get("vocab_size") is None:
        return _Count(size=known, assumption=f"The usual {known} tokens are assumed for {kind}: {missing}.")
    return _count_given(arguments, kind, f"was not found ({missing})")


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
        return _count_given(arguments, kind, f"needs {named}")
    name = str(value)
    place = folder / name if (folder / name).exists() else _cached(name, environ=environ)
    if place is not None:
        try:
            size, source = count_hugging_face(place)
        except _UNREADABLE as error:
            raise _unreadable(named, place, error) from None
        if source != "config.json":
            return _Count(size=size)
        return _Count(size=size, assumption=f"{size} tokens are assumed, from {place / source}; they may include unused rows.")
    known = known_size(name)
    if known is not None and arguments.get("vocab_size") is None:
        return _Count(
            size=known,
            assumption=f"The published {known} tokens are assumed for {name}: its files were not found.",
        )
    return _count_given(arguments, kind, f"was not found ({name} is neither a local tokenizer nor a name with a known size)")


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
