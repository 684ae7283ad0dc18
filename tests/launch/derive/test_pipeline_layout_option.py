"""`--pipeline-model-parallel-layout`: examples from Megatron's docstring, and rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.errors import InputError
from analyzer.launch.derive.pipeline_layout import unroll
from tests.job_of import job_of


@pytest.mark.parametrize(
    ("written", "stages"),
    [
        # the examples in PipelineParallelLayerLayout.parse_str_to_list (megatron-core 0.16.1)
        ("Ettt|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"]),
        ("Et*3|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"]),
        ("(|tt)*2,L", ["", "tt", "ttL"]),
        ("(tt)*3", ["tttttt"]),
        ("tt,(tt|)*2", ["tttt", "tt", ""]),
        ("EttL", ["EttL"]),
    ],
)
def test_unroll(written: str, stages: list[str]) -> None:
    assert unroll(written) == tuple(stages)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_a_repetition_equals_the_repeated_letters(counts: list[int]) -> None:
    short = "|".join(f"t*{count}" if count else "" for count in counts)
    assert unroll(short) == tuple("t" * count for count in counts)


@pytest.mark.parametrize(("written", "word"), [("Ett|ttx|L", "'x'"), ("Et*9999999999|tL", "unrolls")])
def test_invalid_layouts_are_refused(written: str, word: str) -> None:
    with pytest.raises(InputError, match="--pipeline-model-parallel-layout") as error:
        unroll(written)
    assert word in error.value.fault


@pytest.mark.parametrize(
    ("written", "word"),
    [
        ("Ett|t|tttL", "3 stages"),
        ("tt|ttttttL", "E"),
        ("Ett|tttttt", "L"),
        ("EEtt|ttttttL", "E"),
        ("Ett|ttL", "4 decoder layers"),
        ("Ett|tmtttttL", "m"),
    ],
)
def test_layouts_that_contradict_the_model_are_refused(written: str, word: str) -> None:
    with pytest.raises(InputError, match="--pipeline-model-parallel-layout") as error:
        job_of(f"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout {written}")
    assert word in error.value.fault


def test_stages_of_a_virtual_pipeline() -> None:
    job = job_of("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tt|tt|tttL")
    assert job.parallel.pipeline_layout.layout == ("Et", "tt", "tt", "tttL")
    assert job.parallel.virtual_pipeline == 2
