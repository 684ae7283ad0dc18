"""The quick tests run no PyTorch: to import it takes each of their processes longer than the quick tests of these files."""

from __future__ import annotations

from tests.examples import QUICK

_IMPORT_TORCH = [
    *(f"calibrate/test_{name}.py" for name in ("collectives", "disk", "host", "kernels")),
    *(f"shadow/test_{name}.py" for name in ("release_adapters", "te_releases")),
    "test_megatron_optimizers.py",
]
collect_ignore = _IMPORT_TORCH if QUICK else []
