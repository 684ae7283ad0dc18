"""Kernels of a router: bytes for each score that megatron-core 0.16.1 moves in PyTorch, as the shadow engine recorded them.

Recorded were 512 experts in layers of 4,096 tokens with `--moe-router-dtype fp32`: the difference that an option makes. The record
has the argument of `zeros_like`, which is not read (4 bytes, twice with an auxiliary loss), and reads the input of top-k once.
"""

from __future__ import annotations

import pytest

from analyzer.time.work.kernels import MemoryBound
from tests.time.work.executed import LAYERS, TOKENS, job, kernels

EXPERTS = 64
MOE = f"--num-experts {EXPERTS} --moe-router-topk 4 --moe-grouped-gemm --disable-bias-linear --moe-router-dtype fp32 "
MOE += "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 8"
SIGMOID = "--moe-router-score-function sigmoid "
TOPK_AGAIN = 60
"""Bytes by which 16 reads of a score in top-k exceed one."""


def of_score(line: str, name: str) -> float:
    """Bytes of the routing kernels for each score."""
    found = kernels(job(f"{MOE} {line}"))
    moved = sum(kernel.bytes * count for _, kernel, count in found if isinstance(kernel, MemoryBound) and kernel.name == name)
    return moved / (TOKENS * LAYERS * EXPERTS)


@pytest.mark.parametrize(("line", "forward", "backward"), [
    (SIGMOID, 8.0, 12.0),
    ("--moe-router-pre-softmax", 7.9, 11.8),
    (f"{SIGMOID} --moe-router-enable-expert-bias", 17.0, 12.0),
    ("--moe-aux-loss-coeff 1e-3", 46.4 - 4 + TOPK_AGAIN, 20.0),
    (f"{SIGMOID} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4", 66.6 - 4 + TOPK_AGAIN, 84.9),
    ("--moe-z-loss-coeff 1e-3", 4.0, 36.0),
])  # fmt: skip
def test_bytes_that_an_option_of_the_router_adds(line: str, forward: float, backward: float) -> None:
    assert of_score(line, "routing") - of_score("", "routing") == pytest.approx(forward, abs=1.5)
    assert of_score(line, "routing gradient") - of_score("", "routing gradient") == pytest.approx(backward, abs=1.5)
