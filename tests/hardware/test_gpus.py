"""The table of GPUs, look-up by name, and the local GPU as reported by a substitute for NVML."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.errors import InputError
from analyzer.hardware import gpus
from analyzer.hardware.speeds import speed_of
from analyzer.specs import HardwareSpec

GIB = 2**30
MIB = 2**20

# totals of nvidia-smi, which include memory reserved by the driver (0.5 to 5 % in public reports)
NVIDIA_SMI_MIB = {
    "V100-16GB": 16384,
    "A100-40GB": 40960,
    "A100-80GB": 81920,
    "H100-80GB": 81559,
    "H100-NVL": 95830,
    "H200": 143771,
    "B200": 183359,
    "GB200": 189471,
    "B300": 275040,
    "GH200": 97871,
    "L40S": 46068,
    "A10": 23028,
    "RTX-4090": 24564,
}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("h100", "H100-80GB"),
        ("H100-80GB", "H100-80GB"),
        ("h100_80g", "H100-80GB"),
        ("H100 80 GiB", "H100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA H100 NVL", "H100-NVL-94GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("A100-SXM4-40GB", "A100-40GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA H200", "H200-141GB"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("b200", "B200-180GB"),
        ("GB200", "GB200-186GB"),
        ("NVIDIA B300 SXM6 AC", "B300-288GB"),
        ("AMD Instinct MI300X", "MI300X-192GB"),
        ("mi250x", "MI250X-64GB"),
        ("A10", "A10"),
        ("A10G", "A10G"),
        ("l40s", "L40S"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
    ],
)
def test_a_gpu_is_found_by_each_spelling_of_its_name(name: str, row: str) -> None:
    assert gpus.find(name)[0].name == row


@given(st.sampled_from(gpus.GPUS), st.sampled_from(["", " ", "_", "-"]), st.booleans())
def test_case_and_separators_are_ignored(gpu: gpus.Gpu, separator: str, upper: bool) -> None:
    name = gpu.name.replace("-", separator)
    assert gpus.find(name.upper() if upper else name.lower())[0] is gpu


@pytest.mark.parametrize(("name", "mib"), NVIDIA_SMI_MIB.items())
def test_capacity_is_a_little_less_than_nvidia_smi_reports(name: str, mib: int) -> None:
    capacity = gpus.find(name)[0].spec.capacity_bytes
    assert capacity is not None
    assert 0.95 * mib * MIB < capacity < mib * MIB


def test_capacity_is_the_total_of_pytorch() -> None:
    # total_memory=81082MB, printed by PyTorch for an 'NVIDIA H100 80GB HBM3'
    spec = gpus.find("H100-80GB")[0].spec
    assert spec == HardwareSpec(name="H100-80GB", capacity_bytes=81082 * MIB, compute_capability=(9, 0), multiprocessors=132)


def test_the_default_variant_of_a_name_is_assumed_and_reported() -> None:
    spec, notes = gpus.hardware("H100", None)
    assert spec.name == "H100-80GB"
    assert notes[0].startswith("H100-80GB is assumed for H100;")
    assert gpus.hardware("H100-80GB", None)[1] == ()


@pytest.mark.parametrize(("name", "choices"), [("A100", "A100-40GB, A100-80GB"), ("V100", "V100-16GB, V100-32GB")])
def test_an_ambiguous_name_is_refused_with_the_choices(name: str, choices: str) -> None:
    with pytest.raises(InputError, match=f"--info-gpu: '{name}'.*{choices}"):
        gpus.find(name)


@pytest.mark.parametrize(("name", "nearest"), [("H100-88GB", "H100-80GB"), ("GB201", "GB200-186GB"), ("MI300", "MI300X-192GB")])
def test_an_unknown_name_is_refused_with_the_nearest_names(name: str, nearest: str) -> None:
    with pytest.raises(InputError, match=nearest) as caught:
        gpus.find(name)
    assert "--info-gpu-memory" in str(caught.value)


@pytest.mark.parametrize("name", ["", "xyz", "😀", ")("])
def test_any_invalid_name_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(InputError) as caught:
        gpus.find(name)
    assert "\n" not in str(caught.value)


def test_a_given_capacity_takes_precedence_over_the_table() -> None:
    assert gpus.hardware(None, 80 * GIB) == (HardwareSpec(capacity_bytes=80 * GIB), ())
    spec, notes = gpus.hardware("A100-80GB", 70 * GIB)
    assert (spec.capacity_bytes, spec.compute_capability) == (70 * GIB, (8, 0))
    assert "--info-gpu-memory" in notes[0]


class _NvmlError(Exception):
    pass


def _nvml(devices: Sequence[tuple[str, int, int]], *, fails: str = "", versioned: bool = True) -> ModuleType:
    """A substitute for pynvml with devices (name, total MiB, reserved MiB), in which the function `fails` raises."""
    module: Any = ModuleType("pynvml")

    def call(name: str, result: Any) -> Any:
        def of(*args: Any, **kwargs: Any) -> Any:
            if name == fails:
                raise _NvmlError("Driver Not Loaded")
            return result(*args, **kwargs)

        return of

    def memory(handle: int, version: object = None) -> SimpleNamespace:
        total, reserved = (size * MIB for size in devices[handle][1:])
        return SimpleNamespace(total=total, reserved=reserved) if version else SimpleNamespace(total=total)

    module.NVMLError = _NvmlError
    if versioned:
        module.nvmlMemory_v2 = 2
    module.nvmlInit = call("nvmlInit", lambda: None)
    module.nvmlShutdown = call("nvmlShutdown", lambda: None)
    module.nvmlDeviceGetCount = call("nvmlDeviceGetCount", lambda: len(devices))
    module.nvmlDeviceGetHandleByIndex = call("nvmlDeviceGetHandleByIndex", lambda index: index)
    module.nvmlDeviceGetName = call("nvmlDeviceGetName", lambda handle: devices[handle][0])
    module.nvmlDeviceGetMemoryInfo = call("nvmlDeviceGetMemoryInfo", memory)
    module.nvmlDeviceGetCudaComputeCapability = call("nvmlDeviceGetCudaComputeCapability", lambda _: (9, 0))
    return module  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Makes the files of the driver exist."""
    monkeypatch.setattr(gpus, "DRIVER_FILES", (str(tmp_path),))


