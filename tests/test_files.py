"""Compiled libraries and cached traces are used only where no other user can put them. Output files are written in one step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from allocator_hook.cuda import build as build_module
from allocator_hook.shadow import engine
from allocator_hook.shadow.request import Request
from allocator_hook.trace_writer import TraceWriter
from analyzer.errors import AnalyzerError, InputError
from analyzer.files import check_writable, is_private, private_folder, replacing
from analyzer.report.json.document import write_text
from analyzer.trace.events import Header
from analyzer.trace.reader import read_complete_trace
from tests.job_of import job_of

JOB = job_of("--num-layers 4 --global-batch-size 8")


def write_trace(path: Path, pointer: int = 7) -> None:
    with TraceWriter(path, Header(recorder="shadow")) as writer:
        writer.free(pointer)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for an engine whose worker only writes traces."""
    monkeypatch.setattr(engine, "check_supported", lambda _job: None)
    monkeypatch.setattr(engine, "installed", lambda: {"torch": "2.10"})

    def work(request: Request, _folder: Path, finished: Callable[[int], None]) -> None:
        for rank, path in request.traces.items():
            write_trace(path)
            finished(rank)

    monkeypatch.setattr(engine, "_work", work)
    return tmp_path / "cache"


def test_files_that_others_can_write_to_are_not_private(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for mode, expected in ((0o600, True), (0o644, True), (0o664, False), (0o646, False)):
        file.chmod(mode)
        assert is_private(file) == expected
    file.chmod(0o600)
    (tmp_path / "link").symlink_to(file)
    assert not is_private(tmp_path / "link")
    assert not is_private(tmp_path / "absent")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_files_and_folders_of_another_user_are_not_private(tmp_path: Path) -> None:
    file = tmp_path / "planted"
    file.mkdir()
    os.chown(file, 1234, -1)
    assert not is_private(file)
    with pytest.raises(PermissionError, match="other users can write to"):
        private_folder(file / "inside")


def test_a_folder_is_created_for_the_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (made, made.parent)] == [0o700, 0o700]


@pytest.mark.parametrize("shared", ["a", "a/b"])
def test_a_folder_below_one_that_others_can_write_to_is_refused(tmp_path: Path, shared: str) -> None:
    private_folder(tmp_path / "a" / "b")
    (tmp_path / shared).chmod(0o770)
    with pytest.raises(PermissionError, match=f"other users can write to .*/{shared}$|other users can write to .*/{shared}:"):
        private_folder(tmp_path / "a" / "b")


def test_a_library_that_others_can_write_to_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho compiled > "$2"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    library = build_module.build()
    library.write_text("planted")
    assert build_module.build().read_text() == "planted", "an own library is used as it is"
    library.chmod(0o666)
    assert build_module.build().read_text() == "compiled\n"
    assert library.stat().st_mode & 0o777 == 0o700
    library.unlink()
    (tmp_path / "planted").write_text("planted")
    library.symlink_to(tmp_path / "planted")
    assert build_module.build().read_text() == "compiled\n"
    assert (tmp_path / "planted").read_text() == "planted", "the file behind the link does not change"
    library.parent.chmod(0o777)
    with pytest.raises(InputError, match="only you can write to"):
        build_module.build()


def test_a_damaged_truncated_or_planted_trace_is_recorded_again(cache: Path) -> None:
    path = engine.run(JOB, [0], cache_dir=cache)[0]
    whole = path.read_bytes()
    assert (cache.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    for damaged in (whole[:-48], whole[:60], b"", whole[:-1] + b"\0", b"no trace"):
        path.write_bytes(damaged)
        assert len(read_complete_trace(engine.run(JOB, [0], cache_dir=cache)[0])) == 1
    write_trace(path, pointer=9)
    path.chmod(0o666)
    [free] = read_complete_trace(engine.run(JOB, [0], cache_dir=cache)[0])
    assert free.pointer == 7  # type: ignore[union-attr]
    assert [each.name for each in cache.iterdir()] == [path.name]
    cache.chmod(0o777)
    with pytest.raises(InputError, match="only you can write to"):
        engine.run(JOB, [0], cache_dir=cache)


def test_an_incomplete_recording_does_not_reach_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(request: Request, _folder: Path, finished: Callable[[int], None]) -> None:
        write_trace(request.traces[0])
        os.truncate(request.traces[0], request.traces[0].stat().st_size - 48)
        finished(0)

    monkeypatch.setattr(engine, "_work", work)
    with pytest.raises(AnalyzerError, match="did not finish"):
        engine.run(JOB, [0], cache_dir=cache)
    assert not list(cache.iterdir())


def test_a_failure_leaves_the_older_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text("older")

    def fail() -> None:
        with replacing(file) as unfinished:
            unfinished.write_text("half")
            assert file.read_text() == "older"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert file.read_text() == "older"
    assert list(tmp_path.iterdir()) == [file]


def test_a_new_file_has_the_permissions_of_open_and_an_older_one_keeps_its_own(tmp_path: Path) -> None:
    file, private = tmp_path / "report.json", tmp_path / "private.json"
    private.touch(mode=0o600)
    before = os.umask(0o027)
    try:
        for each in (file, private):
            write_text("{}", str(each))
    finally:
        os.umask(before)
    assert [each.stat().st_mode & 0o777 for each in (file, private)] == [0o640, 0o600]


def test_a_link_is_replaced_and_the_file_behind_it_does_not_change(tmp_path: Path) -> None:
    target, link, dangling = tmp_path / "notes", tmp_path / "report.json", tmp_path / "new.json"
    target.write_text("mine")
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "absent")
    for each in (link, dangling):
        write_text("{}", str(each))
        assert (each.is_symlink(), each.read_text()) == (False, "{}")
    assert target.read_text() == "mine"
    assert not (tmp_path / "absent").exists()


def test_a_folder_behind_a_link_is_written_to_and_a_link_to_a_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "results")
    write_text("{}", str(tmp_path / "link" / "report.json"))
    assert [each.name for each in (tmp_path / "results").iterdir()] == ["report.json"]
    with pytest.raises(InputError, match=r"cannot write .*directory"):
        write_text("{}", str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()


def test_a_pipe_gets_the_document(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text("{}", str(pipe))
    reader.join(timeout=10)
    assert read == ["{}"]
    assert pipe.is_fifo()


def test_open_files_of_the_process_are_continued(tmp_path: Path) -> None:
    """`--info-json /dev/stdout >> FILE` adds to the file, of which nothing is lost."""
    file = tmp_path / "all.json"
    file.write_text("[1]\n")
    with file.open("a") as stream:
        for _ in range(2):
            write_text("{}\n", f"/dev/fd/{stream.fileno()}")
    assert file.read_text() == "[1]\n{}\n{}\n"
    assert not Path("/dev/null").is_file()
    write_text("{}", "/dev/null")
    assert Path("/dev/null").is_char_device()


def test_a_file_that_can_be_written_is_not_created(tmp_path: Path) -> None:
    check_writable(str(tmp_path / "report.json"), "--info-json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for wrong in (tmp_path, tmp_path / "absent" / "report.json", tmp_path / "file" / "report.json"):
        with pytest.raises(InputError, match=r"^--info-json: cannot write .*; name a file"):
            check_writable(str(wrong), "--info-json")
