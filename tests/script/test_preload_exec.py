"""Programs that a script reaches in other ways than by their name in bash: by a path, through other programs, and after changes of
the shell. A real launcher must never start, and a file must not be removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from analyzer.script.preload_library import COMPILERS, write_library
from tests.script.commands import MODEL, executable, printed, run_text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(all(shutil.which(name) is None for name in COMPILERS), reason="there is no C compiler"),
]

LAUNCH = f"$F/torchrun pretrain_gpt.py {MODEL}"
STARTS = [
    f'run() {{ echo "+ $*"; "$@"; }}; run {LAUNCH}',
    f'set -- {LAUNCH}; "$@"',
    f"word=$F/torchrun; $word pretrain_gpt.py {MODEL}",
    f"MASTER_ADDR=$(hostname) {LAUNCH}",
    f"PATH=$(pwd)/real:$PATH torchrun pretrain_gpt.py {MODEL}",
    f"$(dirname $F/x)/torchrun pretrain_gpt.py {MODEL}",
    f"$F/torch*un pretrain_gpt.py {MODEL}",
    f'trap "{LAUNCH}" EXIT',
    f"exec -a other {LAUNCH}",
    f"exec -c {LAUNCH}",
    f"trap - DEBUG; {LAUNCH}",
    f"set -o posix; {LAUNCH}",
    f"BASH_ENV= bash -c '{LAUNCH}'",
    f"unset LD_PRELOAD; {LAUNCH}",
    f"export LD_PRELOAD=; {LAUNCH}",
    f"env -i F=$F {LAUNCH}",
    f"/usr/bin/env -i {LAUNCH}",
    "./real/nested",
    f"./pretrain_own.py {MODEL}",
    f"./linked pretrain_gpt.py {MODEL}",
    f"./python_link pretrain_gpt.py {MODEL}",
    f"find . -name launch.sh -exec {LAUNCH} ';'",
    f"python3 -c \"import os; os.system('{LAUNCH}')\"",
    f"python3 -c \"import subprocess; subprocess.run('{LAUNCH}'.split())\"",
    f"perl -e 'system(\"{LAUNCH.replace('$F', '$ENV{F}')}\")'",
    f"awk 'BEGIN {{ system(\"{LAUNCH}\") }}'",
]
REMOVALS = [
    'run() { "$@"; }; run /bin/rm -rf kept',
    "T=$(mktemp -d) /bin/rm -rf kept",
    "command -p rm -rf kept",
    "find kept -type f -exec /bin/rm {} ';'",
    "awk 'BEGIN { system(\"/bin/rm -rf kept\") }'",
    "python3 -c \"import subprocess; subprocess.run(['/bin/rm', '-rf', 'kept'])\"",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with programs that leave a mark if they start, and a file to remove."""
    mark = f'echo started >> "{tmp_path}/mark"\n'
    executable(tmp_path / "real" / "torchrun", f"#!/bin/sh\n{mark}")
    executable(tmp_path / "real" / "nested", f"#!/bin/sh\n{LAUNCH}\n")
    python = f"open({str(tmp_path / 'mark')!r}, 'a').write('started')\n"
    executable(tmp_path / "pretrain_own.py", f"#!{shutil.which('python3')}\n{python}")
    (tmp_path / "pretrain_gpt.py").write_text(python)
    (tmp_path / "linked").symlink_to(tmp_path / "real" / "torchrun")
    (tmp_path / "python_link").symlink_to(os.path.realpath(str(shutil.which("python3"))))
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    return tmp_path


@pytest.mark.parametrize("text", STARTS)
def test_a_launcher_by_its_path_is_intercepted(text: str, folder: Path) -> None:
    done = run_text(text, "--info-dry", folder=folder, environ={"F": str(folder / "real")})
    assert not (folder / "mark").exists()
    assert done.returncode == 0, done.stderr
    [launch] = printed(done.stdout)
    assert launch.value("--num-layers") == "2"


@pytest.mark.parametrize("text", REMOVALS)
def test_a_command_by_its_path_removes_nothing(text: str, folder: Path) -> None:
    done = run_text(f"{text}\n{LAUNCH}", "--info-dry", folder=folder, environ={"F": str(folder / "real")})
    assert (folder / "kept" / "file").exists()
    assert done.returncode == 0, done.stderr


def test_other_programs_by_their_path_run_as_usual(folder: Path) -> None:
    text = f"/usr/bin/env >&2\nL=$(python3 -c 'print(7)')\n$F/torchrun x.py {MODEL} --num-layers $L"
    done = run_text(text, "--info-dry", folder=folder, environ={"F": str(folder / "real"), "LD_PRELOAD": ""})
    assert printed(done.stdout)[0].words.count("7") == 1
    assert "HOME=" in done.stderr


def test_the_library_is_compiled_again_if_others_can_write_to_it(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    assert write_library(tmp_path / "first.so", environ)
    [cached] = (tmp_path / ".cache/get-training-info/script").iterdir()
    cached.write_bytes(b"planted")
    cached.chmod(0o777)
    assert write_library(tmp_path / "second.so", environ)
    assert (tmp_path / "second.so").read_bytes() == (tmp_path / "first.so").read_bytes()


def test_without_a_compiler_there_is_no_library(tmp_path: Path) -> None:
    assert not write_library(tmp_path / "none.so", {"HOME": str(tmp_path), "PATH": str(tmp_path)})
    assert not (tmp_path / "none.so").exists()