def test_the_local_capacity_excludes_memory_reserved_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _nvml([("NVIDIA H200", 143771, 616)] * 8))
    spec, notes = gpus.hardware(None, None)
    assert spec == HardwareSpec(
        name="NVIDIA H200", capacity_bytes=(143771 - 616) * MIB, compute_capability=(9, 0), multiprocessors=132
    )
    assert "NVIDIA H200" in notes[0]


def test_an_old_nvml_reports_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _nvml([("An unknown GPU", 1000, 10)], versioned=False))
    spec, _ = gpus.hardware(None, None)
    assert (spec.capacity_bytes, spec.multiprocessors) == (1000 * MIB, None)


def test_the_smallest_of_different_local_gpus_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _nvml([("NVIDIA H200", 143771, 616), ("NVIDIA L4", 23034, 500)]))
    spec, notes = gpus.hardware(None, None)
    assert spec.name == "NVIDIA L4"
    assert "differ" in notes[0]


@pytest.mark.parametrize("fails", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo"])
def test_there_is_no_verdict_if_nvml_fails(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _nvml([("NVIDIA H200", 143771, 616)], fails=fails))
    spec, notes = gpus.hardware(None, None)
    assert spec == HardwareSpec()
    assert notes[0].endswith("for a verdict.")


def test_there_is_no_verdict_without_device_package_or_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, reason in ((_nvml([]), "no GPU"), (None, "not installed")):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        spec, notes = gpus.hardware(None, None)
        assert spec == HardwareSpec()
        assert reason in notes[0]
    monkeypatch.setattr(gpus, "DRIVER_FILES", ("/no/such/file",))
    assert "no NVIDIA driver" in gpus.hardware(None, None)[1][0]


def test_nvlink_connects_as_many_gpus_as_the_speeds_say() -> None:
    for gpu in gpus.GPUS:
        speed = speed_of(gpu.name)
        if speed is not None and speed.nvlink_domain > 8:
            assert gpu.spec.nvlink_domain == speed.nvlink_domain, gpu.name
        else:
            assert gpu.spec.nvlink_domain == HardwareSpec.nvlink_domain, gpu.name


def test_nvlinks_have_the_bandwidth_that_the_speeds_say() -> None:
    """A link has 25 GB/s in a direction, and 50 GB/s in Blackwell."""
    for gpu in gpus.GPUS:
        speed = speed_of(gpu.name)
        if speed is not None and gpu.spec.nvlinks:
            assert speed.nvlink_bytes == gpu.spec.nvlinks * (50e9 if gpu.compute_capability[0] >= 10 else 25e9), gpu.name
