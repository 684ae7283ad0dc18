"""The cases of tests/data/hostile/cases.json: command lines, environments and files that are built to break the program."""

from __future__ import annotations

import gzip
import json
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from allocator_hook.trace_writer import TraceWriter
from analyzer.trace.events import Header
from tests.data_files import data_file

GROUPS: Final = {
    "@world": ("--info-world-size", "8", "--info-gpu-memory", "80GiB"),
    "@model": tuple(
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
        "--micro-batch-size 1 --global-batch-size 8 --bf16".split()
    ),
    "@vocabulary": ("--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"),
}
"""Words that stand for several."""

REPEATED: Final = re.compile(r"\{(.)\*(\d+)\}")
"""`{9*5000}` stands for 5,000 digits."""


def cases() -> list[dict[str, Any]]:
    """All cases, with the fields that tests/data/README.md describes."""
    found: list[dict[str, Any]] = json.loads(data_file("hostile/cases.json").read_text(encoding="utf-8"))
    return found


def expanded(text: str, folder: Path) -> str:
    """`text` with its repetitions written out, and the folder of the case."""
    return REPEATED.sub(lambda found: found[1] * int(found[2]), text.replace("{folder}", str(folder)))


def words_of(case: dict[str, Any], folder: Path) -> list[str]:
    """The command line of a case."""
    return [expanded(word, folder) for given in case["words"] for word in GROUPS.get(given, (given,))]


def create_files(case: dict[str, Any], folder: Path) -> None:
    """Create the files of a case. Permissions are changed at the end."""
    files: dict[str, dict[str, Any]] = case.get("files", {})
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if "text" in content:
            path.write_text(expanded(content["text"], folder))
        elif "hex" in content:
            path.write_bytes(bytes.fromhex(content["hex"]))
        elif "pipe" in content:
            os.mkfifo(path)
        elif "folder" in content:
            path.mkdir(exist_ok=True)
        else:
            GENERATED[content["generate"]](path)
    for name, content in files.items():
        if "mode" in content:
            (folder / name).chmod(content["mode"])


def make_accessible(case: dict[str, Any], folder: Path) -> None:
    """Give the user access to the files of a case, so that they can be removed."""
    for name, content in case.get("files", {}).items():
        if "mode" in content and (folder / name).exists():
            (folder / name).chmod(0o700)


def _checkpoint(pickled: bytes, *, compression: int = zipfile.ZIP_STORED) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr("archive/data.pkl", pickled)

    return write


def _with_argument(value: bytes) -> bytes:
    """The pickle of a checkpoint whose only argument has the pickle `value`."""
    return b"\x80\x02}X\x04\x00\x00\x00args(cargparse\nNamespace\no}X\x05\x00\x00\x00value" + value + b"sbs."


def _write_trace(path: Path) -> None:
    with TraceWriter(path, Header(recorder="shadow")) as writer:
        writer.free(512, time_ns=0)


def _trace_and_zeros(path: Path) -> None:
    _write_trace(path)
    os.truncate(path, 2 << 30)  # takes no space on the disk


def _gzip_bomb(path: Path) -> None:
    _write_trace(path)
    content = path.read_bytes()
    with gzip.open(path, "wb") as packed:
        packed.write(content)
        for _ in range(16):
            packed.write(bytes(1 << 22))


GENERATED: Final[dict[str, Callable[[Path], None]]] = {
    # LONG_BINPUT with a large index, for which the unpickler in C allocates 2 GiB
    "9-byte pickle": _checkpoint(b"\x80\x02Nr\xff\xff\xff\x0f."),
    "zip of zeros": _checkpoint(bytes(1 << 26), compression=zipfile.ZIP_DEFLATED),
    "nested tuples": _checkpoint(_with_argument(b")" + b"\x85" * 200_000)),
    "recursive list": _checkpoint(_with_argument(b"]q\x00" + b"h\x00a" * 50)),
    "trace and zeros": _trace_and_zeros,
    "gzip bomb": _gzip_bomb,
}
"""Files that are too large for the repository, by name."""
