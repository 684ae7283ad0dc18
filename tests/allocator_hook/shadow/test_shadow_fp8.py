"""Sizes of quantized tensors in the shadow engine, compared with the definitions of the formats.

- Per-tensor FP8: one byte per element and one fp32 scale per tensor (Micikevicius et al. 2022, arXiv:2209.05433). GPUs of compute
  capability 8.9 and 9.0 support FP8 GEMMs only in the layout "TN", which needs a transposed copy (cuBLAS, "8-bit floating point
  types").
- MXFP8: each block of 32 elements has a one-byte E8M0 scale (OCP Microscaling Formats 1.0, section 5.2). cuBLAS requires the scales
  in tiles of 128 by 4 ("1D block scaling factors layout").
- Blockwise FP8: one fp32 scale per block of 1 by 128 (activations) or 128 by 128 (weights) (DeepSeek-V3, arXiv:2412.19437,
  section 3.3.2).
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.shadow,
    pytest.mark.skipif(
        any(find_spec(package) is None for package in ("torch", "transformer_engine")), reason="the shadow extra is not installed"
    ),
]

ROOT = Path(__file__).resolve().parents[3]
HOPPER, BLACKWELL = (9, 0), (10, 0)
ROWS, COLUMNS = 256, 512
ELEMENTS = ROWS * COLUMNS

PROGRAM = """
import json, sys, torch
from allocator_hook.shadow.facade import fake_cuda
from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.recorder import Recorder
from allocator_hook.step.patching import Patches

class Sink:
    def __init__(self): self.live, self.peak, self.current = {}, 0, 0
    def allocation(self, pointer, bytes, stream=0):
        self.live[pointer] = bytes
        self.current += bytes
        self.peak = max(self.peak, self.current)
    def free(self, pointer): self.current -= self.live.pop(pointer)
    def label(self, *a, **k): pass

gpu = Gpu(name="X", capability=CAPABILITY, multiprocessors=132, memory_bytes=1)
with fake_cuda(gpu, compiler=lambda f=None, **k: f or (lambda g: g), memory_allocated=lambda: 0):
    import transformer_engine.pytorch
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    E4M3 = tex.DType.kFloat8E4M3
    def quantizer(recipe, rows=True, columns=True, blocks=1, internal=True):
        usages = dict(rowwise=rows, columnwise=columns)
        if recipe == "delayed":
            made = Float8Quantizer(torch.empty(1, device="cuda"), torch.empty(1, device="cuda"), E4M3, **usages)
        elif recipe == "tensorwise":
            made = Float8CurrentScalingQuantizer(E4M3, torch.device("cuda"), **usages)
        elif recipe == "blockwise":
            made = Float8BlockQuantizer(E4M3, block_scaling_dim=blocks, **usages)
        else:
            made = MXFP8Quantizer(E4M3, **usages)
        made.internal = internal
        return made
    def bf16(*shape): return torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    found = {}
    for name, (prepare, call) in json.loads(sys.stdin.read()).items():
        x, weight = bf16(256, 512), bf16(512)
        q = eval(prepare)
        sink = Sink()
        recorder = Recorder(sink, cublas_workspace_bytes=0)
        with Patches(recorder.patches()), recorder:
            out = eval(call)
            found[name] = [sorted(sink.live.values()), sink.peak]
            del out
    print(json.dumps(found))
