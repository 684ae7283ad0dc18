"""Quantized tensors of the shadow: their sizes against the formats' own definitions.

- One byte an element, one fp32 scale for a tensor (per-tensor FP8; Micikevicius et al. 2022, arXiv:2209.05433). GPUs of compute
  capability 8.9 and 9.0 multiply FP8 in one layout, "TN", and so need a transposed copy (cuBLAS, "8-bit floating point types").
- MXFP8: blocks of 32 elements share one byte, E8M0 (OCP Microscaling Formats 1.0, section 5.2); cuBLAS wants them in tiles of
  128 by 4 ("1D block scaling factors layout").
- Blocks of 1 by 128 for activations, 128 by 128 for weights, an fp32 scale each (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    any(find_spec(package) is None for package in ("torch", "transformer_engine")), reason="the shadow extra is not installed"
)

ROOT = Path(__file__).resolve().parents[3]
HOPPER, BLACKWELL = (9, 0), (10, 0)
ROWS, COLUMNS = 256, 512
ELEMENTS = ROWS * COLUMNS

PROGRAM = """
import json, sys, torch
from allocator_hook.shadow.facade import facade
from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.recorder import Recorder
from allocator_hook.step.patching import Patches

class Sink:
    def __init__(self): self.live, self.most, self.now = {}, 0, 0
    def allocation(self, pointer, bytes):
        self.live[pointer] = bytes
        self.now += bytes
        self.most = max(self.most, self.now)
    def free(self, pointer): self.now -= self.live.pop(pointer)
    def label(self, *a, **k): pass

gpu = Gpu(name="X", capability=CAPABILITY, multiprocessors=132, memory_bytes=1)
with facade(gpu, one_kernel=lambda f=None, **k: f or (lambda g: g), memory_allocated=lambda: 0):
    import transformer_engine.pytorch
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    E4M3 = tex.DType.kFloat8E4M3
    def quantizer(recipe, rows=True, columns=True, blocks=1, internal=True):
        ways = dict(rowwise=rows, columnwise=columns)
        if recipe == "delayed":
            made = Float8Quantizer(torch.empty(1, device="cuda"), torch.empty(1, device="cuda"), E4M3, **ways)
        elif recipe == "tensorwise":
            made = Float8CurrentScalingQuantizer(E4M3, torch.device("cuda"), **ways)
        elif recipe == "blockwise":
            made = Float8BlockQuantizer(E4M3, block_scaling_dim=blocks, **ways)
        else:
            made = MXFP8Quantizer(E4M3, **ways)
        made.internal = internal
        return made
    def given(*shape): return torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    found = {}
    for name, (prepare, call) in json.loads(sys.stdin.read()).items():
        x = given(256, 512)
        q = eval(prepare)
        sink = Sink()
        recorder = Recorder(sink, cublas_workspace_bytes=0)
        with Patches(recorder.patches()), recorder:
            out = eval(call)
            found[name] = [sorted(sink.live.values()), sink.most]
            del out
    print(json.dumps(found))
"""

Allocated = dict[str, tuple[list[int], int]]
"""By case: bytes of what is left, in order, and the most that there was at once."""


def cases(*recipes: str) -> dict[str, tuple[str, str]]:
    """What is run: `q` is made first, `x` is a bf16 tensor of ROWS by COLUMNS."""
    quantize, norm = "tex.quantize(x, q)", "tex.rmsnorm_fwd(x, given(512), 1e-5, None, q, tex.DType.kBFloat16, 0, False)"
    product = "tex.generic_gemm(q, True, q, False, None, None, tex.DType.kBFloat16, None, None, False, None, False, *[None] * 4)"
    found = {}
    for recipe in recipes:
        rows = f"quantizer('{recipe}', columns=False)"
        found |= {
            recipe: (f"quantizer('{recipe}')", quantize),
            f"{recipe}, rows": (rows, quantize),
            f"{recipe}, norm": (rows, norm),
            f"{recipe}, product": (f"tex.quantize(x, quantizer('{recipe}', blocks=2))", product),
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
    asked["odd"] = ("quantizer('mxfp8')", "tex.quantize(given(96, 160), q)")
    return run(BLACKWELL, asked)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_one_scale_for_a_tensor(recipe: str, hopper: Allocated, blackwell: Allocated) -> None:
    assert hopper[recipe][0] == [4, ELEMENTS, ELEMENTS]
    assert hopper[f"{recipe}, rows"][0] == [4, ELEMENTS]
    assert blackwell[recipe][0] == [4, ELEMENTS]


def test_mxfp8_has_a_byte_for_each_32_elements(blackwell: Allocated) -> None:
    assert blackwell["mxfp8"][0] == [ELEMENTS // 32, ELEMENTS // 32, ELEMENTS, ELEMENTS]


def test_scales_of_mxfp8_fill_tiles_of_128_by_4(blackwell: Allocated) -> None:
    """[96, 160]: 96 by 5 scales along rows become 128 by 8, and 3 by 160 along columns 4 by 256."""
    assert blackwell["odd"][0] == sorted([96 * 160, 96 * 160, 128 * 8, 4 * 256])


def test_blocks_of_128(hopper: Allocated) -> None:
    assert hopper["blockwise"][0] == [ELEMENTS // 128 * 4, ELEMENTS // 128 * 4, ELEMENTS, ELEMENTS]
    # 2 by 4 blocks; by columns 4 by 2, of which cuBLAS wants rows of 4
    assert hopper["weight"][0] == [2 * 4 * 4, 4 * 4 * 4, ELEMENTS, ELEMENTS]


def test_rows_of_experts_share_a_buffer_for_each_way(hopper: Allocated, blackwell: Allocated) -> None:
    assert hopper["blockwise, experts"][0] == [ELEMENTS + ELEMENTS // 128 * 4] * 2
    assert blackwell["mxfp8, experts"][0] == [ELEMENTS + ELEMENTS // 32] * 2


def test_rows_of_experts_with_one_scale_each_lie_apart(blackwell: Allocated) -> None:
    assert blackwell["tensorwise, experts"][0] == [4, 4, ELEMENTS // 2, ELEMENTS // 2]


def test_a_norm_writes_fp8_itself_where_the_scale_is_known_before(hopper: Allocated, blackwell: Allocated) -> None:
    """Else its output is in memory in 16 bit until it is quantized (csrc/extensions/normalization.cpp)."""
    for found, recipe, plain in (
        (hopper, "delayed", 0),
        (hopper, "tensorwise", 2),
        (hopper, "blockwise", 2),
        (blackwell, "mxfp8", 2),
    ):
        sizes, most = found[f"{recipe}, norm"]
        assert most - sum(sizes) == plain * ELEMENTS, recipe


def test_products_reorder_scales_of_mxfp8_while_they_run(hopper: Allocated, blackwell: Allocated) -> None:
    for found, recipe, scales in ((hopper, "blockwise", 0), (blackwell, "tensorwise", 0), (blackwell, "mxfp8", 2 * ELEMENTS // 32)):
        sizes, most = found[f"{recipe}, product"]
        assert sizes == [ROWS * ROWS * 2]
        assert most - sum(sizes) == scales, recipe


def test_a_quantized_tensor_has_no_storage_of_its_own(hopper: Allocated) -> None:
    """It wraps others; what is recorded is these."""
    assert hopper["wrapper"][0] == [4, ELEMENTS, ELEMENTS]
