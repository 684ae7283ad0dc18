"""Rates of copies, host memory and attention on the CPU: on a machine with known bandwidths that stands for GPU and host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from allocator_hook.calibrate import clock, disk, host, offload  # noqa: E402
from allocator_hook.calibrate.clock import SAMPLES, HostClock, Run  # noqa: E402
from allocator_hook.calibrate.host import HEAD, HEADS, TOKENS, Rate, cpu_attention, measure_host, probes  # noqa: E402
from allocator_hook.calibrate.measure import Unmeasurable  # noqa: E402
from allocator_hook.calibrate.offload import measured_offload  # noqa: E402
from analyzer.time.calibration import OFFLOAD_RATES  # noqa: E402

BANDWIDTH = {
    ("pinned", "cuda"): 25e9,
    ("cuda", "pinned"): 20e9,
    ("host", "cuda"): 6e9,
    ("cuda", "host"): 5e9,
    ("host", "host"): 12e9,
    ("host", "new pinned"): 8e9,
    ("pinned", "host"): 10e9,
}
"""Bytes per second of a copy, by where its tensors are."""


class Machine:
    """Its time advances with each copy."""

    def __init__(self) -> None:
        self.now = 0.0

    def ones(self, count: int, *, dtype: Any, device: str = "host") -> Tensor:
        """As `torch.ones`."""
        assert dtype is torch.float16
        return Tensor(self, device, 2 * count)

    def seconds(self, runs: Sequence[Run], *, launches: int = 1) -> float:
        """As a clock: the time of one run."""
        assert launches == 1
        start = self.now
        for run in runs:
            run()
        return (self.now - start) / len(runs)


class Tensor:
    """A tensor with a place and a size."""

    def __init__(self, machine: Machine, place: str, size: int) -> None:
        self.machine, self.place, self.size = machine, place, size

    def copy_(self, source: Tensor, *, non_blocking: bool = False) -> Tensor:
        """The machine works as long as the copy takes."""
        assert source.size == self.size
        assert non_blocking in (True, False)
        self.machine.now += self.size / BANDWIDTH[source.place, self.place]
        return self

    def pin_memory(self) -> Tensor:
        """A copy in pinned memory."""
        assert self.place == "host"
        self.machine.now += self.size / BANDWIDTH["host", "new pinned"]
        return Tensor(self.machine, "pinned", self.size)


def test_the_rates_are_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(host, "torch", SimpleNamespace(ones=machine.ones, float16=torch.float16))
    monkeypatch.setattr(host, "cpu_attention", lambda heads: lambda: setattr(machine, "now", machine.now + heads))
    rates, failures = measure_host(probes(size=10**9), machine)
    found = {rate.name: rate.gb_per_s for rate in rates}
    assert failures == []
    assert found == pytest.approx(
        {
            "pcie_to_gpu_gb_per_s": 25,
            "pcie_from_gpu_gb_per_s": 20,
            "unpinned_to_gpu_gb_per_s": 6,
            "unpinned_from_gpu_gb_per_s": 5,
            "staging_gb_per_s": 8,
            "unstaging_gb_per_s": 1 / (1 / 20 + 1 / 10),  # one copy after the other
            "host_memory_gb_per_s": 2 * 12,  # read and written
            "cpu_attention_gb_per_s": 2 * 2 * HEADS * TOKENS * HEAD / HEADS / 1e9,
        }
    )
    assert {*found, "disk_read_gb_per_s", "disk_write_gb_per_s"} == {*OFFLOAD_RATES}
    assert offload.as_json(rates, {})["rates"] == found


def test_the_time_of_a_run_is_a_median(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of seven samples, three are disturbed; the mean would be 4.6 s."""
    seconds = [1.0, 1.0, 9.0, 1.0, 9.0, 1.0, 1.0, 9.0, 1.0]
    now = iter([moment for each in seconds for moment in (0.0, each)])
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    assert SAMPLES == 7
    assert HostClock().seconds([lambda: None]) == 1.0


