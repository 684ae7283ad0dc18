"""`--info-offload` on the command line: the report of a policy, of a search, and errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import assert_refused, report, run

ROOT = Path(__file__).resolve().parents[3]
OPT = "--info-model facebook/opt-30b --info-gpu T4 --info-world-size 1"
JOB = f"{OPT} --info-inference batch=144,prompt=512,generate=32"
MIXTRAL = JOB.replace("facebook/opt-30b", "mistralai/Mixtral-8x7B-v0.1").replace("T4", "A100-40GB")
POLICY = "weights=20/80/0,cache=0/100/0,activations=0/100/0,batches=3,attention=cpu"


def test_fields_of_the_report() -> None:
    found = report(*f"{JOB} --info-offload {POLICY}".split())
    inference = found["inference"]
    policy = inference["policy"]
    assert found["verdict"]["fits"] is True
    assert inference["batch_size"] == 144
    assert (policy["batch_size"], policy["batches"], policy["attention_on_cpu"]) == (48, 3, True)
    assert policy["percent"]["weights"] == [20, 80, 0]
    assert policy["actual_percent"]["weights"] == pytest.approx([8.2, 91.8, 0], abs=0.1)
    assert inference["kv_cache_bytes"] == 2 * 2 * 48 * 144 * (512 + 32 - 1) * 7168
    assert inference["latency_seconds"] == pytest.approx(inference["prefill_seconds"] + 31 * inference["decode_seconds_per_token"])
    assert inference["tokens_per_second"] == pytest.approx(144 * 32 / inference["latency_seconds"])
    assert policy["seconds"]["overlapped"]["total"] < policy["seconds"]["serial"]["total"]
    for tier in policy["tiers"]:
        parts = ("weights_bytes", "kv_cache_bytes", "activation_bytes", "buffer_bytes")
        assert sum(tier[part] for part in parts) == pytest.approx(tier["total_bytes"], abs=4)
        assert tier["total_bytes"] <= tier["capacity_bytes"]


def test_the_cost_is_that_of_the_gpu_hours() -> None:
    found = report(*f"{JOB} --info-price 0.36 --info-offload {POLICY}".split())["inference"]
    assert found["cost_per_million_tokens"] == pytest.approx(0.36 * 1e6 / found["tokens_per_second"] / 3600)
    assert report(*f"{JOB} --info-offload {POLICY}".split())["inference"]["cost_per_million_tokens"] is None


def test_the_throughput_is_that_of_the_measured_run() -> None:
    """7.32 tokens/s (README of FlexLLMGen)."""
    found = report(*f"{JOB} --info-offload {POLICY}".split())
    assert found["inference"]["tokens_per_second"] == pytest.approx(7.32, rel=0.15)


def test_the_host_is_checked() -> None:
    done = run(*f"{JOB} --info-offload {POLICY},host-memory=100".split())
    assert done.status == 1
    assert "GiB on host too much." in " ".join(done.out.split())


def test_gpu_memory_is_that_of_the_option() -> None:
    found = report(*f"{JOB} --info-gpu-memory 8GiB --info-offload {POLICY}".split())
    assert found["verdict"]["fits"] is False
    assert found["inference"]["policy"]["tiers"][0]["capacity_bytes"] == 8 * 2**30


def test_a_tight_policy() -> None:
    done = run(*f"{JOB} --info-margin 6GiB --info-fail-on tight --info-offload {POLICY}".split())
    assert done.status == 1
    assert "It is tight: " in done.out


@pytest.mark.slow
def test_a_search() -> None:
    """The best measured policy without compression is 7.32 tokens/s, with a compressed cache 8.38."""
    job = JOB.replace("batch=144", "batch=512")
    found = report(*f"{job} --info-offload search,compress=cache".split())["inference"]
    assert found["tokens_per_second"] == pytest.approx(8.38, rel=0.15)
    assert found["policy"]["compressed_cache"] is True
    assert found["front"][-1]["tokens_per_second"] == pytest.approx(found["tokens_per_second"])
    rates = [each["tokens_per_second"] for each in found["front"]]
    assert rates == sorted(rates)


def test_a_search_prints_policies_that_can_be_given() -> None:
    job = JOB.replace("batch=144", "batch=4")
    done = run(*f"{job} --info-offload search".split())
    line = next(line for line in done.out.splitlines() if line.startswith("  policy "))
    found = next(line for line in done.out.splitlines() if line.startswith("  throughput "))
    again = run(*f"{job} --info-offload {line.split()[1]}".split())
    assert found in again.out


@pytest.mark.parametrize(
    "value",
    [
        *("weights=50/20/10", "weights=nan/0/100", "weights=100", "weights=-10/110/0", "cache=0/100/0", "search,weights=0/100/0"),
        *("search,batches=2", "weights=0/100/0,weights=0/100/0", "weights=0/100/0,batches=0", "weights=0/100/0,colour=red"),
        *("weights=0/100/0,attention=disk", "weights=0/100/0,compress=activations", "weights=0/100/0,activations=50/50/0"),
        *("weights=0/100/0,cache=50/50/0,compress=cache", "weights=0/100/0,host-memory=-1", "weights=0/100/0,pcie=nan"),
        *("weights=0/100/0,batches=5", "weights=0/100/0,attention=cpu", "weights=0/100/0,compress=weights+weights"),
    ],
)
def test_a_wrong_value_is_refused(value: str) -> None:
    assert_refused(run(*f"{JOB} --info-offload {value}".split()), "--info-offload")


def test_one_generated_token_has_no_decode() -> None:
    found = report(*f"{JOB.replace('generate=32', 'generate=1')} --info-offload {POLICY}".split())["inference"]
    assert found["decode_seconds_per_token"] is None
    assert found["latency_seconds"] == found["prefill_seconds"]


def test_a_search_in_which_nothing_fits() -> None:
    done = run(*f"{JOB} --info-offload search,host-memory=9,disk=1".split())
    assert done.status == 1
    assert done.err.startswith("get-training-info: --info-offload: no policy fits")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (f"{OPT} --info-offload search", "--info-offload"),
        (f"{JOB.replace('--info-gpu T4', '')} --info-offload search", "--info-offload"),
        (f"{JOB.replace('--info-gpu T4', '--info-gpu RTX-4090')} --info-offload search", "--info-offload"),
        (f"{JOB} --info-quantize w4a16 --info-offload search", "--info-quantize"),
        (f"{JOB} --info-efficiency flops=0.5 --info-offload search", "--info-efficiency"),
        (f"{JOB} --info-network 5 --info-offload search", "--info-network"),
        (f"{JOB.replace('size 1', 'size 2')} --info-offload search", "--info-offload"),
        (f"{MIXTRAL} --info-offload search", "--info-offload"),
    ],
)
def test_what_is_not_modelled_is_refused(line: str, named: str) -> None:
    assert_refused(run(*line.split()), named)


@pytest.mark.slow
def test_without_scipy_a_search_is_refused_and_a_policy_is_not() -> None:
    for value, status in (("search", 2), (POLICY, 0)):
        program = (
            "import sys\nsys.modules['scipy'] = None\nimport get_training_info\n"
            f"sys.exit(get_training_info.main({[*JOB.split(), '--info-offload', value]!r}))"
        )
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == status, done.stderr
        assert ("pip install 'get-training-info[offload]'" in done.stderr) == (status == 2)


def test_the_page_has_the_output_of_its_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/offloading.md, up to the assumptions."""
    text = (ROOT / "docs" / "offloading.md").read_text()
    monkeypatch.setenv("COLUMNS", "100")
    command = text.split("```bash\n", 1)[1].split("```", 1)[0].replace("\\\n", " ").split()
    assert command[0] == "get-training-info"
    shown = text.split("```text\nIt fits", 1)[1].split("```", 1)[0]
    out = run(*command[1:]).out
    assert f"It fits{shown}" == out[: out.index("\n── Assumptions")]
