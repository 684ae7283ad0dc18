"""Parameter ownership of layer-wise optimizers and optimizer offloading, compared with megatron-core. Needs torch."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def release() -> tuple[int, ...]:
    """Return the release of megatron-core; (0,) if it or torch is not installed."""
    try:
        metadata.version("torch")
        return tuple(int(part) for part in metadata.version("megatron-core").split(".")[:2])
    except metadata.PackageNotFoundError:
        return (0,)


@pytest.mark.shadow
@pytest.mark.skipif(release() < (0, 16), reason="needs torch and megatron-core 0.16 or later")
def test_ownership_and_offloading_equal_those_of_megatron() -> None:
    run = "import runpy, sys; sys.modules['transformer_engine'] = None; runpy.run_module('tests.megatron_optimizers')"
    command = [sys.executable, "-c", run]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == "100"
