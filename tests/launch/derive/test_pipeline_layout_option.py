"""`--pipeline-model-parallel-layout`: examples of Megatron's own docstring, and its rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.errors import InputError
from analyzer.launch.derive.pipeline_layout import check_layout, unroll


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
def test_repetition_is_writing_out(counts: list[int]) -> None:
    short = "|".join(f"t*{count}" if count else "" for count in counts)
    assert unroll(short) == tuple("t" * count for count in counts)


@pytest.mark.parametrize(
    ("written", "layers", "pipeline", "word"),
    [
        ("Ett|ttx|L", 4, 3, "'x'"),
        ("Ett|ttL", 4, 3, "2 stages"),
        ("tt|ttL", 4, 2, "E"),
        ("Ett|tt", 4, 2, "L"),
        ("EEtt|ttL", 4, 2, "E"),
        ("Ett|ttL", 5, 2, "4 decoder layers"),
        ("Ett|tmtL", 4, 2, "m"),
        ("Et*9999999999|tL", 4, 2, "unrolls"),
    ],
)
def test_refused(written: str, layers: int, pipeline: int, word: str) -> None:
    with pytest.raises(InputError, match="--pipeline-model-parallel-layout") as error:
        check_layout(written, num_layers=layers, pipeline=pipeline)
    assert word in error.value.fault


def test_stages_of_a_virtual_pipeline() -> None:
    assert check_layout("Et|t|tt|tt|t|tL", num_layers=8, pipeline=3) == ("Et", "t", "tt", "tt", "t", "tL")
