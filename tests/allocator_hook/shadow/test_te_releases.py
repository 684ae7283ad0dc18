"""Positional arguments of Transformer Engine's bindings, and the import of releases that load their library themselves."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from allocator_hook.shadow.imports import Imports, _LibraryFolder  # noqa: E402
from allocator_hook.shadow.te_kernels import attention, release_1, releases  # noqa: E402
from allocator_hook.shadow.te_kernels.enums import DType  # noqa: E402
from analyzer.errors import AnalyzerError  # noqa: E402

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


def test_release_1_packs_the_gradients_of_a_packed_tensor() -> None:
    """pytorch/csrc/extensions/attention.cu 1.11: the gradient has the shape of QKV, [s, b, a, 3, d]."""
    qkv = torch.empty((64, 2, 4, 3, 16), dtype=torch.bfloat16, device="meta")
    layout, causal = attention.LAYOUT["NVTE_SBH3D"], 2
    starts = torch.empty((3,), dtype=torch.int32, device="meta")
    out, statistics, _ = release_1.fused_attn_fwd_qkvpacked(64, layout, causal, (-1, 0), starts, qkv)
    assert (tuple(out.shape), tuple(statistics.shape)) == ((64, 2, 4, 16), (2, 4, 64, 1))
    gradient, bias = release_1.fused_attn_bwd_qkvpacked(64, layout, causal, (-1, 0), starts, qkv)
    assert gradient is not None
    assert gradient.shape == qkv.shape
    assert gradient.untyped_storage().nbytes() == qkv.untyped_storage().nbytes()
    assert bias is None


def test_release_1_packs_the_gradients_of_key_and_value() -> None:
    query = torch.empty((64, 2, 4, 16), dtype=torch.bfloat16, device="meta")
    packed = torch.empty((64, 2, 2, 2, 16), dtype=torch.bfloat16, device="meta")
    layout = attention.LAYOUT["NVTE_SBHD_SBH2D"]
    starts = torch.empty((3,), dtype=torch.int32, device="meta")
    of_query, of_both, _ = release_1.fused_attn_bwd_kvpacked(64, 64, layout, 2, (-1, 0), starts, query, packed)
    assert of_query is not None
    assert of_both is not None
    assert (of_query.shape, of_both.shape) == (query.shape, packed.shape)
    assert of_both.untyped_storage().nbytes() == packed.untyped_storage().nbytes()


def test_release_1_refuses_fp8() -> None:
    tensor = torch.empty((16, 16), dtype=torch.uint8, device="meta")
    with pytest.raises(AnalyzerError, match="FP8 needs Transformer Engine 2"):
        release_1.te_gemm(tensor, DType["kFloat8E4M3"], True, tensor, False, False)
