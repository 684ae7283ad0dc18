"""The workflow that publishes a release, and the tool that tries its wheel."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from analyzer.version import __version__
from tools.try_wheel import VERSIONS, main

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())


def test_only_a_tag_of_the_version_with_a_complete_changelog_is_published(tmp_path: Path) -> None:
    (step,) = [each for each in WORKFLOW["jobs"]["wheel"]["steps"] if "Compare" in each.get("name", "")]
    (tmp_path / "analyzer").mkdir()
    (tmp_path / "analyzer" / "version.py").write_text((ROOT / "analyzer" / "version.py").read_text())
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(f"## {__version__}\n")

    def status(tag: str) -> int:
        environ = {"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"}
        return subprocess.run(
            ["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=environ, capture_output=True, check=False
        ).returncode

    assert status(f"v{__version__}") == 0
    assert status("v9.9.9") == 1
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "changelog.d" / "1.added.md").write_text("A change.\n")
    assert status(f"v{__version__}") == 1
    (tmp_path / "changelog.d" / "1.added.md").unlink()
    changelog.write_text("## 0.1.0\n")
    assert status(f"v{__version__}") == 1


def test_the_workflow_tries_every_supported_python_and_stores_no_token() -> None:
    (setup,) = [each for each in WORKFLOW["jobs"]["wheel"]["steps"] if "setup-python" in each.get("uses", "")]
    assert tuple(setup["with"]["python-version"].split()) == VERSIONS
    assert WORKFLOW["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in (ROOT / ".github" / "workflows" / "publish.yml").read_text()


def test_a_wheel_that_does_not_exist_is_wrong_input() -> None:
    assert main(["missing.whl"]) == 2
