"""The workflow for GitHub Actions in examples/: its steps are run with bash, as the runner does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from analyzer.launch.info_options import FLAGS, read_info_options
from tests.job_of import BASE

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / "examples" / "github_actions.yml"
TARGET = "Analyze the scripts of the target branch"
PROPOSED = "Check the scripts of the pull request"
LAUNCH = f"--nproc-per-node 8 pretrain_gpt.py {BASE} --global-batch-size 64"
TOO_LARGE = f"{LAUNCH} --num-layers 512"


def _workflow() -> dict[Any, Any]:
    content: dict[Any, Any] = yaml.safe_load(WORKFLOW.read_text())
    return content


def _steps() -> dict[str, dict[str, Any]]:
    """The steps that have a name."""
    return {step["name"]: step for step in _workflow()["jobs"]["memory"]["steps"] if "name" in step}


def _run(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a step of the workflow in `folder`, with a stand-in for the program that takes the launch from the script's text."""
    program = folder / "bin" / "get-training-info"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nlaunch=$(cat "$1")\nshift\nexec "{sys.executable}" {ROOT}/get_training_info.py $launch "$@"\n')
    program.chmod(0o755)
    step = _steps()[name]
    environ = {
        **{key: str(value) for key, value in _workflow()["env"].items()},
        "PATH": f"{program.parent}:{os.environ.get('PATH', os.defpath)}",
        "HOME": str(folder),
        "RUNNER_TEMP": str(folder / "temp"),
    }
    where = folder / step["working-directory"]
    # the shell of a step of a Linux runner
    return subprocess.run(
        ["bash", "-e", "-c", step["run"]], cwd=where, env=environ, capture_output=True, text=True, timeout=60, check=False
    )


def _branches(folder: Path, target: dict[str, str], proposed: dict[str, str]) -> None:
    for branch, scripts in (("target", target), ("proposed", proposed)):
        (folder / branch / "launch").mkdir(parents=True)
        for name, launch in scripts.items():
            (folder / branch / "launch" / name).write_text(launch)


def test_the_workflow_runs_on_pull_requests_without_write_access() -> None:
    workflow = _workflow()
    assert "pull_request" in workflow[True]  # YAML 1.1 reads the key `on` as a boolean
    assert workflow["permissions"] == {"contents": "read"}
    steps = _steps()
    assert steps["Keep the JSON reports"]["if"] == "always()"
    assert steps["Keep the JSON reports"]["with"]["path"] == "${{ runner.temp }}/reports"
    # text of the pull request must not become part of a shell command
    assert not any("${{" in step.get("run", "") for step in workflow["jobs"]["memory"]["steps"])


def test_the_options_exist_and_have_valid_values() -> None:
    environ = _workflow()["env"]
    used = {}
    for step in _workflow()["jobs"]["memory"]["steps"]:
        assert {*re.findall(r"--info-strict", step.get("run", ""))} <= {*FLAGS}
        for flag, value in re.findall(r"(--info-(?!strict)[a-z-]+) (\S+)", step.get("run", "")):
            variable = re.fullmatch(r'"\$(\w+)"', value)
            used[flag] = str(environ[variable[1]]) if variable else value
    assert {*used} == {"--info-gpu", "--info-fail-on", "--info-margin", "--info-json", "--info-against"}
    assert {*used} <= {*FLAGS}
    options = read_info_options(used.items())
    assert options.fail_on == ("tight", "unknown")
    assert options.margin is not None
    assert options.margin.of(100) == 5


@pytest.mark.slow
def test_a_script_that_no_longer_fits_fails_and_the_others_are_checked(tmp_path: Path) -> None:
    target = {"a.sh": LAUNCH, "b.sh": LAUNCH}
    _branches(tmp_path, target, {"a.sh": TOO_LARGE, "b.sh": LAUNCH, "new.sh": LAUNCH})
    before = _run(TARGET, tmp_path)
    assert (before.returncode, before.stderr) == (0, "")
    done = _run(PROPOSED, tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    first, second, third = done.stdout.split("::endgroup::")[:3]
    assert "It does not fit: " in first
    assert "The verdict differs: fits before, does not fit now." in first
    assert "::error file=launch/a.sh::exit status 1 " in second
    assert "  Nothing changed.\n" in second
    assert "It fits: " in third
    assert "Changes since" not in third
    assert sorted(path.name for path in (tmp_path / "temp" / "reports").iterdir()) == [
        "launch_a.sh.json",
        "launch_b.sh.json",
        "launch_new.sh.json",
    ]


@pytest.mark.slow
def test_scripts_that_fit_pass_also_if_those_of_the_target_branch_are_invalid(tmp_path: Path) -> None:
    _branches(tmp_path, {"a.sh": f"{LAUNCH} --num-layers x"}, {"a.sh": LAUNCH})
    assert _run(TARGET, tmp_path).returncode == 0
    done = _run(PROPOSED, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_repository_without_scripts_fails(tmp_path: Path) -> None:
    _branches(tmp_path, {}, {})
    assert _run(TARGET, tmp_path).returncode == 0
    assert _run(PROPOSED, tmp_path).returncode == 1
