"""Exit statuses for a CI gate: `--info-fail-on` and `--info-margin`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from analyzer.cli.predict import fails
from tests.command import assert_refused, report, run
from tests.fake_report import small_report
from tests.job_of import BASE

LAUNCH = ("--nproc-per-node", "8", "pretrain_gpt.py", *BASE.split(), "--global-batch-size", "64")
VERDICT = small_report().verdict
STATES = {"fits": True, "tight": True, "tight and more than the capacity": False, "does not fit": False, "unknown": None}


@pytest.fixture(autouse=True)
def _no_local_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analyzer.hardware.gpus.DRIVER_FILES", ())


@pytest.mark.parametrize(
    ("fail_on", "failing"),
    [
        ((), {"does not fit", "tight and more than the capacity"}),
        (("tight",), {"does not fit", "tight and more than the capacity", "tight"}),
        (("unknown",), {"does not fit", "tight and more than the capacity", "unknown"}),
        (("unknown", "tight"), {*STATES} - {"fits"}),
    ],
)
def test_verdicts_that_fail(fail_on: tuple[str, ...], failing: set[str]) -> None:
    found = set()
    for name, fits in STATES.items():
        state: Any = None if fits is None else name.partition(" and ")[0]
        if fails(replace(VERDICT, fits=fits, state=state), fail_on):
            found.add(name)
    assert found == failing


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("", 0),
        ("--info-fail-on tight", 0),
        ("--info-fail-on unknown", 1),
        ("--info-fail-on tight,unknown --info-gpu H100-80GB", 0),
        ("--info-fail-on tight,unknown --info-gpu H100-80GB --info-margin 5%", 0),
        ("--info-fail-on unknown --info-gpu H100-80GB --info-margin 99%", 0),
        ("--info-fail-on tight --info-gpu H100-80GB --info-margin 99%", 1),
        ("--info-margin 99% --info-gpu H100-80GB", 0),
        ("--info-gpu-memory 1GiB", 1),
    ],
)
def test_exit_status(words: str, status: int) -> None:
    outcome = run(*LAUNCH, *words.split())
    assert (outcome.status, outcome.err) == (status, "")


@pytest.mark.parametrize(
    ("margin", "expected"), [("4GiB", 4 * 2**30), ("4GB", 4 * 10**9), ("50%", 40 * 2**30), ("2.5 %", 2 * 2**30)]
)
def test_the_margin_is_a_share_of_the_capacity_or_a_size(margin: str, expected: int) -> None:
    verdict = report(*LAUNCH, "--info-gpu-memory", "80GiB", "--info-margin", margin)["verdict"]
    assert verdict["margin_bytes"] == expected


def test_the_margin_is_0_by_default_and_not_known_without_a_capacity() -> None:
    assert report(*LAUNCH, "--info-gpu", "H100-80GB")["verdict"]["margin_bytes"] == 0
    assert report(*LAUNCH, "--info-margin", "5%")["verdict"]["margin_bytes"] is None


def test_the_report_names_the_margin() -> None:
    text = " ".join(run(*LAUNCH, "--info-gpu-memory", "80GiB", "--info-margin", "99%").out.split())
    assert text.startswith("It is tight: rank 0 (stage 0) needs ")
    assert " is below the margin of 79.20 GiB (99%)." in text


@pytest.mark.parametrize("value", ["5", "0", "100%", "-1%", "5%%", "%", "nan%", "5% of it", "lots", "1e999GiB", "infGB"])
def test_invalid_margins(value: str) -> None:
    assert_refused(run(*LAUNCH, f"--info-margin={value}"), "--info-margin")


@pytest.mark.parametrize("value", ["maybe", "tight,maybe", "", ",", "fits"])
def test_invalid_verdicts(value: str) -> None:
    outcome = run(*LAUNCH, f"--info-fail-on={value}")
    assert_refused(outcome, "--info-fail-on")
    assert not value.strip(",") or "use tight or unknown" in outcome.err


def test_an_infinite_gpu_memory_is_refused() -> None:
    assert_refused(run(*LAUNCH, "--info-gpu-memory", "1e999GB"), "--info-gpu-memory")


def test_a_training_is_not_started_after_a_failing_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_args: object, **_named: object) -> None:
        raise AssertionError("the training was started")

    monkeypatch.setattr("analyzer.cli.start.start_training", start)
    words = "--info-launch --info-gpu H100-80GB --info-margin 99% --info-fail-on tight"
    assert run(*LAUNCH, *words.split()).status == 1
    outcome = run(*LAUNCH, *words.replace("99%", "1%").split())
    assert (outcome.status, "the training was started" in outcome.err) == (70, True)


def test_an_internal_error_is_one_line_unless_the_traceback_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_named: object) -> None:
        raise KeyError("of\nseveral lines")

    monkeypatch.setattr("analyzer.cli.predict.report_of", fail)
    outcome = run(*LAUNCH)
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (70, "", 1)
    assert "internal error: KeyError: 'of" in outcome.err
    assert "--info-debug" in outcome.err
    with pytest.raises(KeyError):
        run(*LAUNCH, "--info-debug")


def test_an_interruption_is_one_line_and_exit_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("analyzer.cli.predict.report_of", interrupted)
    outcome = run(*LAUNCH)
    assert (outcome.status, outcome.out, outcome.err) == (130, "", "get-training-info: interrupted\n")
