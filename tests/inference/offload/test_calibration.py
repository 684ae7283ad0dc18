"""Rates of `--info-calibrate` in place of those of the hardware data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analyzer.inference.offload.machine import machine_of
from analyzer.time.calibration import OFFLOAD_RATES, SCHEMA
from tests.command import assert_refused, report, run

JOB = "--info-model facebook/opt-30b --info-gpu T4 --info-world-size 1 --info-inference batch=24,prompt=256,generate=8"
LINK = "weights=0/100/0,cache=100/0/0,activations=100/0/0"
SHIPPED = {
    "pcie_to_gpu_gb_per_s": 0.8 * 15.75,
    "pcie_from_gpu_gb_per_s": 0.8 * 15.75,
    "unpinned_to_gpu_gb_per_s": 5.0,
    "unpinned_from_gpu_gb_per_s": 5.0,
    "staging_gb_per_s": 10.1,
    "unstaging_gb_per_s": 0.607,
    "host_memory_gb_per_s": 20.0,
    "cpu_attention_gb_per_s": 13.5,
    "disk_read_gb_per_s": 2.0,
    "disk_write_gb_per_s": 1.0,
}
"""Those of machine.json, as a calibration has them (docs/offloading.md)."""


def write(path: Path, rates: dict[str, Any] | None, *, gpu: str = "T4", **fields: Any) -> str:
    offload: dict[str, Any] = {} if rates is None else {"offload": {"rates": rates, "measured": [], "disk": None}}
    path.write_text(json.dumps({"schema": SCHEMA, "gpu": gpu, "efficiencies": {}, **offload, **fields}))
    return f"--info-calibration {path}"


def seconds(policy: str, *options: str, job: str = JOB) -> float:
    found = report(*f"{job} --info-offload {policy}".split(), *" ".join(options).split())
    return float(found["inference"]["latency_seconds"])


def test_the_shipped_rates_as_a_calibration_change_nothing(tmp_path: Path) -> None:
    assert {*SHIPPED} == {*OFFLOAD_RATES}
    given = write(tmp_path / "file.json", SHIPPED)
    policies = (LINK, "weights=0/50/50,cache=0/0/100,activations=0/0/100,batches=2", "weights=0/100/0,cache=0/100/0,attention=cpu")
    for policy in policies:
        assert seconds(policy, given) == pytest.approx(seconds(policy))


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("pcie_to_gpu_gb_per_s", LINK),
        ("pcie_from_gpu_gb_per_s", "weights=0/100/0,cache=0/100/0,activations=0/100/0,overlap=no"),
        ("staging_gb_per_s", f"{LINK},pin=no,overlap=no"),
        ("unstaging_gb_per_s", "weights=0/100/0,cache=0/100/0"),
        ("cpu_attention_gb_per_s", "weights=0/100/0,cache=0/100/0,attention=cpu,overlap=no"),
        ("disk_read_gb_per_s", "weights=0/0/100"),
        ("disk_write_gb_per_s", "weights=0/100/0,cache=0/0/100,overlap=no"),
    ],
)
def test_half_a_rate_makes_the_policy_slower_that_depends_on_it(name: str, policy: str, tmp_path: Path) -> None:
    given = write(tmp_path / "file.json", {**SHIPPED, name: SHIPPED[name] / 2})
    relative = seconds(policy, given) / seconds(policy)
    assert 1.001 < relative <= 2.001


def test_a_link_of_half_the_speed_takes_twice_as_long_if_nothing_else_counts(tmp_path: Path) -> None:
    job = JOB.replace("batch=24,prompt=256", "batch=1,prompt=8")
    given = write(tmp_path / "file.json", {**SHIPPED, "pcie_to_gpu_gb_per_s": SHIPPED["pcie_to_gpu_gb_per_s"] / 2})
    assert seconds(LINK, given, job=job) / seconds(LINK, job=job) == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize("name", ["unpinned_to_gpu_gb_per_s", "unpinned_from_gpu_gb_per_s", "host_memory_gb_per_s"])
def test_rates_for_information_change_nothing(name: str, tmp_path: Path) -> None:
    given = write(tmp_path / "file.json", {**SHIPPED, name: 1e-3})
    policy = "weights=0/50/50,cache=0/50/50,activations=0/100/0,batches=2,pin=no"
    assert seconds(policy, given) == pytest.approx(seconds(policy))


def test_fields_of_the_machine_are_bytes_per_second() -> None:
    machine = machine_of("T4", measured={"pcie_to_gpu_gb_per_s": 3.0, "disk_read_gb_per_s": 0.5})
    assert (machine.pcie, machine.disk_read) == (3e9, 0.5e9)
    assert machine.pcie_from == pytest.approx(0.8 * 15.75e9), "not measured"


def test_what_the_option_gives_comes_first(tmp_path: Path) -> None:
    given = write(tmp_path / "file.json", {name: value / 100 for name, value in SHIPPED.items()})
    assert seconds(f"{LINK},pcie=15.75", given) == pytest.approx(seconds(LINK))
    assert seconds("weights=0/0/100,disk-read=2,pcie=15.75", given) == pytest.approx(seconds("weights=0/0/100"))


def test_a_gpu_whose_link_is_not_known_can_be_measured(tmp_path: Path) -> None:
    short = JOB.replace("batch=24,prompt=256", "batch=1,prompt=8")
    job = short.replace("T4", "B200-180GB")
    assert_refused(run(*f"{job} --info-offload {LINK}".split()), "--info-offload")
    given = write(tmp_path / "file.json", SHIPPED, gpu="B200-180GB")
    assert seconds(LINK, given, job=job) == pytest.approx(seconds(LINK, job=short), rel=0.05), "the link limits both"


def test_the_report_says_which_rates_were_measured(tmp_path: Path) -> None:
    given = write(tmp_path / "file.json", {"pcie_to_gpu_gb_per_s": 12.0})
    (found,) = (each for each in report(*f"{JOB} {given} --info-offload {LINK}".split())["assumptions"] if "Rates of" in each)
    assert str(tmp_path / "file.json") in found
    assert "It lacks pcie_from_gpu, staging, unstaging, cpu_attention, disk_read, disk_write" in found


@pytest.mark.parametrize(
    "content",
    [
        {"rates": None},
        {"rates": {}},
        {"rates": {"pcie_gb_per_s": 12}},
        {"rates": {"staging_gb_per_s": "12"}},
        {"rates": {"staging_gb_per_s": 0}},
        {"rates": {"staging_gb_per_s": True}},
        {"rates": {"staging_gb_per_s": float("nan")}},
        {"rates": SHIPPED, "gpu": "H100-80GB"},
        {"rates": SHIPPED, "speed": 1},
        {"rates": SHIPPED, "offload": []},
    ],
    ids=lambda content: str(content)[:50],
)
def test_a_file_that_cannot_be_used_is_refused(content: dict[str, Any], tmp_path: Path) -> None:
    given = write(tmp_path / "file.json", **content)
    assert_refused(run(*f"{JOB} {given} --info-offload {LINK}".split()), "--info-calibration")
