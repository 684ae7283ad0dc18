"""The launch in the text of a script is that which bash starts, or is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from analyzer.cli.explorer.shell_text import is_script, launch_of_script
from analyzer.errors import InputError

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.sh"))
SCRIPTS = {
    "defaults": 'N=${N:-4}\ntorchrun --nproc-per-node $N pretrain.py --num-layers "${L:=8}" --x $L',
    "arrays": 'A=(--a 1 "two words" # comment\n  --b)\nA+=(--c "$N")\ntorchrun x.py "${A[@]}" ${A[*]} --last ${A}',
    "splitting": 'A=\'--a 1  --b\'\nB="$A --c"\ntorchrun x.py $B "$B" --d$A',
    "quotes": """torchrun x.py --a 'single $A' --b "double \\"quoted\\" \\$A" --c un\\ quoted --d ''""",
    "arithmetic": "G=8\nN=$((G * 4 + 2))\ntorchrun --nnodes $(( N / G )) x.py --w $N",
    "continued": "torchrun \\\n  --nnodes 2 \\\n  x.py --a 1 2>&1 | tee log.txt",
    "after cd": "cd / && torchrun x.py --a 1",
    "exported": "export A=5 B\nC=7 torchrun x.py --a $A",
    "positional": 'A=$1\ntorchrun x.py --a "$A" --b ${2:-3} "$@"',
    "branch without effect": 'if [ -z "$X" ]; then\n  Y=1\nfi\ntorchrun x.py --a 1',
    "plus": "torchrun x.py ${SET+--never} --a ${UNSET:-b}",
    "exec": "exec torchrun x.py --a 1",
    "python module": "python -m torch.distributed.run --nnodes 1 x.py --a 1",
    "append text": 'A="--a"\nA+=" 1"\ntorchrun x.py $A',
}
REFUSED = {
    "output of a command": "A=$(nproc)\ntorchrun --nproc-per-node $A x.py",
    "assigned in a branch": "A=1\nif true; then\n  A=2\nfi\ntorchrun x.py --a $A",
    "assigned after &&": "A=1\n[ -d / ] && A=2\ntorchrun x.py --a $A",
    "assigned in case": 'A=1\ncase "$B" in\n  x) A=2 ;;\n  *) A=3 ;;\nesac\ntorchrun x.py --a $A',
    "loop": "for A in 1 2; do\n  torchrun x.py --a $A\ndone",
    "loop variable": "for A in 1 2; do\n  echo $A\ndone\ntorchrun x.py --a $A",
    "function": "f() {\n  torchrun x.py --a 1\n}\nf",
    "two launches": "torchrun x.py --a 1\ntorchrun x.py --a 2",
    "sourced": ". ./settings.sh\ntorchrun x.py --a $A",
    "no launch": "echo hello\nls",
    "unended": "torchrun x.py --a 'b\nls",
    "here-document": "cat <<EOF\ntorchrun\nEOF\ntorchrun x.py",
    "read": "read A < file\ntorchrun x.py --a $A",
    "doubling": "A=" + "x" * 1000 + "\n" + "A=$A$A\n" * 40 + "torchrun x.py --a $A",
    "nested": "torchrun x.py --a " + "${A:-" * 3000 + "}" * 3000,
    "must be set": "torchrun x.py --a ${A:?}",
}


def by_bash(script: Path, folder: Path) -> list[str]:
    """The words that bash gives to the launcher: `torchrun` and `python` are programs that print them."""
    for name in ("torchrun", "python"):
        program = folder / name
        program.write_text('#!/bin/sh\nprintf "%s\\0" "${0##*/}" "$@" > "$WORDS"\n')
        program.chmod(0o755)
    words = folder / "words"
    environ = {"PATH": f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin", "WORDS": str(words), "HOME": str(folder)}
    subprocess.run(["bash", str(script)], env=environ, cwd=folder, check=False, capture_output=True, timeout=20)
    found = words.read_text().split("\0")[:-1]
    return found[2:] if found[:2] == ["python", "-m"] else found


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@needs_bash
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_words_are_those_of_bash(name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SCRIPTS[name])
    assert list(launch_of_script(SCRIPTS[name]).words) == by_bash(script, tmp_path)


@needs_bash
@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_the_words_of_an_example_are_those_of_bash(path: Path, tmp_path: Path) -> None:
    assert list(launch_of_script(path.read_text()).words) == by_bash(path, tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_known_is_refused(name: str) -> None:
    with pytest.raises(InputError):
        launch_of_script(REFUSED[name])


def test_an_unknown_part_of_a_path_is_a_placeholder() -> None:
    found = launch_of_script('DIR=$(dirname "$0")\ntorchrun $DIR/pretrain_gpt.py --data-path $DIR/data --a 1')
    assert found.words == ("torchrun", "unknown/pretrain_gpt.py", "--data-path", "unknown/data", "--a", "1")


def test_variables_of_the_launch_and_empty_ones_are_named() -> None:
    found = launch_of_script("export CUDA_DEVICE_MAX_CONNECTIONS=1\nNCCL_ALGO=Ring torchrun x.py --a $MISSING 1")
    assert found.environ == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_ALGO": "Ring"}
    assert found.empty == ("MISSING",)


def test_one_command_is_no_script() -> None:
    assert not is_script("torchrun --nnodes 2 \\\n  pretrain_gpt.py --num-layers 8")
    assert not is_script("meta-llama/Llama-3.1-8B")
    assert is_script("#!/bin/bash\ntorchrun x.py")
    assert is_script("A=1\ntorchrun x.py --a $A")
