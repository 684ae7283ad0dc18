"""`--info-set` and `--info-unset`: the launch with other options."""

from __future__ import annotations

import pytest

from tests.command import assert_refused, report, run
from tests.job_of import BASE

LAUNCH = ("--nproc-per-node", "8", "pretrain_gpt.py", *BASE.split(), "--global-batch-size", "64", "--sequence-parallel")
LAUNCH = (*LAUNCH, "--tensor-model-parallel-size", "2")
GPU = ("--info-gpu", "H100-80GB")


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        (("--info-set", "--tensor-model-parallel-size 4"), ("--tensor-model-parallel-size", "4")),
        (("--info-set=--recompute-granularity selective",), ("--recompute-granularity", "selective")),
        (("--info-set", "--recompute-activations"), ("--recompute-activations",)),
        (("--info-set", "--micro-batch-size 2 --swiglu"), ("--micro-batch-size", "2", "--swiglu")),
    ],
)  # fmt: skip
def test_options_that_are_set_count_like_those_of_the_launch(changes: tuple[str, ...], same: tuple[str, ...]) -> None:
    found, expected = report(*LAUNCH, *GPU, *changes), report(*LAUNCH, *same, *GPU)
    assert found["ranks"] == expected["ranks"]
    assert found["time"] == expected["time"]
    assert found["ranks"] != report(*LAUNCH, *GPU)["ranks"]


def test_options_that_are_unset_are_left_out_with_their_values() -> None:
    without = LAUNCH[: LAUNCH.index("--sequence-parallel")]
    found = report(*LAUNCH, *GPU, "--info-unset", "sequence-parallel,--tensor-model-parallel-size")
    assert found["ranks"] == report(*without, *GPU)["ranks"]


def test_the_command_of_a_layout_has_the_options_that_are_set() -> None:
    words = (
        *LAUNCH,
        *GPU,
        "--info-set",
        "--micro-batch-size 2",
        "--info-search",
        "--info-search-over",
        "pp",
        "--info-workers",
        "1",
    )
    assert all("--micro-batch-size 2" in command for command in report(*words)["search"]["commands"])


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("--info-set", "4"), "--info-set"),
        (("--info-set", "--a 'b"), "--info-set"),
        (("--info-set", "--info-gpu H200"), "--info-set"),
        (("--info-unset", "fp8-format"), "--info-unset"),
        (("--info-set", "--micro-batch-size 2", "--info-launch"), "--info-set"),
    ],
)
def test_wrong_values_are_refused(words: tuple[str, ...], option: str) -> None:
    outcome = run(*LAUNCH, *GPU, *words)
    if "--info-launch" in words:
        assert outcome.status == 2
        assert outcome.err.splitlines()[-1].startswith(f"get-training-info: {option}: ")
    else:
        assert_refused(outcome, option)
