"""Which kernels are measured, failures, and the document that is written."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from allocator_hook.calibrate.choose import kernels_of_launch, measurable, standard_set, with_separate_additions
from allocator_hook.calibrate.items import Item
from allocator_hook.calibrate.measure import measure
from analyzer.time.calibration import read_calibration
from analyzer.time.kernels.seconds import kernel_seconds
from analyzer.time.work.kernels import Attention, Gemm, MemoryBound
from tests.allocator_hook.calibrate.known_machine import KNOWN, SHIPPED, SPEED, KnownRunner
from tests.job_of import job_of

LAUNCH = "--tensor-model-parallel-size 2 --sequence-parallel --untie-embeddings-and-output-weights"


def silent(_done: int, _total: int, _what: str) -> None:
    """Shows no progress."""


def test_the_kernels_of_a_launch_have_its_shapes() -> None:
    kernels = kernels_of_launch(job_of(LAUNCH), SPEED, SHIPPED)
    # hidden size 1024, FFN 4096, TP 2, 2048 tokens: QKV [3·1024/2], fc1 [4096/2]
    assert Gemm("forward", 2048, 1536, 1024) in kernels
    assert Gemm("forward", 2048, 2048, 1024) in kernels
    assert Gemm("weight gradient", 2048, 1024, 2048, output_bytes=8, depth_is_tokens=True) in kernels
    assert Attention("backward", 1, 8, 2048, 2048, 2048 * 2048 / 2, 64, 64) in kernels
    assert len(kernels) == len(set(kernels))


def test_kernels_that_cannot_be_run_as_they_are_become_others() -> None:
    window = Attention("forward", 1, 8, 4096, 8192, 1e6, 128, 128)
    assert measurable(window) == Attention("forward", 1, 8, 4096, 4096, 4096 * 4096 / 2, 128, 128)
    gradient = Gemm("weight gradient", 1024, 1024, 4096, "8", output_bytes=8, depth_is_tokens=True)
    assert measurable(gradient) == gradient._replace(output_bytes=4)
    assert measurable(Gemm("forward", 520, 2688, 1000, "8")) == Gemm("forward", 528, 2688, 1008, "8")
    assert measurable(Gemm("forward", 520, 2688, 1000)) == Gemm("forward", 520, 2688, 1000)
    assert measurable(Gemm("forward", 0, 1, 1)) is None
    assert measurable(MemoryBound("cross entropy gradient", 3e6)) == MemoryBound("residual add", 2.0**21)
    assert measurable(MemoryBound("norm gradient", 3e6)) == MemoryBound("norm", 2.0**21)
    assert measurable(MemoryBound("routing", 3e6, "permute")) == MemoryBound("permutation", 2.0**21, "permute")
    assert measurable(MemoryBound("norm", 1000.0)) is None
    assert measurable(MemoryBound("scan", 3e6, "scan")) is None
    fused = Gemm("weight gradient", 64, 64, 64, output_bytes=8, depth_is_tokens=True)
    assert with_separate_additions([fused, fused._replace(output_bytes=12)]) == [fused._replace(output_bytes=12)]


def test_a_kernel_that_fails_is_reported_and_the_others_are_measured() -> None:
    found = measure(standard_set(), [], KnownRunner(broken=(Attention,)), budget=1e9, show=silent)
    count = sum(isinstance(item, Attention) for item in standard_set())
    assert len(found.done) == len(standard_set()) - count
    reason = "RuntimeError: CUDA error: no kernel image is available"
    assert found.sentences() == [f"attention forward (7 shapes): {reason}", f"attention backward (7 shapes): {reason}"]


@pytest.mark.parametrize("seconds", [0.0, -1e-6, float("nan")])
def test_a_time_that_is_no_time_is_not_used(seconds: float) -> None:
    class Stopped(KnownRunner):
        def time(self, item: Item) -> float:
            assert item
            return seconds

    found = measure([Gemm("forward", 64, 64, 64)], [], Stopped(), budget=10, show=silent)
    assert found.done == []
    assert found.sentences() == ["GEMM in 16 bit: the clock showed no time"]


def test_the_budget_is_divided_between_the_standard_set_and_the_launch() -> None:
    standard: list[Item] = [Gemm("forward", 64, 64, size) for size in range(1, 21)]
    launch: list[Item] = [Gemm("forward", 64, 64, size) for size in range(20, 41)]
    clock = itertools.count()
    shown: list[tuple[int, int]] = []
    found = measure(
        standard, launch, KnownRunner(), budget=20, show=lambda done, total, _: shown.append((done, total)), now=lambda: next(clock)
    )
    assert [each.of_launch for each in found.done].count(False) == 10
    assert [each.of_launch for each in found.done].count(True) == 20 - 19
    assert sum(found.failures.values()) + len(found.done) == 40
    assert "the time of 20 s was over" in found.sentences()[0]
    assert shown[-1] == (40, 40)
    assert len(shown) == 41


def test_a_written_file_is_accepted_and_has_the_known_efficiencies(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from allocator_hook.calibrate.session import document, measured_kernels

    job = job_of(LAUNCH)
    found = measured_kernels(job, SPEED, SHIPPED, KnownRunner(noise=0.01), show=silent, budget=1e9)
    content = document(found.done, found.sentences(), SPEED, SHIPPED, offload={})
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(content))
    rates = read_calibration(path, SPEED)
    assert rates.gemm_16 == pytest.approx(KNOWN["gemm_16"], rel=0.03)
    assert rates.nvlink == SHIPPED.nvlink, "not measured on one GPU"
    assert any("nvlink" in sentence for sentence in content["not_measured"])
    assert {"driver", "torch", "cuda", "date", "gpu", "measured"} <= content.keys()
    assert any(row["of_launch"] for row in content["measured"])
    row = next(row for row in content["measured"] if row["shape"].get("k") == 16384)
    kernel = Gemm(**row["shape"])
    assert row["predicted_as_shipped"] == kernel_seconds(kernel, SPEED, SHIPPED)
    assert row["predicted"] == pytest.approx(row["seconds"], rel=0.1)


def test_the_kernels_with_the_longest_total_time_are_first() -> None:
    job = job_of(LAUNCH)
    kernels = kernels_of_launch(job, SPEED, SHIPPED)
    dense = [each for each in kernels if isinstance(each, Gemm) and each.name == "forward"]
    # 8 layers of each: fc1 (2,048 columns), QKV (1,536), and the projection of depth 512
    columns = [(each.n, each.k) for each in dense]
    assert columns.index((2048, 1024)) < columns.index((1536, 1024)) < columns.index((1024, 512))