def test_without_a_gpu_the_host_is_measured_and_the_rest_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    rates, failures = measure_host(probes(size=2**20, heads=8), HostClock(samples=3, sample=1e-3))
    assert [rate.name for rate in rates] == ["host_memory_gb_per_s", "cpu_attention_gb_per_s"]
    assert all(rate.gb_per_s > 0 for rate in rates)
    assert [each.partition(":")[0] for each in failures] == [*OFFLOAD_RATES[:6]]


def test_a_clock_that_stands_still_gives_no_rate() -> None:
    stopped = SimpleNamespace(seconds=lambda _runs, launches=1: 0.0 * launches)
    rates, failures = measure_host(probes(size=2**20, heads=8)[-2:], stopped)
    assert rates == []
    assert failures[0] == "host_memory_gb_per_s: the clock showed no time"


def test_attention_on_the_cpu_reads_the_bytes_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[int] = []

    def to_32_bits(tensor: Any) -> Any:
        converted.append(tensor.nbytes)
        return tensor.to(torch.float32)

    monkeypatch.setattr(torch.Tensor, "float", to_32_bits)
    result = cpu_attention(8)()
    (probe,) = (each for each in probes(heads=8) if each.name == "cpu_attention_gb_per_s")
    assert sum(converted) == probe.bytes
    assert result.shape == (8, 1, HEAD)
    assert result.dtype is torch.float32


def test_copies_move_the_bytes_that_are_counted() -> None:
    """With PyTorch on the CPU."""
    pinned: list[int] = []

    def pin(tensor: Any) -> Any:
        pinned.append(tensor.nbytes)
        return tensor.clone()

    for probe in probes("cpu", pin=pin, size=2**20, heads=8)[:-1]:
        probe.make()()
        assert probe.bytes == 2**20 * (2 if probe.name == "host_memory_gb_per_s" else 1)
    assert pinned == [2**20] * 4


def test_the_field_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for CUDA and for the disk, and with a thread for two processors even if torchrun sets one."""
    threads: list[int] = []
    before = torch.get_num_threads()

    def of_disk(folder: Path) -> tuple[Rate, Rate]:
        assert folder == tmp_path
        return Rate("disk_read_gb_per_s", 10**9, 0.5), Rate("disk_write_gb_per_s", 10**9, 1.0)

    def rate(_items: object, _clock: object) -> tuple[list[Rate], list[str]]:
        threads.append(torch.get_num_threads())
        return [Rate("staging_gb_per_s", 10**9, 0.1)], ["pcie_to_gpu_gb_per_s: RuntimeError: out of memory"]

    monkeypatch.setattr(offload, "measure_host", rate)
    monkeypatch.setattr(offload, "measure_disk", of_disk)
    monkeypatch.setattr(offload, "file_system", lambda _folder: "ext4")
    monkeypatch.setattr(offload, "_processors", lambda: 2 * before + 6)
    field, failures = measured_offload(tmp_path, lambda *_: None)
    assert field["rates"] == pytest.approx({"staging_gb_per_s": 10, "disk_read_gb_per_s": 2, "disk_write_gb_per_s": 1})
    assert field["measured"][0] == {"rate": "staging_gb_per_s", "bytes": 10**9, "seconds": 0.1}
    assert field["disk"] == {"folder": str(tmp_path), "file_system": "ext4", "method": disk.METHOD}
    assert failures == ["pcie_to_gpu_gb_per_s: RuntimeError: out of memory"]
    assert threads == [before + 3]
    assert torch.get_num_threads() == before

    field, failures = measured_offload(None, lambda *_: None)
    assert field["disk"] is None
    assert failures[-1] == "the disk: --info-calibrate-disk names no folder"

    def fails(_folder: Path) -> None:
        raise Unmeasurable("it is in memory")

    monkeypatch.setattr(offload, "measure_disk", fails)
    assert measured_offload(tmp_path, lambda *_: None)[1][-1] == "the disk: it is in memory"