"""

Allocated = dict[str, tuple[list[int], int]]
"""By case: the sorted sizes of the live allocations at the end, and the peak, in bytes."""


def cases(*recipes: str) -> dict[str, tuple[str, str]]:
    """Return pairs of code: the first creates `q`, the second is recorded. `x` is a bf16 tensor of ROWS by COLUMNS."""
    quantize, norm = "tex.quantize(x, q)", "tex.rmsnorm_fwd(x, weight, 1e-5, None, q, tex.DType.kBFloat16, 0, False)"
    gemm = "tex.generic_gemm(q, True, q, False, None, None, tex.DType.kBFloat16, None, None, False, None, False, *[None] * 4)"
    found: dict[str, tuple[str, str]] = {}
    for recipe in recipes:
        rows = f"quantizer('{recipe}', columns=False)"
        found |= {
            recipe: (f"quantizer('{recipe}')", quantize),
            f"{recipe}, rows": (rows, quantize),
            f"{recipe}, norm": (rows, norm),
            f"{recipe}, gemm": (f"tex.quantize(x, quantizer('{recipe}', blocks=2))", gemm),
            f"{recipe}, experts": (f"[quantizer('{recipe}') for _ in range(2)]", "tex.split_quantize(x, [128, 128], q)"),
        }
    return found


def run(capability: tuple[int, int], asked: dict[str, tuple[str, str]]) -> Allocated:
    code = PROGRAM.replace("CAPABILITY", str(capability))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, input=json.dumps(asked), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found: Allocated = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def hopper() -> Allocated:
    asked = cases("delayed", "tensorwise", "blockwise")
    asked["weight"] = ("quantizer('blockwise', blocks=2)", "tex.quantize(x, q)")
    asked["wrapper"] = ("quantizer('tensorwise', internal=False)", "tex.quantize(x, q).detach()")
    return run(HOPPER, asked)


@pytest.fixture(scope="module")
def blackwell() -> Allocated:
    asked = cases("delayed", "tensorwise", "mxfp8")
    asked["odd"] = ("quantizer('mxfp8')", "tex.quantize(bf16(96, 160), q)")
    return run(BLACKWELL, asked)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_per_tensor_recipes_have_one_scale_per_tensor(recipe: str, hopper: Allocated, blackwell: Allocated) -> None:
    assert hopper[recipe][0] == [4, ELEMENTS, ELEMENTS]
    assert hopper[f"{recipe}, rows"][0] == [4, ELEMENTS]
    assert blackwell[recipe][0] == [4, ELEMENTS]


def test_mxfp8_has_one_scale_byte_per_32_elements(blackwell: Allocated) -> None:
    assert blackwell["mxfp8"][0] == [ELEMENTS // 32, ELEMENTS // 32, ELEMENTS, ELEMENTS]


def test_mxfp8_scales_are_padded_to_tiles_of_128_by_4(blackwell: Allocated) -> None:
    """[96, 160]: the 96 by 5 rowwise scales are padded to 128 by 8, the 3 by 160 columnwise scales to 4 by 256."""
    assert blackwell["odd"][0] == sorted([96 * 160, 96 * 160, 128 * 8, 4 * 256])


def test_blockwise_scales_are_one_fp32_per_block_of_128(hopper: Allocated) -> None:
    assert hopper["blockwise"][0] == [ELEMENTS // 128 * 4, ELEMENTS // 128 * 4, ELEMENTS, ELEMENTS]
    # rowwise 2 by 4 blocks; columnwise 4 by 2 blocks, padded to rows of 4 for cuBLAS
    assert hopper["weight"][0] == [2 * 4 * 4, 4 * 4 * 4, ELEMENTS, ELEMENTS]


def test_tensors_of_experts_share_one_rowwise_and_one_columnwise_buffer(hopper: Allocated, blackwell: Allocated) -> None:
    assert hopper["blockwise, experts"][0] == [ELEMENTS + ELEMENTS // 128 * 4] * 2
    assert blackwell["mxfp8, experts"][0] == [ELEMENTS + ELEMENTS // 32] * 2


def test_tensors_of_experts_with_per_tensor_scaling_have_separate_buffers(blackwell: Allocated) -> None:
    assert blackwell["tensorwise, experts"][0] == [4, 4, ELEMENTS // 2, ELEMENTS // 2]


def test_a_norm_writes_fp8_directly_only_with_delayed_scaling(hopper: Allocated, blackwell: Allocated) -> None:
    """Otherwise a bf16 output is allocated until it is quantized (csrc/extensions/normalization.cpp)."""
    for found, recipe, plain in (
        (hopper, "delayed", 0),
        (hopper, "tensorwise", 2),
        (hopper, "blockwise", 2),
        (blackwell, "mxfp8", 2),
    ):
        sizes, peak = found[f"{recipe}, norm"]
        assert peak - sum(sizes) == plain * ELEMENTS, recipe


def test_gemms_allocate_swizzled_copies_of_mxfp8_scales(hopper: Allocated, blackwell: Allocated) -> None:
    for found, recipe, scales in ((hopper, "blockwise", 0), (blackwell, "tensorwise", 0), (blackwell, "mxfp8", 2 * ELEMENTS // 32)):
        sizes, peak = found[f"{recipe}, gemm"]
        assert sizes == [ROWS * ROWS * 2]
        assert peak - sum(sizes) == scales, recipe


def test_a_quantized_tensor_has_no_storage_of_its_own(hopper: Allocated) -> None:
    """It wraps other tensors, and only these are recorded."""
    assert hopper["wrapper"][0] == [4, ELEMENTS, ELEMENTS]
