"""The rates of a disk: units, medians, what is refused, and that the page cache is not measured."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

from allocator_hook.calibrate import disk
from allocator_hook.calibrate.disk import BUDGET, FEWEST, SAMPLES, file_system, measure_disk
from allocator_hook.calibrate.measure import Unmeasurable

BLOCK = mmap.PAGESIZE
PIECE = 4 * BLOCK


class Disk:
    """A disk whose pieces take the given seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, write: list[float], read: list[float]) -> None:
        self.now, self.done = 0.0, {"write": 0, "read": 0}
        for name, seconds in (("write", write), ("read", read)):
            monkeypatch.setattr(disk, f"_{name}", self._action(name, seconds))
        monkeypatch.setattr(disk, "_open", lambda _folder, _system: os.open(os.devnull, os.O_RDWR))
        monkeypatch.setattr(disk, "file_system", lambda _folder: "ext4")

    def _action(self, name: str, seconds: list[float]) -> object:
        def act(_descriptor: int, _buffer: mmap.mmap, place: int, _piece: int) -> None:
            self.now += seconds[place]
            self.done[name] += 1

        return act


def test_a_rate_is_the_median_in_gigabytes_per_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Disk(monkeypatch, write=[0.5, 9.0, 0.5, 0.5, 9.0, 0.5, 9.0], read=[0.25, 0.25, 4.0, 0.25, 4.0, 0.25, 4.0])
    read, write = measure_disk(tmp_path, piece=10**6, now=lambda: slow.now)
    assert (write.name, write.seconds) == ("disk_write_gb_per_s", 0.5)
    assert (read.name, read.seconds) == ("disk_read_gb_per_s", 0.25)
    assert (write.gb_per_s, read.gb_per_s) == pytest.approx((0.002, 0.004))
    assert slow.done == {"write": SAMPLES, "read": SAMPLES}


def test_a_slow_disk_takes_fewer_samples_and_reads_only_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Disk(monkeypatch, write=[BUDGET] * SAMPLES, read=[0.1] * SAMPLES)
    measure_disk(tmp_path, piece=10**6, now=lambda: slow.now)
    assert slow.done == {"write": FEWEST, "read": FEWEST}


def test_a_file_is_written_and_read_past_the_page_cache_and_nothing_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    moved = {"pwrite": 0, "preadv": 0, "fdatasync": 0}
    open_file, pwrite, preadv, fdatasync = os.open, os.pwrite, os.preadv, os.fdatasync

    def counted(name: str, done: int) -> int:
        moved[name] += done
        return done

    def opening(path: str, flags: int, mode: int = 0o777) -> int:
        opened.append(flags)
        return open_file(path, flags, mode)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "pwrite", lambda *args: counted("pwrite", pwrite(*args)))
    monkeypatch.setattr(os, "preadv", lambda *args: counted("preadv", preadv(*args)))
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: counted("fdatasync", 1) and fdatasync(descriptor))
    try:
        rates = measure_disk(tmp_path, piece=PIECE, block=BLOCK)
    except Unmeasurable as error:
        pytest.skip(str(error))
    assert opened[-1] & os.O_DIRECT
    assert moved == {"pwrite": SAMPLES * PIECE, "preadv": SAMPLES * PIECE, "fdatasync": SAMPLES}
    assert all(rate.bytes == PIECE and rate.gb_per_s > 0 for rate in rates)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_o_direct_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_file = os.open

    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_file(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr(disk, "file_system", lambda _folder: "other")
    with pytest.raises(Unmeasurable, match=r"\(other\) has no O_DIRECT, so the page cache would be measured"):
        measure_disk(tmp_path, piece=PIECE, block=BLOCK)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_memory_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Path("/dev/shm")
    if shared.is_dir():
        assert file_system(shared) in disk.IN_MEMORY
    monkeypatch.setattr(disk, "file_system", lambda _folder: "tmpfs")
    with pytest.raises(Unmeasurable, match=r"is in memory \(tmpfs\)"):
        measure_disk(tmp_path)


def test_a_full_disk_is_not_measured(tmp_path: Path) -> None:
    with pytest.raises(Unmeasurable, match=r"needs twice as much free space|in memory"):
        measure_disk(tmp_path, piece=2**50)
    assert list(tmp_path.iterdir()) == []


def test_a_short_write_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda _descriptor, buffer, _offset: len(buffer) - 1)
    monkeypatch.setattr(disk, "file_system", lambda _folder: "ext4")
    with pytest.raises(Unmeasurable, match=r"bytes were moved instead of|O_DIRECT"):
        measure_disk(tmp_path, piece=PIECE, block=BLOCK)
