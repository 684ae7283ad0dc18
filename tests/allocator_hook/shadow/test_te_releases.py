"""Positional arguments of Transformer Engine's bindings, and the import of releases that load their library themselves."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from allocator_hook.shadow.imports import Imports, _LibraryFolder  # noqa: E402
from allocator_hook.shadow.te_kernels import attention, releases  # noqa: E402

pytestmark = pytest.mark.shadow


@pytest.mark.parametrize(
    ("installed", "mask", "tensors"),
    [((2, 3, 0), 8, 10), ((2, 11, 0), 8, 11), ((2, 12, 0), 8, 12), ((2, 20, 2), 10, 14)],
)
def test_forward_attention_has_the_positions_of_its_release(installed: tuple[int, ...], mask: int, tensors: int) -> None:
    """Positions in the call of `tex.fused_attn_fwd` in pytorch/cpp_extensions/fused_attn.py of the release."""
    names = releases.parameter_names(attention._FORWARD, installed)
    assert (names.index("attn_mask_type"), names.index("cu_seqlens_q")) == (mask, tensors)


def test_a_kernel_gets_its_own_arguments_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(q: int, dtype: int = 0) -> tuple[int, int]:
        return q, dtype

    monkeypatch.setattr(releases, "release", lambda: (2, 7, 0))
    old = releases.with_names(kernel, "scale q softmax_type>=2.8 dtype<2.15")
    monkeypatch.setattr(releases, "release", lambda: (2, 15, 0))
    new = releases.with_names(kernel, "scale q softmax_type>=2.8 dtype<2.15")
    assert old(1.0, 2, 3, "dropped") == (2, 3)
    assert new(1.0, 2, 3, "dropped") == (2, 0)


def test_the_library_that_releases_up_to_2_3_load_is_the_imported_module() -> None:
    """`_load_library` of transformer_engine/pytorch/__init__.py 2.3, without its checks."""
    extension = ModuleType("transformer_engine_torch")
    with Imports({extension.__name__: extension}):
        path = next((_LibraryFolder() / "transformer_engine").glob("transformer_engine_torch.*.so"))
        spec = importlib.util.spec_from_file_location("transformer_engine_torch", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module is extension is sys.modules["transformer_engine_torch"]
        assert not list(_LibraryFolder().glob("transformer_engine_jax.*.so"))
