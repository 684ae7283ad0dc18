"""Who owns which parameter, and what goes to the host, held against megatron-core itself. Needs torch and megatron-core."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def release() -> tuple[int, ...]:
    """Of megatron-core; (0,) where it or torch is not installed."""
    try:
        metadata.version("torch")
        return tuple(int(part) for part in metadata.version("megatron-core").split(".")[:2])
    except metadata.PackageNotFoundError:
        return (0,)


@pytest.mark.skipif(release() < (0, 16), reason="needs torch and megatron-core 0.16 or later")
def test_owners_and_places() -> None:
    run = "import runpy, sys; sys.modules['transformer_engine'] = None; runpy.run_module('tests.megatron_optimizers')"
    command = [sys.executable, "-c", run]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == "100"
