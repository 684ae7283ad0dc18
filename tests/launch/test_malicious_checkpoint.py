"""Checkpoints that are built to use much memory or time are refused at once."""

from __future__ import annotations

import pickle
import resource
import struct
import time
import zipfile
from pathlib import Path

import pytest

from analyzer.errors import InputError
from analyzer.launch.options import safe_pickle
from analyzer.launch.options.checkpoint_args import read_args

ARGS = b"\x80\x02}X\x04\x00\x00\x00args(cargparse\nNamespace\no}X\x05\x00\x00\x00value%bsbs."
"""A checkpoint whose only argument has the pickle that replaces %b. No protocol but 2 is used by torch.save."""

DEEP = b")" + b"\x85" * 1_000_000
"""Tuples in tuples."""
DOUBLED = b")" + b"2\x86" * 60
"""60 tuples, each with the previous one twice: 2^60 values."""
RECURSIVE = b"]q\x00" + b"h\x00a" * 50
"""A list that contains itself 50 times."""
IGNORED = {
    "a tuple that takes long to hash": b"}(" + DOUBLED + b"K\x01u",
    "a set that takes long to hash": b"(" + DOUBLED + b"\x91",
    "an array of bytes": b"\x96" + struct.pack("<Q", 3) + b"abc",
    "a long integer": b"\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20),
    "arguments that are copied at every call": b"(" + b"K\x01" * 30000 + b"tq\x00" + b"cos\nx\nh\x00R0" * 30000 + b"N",
}
REFUSED = {
    "nested tuples": (DEEP, "nested"),
    "doubled tuples": (DOUBLED, "nested|values"),
    "a recursive list": (RECURSIVE, "nested|values"),
    "many operations": (b"N0" * 4_000_000 + b"N", "operations"),
    "a long string": (b"X" + struct.pack("<I", 2 << 20) + b"x" * (2 << 20), "characters"),
    "an allocated array": (b"\x96" + struct.pack("<Q", 2 << 30), "damaged"),
    "a cut string": (b"X" + struct.pack("<I", 2 << 30), "damaged"),
}


def save(path: Path, data: bytes, *, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data)
    return path


def args_with(value: bytes) -> bytes:
    before, after = ARGS.split(b"%b")
    return before + value + after


@pytest.fixture(autouse=True)
def _limits() -> object:
    """Each file is read in a few seconds of CPU time and with less than 1 GiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    yield
    assert time.process_time() - start < 15
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20


def test_the_constructed_pickle_is_a_checkpoint(tmp_path: Path) -> None:
    assert vars(pickle.loads(args_with(b"K\x07"))["args"]) == {"value": 7}
    assert read_args(save(tmp_path / "common.pt", args_with(b"K\x07"))) == {"value": 7}
    assert read_args(save(tmp_path / "common.pt", args_with(b"](K\x07K\x08e"))) == {"value": (7, 8)}


@pytest.mark.parametrize("value", IGNORED.values(), ids=IGNORED.keys())
def test_values_that_are_no_arguments_are_ignored(tmp_path: Path, value: bytes) -> None:
    path = save(tmp_path / "common.pt", args_with(b"(" + value + b"1K\x07"))
    assert read_args(path) == {"value": 7}


@pytest.mark.parametrize(
    ("value", "fault"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] if name == "many operations" else []) for name, case in REFUSED.items()],
)
def test_values_without_a_limit_are_refused(tmp_path: Path, value: bytes, fault: str) -> None:
    path = save(tmp_path / "common.pt", args_with(value))
    with pytest.raises(InputError, match=fault) as caught:
        read_args(path)
    assert len(str(caught.value)) < 400


def test_the_number_of_operations_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_pickle, "MAX_READS", 1000)
    path = save(tmp_path / "common.pt", args_with(b"N0" * 1000 + b"N"))
    with pytest.raises(InputError, match="more than 1000 operations"):
        read_args(path)


def test_a_pickle_of_nine_bytes_takes_no_memory(tmp_path: Path) -> None:
    """LONG_BINPUT with a large index, for which the unpickler in C allocates 2 GiB."""
    with pytest.raises(InputError, match="contains no arguments"):
        read_args(save(tmp_path / "common.pt", b"\x80\x02Nr\xff\xff\xff\x0f."))


def test_a_zip_of_zeros_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "common.pt", bytes(1 << 26), compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(InputError, match="100 times"):
        read_args(path)
