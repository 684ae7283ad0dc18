"""Counts the tokens in tokenizer files, without the libraries that wrote them.

Formats: Hugging Face `tokenizer.json` (models BPE, WordPiece, WordLevel and Unigram), `vocab.json`, `added_tokens.json` and
`config.json`; SentencePiece models (protobuf message `ModelProto`; field 1 is `pieces`, and field 1 of a piece is its text);
word lists with one word per line. Each function raises ValueError for a file that does not have the expected format, and OSError if
it cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

LARGEST: Final = 10**15
"""Numbers above it are not sizes of a vocabulary."""


def count_vocabulary_json(path: Path) -> int:
    """Number of entries of a JSON object from token to id, such as GPT-2's `vocab.json`."""
    return len(_object(path))


def read_words(path: Path) -> set[str]:
    """The words of a BERT vocabulary."""
    return {line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()}


def read_sentencepieces(path: Path) -> list[str]:
    """The pieces of a SentencePiece model, in order."""
    data = memoryview(path.read_bytes())
    pieces = [_text_of_piece(value) for number, value in _fields(data) if number == 1 and isinstance(value, memoryview)]
    if not pieces:
        raise ValueError(f"{path} has no sentence pieces")
    return pieces


def count_hugging_face(folder: Path) -> tuple[int, str]:
    """`len(tokenizer)` of a tokenizer's folder or file, and the name of the file that was read.

    Includes added tokens. `config.json` is read only if there is no other file: it gives the embedding rows, not the tokens.
    """
    if folder.is_file():
        return (_count_tokenizer_json(folder) if folder.suffix == ".json" else len(read_sentencepieces(folder))), folder.name
    if (folder / "tokenizer.json").is_file():
        return _count_tokenizer_json(folder / "tokenizer.json"), "tokenizer.json"
    added = set(_object(folder / "added_tokens.json")) if (folder / "added_tokens.json").is_file() else set()
    if (folder / "vocab.json").is_file():
        return len(_object(folder / "vocab.json").keys() | added), "vocab.json"
    if (folder / "tokenizer.model").is_file():
        return len(set(read_sentencepieces(folder / "tokenizer.model")) | added), "tokenizer.model"
    size = _object(folder / "config.json").get("vocab_size")
    if size is None:
        raise ValueError(f"{folder / 'config.json'} has no vocab_size")
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= LARGEST:
        raise ValueError(f"vocab_size of {folder / 'config.json'} is {str(size)[:40]}, not a number of tokens")
    return size, "config.json"


def _count_tokenizer_json(path: Path) -> int:
    content = _object(path)
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        tokens = set(vocabulary)
    elif isinstance(vocabulary, list):
        tokens = {entry[0] for entry in vocabulary}
    else:
        raise ValueError(f"{path} has no vocabulary")
    added = content.get("added_tokens")
    return len(tokens | {token["content"] for token in added}) if isinstance(added, list) else len(tokens)


def _object(path: Path) -> dict[str, object]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def _text_of_piece(message: memoryview) -> str:
    for number, value in _fields(message):
        if number == 1 and isinstance(value, memoryview):
            return bytes(value).decode("utf-8", errors="replace")
    return ""


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Field numbers and values of a protobuf message. Fixed-width values are returned as bytes; groups do not occur."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == 2:
            length, at = _varint(message, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} does not occur in SentencePiece models")
        if at + length > len(message):
            raise ValueError("the file is truncated")
        yield number, message[at : at + length]
        at += length


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """The varint at offset `at`, with seven bits per byte, and the offset of its end."""
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("the file is truncated")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
